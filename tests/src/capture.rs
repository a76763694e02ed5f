//! Capturing frames at an interface.

use std::{
    io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    net::if_::if_nametoindex,
    sys::{
        socket::{setsockopt, sockopt},
        time::TimeVal,
    },
};

use crate::{netns::Netns, wait::eventually};

/// A frame as it passed the interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// When it was taken.
    pub at: Instant,
    /// Whether the interface sent it (else it received it).
    pub outgoing: bool,
    /// From the destination MAC on.
    pub bytes: Vec<u8>,
}

/// A running capture.
#[derive(Debug)]
pub struct Capture {
    frames: Arc<Mutex<Vec<Frame>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl Capture {
    /// Starts to capture everything on an interface.
    pub fn start(ns: &Netns, interface: &str) -> Result<Self> {
        let name = interface.to_owned();
        let socket = ns.within(move || open(&name))?;
        let frames = Arc::new(Mutex::new(Vec::new()));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let (frames, stop) = (Arc::clone(&frames), Arc::clone(&stop));
            std::thread::spawn(move || collect(&socket, &frames, &stop))
        };
        Ok(Self { frames, stop, thread: Some(thread) })
    }

    /// What was captured so far.
    pub fn frames(&self) -> Vec<Frame> {
        lock(&self.frames).clone()
    }

    /// Waits for a frame that `pick` makes something of.
    pub fn wait_for<T>(
        &self,
        what: &str,
        within: Duration,
        mut pick: impl FnMut(&Frame) -> Option<T>,
    ) -> Result<T> {
        eventually(what, within, || Ok(self.frames().iter().find_map(&mut pick)))
    }

    /// Waits until nothing comes any more.
    pub fn wait_quiet(&self) -> Result<()> {
        let (mut count, mut since) = (0, Instant::now());
        eventually("the last frame", Duration::from_secs(10), || {
            let now = lock(&self.frames).len();
            if now != count {
                (count, since) = (now, Instant::now());
            }
            Ok((since.elapsed() > Duration::from_millis(300)).then_some(()))
        })
    }

    /// Ends the capture and returns all of it.
    pub fn stop(mut self) -> Result<Vec<Frame>> {
        self.end()?;
        Ok(self.frames())
    }

    fn end(&mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => bail!("the capture thread panicked"),
            None => Ok(()),
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        // What it could tell has been told by `stop`.
        let _ = self.end();
    }
}

/// Sends a frame as it is out of an interface.
pub fn inject(ns: &Netns, interface: &str, frame: &[u8]) -> Result<()> {
    let name = interface.to_owned();
    let socket = ns.within(move || open(&name))?;
    let sent =
        nix::sys::socket::send(socket.as_raw_fd(), frame, nix::sys::socket::MsgFlags::empty())?;
    ensure!(sent == frame.len(), "{sent} of {} bytes sent", frame.len());
    Ok(())
}

fn lock(frames: &Mutex<Vec<Frame>>) -> MutexGuard<'_, Vec<Frame>> {
    frames.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A packet socket bound to one interface.
pub fn open(interface: &str) -> Result<OwnedFd> {
    let index = if_nametoindex(interface).with_context(|| format!("no interface {interface}"))?;
    let protocol = u16::try_from(libc::ETH_P_ALL)?.to_be();
    // Protocol 0 until bound, so that no frame of another interface gets in.
    // SAFETY: plain system call; the result is checked before it is owned.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    ensure!(fd >= 0, "no packet socket: {}", io::Error::last_os_error());
    // SAFETY: a new descriptor that nobody else owns.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    setsockopt(&fd, sockopt::RcvBuf, &(8 << 20))?;
    setsockopt(&fd, sockopt::ReceiveTimeout, &TimeVal::new(0, 20_000))?;
    // SAFETY: all-zero is a valid value of this plain C structure.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = u16::try_from(libc::AF_PACKET)?;
    address.sll_protocol = protocol;
    address.sll_ifindex = i32::try_from(index)?;
    // SAFETY: the address is a live sockaddr_ll and the length is its own.
    let result = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            (&raw const address).cast(),
            libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>())?,
        )
    };
    ensure!(result == 0, "cannot capture on {interface}: {}", io::Error::last_os_error());
    Ok(fd)
}

fn collect(socket: &OwnedFd, frames: &Mutex<Vec<Frame>>, stop: &AtomicBool) -> Result<()> {
    let mut buffer = vec![0_u8; 1 << 17];
    while !stop.load(Ordering::Relaxed) {
        // SAFETY: all-zero is a valid value of this plain C structure.
        let mut from: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        let mut length = libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>())?;
        // SAFETY: buffer and address are live, and the lengths are their own.
        let n = unsafe {
            libc::recvfrom(
                socket.as_raw_fd(),
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                0,
                (&raw mut from).cast(),
                &raw mut length,
            )
        };
        let Ok(n) = usize::try_from(n) else {
            let error = io::Error::last_os_error();
            match error.kind() {
                io::ErrorKind::WouldBlock
                | io::ErrorKind::TimedOut
                | io::ErrorKind::Interrupted => {
                    continue;
                }
                // The interface was deleted or went down: nothing more comes from it.
                _ if matches!(error.raw_os_error(), Some(libc::ENETDOWN | libc::ENODEV)) => {
                    continue;
                }
                _ => return Err(error.into()),
            }
        };
        lock(frames).push(Frame {
            at: Instant::now(),
            outgoing: from.sll_pkttype == libc::PACKET_OUTGOING,
            bytes: buffer[..n].to_vec(),
        });
    }
    Ok(())
}
