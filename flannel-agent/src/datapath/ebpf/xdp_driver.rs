//! Which drivers `--xdp auto` takes.
//!
//! None yet. A driver is proved good here only by a run on it: the same bytes as by TC, right
//! checksums, and a gain. What has been looked at, and what was against it, stands below; whoever
//! has such a NIC can force it by `--xdp native` and tell.

use super::xdp_query;

/// What is known of a driver, and was not enough for `auto`.
const JUDGED: [(&str, &str); 5] = [
    ("veth", "it copies each packet first and takes segmentation from the other end (measured)"),
    ("virtio_net", "it drops packets whose checksum the host left open (read, Linux 6.12)"),
    ("mlx5_core", "it is said to work, but has not been tried with this agent (read, Linux 6.12)"),
    ("ice", "it is said to work, but has not been tried with this agent (read, Linux 6.12)"),
    ("ena", "it needs half of its queues and a small MTU (its vendor's words)"),
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
