//! Bulk TCP: one connection or several, each with a thread at both ends.

use std::{
    io::{Read, Write},
    thread,
};

use anyhow::{Context, Result};

use super::{Ends, Outcome, join};
use crate::bench::{
    priority::Importance,
    window::{Counted, Window},
};

/// What one `write` and one `read` carry at most, in bytes; iperf3 does the same.
const BLOCK: usize = 128 << 10;

/// Sends over `connections` connections until the window closes. Counts bytes.
pub fn run(ends: &Ends<'_>, connections: usize, window: Window) -> Result<Outcome> {
    let pairs = (0..connections).map(|_| ends.connected()).collect::<Result<Vec<_>>>()?;
    thread::scope(|scope| {
        let threads: Vec<_> = pairs
            .into_iter()
            .map(|(mut client, mut server)| {
                let sender = scope.spawn(move || -> Result<Counted> {
                    let mut counter = ends.client_counter(Importance::Nice, window)?;
                    let block = vec![0x5a; BLOCK];
                    loop {
                        let written = client.write(&block).context("the stream stalls")?;
                        if !counter.add(written as u64)? {
                            return counter.finish();
                        }
                    }
                });
                let receiver = scope.spawn(move || -> Result<Counted> {
                    let mut counter = ends.server_counter(Importance::Nice, window)?;
                    let mut block = vec![0; BLOCK];
                    loop {
                        let read = server.read(&mut block).context("the stream stalls")?;
                        // The rest is read as well, so that no reset cuts the sender short.
                        if !counter.add(read as u64)? || read == 0 {
                            break;
                        }
                    }
                    let counted = counter.finish()?;
                    while server.read(&mut block).context("the stream does not end")? > 0 {}
                    Ok(counted)
                });
                (sender, receiver)
            })
            .collect();
        let mut all = Outcome::default();
        for (sender, receiver) in threads {
            all.client = all.client.and(join(sender)?);
            all.server = all.server.and(join(receiver)?);
        }
        Ok(all)
    })
}
