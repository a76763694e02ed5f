//! `flannel-agent flows`: the flows that bypass the host's stack.
//!
//! They are read from the pinned maps: what is there is so whether an agent answers or not.

use std::{
    io::{self, Write},
    path::Path,
};

use serde_json::Value;

use super::table;
use crate::cli::{FlowsArgs, Output};

/// Reads the flows from the maps pinned in a directory: a JSON array, or why there is none.
pub type PinnedFlows<'a> = &'a dyn Fn(&Path) -> Result<Value, String>;

/// Prints the flows. Exit status 0 if the maps could be read.
pub fn run(args: &FlowsArgs, read: PinnedFlows<'_>, out: &mut impl Write) -> anyhow::Result<u8> {
    let flows = read(&args.bpf_pin_dir)
        .map_err(|why| anyhow::anyhow!("the flows cannot be read from the kernel: {why}"))?;
    print(&flows, args.output, out)?;
    Ok(0)
}

fn print(flows: &Value, output: Output, out: &mut impl Write) -> io::Result<()> {
    match (output, flows.as_array()) {
        (Output::Json, _) | (_, None) => writeln!(out, "{flows}"),
        (Output::Text, Some(flows)) if flows.is_empty() => {
            writeln!(out, "no flow bypasses the stack")
        }
        (Output::Text, Some(flows)) => out.write_all(table::of_objects(flows).as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run_with(output: Output, read: PinnedFlows<'_>) -> (anyhow::Result<u8>, String) {
        let args = FlowsArgs { output, bpf_pin_dir: "/pins".into() };
        let mut out = Vec::new();
        let result = run(&args, read, &mut out);
        (result, String::from_utf8(out).expect("UTF-8"))
    }

    #[test]
    fn flows_are_listed_for_people_and_machines() {
        let read = |pins: &Path| {
            assert_eq!(pins, Path::new("/pins"));
            Ok(json!([{"pod": "10.77.1.2:40000", "packets_out": 7}]))
        };
        let (result, text) = run_with(Output::Json, &read);
        assert_eq!(result.expect("printed"), 0);
        assert_eq!(text, "[{\"pod\":\"10.77.1.2:40000\",\"packets_out\":7}]\n");
        let (_, text) = run_with(Output::Text, &read);
        assert!(text.contains("10.77.1.2:40000"), "{text}");
        let (_, text) = run_with(Output::Text, &|_| Ok(json!([])));
        assert_eq!(text, "no flow bypasses the stack\n");
        let (result, text) = run_with(Output::Text, &|_| Err("no pinned maps".to_owned()));
        assert!(result.expect_err("nothing").to_string().contains("no pinned maps"));
        assert!(text.is_empty());
    }
}
