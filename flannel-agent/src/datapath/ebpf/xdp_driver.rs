//! Which drivers `--xdp auto` takes.
//!
//! None yet: a driver is proved good only by a run on it, with the same bytes as by TC, right checksums
//! and a gain. veth has the first two (the tests run on it) and no gain. Of the others below something
//! is known from their sources or makers (decision 0021); `--xdp native` takes them all the same.

use super::xdp_query;

/// What is known of a driver, and was not enough for `auto`.
const JUDGED: [(&str, &str); 5] = [
    (
        "veth",
        "slower than without XDP: each packet is copied and the other end's merging switched off",
    ),
    ("virtio_net", "said to drop packets whose checksum the host left open; not tried yet"),
    ("mlx5_core", "said to mark packets as tunnelled after XDP took the tunnel off; not tried yet"),
    ("ice", "said to count the checksums of a tunnel that XDP took off; not tried yet"),
    ("ena", "said to need a small MTU and half of the queues; not tried yet"),
];

/// Whether `--xdp auto` takes a device's driver.
///
/// # Errors
/// Why not.
pub fn check(device: &str) -> Result<(), String> {
    match xdp_query::driver(device) {
        Ok(driver) => Err(verdict(&driver)),
        Err(error) => Err(format!("cannot ask for the driver of {device}: {error}")),
    }
}

fn verdict(driver: &str) -> String {
    let judged = JUDGED.iter().find(|(name, _)| *name == driver);
    let why = judged.map_or("nobody has tried it", |(_, why)| why);
    format!("--xdp auto does not take the driver {driver}: {why}")
}
