//! Waiting for something to become true.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};

/// How often a condition is looked at.
const STEP: Duration = Duration::from_millis(20);

/// Waits until `check` gives a value. `what` and the last reason stand in the error.
pub fn eventually<T>(
    what: &str,
    within: Duration,
    mut check: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let start = Instant::now();
    loop {
        let last = match check() {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        if start.elapsed() >= within {
            match last {
                Some(error) => bail!("{what}: not within {within:?}: {error:#}"),
                None => bail!("{what}: not within {within:?}"),
            }
        }
        thread::sleep(STEP);
    }
}

/// Makes sure that `check` stays true for the whole time.
pub fn holds_for(
    what: &str,
    time: Duration,
    mut check: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let start = Instant::now();
    loop {
        if !check()? {
            bail!("{what}: no longer true after {:?}", start.elapsed());
        }
        if start.elapsed() >= time {
            return Ok(());
        }
        thread::sleep(STEP);
    }
}
