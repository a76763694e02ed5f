//! `flannel-agent status`: how the running agent is, or what stands without it.

use std::{fmt::Write as _, fs, io::Write, path::Path, time::SystemTime};

use anyhow::Context;
use serde::Serialize;
use serde_json::Value;

use crate::{
    cli::{Output, StatusArgs},
    control::{self, AskError},
    netlink::inventory::{self, Inventory, Link},
    telemetry::status::Status,
};

/// Prints the status. Exit status 0 if the agent answers and is ready, 1 otherwise.
pub fn run(args: &StatusArgs, out: &mut impl Write) -> anyhow::Result<u8> {
    let client = &args.client;
    match control::ask(&client.control_socket, "/status") {
        Ok(body) => {
            let status: Status =
                serde_json::from_slice(&body).context("the agent's answer is no status")?;
            match client.output {
                // As it came: a newer agent may say more than this client knows.
                Output::Json => out.write_all(&body)?,
                Output::Text => out.write_all(text(&status, SystemTime::now()).as_bytes())?,
            }
            Ok(u8::from(!status.ready))
        }
        Err(error) => {
            let remains = Remains::read(&error, &args.subnet_file)?;
            match client.output {
                Output::Json => writeln!(out, "{}", serde_json::to_string(&remains)?)?,
                Output::Text => out.write_all(remains.text().as_bytes())?,
            }
            Ok(1)
        }
    }
}

/// The status for people.
fn text(status: &Status, now: SystemTime) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name:<12}{value}");
    };
    let ready = if status.ready { "ready" } else { "not ready" };
    let up = duration(status.uptime_seconds);
    line("agent", &format!("{ready}, version {}, up {up}", status.version));
    for missing in &status.missing {
        line("missing", &format!("{}: {}", missing.condition, missing.reason));
    }
    if let Some(store) = &status.store {
        let state = if store.connected { "answers" } else { "does not answer" };
        let detail = if store.detail.is_empty() { "" } else { ": " };
        line("store", &format!("{} {state}{detail}{}", store.kind, store.detail));
    }
    match &status.lease {
        None => line("lease", "none"),
        Some(lease) => {
            let subnets: Vec<_> =
                lease.subnet.iter().chain(&lease.subnet_v6).map(String::as_str).collect();
            let end = match lease.remaining_seconds(now) {
                None => "without an end".to_owned(),
                Some(left) => match u64::try_from(left) {
                    Ok(left) => format!("ends in {} unless renewed", duration(left)),
                    Err(_) => "has ended".to_owned(),
                },
            };
            line("lease", &format!("{}, {end}", subnets.join(" and ")));
        }
    }
    if let Some(interface) = &status.external_interface {
        let public = &interface.public_addresses;
        let public = if *public == interface.addresses {
            String::new()
        } else {
            format!(", peers send to {}", public.join(" and "))
        };
        line(
            "interface",
            &format!(
                "{}, MTU {}, {}{public}",
                interface.name,
                interface.mtu,
                interface.addresses.join(" and ")
            ),
        );
    }
    if !status.backend_type.is_empty() {
        line("backend", &format!("{} {}", status.backend_type, details(&status.backend)));
        for (name, value) in status.backend.as_object().into_iter().flatten() {
            // A list is a line per element; objects have lines of their own elsewhere.
            for element in value.as_array().into_iter().flatten() {
                line(&format!("  {}", name.trim_end_matches('s')), &details(element));
            }
        }
    }
    if let Some(datapath) = &status.datapath {
        let reason = if datapath.reason.is_empty() {
            String::new()
        } else {
            format!(" ({})", datapath.reason)
        };
        line("data path", &format!("{}{reason}", datapath.mode));
    }
    if let Some(xdp) = xdp(&status.backend["datapath"]["programs"]["xdp"]) {
        line("xdp", &xdp);
    }
    if let Some(firewall) = &status.firewall {
        let state = if firewall.in_place { "in place" } else { "not in place" };
        line("firewall", format!("{} {state}", firewall.renderer).trim_start());
        for problem in &firewall.problems {
            line("problem", problem);
        }
        for warning in &firewall.warnings {
            line("warning", warning);
        }
    }
    line("peers", &format!("{} of {} in place", status.peers_applied, status.peers_wanted));
    if let Some(change) = &status.config_change {
        line("config", change);
    }
    for problem in &status.problems {
        line("problem", problem);
    }
    text
}

/// A JSON object's plain members as `key=value`.
fn details(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::Object(members) => members
            .iter()
            .filter_map(|(key, value)| match value {
                Value::Array(_) | Value::Object(_) => None,
                Value::String(text) => Some(format!("{key}={text}")),
                other => Some(format!("{key}={other}")),
            })
            .collect::<Vec<_>>()
            .join(" "),
        other => other.to_string(),
    }
}

/// A duration by its two largest units.
fn duration(seconds: u64) -> String {
    let (days, hours, minutes) = (seconds / 86400, seconds / 3600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, minutes) => format!("{minutes} min {} s", seconds % 60),
        (0, hours, minutes) => format!("{hours} h {minutes} min"),
        (days, hours, _) => format!("{days} d {hours} h"),
    }
}

/// What can be seen while no agent answers.
#[derive(Debug, Serialize)]
struct Remains {
    running: bool,
    error: String,
    devices: Vec<Device>,
    subnet_file: SubnetFile,
}

/// One of the agent's devices.
#[derive(Debug, Serialize)]
struct Device {
    name: String,
    mtu: u32,
    addresses: Vec<String>,
}

impl From<&Link> for Device {
    fn from(link: &Link) -> Self {
        Self {
            name: link.name.clone(),
            mtu: link.mtu,
            addresses: link.addresses.iter().map(ToString::to_string).collect(),
        }
    }
}

/// The subnet file as it stands.
#[derive(Debug, Serialize)]
struct SubnetFile {
    path: String,
    lines: Vec<String>,
    error: Option<String>,
}

impl SubnetFile {
    fn read(path: &Path) -> Self {
        let (lines, error) = match fs::read_to_string(path) {
            Ok(text) => (text.lines().map(String::from).collect(), None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        Self { path: path.display().to_string(), lines, error }
    }
}

impl Remains {
    fn read(error: &AskError, subnet_file: &Path) -> anyhow::Result<Self> {
        let running = matches!(error, AskError::BadAnswer { .. });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
        let inventory = runtime.block_on(inventory::read(false, false, None))?;
        Ok(Self {
            running,
            error: error.to_string(),
            devices: devices(&inventory),
            subnet_file: SubnetFile::read(subnet_file),
        })
    }

    fn text(&self) -> String {
        let mut lines = vec![format!("{:<12}{}", "agent", self.error)];
        if self.devices.is_empty() {
            lines.push(format!("{:<12}none", "devices"));
        }
        for device in &self.devices {
            lines.push(format!(
                "{:<12}{}, MTU {}, {} (its peers: ip route show dev {0}; bridge fdb show dev {0})",
                "device",
                device.name,
                device.mtu,
                device.addresses.join(" and "),
            ));
        }
        let file = &self.subnet_file;
        let problem = file.error.as_ref().map_or(String::new(), |error| format!(": {error}"));
        lines.push(format!("{:<12}{}{problem}", "subnet file", file.path));
        lines.extend(file.lines.iter().map(|line| format!("{:<12}{line}", "")));
        lines.join("\n") + "\n"
    }
}

/// Devices named as flannel names them.
fn devices(inventory: &Inventory) -> Vec<Device> {
    let ours = |link: &&Link| {
        ["flannel.", "flannel-v6.", "flannel-wg"].iter().any(|start| link.name.starts_with(start))
            || link.name.strip_prefix("flannel").is_some_and(|rest| {
                !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit())
            })
    };
    inventory.links.iter().filter(ours).map(Device::from).collect()
}

/// Where tunnel packets are taken out in XDP and how many were, or why none is. `None` if nobody asked
/// for it.
fn xdp(front: &Value) -> Option<String> {
    if let Some(device) = front["device"].as_str() {
        let taken = front["outcomes"]["decapsulated"]["packets"].as_u64().unwrap_or_default();
        return Some(format!("native at {device}, {taken} packets taken out"));
    }
    let why = front["why_not"].as_str().filter(|why| !matches!(*why, "" | "--xdp off"))?;
    Some(format!("off ({why})"))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use serde_json::json;

    use super::*;
    use crate::{
        cli::ClientArgs,
        telemetry::status::{
            DatapathStatus, FirewallStatus, InterfaceStatus, LeaseStatus, Missing, StoreStatus,
        },
    };

    #[test]
    fn a_status_reads_well() {
        let status = Status {
            version: "9.9".into(),
            uptime_seconds: 7384,
            missing: vec![Missing { condition: "peers".into(), reason: "2 fail".into() }],
            store: Some(StoreStatus {
                kind: "etcd".into(),
                connected: true,
                detail: String::new(),
            }),
            lease: Some(LeaseStatus {
                subnet: Some("10.77.1.0/24".into()),
                subnet_v6: Some("fd77:0:0:1::/64".into()),
                expires_epoch_seconds: Some(86_500),
            }),
            external_interface: Some(InterfaceStatus {
                name: "eth0".into(),
                mtu: 1500,
                addresses: vec!["10.0.2.15".into()],
                public_addresses: vec!["192.0.2.11".into()],
            }),
            backend_type: "vxlan".into(),
            backend: json!({"device": "flannel.1", "vni": 1}),
            datapath: Some(DatapathStatus { mode: "kernel".into(), reason: "no bpffs".into() }),
            firewall: Some(FirewallStatus {
                renderer: "nftables".into(),
                in_place: true,
                changes: 1,
                problems: Vec::new(),
                warnings: vec!["a chain drops".into()],
            }),
            peers_wanted: 7,
            peers_applied: 5,
            problems: vec!["two peers claim a MAC".into()],
            ..Status::default()
        };
        let wanted = "\
agent       not ready, version 9.9, up 2 h 3 min
missing     peers: 2 fail
store       etcd answers
lease       10.77.1.0/24 and fd77:0:0:1::/64, ends in 1 d 0 h unless renewed
interface   eth0, MTU 1500, 10.0.2.15, peers send to 192.0.2.11
backend     vxlan device=flannel.1 vni=1
data path   kernel (no bpffs)
firewall    nftables in place
warning     a chain drops
peers       5 of 7 in place
problem     two peers claim a MAC
";
        assert_eq!(text(&status, UNIX_EPOCH + Duration::from_secs(100)), wanted);
        let late = text(&status, UNIX_EPOCH + Duration::from_hours(25));
        assert!(late.contains("has ended"), "{late}");
    }

    #[test]
    fn xdp_is_shown_to_whoever_asked_for_it() {
        let off = |why: &str| json!({"mode": "off", "device": null, "why_not": why});
        assert_eq!(xdp(&Value::Null), None);
        assert_eq!(xdp(&off("--xdp off")), None);
        assert_eq!(xdp(&off("the driver is slow")).as_deref(), Some("off (the driver is slow)"));
        let on = json!({"device": "eth0", "why_not": "",
            "outcomes": {"decapsulated": {"packets": 9}}});
        assert_eq!(xdp(&on).as_deref(), Some("native at eth0, 9 packets taken out"));
    }

    #[test]
    fn without_an_agent_the_rest_is_shown() {
        let dir = tempfile::tempdir().expect("a directory");
        let subnet_file = dir.path().join("subnet.env");
        fs::write(&subnet_file, "FLANNEL_SUBNET=10.77.1.1/24\n").expect("written");
        let control_socket = dir.path().join("absent.sock");
        let show = |output| {
            let client = ClientArgs { output, control_socket: control_socket.clone() };
            let args = StatusArgs { client, subnet_file: subnet_file.clone() };
            let mut out = Vec::new();
            assert_eq!(run(&args, &mut out).expect("printed"), 1);
            String::from_utf8(out).expect("UTF-8")
        };
        let text = show(Output::Text);
        assert!(
            text.contains("cannot reach an agent at") && text.contains("absent.sock"),
            "{text}"
        );
        assert!(text.contains("FLANNEL_SUBNET=10.77.1.1/24"), "{text}");
        let value: Value = serde_json::from_str(&show(Output::Json)).expect("JSON");
        assert_eq!(value["running"], json!(false));
        assert_eq!(value["subnet_file"]["lines"], json!(["FLANNEL_SUBNET=10.77.1.1/24"]));
    }

    #[test]
    fn our_devices_are_known_by_name() {
        let names =
            ["lo", "flannel.1", "flannel-v6.1", "flannel0", "flannel", "flanneling", "flannel-wg"];
        let link = |name: &&str| Link { name: (*name).to_owned(), ..Link::default() };
        let inventory =
            Inventory { links: names.iter().map(link).collect(), ..Inventory::default() };
        let found: Vec<_> = devices(&inventory).into_iter().map(|device| device.name).collect();
        assert_eq!(found, ["flannel.1", "flannel-v6.1", "flannel0", "flannel-wg"]);
    }
}
