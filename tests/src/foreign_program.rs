//! Somebody else's programs at a node's interface: they let everything pass.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
};

use anyhow::{Context, Result};

use crate::node::Node;

/// Their name.
pub const NAME: &str = "stranger";

/// Where they are pinned.
const PIN: &str = "/sys/fs/bpf/stranger";

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_PROG_TYPE_XDP: u32 = 6;

/// r0 = `XDP_PASS`, r0 = `TC_ACT_UNSPEC`, exit.
const XDP_PASS: u64 = 2 << 32 | 0xb7;
const TC_ACT_UNSPEC: u64 = 0xffff_ffff << 32 | 0xb7;
const EXIT: u64 = 0x95;
/// r2 = 802.1Q in network order, r3 = 5, `bpf_skb_vlan_push`.
const PUSH_VLAN_5: [u64; 3] = [0x81 << 32 | 0x02b7, 5 << 32 | 0x03b7, 18 << 32 | 0x85];

/// The kernel's `union bpf_attr` for `BPF_PROG_LOAD`, up to the name.
#[repr(C)]
#[derive(Default)]
struct Load {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buffer: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
}

/// The kernel's `union bpf_attr` for `BPF_OBJ_PIN`.
#[repr(C)]
struct Pin {
    path: u64,
    descriptor: u32,
    flags: u32,
}

/// Attaches one in the driver of an interface, without a link, as most do.
pub fn attach_xdp(node: &Node, interface: &str) -> Result<()> {
    load(node, BPF_PROG_TYPE_XDP, &[XDP_PASS, EXIT])?;
    node.run(&format!("bpftool net attach xdpdrv pinned {PIN} dev {interface}")).map(drop)
}

/// Takes it off.
pub fn detach_xdp(node: &Node, interface: &str) -> Result<()> {
    node.run(&format!("bpftool net detach xdpdrv dev {interface}"))?;
    node.run(&format!("rm {PIN}")).map(drop)
}

/// Attaches one at an interface's TC ingress, as a filter.
pub fn attach_tc(node: &Node, interface: &str) -> Result<()> {
    load(node, BPF_PROG_TYPE_SCHED_CLS, &[TC_ACT_UNSPEC, EXIT])?;
    node.run(&format!("tc qdisc add dev {interface} clsact"))?;
    node.run(&format!("tc filter add dev {interface} ingress bpf da object-pinned {PIN}")).map(drop)
}

/// Takes it off.
pub fn detach_tc(node: &Node, interface: &str) -> Result<()> {
    node.run(&format!("tc filter del dev {interface} ingress"))?;
    node.run(&format!("rm {PIN}")).map(drop)
}

/// Attaches one at an interface's TC egress that tags each packet with VLAN 5, beside the packet, as a
/// VLAN device does.
pub fn attach_tagger(node: &Node, interface: &str) -> Result<()> {
    let [a, b, c] = PUSH_VLAN_5;
    load(node, BPF_PROG_TYPE_SCHED_CLS, &[a, b, c, TC_ACT_UNSPEC, EXIT])?;
    node.run(&format!("tc qdisc add dev {interface} clsact"))?;
    node.run(&format!("tc filter add dev {interface} egress bpf da object-pinned {PIN}")).map(drop)
}

/// Loads a program and pins it.
fn load(node: &Node, kind: u32, instructions: &[u64]) -> Result<()> {
    let instructions: Vec<u64> = instructions.iter().copied().map(u64::from_le).collect();
    let license = c"GPL";
    let mut attributes = Load {
        kind,
        instruction_count: u32::try_from(instructions.len())?,
        instructions: instructions.as_ptr() as u64,
        license: license.as_ptr() as u64,
        ..Load::default()
    };
    attributes.name[..NAME.len()].copy_from_slice(NAME.as_bytes());
    let descriptor = bpf(BPF_PROG_LOAD, &attributes).context("cannot load a program")?;
    // SAFETY: a new descriptor that nobody else owns.
    let program = unsafe { OwnedFd::from_raw_fd(descriptor) };
    let path = CString::new(node.path(PIN).as_os_str().as_bytes())?;
    let descriptor = u32::try_from(program.as_raw_fd())?;
    let pin = Pin { path: path.as_ptr() as u64, descriptor, flags: 0 };
    bpf(BPF_OBJ_PIN, &pin).context("cannot pin a program")?;
    Ok(())
}

fn bpf<T>(command: libc::c_long, attributes: &T) -> Result<i32> {
    let (attributes, length) = (std::ptr::from_ref(attributes), size_of::<T>());
    // SAFETY: the kernel reads the attributes and what they point to, alive until it returns.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, length) };
    if result < 0 {
        return Err(io::Error::last_os_error().into());
    }
    Ok(i32::try_from(result)?)
}
