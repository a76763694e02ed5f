//! Traffic between pods: echo requests and TCP transfers, both in process.

use std::{
    hash::{DefaultHasher, Hasher},
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::fd::{FromRawFd, OwnedFd},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{netns::Netns, pod::Pod};

/// How long an echo reply may take.
const ECHO_WITHIN: Duration = Duration::from_secs(1);

/// Bytes in the standard transfer.
pub const MIB_16: usize = 16 << 20;

/// What came of a TCP transfer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    /// Bytes that arrived.
    pub bytes: usize,
    /// Whether sender and receiver computed the same hash.
    pub intact: bool,
    /// From connect to the receiver's word that it has all.
    pub time: Duration,
}

impl Transfer {
    /// Gigabits per second.
    pub fn rate(&self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let bits = self.bytes as f64 * 8.0;
        bits / self.time.as_secs_f64() / 1e9
    }
}

/// Sends `count` echo requests of 56 bytes one after the other from a namespace. Returns how
/// many were answered.
pub fn ping(from: &Netns, to: IpAddr, count: u16) -> Result<u16> {
    ping_within(from, to, count, ECHO_WITHIN)
}

/// The same with another patience for each.
pub fn ping_within(from: &Netns, to: IpAddr, count: u16, patience: Duration) -> Result<u16> {
    from.within(|| {
        let socket = echo_socket(to)?;
        socket.set_read_timeout(Some(patience))?;
        if socket.connect(SocketAddr::new(to, 0)).is_err() {
            return Ok(0);
        }
        let mut answered = 0;
        for sequence in 0..count {
            let mut packet = vec![0_u8; 64];
            packet[0] = if to.is_ipv4() { 8 } else { 128 };
            packet[6..8].copy_from_slice(&sequence.to_be_bytes());
            // Refused when an earlier error waits at the socket: as good as unanswered.
            if socket.send(&packet).is_err() {
                continue;
            }
            let start = Instant::now();
            let mut buffer = [0_u8; 2048];
            while start.elapsed() < patience {
                match socket.recv(&mut buffer) {
                    Ok(64) if buffer[6..8] == sequence.to_be_bytes() => {
                        answered += 1;
                        break;
                    }
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
        }
        Ok(answered)
    })
}

/// A socket of the kernel's ping service: it sets identifier and checksum, and hands over the
/// replies.
fn echo_socket(to: IpAddr) -> Result<UdpSocket> {
    let (family, protocol) = match to {
        IpAddr::V4(_) => (libc::AF_INET, libc::IPPROTO_ICMP),
        IpAddr::V6(_) => (libc::AF_INET6, libc::IPPROTO_ICMPV6),
    };
    // SAFETY: plain system call; the result is checked before it is owned.
    let fd = unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, protocol) };
    ensure!(fd >= 0, "no echo socket: {}", std::io::Error::last_os_error());
    // SAFETY: a new descriptor that nobody else owns.
    Ok(UdpSocket::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Makes sure that a pod reaches another at every address it has: pings without loss.
pub fn assert_reaches(from: &Pod, to: &Pod) -> Result<()> {
    for address in to.addresses() {
        let answered = ping(from.ns(), address, 5)?;
        ensure!(
            answered == 5,
            "{} pings {} ({address}): {answered} of 5 answered",
            from.name(),
            to.name()
        );
    }
    Ok(())
}

/// Waits until one echo request from a namespace is answered.
pub fn wait_reaches(from: &Netns, to: IpAddr, within: Duration) -> Result<Duration> {
    let start = Instant::now();
    loop {
        if ping_within(from, to, 1, Duration::from_millis(200))? == 1 {
            return Ok(start.elapsed());
        }
        ensure!(start.elapsed() < within, "{to} does not answer within {within:?}");
    }
}

/// Sends pseudo-random bytes over TCP from one pod to an address of another and compares
/// hashes.
pub fn tcp_transfer(from: &Pod, to: &Pod, address: IpAddr, bytes: usize) -> Result<Transfer> {
    const PATIENCE: Duration = Duration::from_secs(20);
    let listener = to.ns().within(move || {
        TcpListener::bind(SocketAddr::new(address, 0))
            .with_context(|| format!("cannot listen on {address}"))
    })?;
    let target = listener.local_addr()?;
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || -> Result<(usize, u64)> {
            let mut stream = accept(&listener, PATIENCE)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            let mut hasher = DefaultHasher::new();
            let (mut got, mut buffer) = (0, vec![0_u8; 1 << 16]);
            while got < bytes {
                let n = stream.read(&mut buffer).context("the transfer stalls")?;
                ensure!(n > 0, "the transfer ends after {got} bytes");
                hasher.write(&buffer[..n]);
                got += n;
            }
            let hash = hasher.finish();
            stream.write_all(&hash.to_be_bytes())?;
            Ok((got, hash))
        });
        let sent = from.ns().within(move || {
            let start = Instant::now();
            let mut stream = TcpStream::connect_timeout(&target, PATIENCE)
                .with_context(|| format!("cannot connect to {target}"))?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            let mut hasher = DefaultHasher::new();
            let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ u64::from(target.port()));
            let mut left = bytes;
            let mut buffer = vec![0_u8; 1 << 16];
            while left > 0 {
                let n = left.min(buffer.len());
                random.fill(&mut buffer[..n]);
                hasher.write(&buffer[..n]);
                stream.write_all(&buffer[..n]).context("the transfer stalls")?;
                left -= n;
            }
            let mut answer = [0_u8; 8];
            stream.read_exact(&mut answer).context("no word from the receiver")?;
            Ok((hasher.finish(), u64::from_be_bytes(answer), start.elapsed()))
        });
        let received = match receiver.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        let what = || format!("{} to {} ({address})", from.name(), to.name());
        let (hash, answer, time) = sent.with_context(what)?;
        let (bytes, received_hash) = received.with_context(what)?;
        Ok(Transfer { bytes, intact: hash == answer && hash == received_hash, time })
    })
}

/// Takes one connection, but does not wait for ever.
fn accept(listener: &TcpListener, within: Duration) -> Result<TcpStream> {
    listener.set_nonblocking(true)?;
    let start = Instant::now();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                ensure!(start.elapsed() < within, "nobody connects");
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// xorshift64: bytes that no compression or duplication hides errors in.
struct Random(u64);

impl Random {
    fn fill(&mut self, buffer: &mut [u8]) {
        for chunk in buffer.chunks_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            chunk.copy_from_slice(&self.0.to_le_bytes()[..chunk.len()]);
        }
    }
}
