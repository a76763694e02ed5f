//! Running loaded eBPF programs on packets of one's choice, by bpf(2).

use std::{
    fs, io,
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
    ptr,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

/// Commands of bpf(2) (`linux/bpf.h`).
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_TEST_RUN: libc::c_long = 10;
const BPF_PROG_GET_FD_BY_ID: libc::c_long = 13;
const BPF_PROG_QUERY: libc::c_long = 16;

/// `BPF_TCX_INGRESS` and `BPF_TCX_EGRESS`.
const TCX_HOOKS: [u32; 2] = [46, 47];

/// More programs than anybody attaches to one hook.
const MAX_AT_HOOK: u32 = 64;

/// `BPF_PROG_TYPE_SCHED_CLS`.
const SCHED_CLS: u32 = 3;

/// `BPF_PROG_TYPE_XDP`.
const XDP: u32 = 6;

/// Where `struct __sk_buff` has the interface's index.
const IFINDEX_AT: usize = 40;

/// A program may add headers of up to this many bytes.
const MAX_GROWTH: usize = 256;

/// A loaded program.
#[derive(Debug)]
pub struct Program {
    fd: OwnedFd,
    in_xdp: bool,
}

/// What came of running a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestRun {
    /// What it returned.
    pub returned: u32,
    /// The packet afterwards.
    pub packet: Vec<u8>,
    /// How long one run took on average.
    pub time: Duration,
}

#[repr(C)]
#[derive(Default)]
struct TestRunAttributes {
    program: u32,
    returned: u32,
    size_in: u32,
    size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    context_size_in: u32,
    context_size_out: u32,
    context_in: u64,
    context_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    reserved: u32,
}

#[repr(C)]
#[derive(Default)]
struct QueryAttributes {
    ifindex: u32,
    hook: u32,
    query_flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    reserved: u32,
    program_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

#[repr(C)]
#[derive(Default)]
struct LoadAttributes {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buffer: u64,
}

/// Numbers of the programs attached by TCX to an interface of the caller's network namespace. None
/// on a kernel without TCX.
pub fn attached_by_tcx(ifindex: u32) -> Result<Vec<u32>> {
    let mut found = Vec::new();
    for hook in TCX_HOOKS {
        let mut ids = vec![0_u32; MAX_AT_HOOK as usize];
        let mut attributes = QueryAttributes {
            ifindex,
            hook,
            ids: address(ids.as_mut_ptr()),
            count: MAX_AT_HOOK,
            ..QueryAttributes::default()
        };
        if let Err(error) = call(BPF_PROG_QUERY, &mut attributes) {
            let known = [libc::ENOENT, libc::EINVAL].map(Some);
            let cause = error.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
            ensure!(known.contains(&cause), error.context("cannot ask for programs"));
            continue;
        }
        ids.truncate(attributes.count as usize);
        found.extend(ids);
    }
    Ok(found)
}

impl Program {
    /// The program that the kernel knows by this number.
    pub fn by_id(id: u32) -> Result<Self> {
        let mut attributes = [id, 0, 0];
        let fd = call(BPF_PROG_GET_FD_BY_ID, &mut attributes)
            .with_context(|| format!("no program with id {id}"))?;
        // SAFETY: a new descriptor that nobody else owns.
        let mut program = Self { fd: unsafe { OwnedFd::from_raw_fd(fd) }, in_xdp: false };
        program.in_xdp = program.told("prog_type:")? == u64::from(XDP);
        Ok(program)
    }

    /// Whether it is one for XDP, not for TC.
    pub fn in_xdp(&self) -> bool {
        self.in_xdp
    }

    /// A program of the same kind that does nothing: what it takes is the measurement's own time.
    pub fn empty_like(other: &Self) -> Result<Self> {
        // r0 = 0; exit
        let instructions: [u64; 2] = [0xb7, 0x95].map(u64::from_le);
        let license = c"Dual MIT/GPL";
        let in_xdp = other.in_xdp;
        let mut attributes = LoadAttributes {
            kind: if in_xdp { XDP } else { SCHED_CLS },
            instruction_count: 2,
            instructions: address(instructions.as_ptr()),
            license: address(license.as_ptr()),
            ..LoadAttributes::default()
        };
        let fd = call(BPF_PROG_LOAD, &mut attributes).context("cannot load an empty program")?;
        // SAFETY: a new descriptor that nobody else owns.
        Ok(Self { fd: unsafe { OwnedFd::from_raw_fd(fd) }, in_xdp })
    }

    /// How many instructions the verifier went through, on all ways together.
    pub fn verified_instructions(&self) -> Result<u64> {
        self.told("verified_insns:").context("Linux 5.16 would tell")
    }

    /// A number that the kernel tells of the descriptor.
    fn told(&self, what: &str) -> Result<u64> {
        let path = format!("/proc/self/fdinfo/{}", self.fd.as_raw_fd());
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        let number = text.lines().find_map(|line| line.strip_prefix(what));
        number
            .and_then(|number| number.trim().parse().ok())
            .with_context(|| format!("no {what} in {path}"))
    }

    /// Runs it so many times on one packet, which keeps its changes from run to run. To the
    /// program it came by the interface `ifindex` of the caller's network namespace.
    pub fn test_run(&self, packet: &[u8], ifindex: u32, repeat: u32) -> Result<TestRun> {
        let length = u32::try_from(packet.len())?;
        let context = if self.in_xdp {
            // `struct xdp_md`: start, end, metadata, device, queue, device to leave by.
            [0, length, 0, ifindex, 0, 0].map(u32::to_ne_bytes).concat()
        } else {
            let mut context = vec![0; IFINDEX_AT];
            context.extend(ifindex.to_ne_bytes());
            context
        };
        let mut out = vec![0; packet.len() + MAX_GROWTH];
        let mut attributes = TestRunAttributes {
            program: u32::try_from(self.fd.as_raw_fd())?,
            size_in: length,
            size_out: u32::try_from(out.len())?,
            data_in: address(packet.as_ptr()),
            data_out: address(out.as_mut_ptr()),
            repeat,
            context_size_in: u32::try_from(context.len())?,
            context_in: address(context.as_ptr()),
            ..TestRunAttributes::default()
        };
        call(BPF_PROG_TEST_RUN, &mut attributes).context("cannot run the program")?;
        out.truncate(attributes.size_out as usize);
        Ok(TestRun {
            returned: attributes.returned,
            packet: out,
            time: Duration::from_nanos(attributes.duration.into()),
        })
    }
}

/// A pointer as bpf(2) takes it.
fn address<T>(pointer: *const T) -> u64 {
    pointer.expose_provenance() as u64
}

/// Calls bpf(2); the attributes' pointers have to be valid for the command.
fn call<T>(command: libc::c_long, attributes: &mut T) -> Result<libc::c_int> {
    // SAFETY: the kernel reads and writes `size_of::<T>()` bytes there, and what its pointers
    // point to, which the callers keep alive.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, ptr::from_mut(attributes), size_of::<T>()) };
    if result < 0 {
        return Err(io::Error::last_os_error().into());
    }
    Ok(libc::c_int::try_from(result)?)
}
