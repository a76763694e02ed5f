//! Request and response over one TCP connection, one at a time.

use std::{
    io::{ErrorKind, Read, Write},
    thread,
    time::Instant,
};

use anyhow::{Context, Result};

use super::{Ends, Outcome, join};
use crate::bench::{
    priority::Importance,
    window::{Counted, Window},
};

/// Size of request and of response in bytes.
const MESSAGE: usize = 64;

/// Asks until the window closes. Returns the counts and each round trip's nanoseconds.
pub fn run(ends: &Ends<'_>, window: Window) -> Result<(Outcome, Vec<u64>)> {
    let (mut client, mut server) = ends.connected()?;
    thread::scope(|scope| {
        let answers = scope.spawn(move || -> Result<Counted> {
            let mut counter = ends.server_counter(Importance::RealTime, window)?;
            let mut message = [0; MESSAGE];
            loop {
                match server.read_exact(&mut message) {
                    Err(error) if error.kind() == ErrorKind::UnexpectedEof => break,
                    result => result.context("no request")?,
                }
                server.write_all(&message).context("cannot answer")?;
                counter.add(1)?;
            }
            counter.finish()
        });
        let asks = scope.spawn(move || -> Result<(Counted, Vec<u64>)> {
            let mut counter = ends.client_counter(Importance::RealTime, window)?;
            let mut times = Vec::with_capacity(1 << 18);
            let mut message = [0x5a; MESSAGE];
            loop {
                let start = Instant::now();
                client.write_all(&message).context("cannot ask")?;
                client.read_exact(&mut message).context("no answer")?;
                let time = start.elapsed();
                if counter.is_open() {
                    times.push(u64::try_from(time.as_nanos())?);
                }
                if !counter.add(1)? {
                    return Ok((counter.finish()?, times));
                }
            }
        });
        let (client, times) = join(asks)?;
        Ok((Outcome { client, server: join(answers)? }, times))
    })
}
