//! The places where our programs hang.

use aya::programs::TcAttachType;

/// A program and the side of a device that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hook {
    /// The program's name in the object; pins and filters are named after it.
    pub(super) program: &'static str,
    /// The side of the device.
    pub(super) side: Side,
    /// The number of its clsact filter: no two programs that may meet at a device's side share one.
    pub(super) handle: u32,
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
pub(super) const UNDERLAY_INGRESS: Hook =
    Hook { program: "underlay_ingress", side: Side::Ingress, handle: 1 };

/// The tunnel device: what is to go into the tunnel.
pub(super) const TUNNEL_EGRESS: Hook =
    Hook { program: "tunnel_egress", side: Side::Egress, handle: 1 };

/// The tunnel device: what came out of the tunnel.
pub(super) const TUNNEL_INGRESS: Hook =
    Hook { program: "tunnel_ingress", side: Side::Ingress, handle: 1 };

/// The host's side of a pod's device: what the pod sends.
pub(super) const POD_INGRESS: Hook =
    Hook { program: "pod_ingress", side: Side::Ingress, handle: 1 };

/// The same device: what the pod gets.
pub(super) const POD_EGRESS: Hook = Hook { program: "pod_egress", side: Side::Egress, handle: 1 };

/// A device that carries pods: what they send.
pub(super) const POD_GUARD: Hook = Hook { program: "pod_guard", side: Side::Ingress, handle: 2 };

/// All of them.
pub(super) const HOOKS: [Hook; 6] =
    [UNDERLAY_INGRESS, TUNNEL_EGRESS, POD_GUARD, TUNNEL_INGRESS, POD_INGRESS, POD_EGRESS];

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
