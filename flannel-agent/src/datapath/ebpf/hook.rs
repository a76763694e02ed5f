//! The places where our programs hang.

use aya::programs::TcAttachType;

/// A program and the side of a device that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hook {
    /// The program's name in the object; pins and filters are named after it.
    pub(super) program: &'static str,
    /// The side of the device.
    pub(super) side: Side,
}

/// The side of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// What comes in.
    Ingress,
    /// What goes out.
    Egress,
}

/// The underlay device: what comes by the tunnel.
pub(super) const UNDERLAY_INGRESS: Hook = Hook { program: "underlay_ingress", side: Side::Ingress };

/// The tunnel device: what is to go into the tunnel.
pub(super) const TUNNEL_EGRESS: Hook = Hook { program: "tunnel_egress", side: Side::Egress };

/// A device that carries pods: what they send.
pub(super) const POD_GUARD: Hook = Hook { program: "pod_guard", side: Side::Ingress };

/// All of them.
pub(super) const HOOKS: [Hook; 3] = [UNDERLAY_INGRESS, TUNNEL_EGRESS, POD_GUARD];

impl Side {
    /// As aya calls it.
    pub(super) fn attach_type(self) -> TcAttachType {
        match self {
            Self::Ingress => TcAttachType::Ingress,
            Self::Egress => TcAttachType::Egress,
        }
    }

    /// `BPF_TCX_INGRESS`, `BPF_TCX_EGRESS` (linux/bpf.h).
    pub(super) fn tcx(self) -> u32 {
        match self {
            Self::Ingress => 46,
            Self::Egress => 47,
        }
    }

    /// `TC_H_CLSACT` with `TC_H_MIN_INGRESS` or `TC_H_MIN_EGRESS` (`linux/pkt_sched.h`).
    pub(super) fn clsact(self) -> u32 {
        match self {
            Self::Ingress => 0xffff_fff2,
            Self::Egress => 0xffff_fff3,
        }
    }
}
