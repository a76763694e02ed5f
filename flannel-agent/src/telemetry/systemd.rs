//! Telling systemd that the service is up.

use std::{
    env, io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

/// Sends `READY=1` to the socket in `NOTIFY_SOCKET`. Without one, nothing is to be done.
pub fn notify_ready() -> io::Result<()> {
    match env::var_os("NOTIFY_SOCKET") {
        Some(socket) if !socket.is_empty() => send(socket.as_bytes(), b"READY=1"),
        _ => Ok(()),
    }
}

/// `socket` is a path, or with a leading `@` a name in the abstract namespace.
fn send(socket: &[u8], message: &[u8]) -> io::Result<()> {
    let address = match socket {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        path => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(path))?,
    };
    UnixDatagram::unbound()?.send_to_addr(message, &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_socket_get_the_message() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let name = format!("flannel-agent-test-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name).expect("a name");
        for (listener, socket) in [
            (UnixDatagram::bind(&path), path.as_os_str().as_bytes().to_vec()),
            (UnixDatagram::bind_addr(&abstract_name), format!("@{name}").into_bytes()),
        ] {
            let listener = listener.expect("a socket");
            send(&socket, b"READY=1").expect("sent");
            let mut buffer = [0; 16];
            let length = listener.recv(&mut buffer).expect("received");
            assert_eq!(&buffer[..length], b"READY=1");
        }
        assert!(send(dir.path().join("absent").as_os_str().as_bytes(), b"READY=1").is_err());
    }
}
