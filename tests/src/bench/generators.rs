//! Traffic between two pods, made and counted by two pinned threads (or more) of this process.

pub mod connections;
pub mod request_response;
pub mod tcp_stream;
pub mod udp_flood;

use std::{
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    panic,
    thread::{self, ScopedJoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use super::{
    priority::Importance,
    window::{Counted, Counter, Window},
};
use crate::netns::Netns;

/// How long anything may block.
const PATIENCE: Duration = Duration::from_secs(3);

/// The two ends of a path.
#[derive(Clone, Copy, Debug)]
pub struct Ends<'a> {
    /// Where traffic starts.
    pub client: &'a Netns,
    /// Where it goes.
    pub server: &'a Netns,
    /// The server's address.
    pub address: IpAddr,
    /// CPUs of the client's and of the server's threads.
    pub cpus: [usize; 2],
}

/// What both ends counted.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// The sender's count.
    pub client: Counted,
    /// The receiver's count: what arrived.
    pub server: Counted,
}

impl Outcome {
    /// CPU time of all threads.
    pub fn cpu(&self) -> Duration {
        self.client.cpu + self.server.cpu
    }
}

impl Ends<'_> {
    /// A listener at the server, on a port of the kernel's choice.
    fn listener(&self) -> Result<TcpListener> {
        self.server.within(|| {
            TcpListener::bind(SocketAddr::new(self.address, 0))
                .with_context(|| format!("cannot listen on {}", self.address))
        })
    }

    /// A connection from the client, and the server's end of it.
    fn connected(&self) -> Result<(TcpStream, TcpStream)> {
        let listener = self.listener()?;
        let target = listener.local_addr()?;
        let client = self.client.within(|| {
            TcpStream::connect_timeout(&target, PATIENCE)
                .with_context(|| format!("cannot connect to {target}"))
        })?;
        let from = client.local_addr()?;
        listener.set_nonblocking(true)?;
        let start = Instant::now();
        let server = loop {
            match listener.accept() {
                Ok((stream, peer)) if peer == from => break stream,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    ensure!(start.elapsed() < PATIENCE, "the connection does not arrive");
                    thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error).context("cannot accept"),
            }
        };
        server.set_nonblocking(false)?;
        for stream in [&client, &server] {
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            stream.set_nodelay(true)?;
        }
        Ok((client, server))
    }

    fn client_counter(&self, importance: Importance, window: Window) -> Result<Counter> {
        Counter::on_cpu(self.cpus[0], importance, window)
    }

    fn server_counter(&self, importance: Importance, window: Window) -> Result<Counter> {
        Counter::on_cpu(self.cpus[1], importance, window)
    }
}

/// The result of a thread; its panic is ours.
fn join<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    match thread.join() {
        Ok(result) => result,
        Err(panic) => panic::resume_unwind(panic),
    }
}
