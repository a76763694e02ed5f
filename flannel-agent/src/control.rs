//! The control socket: how `flannel-agent status` and the like ask the running agent.

use std::{
    fs,
    io::{self, Read, Write},
    os::unix::{
        fs::{FileTypeExt, MetadataExt, PermissionsExt},
        net::UnixStream as BlockingStream,
    },
    path::{Path, PathBuf},
    task::{Context, Poll},
    time::Duration,
};

use tokio::net::{UnixListener, UnixStream};

use crate::telemetry::server::Accept;

/// How long a client waits for the agent, at each step.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(5);
/// More than this is no answer of ours.
const MAX_ANSWER: u64 = 64 << 20;

/// Why the socket cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Another agent answers there.
    #[error(
        "another agent answers at {0}: give this one another --control-socket, or an empty one"
    )]
    InUse(PathBuf),
    /// The path is something else.
    #[error("{0} exists and is no socket: remove it or give another --control-socket")]
    Foreign(PathBuf),
    /// The file system or the kernel refused.
    #[error("cannot make the control socket {path}: {reason}")]
    Io {
        /// The socket's path.
        path: PathBuf,
        /// What the kernel said.
        reason: io::Error,
    },
}

/// The listening socket, for root only. Its file goes away with it.
#[derive(Debug)]
pub struct ControlSocket {
    listener: UnixListener,
    path: PathBuf,
    inode: u64,
}

impl ControlSocket {
    /// Makes the socket, and its directory if need be. A socket left behind by a dead agent is
    /// replaced; one that answers is not.
    pub fn bind(path: &Path) -> Result<Self, ControlError> {
        match fs::symlink_metadata(path) {
            Ok(found) if !found.file_type().is_socket() => {
                return Err(ControlError::Foreign(path.to_owned()));
            }
            Ok(_) if BlockingStream::connect(path).is_ok() => {
                return Err(ControlError::InUse(path.to_owned()));
            }
            _ => (),
        }
        let failed = |reason| ControlError::Io { path: path.to_owned(), reason };
        let directory = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        if let Some(directory) = directory {
            fs::create_dir_all(directory).map_err(failed)?;
        }
        // Made under another name and moved into place, so that there is no moment at which
        // others may connect, nor one without a socket.
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}", std::process::id()));
        let new = path.with_file_name(name);
        let made = Self::bind_at(&new).and_then(|(listener, inode)| {
            fs::rename(&new, path)?;
            Ok(Self { listener, path: path.to_owned(), inode })
        });
        made.map_err(|reason| {
            // It may not have come to be; the error that matters is the first.
            let _ = fs::remove_file(&new);
            failed(reason)
        })
    }

    fn bind_at(path: &Path) -> io::Result<(UnixListener, u64)> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => (),
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        Ok((listener, fs::symlink_metadata(path)?.ino()))
    }
}

impl Accept for ControlSocket {
    type Stream = UnixStream;

    fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<UnixStream>> {
        self.listener.poll_accept(cx).map_ok(|(stream, _)| stream)
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // Another agent may have put its own there since.
        if fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// The running agent gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Nobody listens, or we may not ask: the socket is for root.
    #[error("cannot reach an agent at {path}: {reason}")]
    Unreachable {
        /// The socket's path.
        path: PathBuf,
        /// What the kernel said.
        reason: io::Error,
    },
    /// Somebody does, but it goes wrong.
    #[error("the agent at {path} gave no proper answer: {reason}")]
    BadAnswer {
        /// The socket's path.
        path: PathBuf,
        /// What went wrong.
        reason: String,
    },
}

/// Asks the running agent for a page (`/status`, `/peers`); returns the body. Blocks.
pub fn ask(socket: &Path, page: &str) -> Result<Vec<u8>, AskError> {
    let bad = |reason: String| AskError::BadAnswer { path: socket.to_owned(), reason };
    let stream = BlockingStream::connect(socket)
        .map_err(|reason| AskError::Unreachable { path: socket.to_owned(), reason })?;
    let answer = exchange(stream, page).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            bad(format!("nothing came within {} s", CLIENT_TIMEOUT.as_secs()))
        }
        _ => bad(error.to_string()),
    })?;
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
    let (head, body) = answer.split_at(end.ok_or_else(|| bad("no HTTP head".to_owned()))?);
    let status = head.split(|byte| *byte == b'\r').next().unwrap_or(head);
    let status = String::from_utf8_lossy(status);
    if status.split(' ').nth(1) != Some("200") {
        return Err(bad(format!("it says {status}")));
    }
    Ok(body[4..].to_vec())
}

fn exchange(mut stream: BlockingStream, page: &str) -> io::Result<Vec<u8>> {
    stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    write!(stream, "GET {page} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use serde_json::{Value, json};

    use super::*;
    use crate::telemetry::{
        Telemetry,
        metrics::Metrics,
        server::{Pages, serve},
        status::{StateSource, Status},
    };

    struct Source(Rc<Telemetry>);

    impl StateSource for Source {
        fn status(&self) -> Status {
            self.0.base_status()
        }

        fn peers(&self) -> Value {
            json!([{"subnet": "10.77.3.0/24"}])
        }
    }

    #[tokio::test]
    async fn a_client_gets_its_pages() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("run/agent.sock");
        let socket = ControlSocket::bind(&path).expect("bound");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        let telemetry = Rc::new(Telemetry::new(Metrics::default(), |_| ()));
        let source = Rc::new(Source(Rc::clone(&telemetry)));
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let server = serve(socket, Pages::Control, telemetry, source, async {
            let _ = stopped.await;
        });
        let client_path = path.clone();
        let client = async move {
            let answers = tokio::task::spawn_blocking(move || {
                ["/peers", "/status", "/healthz"].map(|page| ask(&client_path, page))
            });
            let [peers, status, health] = answers.await.expect("asked");
            let peers: Value = serde_json::from_slice(&peers.expect("peers")).expect("JSON");
            assert_eq!(peers, json!([{"subnet": "10.77.3.0/24"}]));
            let status: Status = serde_json::from_slice(&status.expect("status")).expect("JSON");
            assert!(!status.ready);
            assert!(
                matches!(health, Err(AskError::BadAnswer { reason, .. }) if reason.contains("404"))
            );
            drop(stop);
        };
        tokio::join!(server, client);
        assert!(!path.exists(), "the socket's file goes with the agent");
        assert!(matches!(ask(&path, "/status"), Err(AskError::Unreachable { .. })));
    }

    #[tokio::test]
    async fn only_a_dead_agents_socket_is_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("agent.sock");
        let first = ControlSocket::bind(&path).expect("bound");
        assert!(matches!(ControlSocket::bind(&path), Err(ControlError::InUse(_))));
        // What a killed agent leaves: a socket file nobody listens on.
        let left = dir.path().join("left.sock");
        drop(std::os::unix::net::UnixListener::bind(&left).expect("bound"));
        let second = ControlSocket::bind(&left).expect("replaced");
        // The file of another agent survives the first one's end.
        fs::rename(&left, &path).expect("moved");
        drop(first);
        assert!(path.exists());
        drop(second);

        let file = dir.path().join("file");
        fs::write(&file, "precious").expect("written");
        assert!(matches!(ControlSocket::bind(&file), Err(ControlError::Foreign(_))));
        let error = ControlSocket::bind(&file.join("agent.sock")).expect_err("no directory");
        assert!(error.to_string().contains("agent.sock"), "{error}");
        let names: Vec<_> = fs::read_dir(dir.path()).expect("read").flatten().collect();
        assert_eq!(names.len(), 2, "no temporary file stays: {names:?}");
    }
}
