//! Connections between pods that last for a whole story.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::netns::Netns;

/// How long an answer may take before the conversation counts as broken.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often a waiting thread looks whether it shall stop.
const LOOK: Duration = Duration::from_millis(200);

/// A TCP connection to an echo server.
#[derive(Debug)]
pub struct Conversation {
    stream: TcpStream,
    sent: u64,
    server: Server,
}

/// A thread that ends with this.
#[derive(Debug)]
struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(work: impl FnOnce(&AtomicBool) + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stop);
        Self { stop, thread: Some(thread::spawn(move || work(&told))) }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A story that fails says so itself.
            let _ = thread.join();
        }
    }
}

/// Listens in a namespace; returns the address.
pub fn listen(at: &Netns, address: SocketAddr) -> Result<TcpListener> {
    at.within(move || {
        TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))
    })
}

impl Conversation {
    /// Connects from a namespace to a listener, by `target` if that is not the listener's own
    /// address (a service's).
    pub fn open(from: &Netns, listener: TcpListener, target: Option<SocketAddr>) -> Result<Self> {
        let target = target.map_or_else(|| listener.local_addr(), Ok)?;
        listener.set_nonblocking(true)?;
        let server = Server::start(move |stop| echo(&listener, stop));
        let stream = from.within(move || {
            TcpStream::connect_timeout(&target, PATIENCE)
                .with_context(|| format!("cannot connect to {target}"))
        })?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, sent: 0, server })
    }

    /// The same, straight from pod to pod.
    pub fn between(from: &Netns, to: &Netns, address: IpAddr) -> Result<Self> {
        Self::open(from, listen(to, SocketAddr::new(address, 0))?, None)
    }

    /// Our port.
    pub fn port(&self) -> Result<u16> {
        Ok(self.stream.local_addr()?.port())
    }

    /// Sends words and gets each back, for this long. Returns how many.
    pub fn talk(&mut self, time: Duration) -> Result<u64> {
        let start = Instant::now();
        let mut words = 0;
        while start.elapsed() < time {
            self.word()?;
            words += 1;
        }
        Ok(words)
    }

    /// Sends one word and gets it back.
    pub fn word(&mut self) -> Result<()> {
        self.sent += 1;
        let sent = self.sent.to_be_bytes();
        self.stream.write_all(&sent).context("cannot send")?;
        let mut got = [0; 8];
        self.stream.read_exact(&mut got).context("no answer")?;
        ensure!(got == sent, "{got:?} came back for {sent:?}");
        Ok(())
    }

    /// Whether a word is answered within a time. If not, the answer may come later still: the
    /// conversation goes on with [`catch_up`](Self::catch_up).
    pub fn is_answered(&mut self, within: Duration) -> Result<bool> {
        self.sent += 1;
        self.stream.write_all(&self.sent.to_be_bytes()).context("cannot send")?;
        self.stream.set_read_timeout(Some(within))?;
        let mut got = [0; 8];
        let result = self.stream.read_exact(&mut got);
        self.stream.set_read_timeout(Some(PATIENCE))?;
        Ok(result.is_ok())
    }

    /// Reads what [`is_answered`](Self::is_answered) gave up on, until all that was sent is back.
    pub fn catch_up(&mut self) -> Result<()> {
        loop {
            let mut got = [0; 8];
            self.stream.read_exact(&mut got).context("the conversation stalls")?;
            if u64::from_be_bytes(got) == self.sent {
                return Ok(());
            }
        }
    }

    /// Whether the echo server still runs.
    pub fn is_served(&self) -> bool {
        self.server.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

fn echo(listener: &TcpListener, stop: &AtomicBool) {
    let stream = loop {
        match listener.accept() {
            Ok((stream, _)) => break stream,
            Err(_) if stop.load(Ordering::Relaxed) => return,
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    };
    let mut stream = stream;
    let mut buffer = vec![0; 1 << 16];
    let ready = stream.set_nonblocking(false).is_ok()
        && stream.set_read_timeout(Some(LOOK)).is_ok()
        && stream.set_nodelay(true).is_ok();
    while ready && !stop.load(Ordering::Relaxed) {
        match stream.read(&mut buffer) {
            Ok(0) => return,
            Ok(read) => {
                if stream.write_all(&buffer[..read]).is_err() {
                    return;
                }
            }
            Err(error) if is_timeout(&error) => {}
            Err(_) => return,
        }
    }
}

/// A TCP stream that never ends, one way: zeros as fast as they go.
#[derive(Debug)]
pub struct Bulk {
    received: Arc<AtomicU64>,
    _sender: Server,
    _receiver: Server,
}

impl Bulk {
    /// Starts it.
    pub fn start(from: &Netns, to: &Netns, address: IpAddr) -> Result<Self> {
        let listener = listen(to, SocketAddr::new(address, 0))?;
        let target = listener.local_addr()?;
        let mut stream = from.within(move || {
            TcpStream::connect_timeout(&target, PATIENCE).context("cannot connect")
        })?;
        stream.set_write_timeout(Some(LOOK))?;
        let (mut incoming, _) = listener.accept()?;
        incoming.set_read_timeout(Some(LOOK))?;
        let received = Arc::new(AtomicU64::new(0));
        let sender = Server::start(move |stop| {
            let zeros = vec![0; 1 << 16];
            while !stop.load(Ordering::Relaxed) {
                match stream.write(&zeros) {
                    Ok(_) => {}
                    Err(error) if is_timeout(&error) => {}
                    Err(_) => return,
                }
            }
        });
        let count = Arc::clone(&received);
        let receiver = Server::start(move |stop| {
            let mut buffer = vec![0; 1 << 18];
            while !stop.load(Ordering::Relaxed) {
                match incoming.read(&mut buffer) {
                    Ok(0) => return,
                    Ok(read) => {
                        count.fetch_add(read as u64, Ordering::Relaxed);
                    }
                    Err(error) if is_timeout(&error) => {}
                    Err(_) => return,
                }
            }
        });
        Ok(Self { received, _sender: sender, _receiver: receiver })
    }

    /// Bytes that have arrived.
    pub fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    /// Watches it for a time. Returns the longest pause between two arrivals, to about 5 ms.
    pub fn longest_pause(&self, time: Duration) -> Duration {
        let start = Instant::now();
        let (mut last, mut since, mut longest) = (self.received(), start, Duration::ZERO);
        while start.elapsed() < time {
            thread::sleep(Duration::from_millis(5));
            let now = self.received();
            if now != last {
                last = now;
                since = Instant::now();
            }
            longest = longest.max(since.elapsed());
        }
        longest
    }
}

/// Datagrams to and fro.
#[derive(Debug)]
pub struct Datagrams {
    socket: UdpSocket,
    sent: u64,
    _server: Server,
}

impl Datagrams {
    /// An echo server in one namespace, a socket in the other.
    pub fn between(from: &Netns, to: &Netns, address: IpAddr) -> Result<Self> {
        Self::on_ports(from, to, address, (0, 0))
    }

    /// The same with these ports, the socket's first.
    pub fn on_ports(
        from: &Netns,
        to: &Netns,
        address: IpAddr,
        (own, other): (u16, u16),
    ) -> Result<Self> {
        let bind = move |at: SocketAddr| move || UdpSocket::bind(at).context("cannot bind");
        let server = to.within(bind(SocketAddr::new(address, other)))?;
        let target = server.local_addr()?;
        server.set_read_timeout(Some(LOOK))?;
        let server = Server::start(move |stop| {
            let mut buffer = [0; 2048];
            while !stop.load(Ordering::Relaxed) {
                if let Ok((read, sender)) = server.recv_from(&mut buffer) {
                    // A lost answer is for the other side to find out.
                    let _ = server.send_to(&buffer[..read], sender);
                }
            }
        });
        let any: IpAddr = if address.is_ipv4() { "0.0.0.0" } else { "::" }.parse()?;
        let socket = from.within(bind(SocketAddr::new(any, own)))?;
        socket.connect(target)?;
        socket.set_read_timeout(Some(LOOK))?;
        Ok(Self { socket, sent: 0, _server: server })
    }

    /// Our port.
    pub fn port(&self) -> Result<u16> {
        Ok(self.socket.local_addr()?.port())
    }

    /// Sends datagrams and waits for each to come back, for this long. Returns how many were sent
    /// and how many came back.
    pub fn talk(&mut self, time: Duration) -> Result<(u64, u64)> {
        let start = Instant::now();
        let (mut sent, mut answered) = (0, 0);
        while start.elapsed() < time {
            self.sent += 1;
            sent += 1;
            let word = self.sent.to_be_bytes();
            if self.socket.send(&word).is_err() {
                continue;
            }
            let mut buffer = [0; 64];
            while let Ok(read) = self.socket.recv(&mut buffer) {
                if buffer[..read] == word {
                    answered += 1;
                    break;
                }
            }
        }
        ensure!(sent > 0, "no time to send anything");
        Ok((sent, answered))
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), TimedOut | WouldBlock | Interrupted)
}
