//! Connect, request, response, close, and again.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context, Result};

use super::{Ends, Outcome, PATIENCE, join};
use crate::bench::{
    priority::Importance,
    window::{Counted, Window},
};

/// Size of request and of response in bytes.
const MESSAGE: usize = 64;

/// Opens connections one after the other until the window closes. Counts those that got their
/// answer and were closed by both ends.
pub fn run(ends: &Ends<'_>, window: Window) -> Result<Outcome> {
    let listener = ends.listener()?;
    let target = listener.local_addr()?;
    let over = AtomicBool::new(false);
    let over = &over;
    thread::scope(|scope| {
        let answers = scope.spawn(move || -> Result<Counted> {
            let mut counter = ends.server_counter(Importance::RealTime, window)?;
            let mut message = [0; MESSAGE];
            loop {
                let (mut stream, _) = listener.accept().context("cannot accept")?;
                if over.load(Ordering::Acquire) {
                    return counter.finish();
                }
                stream.set_read_timeout(Some(PATIENCE))?;
                match stream.read_exact(&mut message) {
                    // The last connection only wakes this thread.
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => continue,
                    result => result.context("no request")?,
                }
                stream.write_all(&message).context("cannot answer")?;
                // The client closes first, and so keeps the port busy, as clients do.
                let _end = stream.read(&mut message).context("the client does not close")?;
                counter.add(1)?;
            }
        });
        let asks = scope.spawn(move || {
            let asked = ends.client.within(|| -> Result<Counted> {
                let mut counter = ends.client_counter(Importance::RealTime, window)?;
                let mut message = [0x5a; MESSAGE];
                loop {
                    let mut stream = TcpStream::connect_timeout(&target, PATIENCE)
                        .with_context(|| format!("cannot connect to {target}"))?;
                    stream.set_read_timeout(Some(PATIENCE))?;
                    stream.write_all(&message).context("cannot ask")?;
                    stream.read_exact(&mut message).context("no answer")?;
                    stream.shutdown(Shutdown::Write)?;
                    // Until the other end has closed too, so that one connection at a time lives.
                    let _end = stream.read(&mut message)?;
                    if !counter.add(1)? {
                        return counter.finish();
                    }
                }
            });
            over.store(true, Ordering::Release);
            // In the server's own namespace: it reaches the listener whatever the path is like.
            ends.server.within(|| Ok(TcpStream::connect_timeout(&target, PATIENCE)?))?;
            asked
        });
        let client = join(asks)?;
        Ok(Outcome { client, server: join(answers)? })
    })
}
