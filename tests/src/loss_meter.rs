//! A stream of one small packet per millisecond, and what became of it.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::socket::{setsockopt, sockopt};

use crate::{netns::Netns, wait::eventually};

/// Between two packets.
const INTERVAL: Duration = Duration::from_millis(1);

/// What became of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// Packets sent.
    pub sent: u64,
    /// Packets that never arrived.
    pub lost: u64,
    /// Packets that arrived again.
    pub duplicates: u64,
    /// The longest time between two arrivals.
    pub longest_gap: Duration,
    /// Sources the packets came from.
    pub sources: BTreeSet<IpAddr>,
}

impl Loss {
    /// An error unless every packet came once, from `source`.
    pub fn ensure_none(&self, source: IpAddr) -> Result<()> {
        ensure!(self.sent > 0, "nothing was sent");
        ensure!(
            self.lost == 0 && self.duplicates == 0,
            "{} of {} packets lost, {} twice, longest gap {:?}",
            self.lost,
            self.sent,
            self.duplicates,
            self.longest_gap
        );
        ensure!(self.sources == BTreeSet::from([source]), "packets came from {:?}", self.sources);
        Ok(())
    }
}

/// A running stream.
#[derive(Debug)]
pub struct LossMeter {
    stop_sending: Arc<AtomicBool>,
    stop_receiving: Arc<AtomicBool>,
    sender: JoinHandle<Result<u64>>,
    receiver: JoinHandle<Result<Received>>,
}

#[derive(Debug, Default)]
struct Received {
    seen: Vec<bool>,
    duplicates: u64,
    longest_gap: Duration,
    sources: BTreeSet<IpAddr>,
}

impl LossMeter {
    /// Starts the stream, and returns when its first packet has arrived.
    pub fn start(from: &Netns, to: &Netns, address: IpAddr) -> Result<Self> {
        let socket = to.within(move || {
            let socket = UdpSocket::bind(SocketAddr::new(address, 0))
                .with_context(|| format!("cannot listen on {address}"))?;
            // Beyond the system's limit: seconds of the stream, however late its reader is run.
            setsockopt(&socket, sockopt::RcvBufForce, &(4 << 20))?;
            socket.set_read_timeout(Some(Duration::from_millis(50)))?;
            Ok(socket)
        })?;
        let target = socket.local_addr()?;
        let arrived = Arc::new(AtomicBool::new(false));
        let stop_sending = Arc::new(AtomicBool::new(false));
        let stop_receiving = Arc::new(AtomicBool::new(false));
        let receiver = {
            let (arrived, stop) = (Arc::clone(&arrived), Arc::clone(&stop_receiving));
            thread::spawn(move || receive(&socket, &arrived, &stop))
        };
        let stop = Arc::clone(&stop_sending);
        let sender = from.spawn(move || send(target, &stop))?;
        let meter = Self { stop_sending, stop_receiving, sender, receiver };
        let first = eventually("the stream's first packet", Duration::from_secs(5), || {
            Ok(arrived.load(Ordering::Relaxed).then_some(()))
        });
        if let Err(error) = first {
            meter.stop()?;
            return Err(error);
        }
        Ok(meter)
    }

    /// Ends the stream and tells.
    pub fn stop(self) -> Result<Loss> {
        self.stop_sending.store(true, Ordering::Relaxed);
        let sent = join(self.sender)?;
        // What is under way arrives well within this.
        thread::sleep(Duration::from_millis(200));
        self.stop_receiving.store(true, Ordering::Relaxed);
        let received = join(self.receiver)?;
        let arrived = received.seen.iter().filter(|seen| **seen).count() as u64;
        Ok(Loss {
            sent,
            lost: sent.saturating_sub(arrived),
            duplicates: received.duplicates,
            longest_gap: received.longest_gap,
            sources: received.sources,
        })
    }
}

fn join<T>(thread: JoinHandle<Result<T>>) -> Result<T> {
    match thread.join() {
        Ok(result) => result,
        Err(_) => bail!("a thread of the loss meter panicked"),
    }
}

fn send(target: SocketAddr, stop: &AtomicBool) -> Result<u64> {
    let any: IpAddr = if target.is_ipv4() { "0.0.0.0".parse()? } else { "::".parse()? };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0))?;
    let mut due = Instant::now();
    let mut sequence = 0_u64;
    while !stop.load(Ordering::Relaxed) {
        // A refusal (no route, say) is a lost packet, which is what is measured.
        let _ = socket.send_to(&sequence.to_be_bytes(), target);
        sequence += 1;
        // Late by the machine's fault: go on from now, a burst would measure queues.
        due = (due + INTERVAL).max(Instant::now());
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    Ok(sequence)
}

fn receive(socket: &UdpSocket, arrived: &AtomicBool, stop: &AtomicBool) -> Result<Received> {
    let mut received = Received::default();
    let mut last: Option<Instant> = None;
    let mut buffer = [0_u8; 64];
    while !stop.load(Ordering::Relaxed) {
        let (8, source) = (match socket.recv_from(&mut buffer) {
            Ok(packet) => packet,
            Err(error)
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut
                ) =>
            {
                continue;
            }
            Err(error) => return Err(error.into()),
        }) else {
            continue;
        };
        let now = Instant::now();
        if let Some(last) = last {
            received.longest_gap = received.longest_gap.max(now - last);
        }
        last = Some(now);
        received.sources.insert(source.ip());
        let sequence = usize::try_from(u64::from_be_bytes(buffer[..8].try_into()?))?;
        if received.seen.len() <= sequence {
            received.seen.resize(sequence + 1, false);
        }
        if received.seen[sequence] {
            received.duplicates += 1;
        }
        received.seen[sequence] = true;
        arrived.store(true, Ordering::Relaxed);
    }
    Ok(received)
}
