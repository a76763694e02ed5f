//! A stand-in for a node of flannel's `udp` backend, plain as can be: one packet per system call
//! between a TUN device and a socket. What our packets have to be understood by, and what our own
//! forwarding is compared with.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddrV4, UdpSocket},
    os::{
        fd::{AsFd, AsRawFd},
        unix::fs::OpenOptionsExt,
    },
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Value, json};

use crate::{agent::SubnetEnv, node::Node};

/// flannel's port for bare packets in UDP.
pub const PORT: u16 = 8285;

/// Bytes around an inner packet.
const OVERHEAD: u32 = 28;

/// The cluster's network.
const NETWORK: &str = "10.77.0.0/16";

/// How long the thread sleeps before it looks whether to stop, in milliseconds.
const LOOK: u8 = 100;

/// Subnets and the hosts that have them: first bits, how many, address.
type Peers = Arc<Mutex<Vec<(u32, u32, Ipv4Addr)>>>;

/// The running proxy. Stops, and its device goes, when it is dropped.
#[derive(Debug)]
pub struct UdpProxy {
    peers: Peers,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
    subnet: String,
    public: String,
}

impl UdpProxy {
    /// Starts it on a node, for a subnet with length.
    pub fn start(node: &Node, subnet: &str) -> Result<Self> {
        let peers = Peers::default();
        let stop = Arc::<AtomicBool>::default();
        let local: Ipv4Addr = node.v4().parse()?;
        let (tun, socket) = node.ns().within(|| {
            let socket = UdpSocket::bind((local, PORT)).context("cannot bind the proxy's port")?;
            socket.set_nonblocking(true)?;
            Ok((open_tun("flannel0")?, socket))
        })?;
        let base = subnet.split('/').next().unwrap_or_default();
        node.ns().ip(&[
            &format!("link set flannel0 mtu {} up", 1500 - OVERHEAD),
            &format!("addr add {base}/32 dev flannel0"),
            &format!("route add {NETWORK} dev flannel0"),
        ])?;
        let thread = {
            let (peers, stop) = (Arc::clone(&peers), Arc::clone(&stop));
            node.ns().spawn(move || forward(tun, &socket, &peers, &stop))?
        };
        let (subnet, public) = (subnet.to_owned(), node.v4());
        Ok(Self { peers, stop, thread: Some(thread), subnet, public })
    }

    /// Key and value of its lease.
    pub fn lease(&self) -> (String, Value) {
        (self.subnet.replace('/', "-"), json!({"PublicIP": self.public, "PublicIPv6": null}))
    }

    /// The env file a flannel would have written there.
    pub fn env(&self) -> Result<SubnetEnv> {
        SubnetEnv::by_hand(Some(&self.subnet), None, 1500 - OVERHEAD)
    }

    /// Tells it of another node by that node's lease.
    pub fn learn(&self, key: &str, lease: &Value) -> Result<()> {
        let (base, len) = key.rsplit_once('-').context("a key without length")?;
        let (base, len): (Ipv4Addr, u32) = (base.parse()?, len.parse()?);
        let public = lease["PublicIP"].as_str().context("no PublicIP")?.parse()?;
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.push((base.to_bits(), 32 - len, public));
        Ok(())
    }
}

impl Drop for UdpProxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // An error would have shown in the story.
            let _ = thread.join();
        }
    }
}

/// A TUN device of this name without packet information, not blocking.
pub fn open_tun(name: &str) -> Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")
        .context("no TUN devices")?;
    // SAFETY: an `ifreq` is plain old data, for which all zeroes are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.as_bytes()) {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = i16::try_from(libc::IFF_TUN | libc::IFF_NO_PI)?;
    // SAFETY: the descriptor is open, and TUNSETIFF reads and writes one `ifreq`.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    ensure!(result == 0, "no TUN device {name}: {}", std::io::Error::last_os_error());
    Ok(file)
}

fn forward(mut tun: File, socket: &UdpSocket, peers: &Peers, stop: &AtomicBool) -> Result<()> {
    let mut buffer = [0_u8; 1500];
    while !stop.load(Ordering::Relaxed) {
        {
            let mut fds = [
                PollFd::new(tun.as_fd(), PollFlags::POLLIN),
                PollFd::new(socket.as_fd(), PollFlags::POLLIN),
            ];
            poll(&mut fds, PollTimeout::from(LOOK))?;
        }
        while let Ok(length @ 20..) = tun.read(&mut buffer) {
            let to = u32::from_be_bytes(buffer[16..20].try_into()?);
            let known = peers.lock().unwrap_or_else(PoisonError::into_inner);
            let peer = known.iter().find(|(base, bits, _)| (to ^ base) >> bits == 0).copied();
            drop(known);
            if let Some((_, _, public)) = peer
                && hop(&mut buffer[..length])
            {
                // Lost like any packet if it cannot be sent.
                let _ = socket.send_to(&buffer[..length], SocketAddrV4::new(public, PORT));
            }
        }
        while let Ok(length @ 20..) = socket.recv(&mut buffer) {
            if hop(&mut buffer[..length]) {
                let _ = tun.write(&buffer[..length]);
            }
        }
    }
    Ok(())
}

/// Takes one off the time to live; `false` if none is left.
fn hop(packet: &mut [u8]) -> bool {
    if packet[8] <= 1 {
        return false;
    }
    packet[8] -= 1;
    let sum = u32::from(u16::from_be_bytes([packet[10], packet[11]])) + 0x100;
    let sum = (sum & 0xffff) + (sum >> 16);
    packet[10..12].copy_from_slice(&sum.to_be_bytes()[2..]);
    true
}
