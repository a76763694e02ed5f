//! Removing what agents made on this host: the one thing that stopping them never does.
//!
//! What is ours is known by the places it is recorded in: the state directory and the pins name
//! the devices, the subnet file names the networks inside which routes of our protocol are ours.
//! Nothing is removed by its looks alone.

mod files;
mod kernel;

use std::path::PathBuf;

use serde::Serialize;

use crate::{
    control,
    datapath::ebpf,
    device_claim::DeviceClaim,
    firewall::removal,
    subnet_env::{SubnetFile, SubnetFileError},
};

/// Where agents were told to keep things.
#[derive(Clone, Debug)]
pub struct Places {
    /// The subnet file.
    pub subnet_file: PathBuf,
    /// The directory of what survives reboots.
    pub state_dir: PathBuf,
    /// The directory of pinned maps and links.
    pub pin_dir: PathBuf,
    /// The control socket.
    pub control_socket: PathBuf,
}

/// Why nothing is removed at all.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// An agent answers at the control socket.
    #[error(
        "an agent is running (it answers at {0}): stop it first, or it would put everything back"
    )]
    Running(PathBuf),
    /// The subnet file is locked, or its directory cannot be used.
    #[error("an agent seems to be running: {0}")]
    SubnetFile(#[from] SubnetFileError),
    /// An agent in this network namespace works on a device.
    #[error("an agent is running (it works on device {0}): stop it first")]
    Device(String),
    /// Pins are locked.
    #[error("an agent is running (it uses the pins in {0}): stop it first")]
    Pins(PathBuf),
}

/// Something that was there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Thing {
    /// `device`, `route`, `neighbour`, `fdb`, `link`, `filter`, `pins`, `firewall`, `file`.
    pub kind: &'static str,
    /// How `ip`, `bridge`, `bpftool` or `ls` show it.
    pub name: String,
}

/// What came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What was removed.
    pub removed: Vec<Thing>,
    /// What looks like an agent's and was left, and why.
    pub left: Vec<String>,
    /// What could not be removed, and why.
    pub problems: Vec<String>,
}

impl Report {
    fn removed(&mut self, kind: &'static str, name: &str) {
        self.removed.push(Thing { kind, name: name.to_owned() });
    }

    /// Notes what came of removing one thing.
    fn note(&mut self, kind: &'static str, name: &str, result: Result<bool, String>) {
        match result {
            Ok(true) => self.removed(kind, name),
            Ok(false) => {}
            Err(why) => self.problems.push(format!("cannot remove {kind} {name}: {why}")),
        }
    }
}

/// Removes everything. A second run finds nothing and is fine.
///
/// # Errors
/// If an agent runs. Single failures are in the report, and do not keep the rest from going.
pub async fn run(places: &Places) -> Result<Report, Refusal> {
    if control::ask(&places.control_socket, "/status").is_ok() {
        return Err(Refusal::Running(places.control_socket.clone()));
    }
    let subnet_file = SubnetFile::new(&places.subnet_file);
    let lock = subnet_file.lock(std::time::Duration::ZERO).await?;
    let pins = ebpf::Pins::lock(&places.pin_dir).map_err(Refusal::Pins)?;

    let mut report = Report::default();
    let mut devices = files::recorded_devices(&places.state_dir);
    devices.extend(pins.devices());
    let claims = devices
        .iter()
        .map(|device| DeviceClaim::take(device).map_err(|_| Refusal::Device(device.clone())));
    let claims: Vec<_> = claims.collect::<Result<_, _>>()?;
    // Whatever an agent makes has its step here; the record that leads to it goes last, so that a
    // run that fails half-way can be repeated.
    let rest = kernel::remove(&devices, &subnet_file, &mut report);
    pins.remove(&mut |kind, name, result| report.note(kind, name, result));
    firewall(&mut report).await;
    files::remove(places, &subnet_file, &rest, &mut report);
    drop((lock, claims));
    Ok(report)
}

async fn firewall(report: &mut Report) {
    let (removed, problems) = removal::remove_all().await;
    for name in removed {
        report.removed("firewall", &name);
    }
    report.problems.extend(problems);
}
