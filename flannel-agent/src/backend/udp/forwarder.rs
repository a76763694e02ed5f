//! The thread that carries packets between the TUN device and the UDP socket.

use std::{
    fs::File,
    io::{self, PipeReader, PipeWriter, Read, Write},
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    os::fd::AsFd,
    sync::{Arc, PoisonError, RwLock},
    thread::{self, JoinHandle},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};

use super::{
    counters::Counters,
    packet::{MAX_UNREACHABLE, Packet},
    peer_routes::PeerRoutes,
};

/// Longest IPv4 packet.
const BUFFER: usize = 65_535;

/// Packets taken from one side before the other is looked at.
const BURST: usize = 64;

/// The thread needs little: its buffer is on the heap.
const STACK: usize = 128 << 10;

/// What the thread works with.
#[derive(Debug)]
pub struct Path {
    /// The TUN device, not blocking.
    pub tun: File,
    /// Our address on the TUN device: the source of "net unreachable".
    pub tun_ip: Ipv4Addr,
    /// The socket that peers send to, not blocking.
    pub socket: UdpSocket,
    /// UDP port of all peers.
    pub port: u16,
}

/// What the agent's own thread and the forwarding one share.
#[derive(Debug, Default)]
pub struct Shared {
    /// Replaced as a whole, so that the forwarder never sees half a change.
    pub routes: RwLock<Arc<PeerRoutes>>,
    /// What happened to packets.
    pub counters: Counters,
}

impl Shared {
    /// The table as it is now.
    pub fn routes(&self) -> Arc<PeerRoutes> {
        Arc::clone(&self.routes.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Puts another table in place.
    pub fn set_routes(&self, routes: PeerRoutes) {
        *self.routes.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(routes);
    }
}

/// A running thread. Ends when this is dropped.
#[derive(Debug)]
pub struct Forwarder {
    /// The thread polls the other end; closing this one wakes it.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
}

impl Forwarder {
    /// Starts the thread.
    pub fn start(path: Path, shared: Arc<Shared>) -> io::Result<Self> {
        let (stopped, stop) = io::pipe()?;
        let work = move || {
            if let Err(err) = Worker::new(path, shared).run(&stopped) {
                // The device was removed: the agent hears of it and makes another.
                tracing::debug!("forwarding ends: {err}");
            }
        };
        let thread =
            thread::Builder::new().name("udp-forward".to_owned()).stack_size(STACK).spawn(work)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }

    /// Whether the thread still works; it ends by itself when its device is gone.
    pub fn alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the udp backend's forwarding thread ended in a panic");
        }
    }
}

/// The thread's own state.
struct Worker {
    path: Path,
    shared: Arc<Shared>,
    buffer: Vec<u8>,
    answer: [u8; MAX_UNREACHABLE],
}

impl Worker {
    fn new(path: Path, shared: Arc<Shared>) -> Self {
        Self { path, shared, buffer: vec![0; BUFFER], answer: [0; MAX_UNREACHABLE] }
    }

    /// Works until the other end of `stopped` is closed or the device is gone.
    fn run(mut self, stopped: &PipeReader) -> io::Result<()> {
        loop {
            let (from_tun, from_socket) = {
                let mut fds = [
                    PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
                    PollFd::new(self.path.tun.as_fd(), PollFlags::POLLIN),
                    PollFd::new(self.path.socket.as_fd(), PollFlags::POLLIN),
                ];
                match poll(&mut fds, PollTimeout::NONE) {
                    Ok(_) => {}
                    Err(Errno::EINTR) => continue,
                    Err(err) => return Err(err.into()),
                }
                let [stop, tun, socket] = fds.map(|fd| fd.any().unwrap_or(false));
                if stop {
                    return Ok(());
                }
                (tun, socket)
            };
            if from_tun {
                self.tun_to_socket()?;
            }
            if from_socket {
                self.socket_to_tun()?;
            }
        }
    }

    fn tun_to_socket(&mut self) -> io::Result<()> {
        for _ in 0..BURST {
            match (&self.path.tun).read(&mut self.buffer) {
                Ok(len) => self.send(len)?,
                Err(err) if passing(&err) => return Ok(()),
                Err(err) => return Err(err),
            }
        }
        Ok(())
    }

    /// Sends the packet in the buffer to the peer that has its destination.
    fn send(&mut self, len: usize) -> io::Result<()> {
        let counters = &self.shared.counters;
        let Some(mut packet) = self.buffer.get_mut(..len).and_then(Packet::new) else {
            // IPv6's own chatter, which the kernel sends on every device.
            counters.not_ipv4.add();
            return Ok(());
        };
        let Some(peer) = self.shared.routes().find(packet.destination()) else {
            counters.no_peer.add();
            if let Some(len) = packet.unreachable(self.path.tun_ip, &mut self.answer) {
                return write(&self.path.tun, &self.answer[..len], counters).map(drop);
            }
            return Ok(());
        };
        if packet.hop().is_err() {
            counters.ttl_expired.add();
            return Ok(());
        }
        match self.path.socket.send_to(packet.bytes(), SocketAddrV4::new(peer, self.path.port)) {
            Ok(_) => counters.sent.add(),
            // As on any link: what cannot be sent now is lost, and the sender notices.
            Err(_) => counters.send_failed.add(),
        }
        Ok(())
    }

    fn socket_to_tun(&mut self) -> io::Result<()> {
        for _ in 0..BURST {
            match self.path.socket.recv(&mut self.buffer) {
                Ok(len) => self.deliver(len)?,
                Err(err) if err.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // An error that an earlier packet met is told here, once.
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Hands the packet in the buffer to the kernel.
    fn deliver(&mut self, len: usize) -> io::Result<()> {
        let counters = &self.shared.counters;
        let Some(mut packet) = self.buffer.get_mut(..len).and_then(Packet::new) else {
            counters.malformed.add();
            return Ok(());
        };
        if packet.hop().is_err() {
            counters.ttl_expired.add();
            return Ok(());
        }
        if write(&self.path.tun, packet.bytes(), counters)? {
            counters.received.add();
        }
        Ok(())
    }
}

/// Writes one packet to the device. Returns whether the kernel took it.
///
/// # Errors
/// Only if the device is gone.
fn write(mut tun: &File, packet: &[u8], counters: &Counters) -> io::Result<bool> {
    match tun.write(packet) {
        Ok(_) => Ok(true),
        Err(err) if err.raw_os_error() == Some(libc::EBADFD) => Err(err),
        // EIO while the device is down, EINVAL for what is no packet after all.
        Err(_) => {
            counters.write_failed.add();
            Ok(false)
        }
    }
}

/// Whether an error of the device passes by itself: nothing to read, or a signal came.
fn passing(err: &io::Error) -> bool {
    matches!(err.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests;
