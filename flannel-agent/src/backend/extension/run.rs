//! Running a command: no shell, a deadline, its words kept.

use std::{
    io,
    os::fd::OwnedFd,
    process::{ExitStatus, Stdio},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::unix::pipe::Receiver,
    process::Command,
    time::timeout,
};

use super::words::Words;

/// How much of what a command says is kept, in bytes.
const KEPT: usize = 64 << 10;

/// How long the output is still read after the command's end: something it left in the background
/// may hold the pipe open for ever.
const AFTERGLOW: Duration = Duration::from_millis(500);

/// Not for the commands of a network configuration to see.
const SECRETS: [&str; 1] = ["FLANNELD_ETCD_PASSWORD"];

/// Environment variables.
pub type Variables = Vec<(&'static str, String)>;

/// What a command is run with.
#[derive(Clone, Debug)]
pub struct Call {
    /// The command.
    pub words: Words,
    /// Variables on top of the agent's own environment.
    pub variables: Variables,
    /// What it reads, without the line's end.
    pub input: String,
    /// How long it may take.
    pub timeout: Duration,
}

/// What a command said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// Standard output and error as they came, trimmed.
    pub text: String,
    /// Whether there was more than is kept.
    pub cut: bool,
}

/// Runs a command to its end.
///
/// # Errors
/// Why it did not work, without the command's name: it could not be started, failed, or took too
/// long and was killed. With what it said.
pub async fn run(call: &Call) -> Result<Said, String> {
    let hidden = |name: &str| SECRETS.contains(&name);
    let lookup = |name: &str| {
        let given = call.variables.iter().find(|(key, _)| *key == name).map(|(_, v)| v.clone());
        given.or_else(|| std::env::var(name).ok().filter(|_| !hidden(name))).unwrap_or_default()
    };
    let argv = call.words.argv(lookup);
    let (output, writer) = io::pipe().map_err(|err| format!("no pipe: {err}"))?;
    let stderr = writer.try_clone().map_err(|err| format!("no pipe: {err}"))?;
    let mut command = Command::new(&argv[0]);
    command
        .args(&argv[1..])
        .envs(call.variables.iter().map(|(key, value)| (key, value)))
        .stdin(Stdio::piped())
        .stdout(writer)
        .stderr(stderr)
        .process_group(0)
        .kill_on_drop(true);
    for secret in SECRETS {
        command.env_remove(secret);
    }
    let mut child = command.spawn().map_err(|err| format!("cannot be started: {err}"))?;
    // Holds the pipe's writing ends.
    drop(command);
    let group = Group(child.id().and_then(|id| i32::try_from(id).ok()).map(Pid::from_raw));
    let output = Receiver::from_owned_fd(OwnedFd::from(output))
        .map_err(|err| format!("its output cannot be read: {err}"))?;

    let mut said = Vec::new();
    let work = async {
        let stdin = child.stdin.take();
        let feed = async {
            if let Some(mut stdin) = stdin {
                // One that does not read it all ends without.
                let _ = stdin.write_all(format!("{}\n", call.input).as_bytes()).await;
            }
            std::future::pending::<()>().await;
        };
        let end = async {
            let mut read = std::pin::pin!(keep(output, &mut said));
            tokio::select! {
                () = &mut read => child.wait().await,
                status = child.wait() => {
                    let _ = timeout(AFTERGLOW, read).await;
                    status
                }
            }
        };
        tokio::select! {
            status = end => status,
            () = feed => Err(io::ErrorKind::Interrupted.into()),
        }
    };
    let ended = timeout(call.timeout, work).await;
    let said = Said {
        text: String::from_utf8_lossy(&said[..said.len().min(KEPT)]).trim().to_owned(),
        cut: said.len() > KEPT,
    };
    match ended {
        Ok(Ok(status)) => {
            group.leave();
            outcome(status, said)
        }
        Ok(Err(err)) => Err(format!("cannot be waited for: {err}")),
        Err(_) => {
            let seconds = call.timeout.as_secs();
            Err(with_words(format!("took more than {seconds} s and was killed"), &said))
        }
    }
}

fn outcome(status: ExitStatus, said: Said) -> Result<Said, String> {
    if status.success() { Ok(said) } else { Err(with_words(format!("failed ({status})"), &said)) }
}

fn with_words(reason: String, said: &Said) -> String {
    if said.text.is_empty() { reason } else { format!("{reason} and said: {}", said.text) }
}

/// Reads to the end, and keeps a little more than is shown to know that there was more.
async fn keep(mut output: Receiver, said: &mut Vec<u8>) {
    let mut buffer = [0_u8; 4096];
    while let Ok(count @ 1..) = output.read(&mut buffer).await {
        let room = (KEPT + 1).saturating_sub(said.len());
        said.extend_from_slice(&buffer[..count.min(room)]);
    }
}

/// The command and what it started: killed together, unless it ended by itself.
struct Group(Option<Pid>);

impl Group {
    /// What was started may go on.
    fn leave(mut self) {
        self.0 = None;
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            // Gone already is as good.
            let _ = killpg(pid, Signal::SIGKILL);
        }
    }
}

#[cfg(test)]
mod tests;
