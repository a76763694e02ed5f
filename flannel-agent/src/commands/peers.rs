//! `flannel-agent peers`: the peers, and what the data path knows of them.

use std::{
    io::{self, Write},
    path::Path,
};

use anyhow::Context;
use serde_json::Value;

use super::table;
use crate::{
    cli::{Output, PeersArgs},
    control::{self, AskError},
};

/// Reads the peers without the agent, from what stays in the kernel: a JSON array as the agent
/// gives it, or why there is none.
pub type OfflinePeers<'a> = &'a dyn Fn() -> Result<Value, String>;

/// Prints the peers. Exit status 0 if the agent answered.
pub fn run(
    args: &PeersArgs,
    offline: OfflinePeers<'_>,
    out: &mut impl Write,
) -> anyhow::Result<u8> {
    match fetch(&args.client.control_socket) {
        Ok(peers) => {
            print(&peers, args.client.output, out)?;
            Ok(0)
        }
        Err(error) => {
            // On standard error: what follows on standard output may be read by a machine.
            let _ = writeln!(io::stderr(), "{error:#}");
            let peers = offline().map_err(|why| {
                anyhow::anyhow!("the peers cannot be read from the kernel either: {why}")
            })?;
            let _ = writeln!(io::stderr(), "this is what stands in the kernel without it:");
            print(&peers, args.client.output, out)?;
            Ok(1)
        }
    }
}

fn fetch(socket: &Path) -> anyhow::Result<Value> {
    let body = control::ask(socket, "/peers").map_err(|error: AskError| anyhow::anyhow!(error))?;
    serde_json::from_slice(&body).context("the agent's answer is no JSON")
}

fn print(peers: &Value, output: Output, out: &mut impl Write) -> io::Result<()> {
    match (output, peers.as_array()) {
        (Output::Json, _) | (_, None) => writeln!(out, "{peers}"),
        (Output::Text, Some(peers)) if peers.is_empty() => writeln!(out, "no peers"),
        (Output::Text, Some(peers)) => out.write_all(table::of_objects(peers).as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cli::ClientArgs;

    fn run_offline(output: Output, offline: OfflinePeers<'_>) -> (anyhow::Result<u8>, String) {
        let dir = tempfile::tempdir().expect("a directory");
        let control_socket = dir.path().join("absent.sock");
        let args = PeersArgs { client: ClientArgs { output, control_socket } };
        let mut out = Vec::new();
        let result = run(&args, offline, &mut out);
        (result, String::from_utf8(out).expect("UTF-8"))
    }

    #[test]
    fn without_the_agent_the_kernel_is_asked() {
        let (result, text) = run_offline(Output::Json, &|| Ok(json!([{"subnet": "10.77.3.0/24"}])));
        assert_eq!(result.expect("printed"), 1);
        assert_eq!(text, "[{\"subnet\":\"10.77.3.0/24\"}]\n");
        let (result, text) = run_offline(Output::Text, &|| Ok(json!([])));
        assert_eq!((result.expect("printed"), text.as_str()), (1, "no peers\n"));
        let (result, text) = run_offline(Output::Text, &|| Err("no pinned maps".to_owned()));
        assert!(result.expect_err("nothing").to_string().contains("no pinned maps"));
        assert!(text.is_empty());
    }
}
