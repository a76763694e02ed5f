//! A network of one's own, with a bpf file system of one's own.

use std::{
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    net::if_::if_nametoindex,
    sched::{CloneFlags, unshare},
};

/// Runs a story in a thread with fresh network and mount namespaces. `v0` and `v1` are the ends
/// of a cable; the directory is a bpf file system.
pub fn in_namespace(story: impl FnOnce(&Path) + Send + 'static) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().to_owned();
    let run = move || {
        unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS).expect("namespaces: be root");
        let private = MsFlags::MS_PRIVATE | MsFlags::MS_REC;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).expect("private mounts");
        mount_bpffs(&path);
        ip("link set lo up");
        ip("link add v0 type veth peer name v1");
        ip("link set v0 up");
        ip("link set v1 up");
        // The programs' ring buffer is registered with one, as in the agent.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.expect("a runtime");
        let _entered = runtime.enter();
        story(&path);
    };
    if let Err(panic) = thread::spawn(run).join() {
        std::panic::resume_unwind(panic);
    }
}

pub fn mount_bpffs(path: &Path) {
    mount(Some("bpf"), path, Some("bpf"), MsFlags::empty(), None::<&str>).expect("mounted");
}

pub fn unmount(path: &Path) {
    umount2(path, MntFlags::MNT_DETACH).expect("unmounted");
}

pub fn ip(arguments: &str) {
    run("ip", arguments);
}

/// Runs a command that must succeed; returns what it printed.
pub fn run(program: &str, arguments: &str) -> String {
    let output = Command::new(program).args(arguments.split(' ')).output().expect(program);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {complaint}");
    text
}

pub fn ifindex(name: &str) -> u32 {
    if_nametoindex(name).expect("a device")
}

/// The programs at the TCX ingress of a device, in their order.
pub fn tcx(device: &str) -> Vec<ProgramInfo> {
    tcx_at(device, TcAttachType::Ingress)
}

/// The programs at a TCX hook of a device, in their order.
pub fn tcx_at(device: &str, side: TcAttachType) -> Vec<ProgramInfo> {
    SchedClassifier::query_tcx(device, side).expect("queried").1
}

/// The filters at the clsact ingress of a device, as `tc` prints them.
pub fn filters(device: &str) -> Vec<String> {
    let text = run("tc", &format!("filter show dev {device} ingress"));
    text.lines().filter(|line| line.contains("handle")).map(str::to_owned).collect()
}

/// The object that the agent embeds.
pub fn object() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bpf/flannel-ebpf")
}

/// Gives one packet to a program; returns what the program returned.
pub fn test_run(program: &ProgramInfo, packet: &[u8]) -> i32 {
    test_run_repeated(program, packet, 1).0
}

/// Gives a packet to a program (`BPF_PROG_TEST_RUN`), over and over again. Returns what the program
/// returned at last, what became of the packet, and nanoseconds for each time.
pub fn test_run_repeated(program: &ProgramInfo, packet: &[u8], repeat: u32) -> (i32, Vec<u8>, u32) {
    test_run_with(program, packet, repeat, &[])
}

/// Gives a packet to a program in XDP, as if it came in at a device. Returns what the program
/// returned, and the packet after, with its metadata before it.
pub fn test_run_xdp(program: &ProgramInfo, packet: &[u8], ifindex: u32) -> (i32, Vec<u8>) {
    // The kernel's `struct xdp_md`: start, end, metadata, device, queue, device to leave by.
    let end = u32::try_from(packet.len()).expect("short");
    let context = [0, end, 0, ifindex, 0, 0];
    let (action, out, _) = test_run_with(program, packet, 1, &context);
    (action, out)
}

fn test_run_with(
    program: &ProgramInfo,
    packet: &[u8],
    repeat: u32,
    context: &[u32],
) -> (i32, Vec<u8>, u32) {
    /// The kernel's `union bpf_attr`, member `test`, up to what is used.
    #[repr(C)]
    #[derive(Default)]
    struct TestRun {
        prog_fd: u32,
        retval: u32,
        data_size_in: u32,
        data_size_out: u32,
        data_in: u64,
        data_out: u64,
        repeat: u32,
        duration: u32,
        ctx_size_in: u32,
        ctx_size_out: u32,
        ctx_in: u64,
        ctx_out: u64,
    }
    const BPF_PROG_TEST_RUN: libc::c_long = 10;
    let descriptor = program.fd().expect("a descriptor");
    let mut out = vec![0; packet.len() + 256];
    let mut attributes = TestRun {
        prog_fd: std::os::fd::AsFd::as_fd(&descriptor).as_raw_fd().cast_unsigned(),
        data_size_in: u32::try_from(packet.len()).expect("short"),
        data_in: packet.as_ptr() as u64,
        data_size_out: u32::try_from(out.len()).expect("short"),
        data_out: out.as_mut_ptr() as u64,
        repeat,
        ctx_size_in: u32::try_from(size_of_val(context)).expect("short"),
        ctx_in: if context.is_empty() { 0 } else { context.as_ptr() as u64 },
        ..TestRun::default()
    };
    // SAFETY: the kernel reads the packet and the context, and writes to `out` and the attributes.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_PROG_TEST_RUN, &raw mut attributes, size_of::<TestRun>())
    };
    assert_eq!(result, 0, "test run: {}", std::io::Error::last_os_error());
    out.truncate(attributes.data_size_out as usize);
    (attributes.retval.cast_signed(), out, attributes.duration)
}
