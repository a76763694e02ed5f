//! The extension backend: specification §7.8. The user's own commands move the packets; they are
//! told of our lease and of every peer that comes, changes or goes.
//!
//! One command runs at a time, as a task beside the agent's loop, which never waits for it.

mod options;
mod plan;
mod run;
mod words;

use std::{
    cell::RefCell,
    net::{Ipv4Addr, Ipv6Addr},
    rc::Rc,
};

use async_trait::async_trait;
use ipnet::{Ipv4Net, Ipv6Net};
use serde_json::{Value, json};
use tokio::{
    task::{AbortHandle, JoinHandle},
    time::Instant,
};
use tracing::{info, warn};

pub use self::options::ExtensionOptions;
use self::{
    plan::{Plan, Task},
    run::{Call, Said, Variables},
    words::Words,
};
use super::{ApplyReport, Backend, BackendError, Farewell, interface_mtu::InterfaceMtu};
use crate::{
    external_interface::ExternalInterface,
    lease::{Lease, LeaseAttributes, RawJson, Subnets},
    peer_table::PeerTable,
};

/// The name peers find in leases.
const NAME: &str = "extension";

/// What the backend works with.
#[derive(Clone, Debug)]
pub struct ExtensionConfig {
    /// The options of the network configuration.
    pub options: ExtensionOptions,
    /// The interface whose own addresses are published.
    pub external: ExternalInterface,
    /// The cluster's IPv4 network, if IPv4 is enabled.
    pub ipv4_network: Option<Ipv4Net>,
    /// The cluster's IPv6 network, if IPv6 is enabled.
    pub ipv6_network: Option<Ipv6Net>,
}

/// A command at work. Killed when this is dropped.
struct Running {
    task: Task,
    result: JoinHandle<Result<(), String>>,
    kill: AbortHandle,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill.abort();
    }
}

/// The backend.
pub struct ExtensionBackend {
    options: ExtensionOptions,
    network: Option<Ipv4Net>,
    public_ip: Option<Ipv4Addr>,
    public_ipv6: Option<Ipv6Addr>,
    mtu: InterfaceMtu,
    /// What `PreStartupCommand` said, once it has.
    data: Option<RawJson>,
    prepared: bool,
    plan: Plan,
    running: Option<Running>,
    /// Our own values for `ShutdownCommand`; `None` as long as there is nothing to shut down.
    own: Rc<RefCell<Option<Variables>>>,
}

impl ExtensionBackend {
    /// Runs nothing yet.
    ///
    /// # Errors
    /// [`BackendError::Kernel`] if netlink is refused.
    pub fn new(config: ExtensionConfig) -> Result<Self, BackendError> {
        let ExtensionConfig { options, external, ipv4_network, ipv6_network } = config;
        Ok(Self {
            options,
            network: ipv4_network,
            public_ip: external.addr.filter(|_| ipv4_network.is_some()),
            public_ipv6: external.addr_v6.filter(|_| ipv6_network.is_some()),
            mtu: InterfaceMtu::new(&external)?,
            data: None,
            prepared: false,
            plan: Plan::default(),
            running: None,
            own: Rc::default(),
        })
    }

    fn call(&self, words: &Words, variables: Variables, input: String) -> Call {
        Call { words: words.clone(), variables, input, timeout: self.options.timeout }
    }

    /// Our own values, what is missing in Go's words.
    fn own_variables(&self, own: Subnets) -> Variables {
        let or = |value: Option<String>, none: &str| value.unwrap_or_else(|| none.to_owned());
        vec![
            ("NETWORK", or(self.network.map(|net| net.to_string()), "0.0.0.0/0")),
            ("SUBNET", or(own.v4.map(|net| net.to_string()), "0.0.0.0/0")),
            ("IPV6SUBNET", or(own.v6.map(|net| net.to_string()), "::/0")),
            ("PUBLIC_IP", or(self.public_ip.map(|ip| ip.to_string()), "<nil>")),
            ("PUBLIC_IPV6", or(self.public_ipv6.map(|ip| ip.to_string()), "<nil>")),
        ]
    }

    /// Starts the next command unless one is at work. What has no command is done at once.
    fn start_next(&mut self) {
        let now = Instant::now();
        while self.running.is_none()
            && let Some(task) = self.plan.next(now)
        {
            let (field, words, call) = match &task {
                Task::Own(own) => {
                    let variables = self.own_variables(*own);
                    *self.own.borrow_mut() = Some(variables.clone());
                    (
                        "PostStartupCommand",
                        &self.options.post_startup,
                        Ok((variables, String::new())),
                    )
                }
                Task::Add(subnets, attributes) => {
                    ("SubnetAddCommand", &self.options.subnet_add, about(*subnets, attributes))
                }
                Task::Remove(subnets, attributes) => {
                    let words = &self.options.subnet_remove;
                    ("SubnetRemoveCommand", words, about(*subnets, attributes))
                }
            };
            let Some(words) = words else {
                self.plan.done(task, Ok(()), now);
                continue;
            };
            match call {
                Err(reason) => self.plan.done(task, Err(reason), now),
                Ok((variables, input)) => {
                    let result =
                        tokio::spawn(run_and_log(field, self.call(words, variables, input)));
                    let kill = result.abort_handle();
                    self.running = Some(Running { task, result, kill });
                }
            }
        }
    }
}

/// A peer's values and what its `PreStartupCommand` said.
fn about(subnets: Subnets, attributes: &LeaseAttributes) -> Result<(Variables, String), String> {
    let values = [
        ("SUBNET", subnets.v4.map(|net| net.to_string())),
        ("IPV6SUBNET", subnets.v6.map(|net| net.to_string())),
        ("PUBLIC_IP", attributes.public_ip.map(|ip| ip.to_string())),
        ("PUBLIC_IPV6", attributes.public_ipv6.map(|ip| ip.to_string())),
    ];
    let variables = values.into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
    let input = match &attributes.backend_data {
        None => String::new(),
        Some(data) => serde_json::from_str(data.as_str()).map_err(|_| {
            format!("is not run: the peer's backend data {} is no string", data.as_str())
        })?,
    };
    Ok((variables, input))
}

/// Runs a command and logs what it says, line by line.
async fn run_and_log(field: &'static str, call: Call) -> Result<(), String> {
    let about = call.variables.iter().find(|(key, _)| *key == "SUBNET").map(|(_, value)| &**value);
    let (program, about) = (call.words.program(), about.unwrap_or_default());
    match run::run(&call).await {
        Ok(Said { text, cut }) => {
            info!("{field} {program} for {about} worked");
            for line in text.lines() {
                info!("{field} for {about}: {line}");
            }
            if cut {
                warn!("{field} for {about}: there was more, which is not shown");
            }
            Ok(())
        }
        Err(reason) => {
            // Shown as a problem as well, but for a removal, which nobody hears of otherwise.
            if field == "SubnetRemoveCommand" {
                warn!("{field} {program} for {about} {reason}");
            }
            Err(reason)
        }
    }
}

#[async_trait(?Send)]
impl Backend for ExtensionBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn prepare(&mut self, _stored: Option<&LeaseAttributes>) -> Result<(), BackendError> {
        if self.prepared {
            return Ok(());
        }
        if let Some(words) = &self.options.pre_startup {
            let refused = |why: String| BackendError::Config(format!("PreStartupCommand {why}"));
            let said = run::run(&self.call(words, Vec::new(), String::new())).await;
            let Said { text, cut } = said.map_err(refused)?;
            if cut {
                return Err(refused("says more than can be published with a lease".to_owned()));
            }
            info!("PreStartupCommand {} says: {text}", words.program());
            self.data = Some(RawJson::from_compact(Value::String(text).to_string()));
        }
        self.prepared = true;
        self.own.borrow_mut().get_or_insert_default();
        Ok(())
    }

    fn attributes(&self) -> LeaseAttributes {
        LeaseAttributes {
            public_ip: self.public_ip,
            public_ipv6: self.public_ipv6,
            backend_type: NAME.to_owned(),
            backend_data: self.data.clone(),
            ..LeaseAttributes::default()
        }
    }

    async fn apply(&mut self, own: &Lease, peers: &PeerTable) -> ApplyReport {
        self.plan.want(own.subnets, peers, NAME);
        self.start_next();
        let mut problems: Vec<_> = self.mtu.refresh().err().into_iter().collect();
        let others = peers.peers().filter(|(_, attributes)| attributes.backend_type != NAME);
        problems.extend(others.map(|(subnets, attributes)| {
            let other = &attributes.backend_type;
            format!("peer {subnets} uses backend \"{other}\", not {NAME}: it is left out")
        }));
        problems.extend(self.plan.problems());
        ApplyReport {
            problems,
            device_problem: self.plan.own_problem(),
            peers_applied: self.plan.served(),
            ..ApplyReport::default()
        }
    }

    async fn changed(&mut self) {
        let due = self.plan.next_try().filter(|_| self.running.is_none());
        let retry = async {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        let ended = async {
            match &mut self.running {
                Some(running) => (&mut running.result).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            result = ended => {
                let result = result.unwrap_or_else(|err| Err(format!("was not run to its end: {err}")));
                if let Some(running) = self.running.take() {
                    self.plan.done(running.task.clone(), result, Instant::now());
                }
            }
            () = retry => {}
            () = self.mtu.changed() => {}
        }
    }

    fn mtu(&self) -> u32 {
        self.mtu.get()
    }

    fn status(&self) -> Value {
        let running = self.running.as_ref().map(|running| match &running.task {
            Task::Own(_) => "PostStartupCommand".to_owned(),
            Task::Add(subnets, _) => format!("SubnetAddCommand for {subnets}"),
            Task::Remove(subnets, _) => format!("SubnetRemoveCommand for {subnets}"),
        });
        json!({
            "interface": { "name": self.mtu.name(), "mtu": self.mtu.get() },
            "peers_served": self.plan.served(),
            "problems": self.plan.problems().len(),
            "running": running,
        })
    }

    fn farewell(&self) -> Option<Farewell> {
        let words = self.options.shutdown.clone()?;
        let (own, timeout) = (Rc::clone(&self.own), self.options.timeout);
        Some(Box::pin(async move {
            let Some(variables) = own.take() else { return };
            let call = Call { words, variables, input: String::new(), timeout };
            if let Err(reason) = run_and_log("ShutdownCommand", call).await {
                warn!("ShutdownCommand {reason}");
            }
        }))
    }
}
