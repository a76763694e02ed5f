//! The threads that carry packets between the TUN device and the UDP socket, one each way.

use std::{
    fs::File,
    io::{self, PipeReader, PipeWriter, Read, Write},
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
    thread::{self, JoinHandle},
};

use nix::{
    errno::Errno,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use socket2::Socket;
use tokio::sync::Notify;

use super::{
    batch::{BATCH, Batch},
    counters::Counters,
    packet::{MAX_ERROR, Packet},
    peer_routes::PeerRoutes,
};

/// The threads need little: their buffers are on the heap.
const STACK: usize = 128 << 10;

/// What the threads work with.
#[derive(Debug)]
pub struct Path {
    /// The TUN device, not blocking.
    pub tun: File,
    /// Our address on the TUN device: the source of what we say ourselves.
    pub tun_ip: Ipv4Addr,
    /// The socket that peers send to, not blocking.
    pub socket: UdpSocket,
    /// For ICMP errors to our own pods, header included. By way of the device the kernel takes
    /// them for forged: they come from an address of this host.
    pub icmp: Option<Socket>,
    /// UDP port of all peers.
    pub port: u16,
}

/// What the agent's own thread and the forwarding ones share.
#[derive(Debug, Default)]
pub struct Shared {
    /// Replaced as a whole, so that the forwarder never sees half a change.
    pub routes: RwLock<Arc<PeerRoutes>>,
    /// The device's MTU in bytes; 0 as long as it is not known.
    pub mtu: AtomicU16,
    /// What happened to packets.
    pub counters: Counters,
    /// Told when a thread ends without having been asked to.
    pub ended: Notify,
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

/// The running threads. They end when this is dropped.
#[derive(Debug)]
pub struct Forwarder {
    /// The threads poll the other end; closing this one wakes them.
    stop: Option<PipeWriter>,
    threads: Vec<JoinHandle<()>>,
    ended: Arc<AtomicBool>,
}

impl Forwarder {
    /// Starts the threads.
    pub fn start(path: Path, shared: &Arc<Shared>) -> io::Result<Self> {
        let (stopped, stop) = io::pipe()?;
        let ended = Arc::<AtomicBool>::default();
        let mut forwarder = Self { stop: Some(stop), threads: Vec::new(), ended };
        let path = Arc::new(path);
        for (name, way) in [
            ("udp-from-tun", Worker::tun_to_socket as fn(&mut Worker) -> io::Result<()>),
            ("udp-to-tun", Worker::socket_to_tun),
        ] {
            let (path, shared, stopped) =
                (Arc::clone(&path), Arc::clone(shared), stopped.try_clone()?);
            let end = End { ended: Arc::clone(&forwarder.ended), shared: Arc::clone(&shared) };
            let from_tun = forwarder.threads.is_empty();
            let work = move || {
                let end = end;
                let result = Worker::new(path, shared).run(&stopped, from_tun, way);
                if let Err(err) = result {
                    // The device was removed, most likely: the agent makes another.
                    tracing::debug!("{name}: forwarding ends: {err}");
                }
                drop(end);
            };
            let thread = thread::Builder::new().name(name.to_owned()).stack_size(STACK);
            forwarder.threads.push(thread.spawn(work)?);
        }
        Ok(forwarder)
    }

    /// Whether both threads work; they end by themselves when their device is gone.
    pub fn alive(&self) -> bool {
        !self.ended.load(Ordering::Acquire)
    }
}

impl Drop for Forwarder {
    fn drop(&mut self) {
        drop(self.stop.take());
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a forwarding thread of the udp backend ended in a panic");
            }
        }
    }
}

/// Tells of a thread's end, whichever way it comes.
struct End {
    ended: Arc<AtomicBool>,
    shared: Arc<Shared>,
}

impl Drop for End {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        self.shared.ended.notify_one();
    }
}

/// One thread's own state.
struct Worker {
    path: Arc<Path>,
    shared: Arc<Shared>,
    batch: Batch,
    answer: [u8; MAX_ERROR],
}

impl Worker {
    fn new(path: Arc<Path>, shared: Arc<Shared>) -> Self {
        Self { path, shared, batch: Batch::new(), answer: [0; MAX_ERROR] }
    }

    /// Works `way` whenever there is something to read, until the other end of `stopped` is
    /// closed or the device is gone.
    fn run(
        mut self,
        stopped: &PipeReader,
        from_tun: bool,
        way: fn(&mut Self) -> io::Result<()>,
    ) -> io::Result<()> {
        loop {
            {
                let source: BorrowedFd<'_> =
                    if from_tun { self.path.tun.as_fd() } else { self.path.socket.as_fd() };
                let mut fds = [
                    PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
                    PollFd::new(source, PollFlags::POLLIN),
                ];
                match poll(&mut fds, PollTimeout::NONE) {
                    Ok(_) => {}
                    Err(Errno::EINTR) => continue,
                    Err(err) => return Err(err.into()),
                }
                if fds[0].any().unwrap_or(false) {
                    return Ok(());
                }
            }
            way(&mut self)?;
        }
    }

    /// Reads what the kernel has for peers, one batch at most, and sends it.
    fn tun_to_socket(&mut self) -> io::Result<()> {
        let mut count = 0;
        // Packets that go nowhere do not fill the batch, but are no reason to go on for ever.
        for _ in 0..BATCH {
            match (&self.path.tun).read(self.batch.slot(count)) {
                Ok(length) => {
                    if let Some(peer) = self.route(count, length)? {
                        self.batch.address(count, length, SocketAddrV4::new(peer, self.path.port));
                        count += 1;
                    }
                }
                Err(err) if passing(&err) => break,
                Err(err) => return Err(err),
            }
        }
        let taken = self.batch.send(&self.path.socket, count);
        self.shared.counters.sent.add_many(taken);
        self.shared.counters.send_failed.add_many(count - taken);
        Ok(())
    }

    /// The peer that the packet in a slot goes to; answers it if there is none.
    fn route(&mut self, slot: usize, length: usize) -> io::Result<Option<Ipv4Addr>> {
        let counters = &self.shared.counters;
        let Some(mut packet) = self.batch.slot(slot).get_mut(..length).and_then(Packet::new) else {
            // IPv6's own chatter, which the kernel sends on every device.
            counters.not_ipv4.add();
            return Ok(None);
        };
        let Some(peer) = self.shared.routes().find(packet.destination()) else {
            counters.no_peer.add();
            let to = SocketAddrV4::new(packet.source(), 0);
            if let Some(len) = packet.unreachable(self.path.tun_ip, &mut self.answer) {
                let answer = &self.answer[..len];
                match &self.path.icmp {
                    // Lost like any packet if it cannot be sent.
                    Some(icmp) => drop(icmp.send_to(answer, &to.into())),
                    None => drop(write(&self.path.tun, answer, counters)?),
                }
            }
            return Ok(None);
        };
        if packet.hop().is_err() {
            counters.ttl_expired.add();
            return Ok(None);
        }
        Ok(Some(peer))
    }

    /// Receives what peers sent, one batch at most, and hands it to the kernel.
    fn socket_to_tun(&mut self) -> io::Result<()> {
        // An error that an earlier packet met is told here, once.
        let Ok(count) = self.batch.receive(&self.path.socket) else { return Ok(()) };
        for slot in 0..count {
            self.deliver(slot)?;
        }
        Ok(())
    }

    /// Hands the packet in a slot to the kernel.
    fn deliver(&mut self, slot: usize) -> io::Result<()> {
        let counters = &self.shared.counters;
        let mtu = self.shared.mtu.load(Ordering::Relaxed);
        let bytes = self.batch.received(slot);
        let length = bytes.len();
        let Some(mut packet) = Packet::new(bytes) else {
            counters.malformed.add();
            return Ok(());
        };
        // One that may be fragmented is, by the kernel, where it has to be.
        if mtu != 0 && length > usize::from(mtu) && packet.dont_fragment() {
            counters.too_long.add();
            let answer = packet.too_long(self.path.tun_ip, mtu, &mut self.answer);
            if let (Some(len), Some(peer)) = (answer, self.shared.routes().find(packet.source())) {
                // Lost like any packet if it cannot be sent.
                let to = SocketAddrV4::new(peer, self.path.port);
                let _ = self.path.socket.send_to(&self.answer[..len], to);
            }
            return Ok(());
        }
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
