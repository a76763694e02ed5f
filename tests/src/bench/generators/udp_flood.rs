//! UDP as fast as one thread can send, and what of it arrives.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd,
    ptr, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{setsockopt, sockopt};

use super::{Ends, Outcome, PATIENCE, join};
use crate::bench::{
    priority::Importance,
    window::{Counted, Window},
};

/// Messages to a system call.
const BATCH: u32 = 64;

/// Room at the receiver in bytes: a stall of its thread is to cost nothing.
const RECEIVE_BUFFER: usize = 16 << 20;

/// A message that is none of the flood.
const GREETING: &[u8] = b"hello";

/// How long the receiver waits before it looks at the clock.
const LOOK: Duration = Duration::from_millis(20);

/// Two connected sockets, one at each end of a path: a flow that lives as long as they do.
#[derive(Debug)]
pub struct Flow {
    client: UdpSocket,
    server: UdpSocket,
}

impl Flow {
    /// Opens a flow; the first message has gone both ways.
    pub fn open(ends: &Ends<'_>) -> Result<Self> {
        let server = ends.server.within(|| bound(SocketAddr::new(ends.address, 0)))?;
        let target = server.local_addr()?;
        let any = if ends.address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        let client = ends.client.within(|| bound(any.parse()?))?;
        client.connect(target).with_context(|| format!("no way to {target}"))?;
        let from = client.local_addr()?;
        server.connect(from)?;
        setsockopt(&server, sockopt::RcvBufForce, &RECEIVE_BUFFER)
            .context("cannot enlarge a receive buffer")?;
        let flow = Self { client, server };
        let start = Instant::now();
        let mut message = [0; GREETING.len()];
        loop {
            flow.greet()?;
            if flow.server.recv(&mut message).is_ok() && flow.client.recv(&mut message).is_ok() {
                return Ok(flow);
            }
            ensure!(start.elapsed() < PATIENCE, "{from} and {target} do not hear each other");
        }
    }

    /// The client's and the server's address.
    pub fn addresses(&self) -> Result<(SocketAddr, SocketAddr)> {
        Ok((self.client.local_addr()?, self.server.local_addr()?))
    }

    /// Sends a message in both directions, as nearly every UDP protocol does now and then. To
    /// conntrack, a flow that does this for two seconds is established.
    pub fn greet(&self) -> Result<()> {
        self.client.send(GREETING).context("cannot send to the server")?;
        self.server.send(GREETING).context("cannot send to the client")?;
        Ok(())
    }

    /// Sends messages of `size` bytes until the window closes. Counts messages; the server's
    /// count is of those that arrived.
    pub fn flood(&self, ends: &Ends<'_>, size: usize, window: Window) -> Result<Outcome> {
        thread::scope(|scope| {
            let arrives = scope.spawn(move || -> Result<Counted> {
                let mut counter = ends.server_counter(Importance::Nice, window)?;
                let mut batch = Batch::new(size);
                loop {
                    let received = batch.receive(&self.server, size)?;
                    if !counter.add(received)? {
                        return counter.finish();
                    }
                }
            });
            let leaves = scope.spawn(move || -> Result<Counted> {
                let mut counter = ends.client_counter(Importance::Nice, window)?;
                let mut batch = Batch::new(size);
                loop {
                    let sent = batch.send(&self.client)?;
                    if !counter.add(sent)? {
                        return counter.finish();
                    }
                }
            });
            Ok(Outcome { client: join(leaves)?, server: join(arrives)? })
        })
    }
}

fn bound(address: SocketAddr) -> Result<UdpSocket> {
    let socket = UdpSocket::bind(address).with_context(|| format!("cannot bind to {address}"))?;
    socket.set_read_timeout(Some(LOOK))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    Ok(socket)
}

/// Messages for `sendmmsg` and `recvmmsg`, and what these point to.
struct Batch {
    headers: Vec<libc::mmsghdr>,
    /// Pointed to by `headers`: never resized.
    _parts: Vec<libc::iovec>,
    /// Pointed to by `_parts`: never resized.
    _bytes: Vec<u8>,
}

impl Batch {
    fn new(size: usize) -> Self {
        let mut bytes = vec![0x5a; BATCH as usize * size];
        let mut parts: Vec<_> = bytes
            .chunks_exact_mut(size)
            .map(|chunk| libc::iovec { iov_base: chunk.as_mut_ptr().cast(), iov_len: size })
            .collect();
        let headers = parts
            .iter_mut()
            .map(|part| {
                // SAFETY: all zero is a valid header: no address, no parts, no control data.
                let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
                header.msg_hdr.msg_iov = ptr::from_mut(part);
                header.msg_hdr.msg_iovlen = 1;
                header
            })
            .collect();
        Self { headers, _parts: parts, _bytes: bytes }
    }

    /// How many messages the kernel took.
    fn send(&mut self, socket: &UdpSocket) -> Result<u64> {
        // SAFETY: `headers` holds BATCH headers whose parts and bytes live as long as it.
        let sent =
            unsafe { libc::sendmmsg(socket.as_raw_fd(), self.headers.as_mut_ptr(), BATCH, 0) };
        counted(sent).context("cannot send")
    }

    /// How many messages of this size came; 0 if none comes for a while.
    fn receive(&mut self, socket: &UdpSocket, size: usize) -> Result<u64> {
        // SAFETY: as in `send`; a null pointer means no time limit of the call's own.
        let received = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                BATCH,
                libc::MSG_WAITFORONE,
                ptr::null_mut(),
            )
        };
        let received = counted(received).context("cannot receive")?;
        let mut of_size = 0;
        for header in self.headers.iter().take(usize::try_from(received)?) {
            // Greetings do not count, nor what was still waiting from another size's turn.
            of_size += u64::from(header.msg_len as usize == size);
        }
        Ok(of_size)
    }
}

/// The result of a call that was not given anything to do for now is 0.
fn counted(result: libc::c_int) -> io::Result<u64> {
    if let Ok(count) = u64::try_from(result) {
        return Ok(count);
    }
    let error = io::Error::last_os_error();
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(0),
        _ => Err(error),
    }
}
