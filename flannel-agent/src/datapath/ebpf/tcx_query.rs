//! Asking the kernel which programs are at a device's TCX ingress (bpf(2), `BPF_PROG_QUERY`).
//!
//! aya's own query also opens each program, those of others too, for which the kernel wants
//! `CAP_SYS_ADMIN`. The numbers alone take `CAP_NET_ADMIN`, which the agent has anyhow.

use std::io;

use super::hook::Side;

const BPF_PROG_QUERY: libc::c_long = 16;

/// `BPF_MPROG_MAX`: no hook takes more.
const MAX_PROGRAMS: usize = 64;

/// The kernel's `union bpf_attr`, member `query`, as of Linux 6.6.
#[repr(C)]
#[derive(Default)]
struct Query {
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    count: u32,
    padding: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// Whether the program with this number is at the device's TCX ingress. A kernel without TCX has
/// none there.
pub(super) fn is_attached(side: Side, ifindex: u32, program: u32) -> io::Result<bool> {
    let mut ids = [0_u32; MAX_PROGRAMS];
    let mut query = Query {
        target_ifindex: ifindex,
        attach_type: side.tcx(),
        prog_ids: ids.as_mut_ptr() as u64,
        count: u32::try_from(ids.len()).unwrap_or_default(),
        ..Query::default()
    };
    // SAFETY: the kernel reads and writes one `Query` and at most `count` numbers at `prog_ids`,
    // which are both alive until the call returns.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, &raw mut query, size_of::<Query>()) };
    if result == 0 {
        let count = usize::try_from(query.count).unwrap_or_default();
        return Ok(ids.iter().take(count).any(|id| *id == program));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // No such hook; no such device.
        Some(libc::EINVAL | libc::E2BIG | libc::ENODEV) => Ok(false),
        _ => Err(error),
    }
}
