//! Programs run as children: never for longer than a deadline, never with more output than fits,
//! and what they complained about is kept.

use std::{process::Stdio, time::Duration};

use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    process::Command,
};

/// How long a child may run. The xtables lock may be waited for within it.
const DEADLINE: Duration = Duration::from_secs(10);

/// How much of a listing is read, in bytes: some 100 000 rules of others beside ours.
const OUTPUT_LIMIT: u64 = 32 << 20;

/// How much of what it complains is kept, in bytes.
const COMPLAINT_LIMIT: u64 = 4096;

/// Why a child did not do what it was asked to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChildError {
    /// There is no such program.
    #[error("{0} is not installed (looked for it in PATH)")]
    Missing(String),
    /// It could not be started or talked to.
    #[error("cannot run {program}: {reason}")]
    Start {
        /// Its name.
        program: String,
        /// What the system says.
        reason: String,
    },
    /// It ran out of time.
    #[error("{0} did not end in time ({DEADLINE:?}) and was killed")]
    Late(String),
    /// It failed.
    #[error("{program} failed ({status}): {complaint}")]
    Failed {
        /// Its name and arguments.
        program: String,
        /// Exit status or signal.
        status: String,
        /// What it said on standard error.
        complaint: String,
    },
}

/// Runs a program to its end with `input`, and returns what it printed.
pub async fn run(program: &str, arguments: &[&str], input: &str) -> Result<String, ChildError> {
    let start = |reason: std::io::Error| match reason.kind() {
        std::io::ErrorKind::NotFound => ChildError::Missing(program.to_owned()),
        _ => ChildError::Start { program: program.to_owned(), reason: reason.to_string() },
    };
    let mut child = Command::new(program)
        .args(arguments)
        // Numbers and words as the parsers know them.
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(start)?;
    let (mut stdin, stdout, stderr) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let talk = async {
        let write = async {
            if let Some(mut stdin) = stdin.take() {
                // One that fails early does not read on; its status tells.
                let _ = stdin.write_all(input.as_bytes()).await;
            }
        };
        let ((), output, complaint) =
            tokio::join!(write, read(stdout, OUTPUT_LIMIT), read(stderr, COMPLAINT_LIMIT));
        (child.wait().await, output, complaint)
    };
    let called = || format!("{program} {}", arguments.join(" ")).trim_end().to_owned();
    let Ok((status, output, complaint)) = tokio::time::timeout(DEADLINE, talk).await else {
        return Err(ChildError::Late(called()));
    };
    let status = status.map_err(start)?;
    if status.success() {
        return Ok(output);
    }
    let complaint = complaint.split_whitespace().collect::<Vec<_>>().join(" ");
    Err(ChildError::Failed { program: called(), status: status.to_string(), complaint })
}

/// All of a stream up to a limit; what is beyond is read and dropped, or the child would block.
async fn read(stream: Option<impl AsyncRead + Unpin>, limit: u64) -> String {
    let Some(mut stream) = stream else { return String::new() };
    let mut bytes = Vec::new();
    // What was read before an error is all there is.
    let _ = (&mut stream).take(limit).read_to_end(&mut bytes).await;
    let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_childs_words_come_back_and_its_failure_is_told() {
        assert_eq!(run("cat", &[], "words").await, Ok("words".to_owned()));
        let failed = run("sh", &["-c", "echo no such chain >&2; exit 3"], "").await;
        let text = failed.unwrap_err().to_string();
        assert!(text.contains("no such chain") && text.contains('3'), "{text}");
        let missing = run("flannel-no-such-program", &[], "").await;
        assert_eq!(missing, Err(ChildError::Missing("flannel-no-such-program".to_owned())));
    }

    #[tokio::test(start_paused = true)]
    async fn a_child_that_hangs_is_killed() {
        assert!(matches!(run("sleep", &["600"], "").await, Err(ChildError::Late(_))));
    }
}
