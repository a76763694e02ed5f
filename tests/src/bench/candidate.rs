//! The ways from pod to pod that are compared.

use std::fmt;

use clap::ValueEnum;
use serde_json::Value;

/// A way from one pod to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Candidate {
    /// From node to node without pods, rules or tunnel: the ceiling
    Host,
    /// Routed from pod to pod through the nodes, without a tunnel
    HostGw,
    /// The kernel's VXLAN with flannel's own rules: what everything is compared with
    KernelVxlan,
    /// The same with an nftables flowtable for established flows
    KernelFlowtable,
    /// Our agent with --datapath kernel
    OursKernel,
    /// Our agent with --fast-path stack
    OursStack,
    /// Our agent with --fast-path flows
    OursFlows,
    /// Our agent with --fast-path stack --xdp native
    #[value(alias = "ours-stack-xdp")]
    OursXdpStack,
    /// Our agent with --fast-path flows --xdp native
    #[value(alias = "ours-flows-xdp")]
    OursXdpFlows,
    /// Our agent's udp backend
    OursUdp,
    /// A plain proxy in its place, one packet per system call
    PlainUdp,
    /// The flanneld that --flanneld names
    Flanneld,
}

/// All of them, in the order of reports.
pub const ALL: [Candidate; 12] = [
    Candidate::Host,
    Candidate::HostGw,
    Candidate::KernelVxlan,
    Candidate::KernelFlowtable,
    Candidate::OursKernel,
    Candidate::OursStack,
    Candidate::OursFlows,
    Candidate::OursXdpStack,
    Candidate::OursXdpFlows,
    Candidate::OursUdp,
    Candidate::PlainUdp,
    Candidate::Flanneld,
];

impl Candidate {
    /// Its name on the command line and in reports.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// What our agent is started with; `None` if it is not ours.
    pub fn agent_flags(self) -> Option<&'static [&'static str]> {
        match self {
            Self::OursKernel => Some(&["--datapath=kernel"]),
            Self::OursUdp => Some(&[]),
            Self::OursStack => Some(&["--datapath=ebpf", "--fast-path=stack", "--xdp=off"]),
            Self::OursFlows => Some(&["--datapath=ebpf", "--fast-path=flows", "--xdp=off"]),
            Self::OursXdpStack => Some(&["--datapath=ebpf", "--fast-path=stack", "--xdp=native"]),
            Self::OursXdpFlows => Some(&["--datapath=ebpf", "--fast-path=flows", "--xdp=native"]),
            _ => None,
        }
    }

    /// Whether an agent with this status document really does what this candidate stands for. If
    /// not, why not, as far as the agent tells.
    pub fn is_in_use(self, status: &Value) -> Result<(), String> {
        if self == Self::OursUdp {
            let forwarding = &status["backend"]["devices"][0]["forwarding"];
            return if *forwarding == true {
                Ok(())
            } else {
                Err("it does not forward".to_owned())
            };
        }
        let datapath = &status["datapath"];
        let mode = datapath["mode"].as_str().unwrap_or("unknown");
        let reason = match datapath["reason"].as_str() {
            Some(reason) if !reason.is_empty() => format!(": {reason}"),
            _ => String::new(),
        };
        let wanted_mode = if self == Self::OursKernel { "kernel" } else { "ebpf" };
        if mode != wanted_mode {
            return Err(format!("the agent's data path is {mode}{reason}"));
        }
        let fast_path = match self {
            Self::OursStack | Self::OursXdpStack => "stack",
            Self::OursFlows | Self::OursXdpFlows => "flows",
            _ => return Ok(()),
        };
        let backend = &status["backend"]["datapath"];
        let programs = &backend["programs"];
        match backend["fast_path"].as_str() {
            Some(word) if word == fast_path => {}
            Some(word) => {
                let why = programs["problem"].as_str().unwrap_or("no reason given");
                return Err(format!("the agent's fast path is {word}: {why}"));
            }
            None => return Err("the agent has no fast path".to_owned()),
        }
        let in_xdp = |attached: &Value| {
            attached["program"].as_str().is_some_and(|program| program.contains("xdp"))
        };
        let attached = programs["attached"].as_array();
        if self.is_in_xdp() && !attached.is_some_and(|all| all.iter().any(in_xdp)) {
            let why = programs["xdp"]["why_not"].as_str().unwrap_or("no reason given");
            return Err(format!("the agent has no XDP program attached: {why}"));
        }
        Ok(())
    }

    fn is_in_xdp(self) -> bool {
        matches!(self, Self::OursXdpStack | Self::OursXdpFlows)
    }
}

impl Candidate {
    /// Whether an agent with this status document has sent packets the way that this candidate
    /// stands for. If not, why not, as far as the agent tells.
    pub fn has_carried(self, status: &Value) -> Result<(), String> {
        let programs = &status["backend"]["datapath"]["programs"];
        let encapsulates = self.is_in_xdp() || matches!(self, Self::OursStack | Self::OursFlows);
        let flows = matches!(self, Self::OursFlows | Self::OursXdpFlows);
        if encapsulates
            && programs["outcomes"]["encapsulated"]["packets"].as_u64().unwrap_or(0) == 0
        {
            return Err("the programs have encapsulated nothing".to_owned());
        }
        if flows && programs["flows"]["promotions"].as_u64().unwrap_or(0) == 0 {
            let why = programs["flows"]["last_refusal"].as_str().unwrap_or("no reason given");
            return Err(format!("no flow was promoted: {why}"));
        }
        let taken = &programs["xdp"]["outcomes"]["decapsulated"]["packets"];
        if self.is_in_xdp() && taken.as_u64().unwrap_or(0) == 0 {
            return Err("XDP has taken nothing out".to_owned());
        }
        Ok(())
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_are_those_of_the_reports() {
        assert_eq!(
            ALL.map(Candidate::name).join(" "),
            "host host-gw kernel-vxlan kernel-flowtable ours-kernel ours-stack ours-flows \
             ours-xdp-stack ours-xdp-flows ours-udp plain-udp flanneld"
        );
    }

    #[test]
    fn what_the_agent_does_not_do_is_not_measured_as_if_it_did() {
        let kernel = json!({"datapath": {"mode": "kernel", "reason": "no BPF"}});
        assert_eq!(Candidate::OursKernel.is_in_use(&kernel), Ok(()));
        let why = Candidate::OursFlows.is_in_use(&kernel).unwrap_err();
        assert!(why.contains("no BPF"), "{why}");
        let status = |fast_path: Value, programs: Value| {
            json!({"datapath": {"mode": "ebpf", "reason": ""},
                "backend": {"datapath": {"fast_path": fast_path, "programs": programs}}})
        };
        let none = status(Value::Null, json!({}));
        assert!(Candidate::OursKernel.is_in_use(&none).is_err());
        assert!(Candidate::OursStack.is_in_use(&none).is_err());
        let stack = status(json!("stack"), json!({"problem": "no conntrack"}));
        assert_eq!(Candidate::OursStack.is_in_use(&stack), Ok(()));
        let why = Candidate::OursFlows.is_in_use(&stack).unwrap_err();
        assert!(why.contains("no conntrack"), "{why}");
        let tc = json!({"attached": [{"program": "pod_ingress", "hook": "tcx"}]});
        let flows = status(json!("flows"), tc);
        assert_eq!(Candidate::OursFlows.is_in_use(&flows), Ok(()));
        assert!(Candidate::OursStack.is_in_use(&flows).is_err());
        assert!(Candidate::OursXdpFlows.is_in_use(&flows).is_err());
        let xdp = json!({"attached": [{"program": "underlay_xdp", "hook": "native"}]});
        assert_eq!(Candidate::OursXdpFlows.is_in_use(&status(json!("flows"), xdp)), Ok(()));
    }

    #[test]
    fn a_fast_path_that_carried_nothing_is_found_out() {
        let status = |packets: u32, promotions: u32| {
            json!({"backend": {"datapath": {"programs": {
                "outcomes": {"encapsulated": {"packets": packets}},
                "flows": {"promotions": promotions, "last_refusal": "not assured"},
            }}}})
        };
        assert_eq!(Candidate::OursKernel.has_carried(&json!({})), Ok(()));
        assert!(Candidate::OursStack.has_carried(&status(0, 0)).is_err());
        assert_eq!(Candidate::OursStack.has_carried(&status(1, 0)), Ok(()));
        let why = Candidate::OursFlows.has_carried(&status(1, 0)).unwrap_err();
        assert!(why.contains("not assured"), "{why}");
        assert_eq!(Candidate::OursFlows.has_carried(&status(1, 1)), Ok(()));
        let why = Candidate::OursXdpFlows.has_carried(&status(1, 1)).unwrap_err();
        assert!(why.contains("XDP"), "{why}");
    }
}
