//! Links by bpf(2), where aya has no call.
//!
//! A link whose pin and descriptors are gone detaches, but some milliseconds later, when the
//! kernel frees it: `BPF_LINK_DETACH` does it now. And aya attaches to XDP without a link if the
//! kernel refuses one; then nothing would detach it, and anybody could replace it.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use nix::errno::Errno;

use super::{EbpfError, pin};

const BPF_OBJ_PIN: libc::c_long = 6;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_UPDATE: libc::c_long = 29;
const BPF_LINK_DETACH: libc::c_long = 34;

/// `BPF_XDP` (linux/bpf.h).
const BPF_XDP: u32 = 37;
/// `XDP_FLAGS_DRV_MODE` (`linux/if_link.h`): in the driver, or not at all.
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
/// `BPF_LINK_TYPE_XDP`.
const LINK_TYPE_XDP: u32 = 6;

/// The kernel's `union bpf_attr` for `BPF_LINK_CREATE`, as far as XDP needs it.
#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

/// The kernel's `union bpf_attr` for `BPF_LINK_UPDATE`.
#[repr(C)]
struct LinkUpdate {
    link_fd: u32,
    new_prog_fd: u32,
    flags: u32,
    old_prog_fd: u32,
}

/// The kernel's `union bpf_attr` for `BPF_OBJ_GET_INFO_BY_FD`.
#[repr(C)]
struct GetInfo {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// The kernel's `struct bpf_link_info`, as far as XDP's is filled in.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    prog_id: u32,
    padding: u32,
    ifindex: u32,
    padding_2: u32,
}

/// The kernel's `union bpf_attr` for `BPF_OBJ_PIN` and `BPF_OBJ_GET`.
#[repr(C)]
struct ObjGet {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// The kernel's `union bpf_attr` for `BPF_LINK_DETACH`.
#[repr(C)]
struct LinkDetach {
    link_fd: u32,
}

/// Detaches the link pinned at a path and removes the pin; none there is as good.
pub(super) fn detach(path: &Path) -> Result<(), EbpfError> {
    // What cannot be detached now is so once the pin, its last reference, is gone.
    if let Err(reason) = open(path).and_then(|link| detach_now(&link))
        && reason.kind() != io::ErrorKind::NotFound
    {
        tracing::debug!("the link at {} is not detached at once: {reason}", path.display());
    }
    pin::remove(path)
}

/// Attaches a program in XDP, in the device's driver.
pub(super) fn create_xdp(program: BorrowedFd<'_>, ifindex: u32) -> io::Result<OwnedFd> {
    let attributes = LinkCreate {
        prog_fd: program.as_raw_fd().cast_unsigned(),
        target_ifindex: ifindex,
        attach_type: BPF_XDP,
        flags: XDP_FLAGS_DRV_MODE,
    };
    let descriptor = bpf(BPF_LINK_CREATE, &attributes)?;
    // SAFETY: the kernel has just made this descriptor, for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Puts another program into a link, in one step.
pub(super) fn replace(link: &OwnedFd, program: BorrowedFd<'_>) -> io::Result<()> {
    let attributes = LinkUpdate {
        link_fd: link.as_raw_fd().cast_unsigned(),
        new_prog_fd: program.as_raw_fd().cast_unsigned(),
        flags: 0,
        old_prog_fd: 0,
    };
    bpf(BPF_LINK_UPDATE, &attributes).map(drop)
}

/// The device that an XDP link is at, and the number of its program. `None` if it has been detached
/// or is no XDP link.
pub(super) fn xdp_at(link: &OwnedFd) -> io::Result<Option<(u32, u32)>> {
    let mut info = LinkInfo::default();
    let attributes = GetInfo {
        bpf_fd: link.as_raw_fd().cast_unsigned(),
        info_len: u32::try_from(size_of::<LinkInfo>()).unwrap_or_default(),
        info: &raw mut info as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &attributes)?;
    let attached = info.kind == LINK_TYPE_XDP && info.ifindex != 0;
    Ok(attached.then_some((info.ifindex, info.prog_id)))
}

/// Pins a link.
pub(super) fn pin(link: &OwnedFd, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let descriptor = link.as_raw_fd().cast_unsigned();
    let attributes = ObjGet { pathname: path.as_ptr() as u64, bpf_fd: descriptor, file_flags: 0 };
    bpf(BPF_OBJ_PIN, &attributes).map(drop)
}

/// Opens a pinned link.
pub(super) fn open(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attributes = ObjGet { pathname: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 };
    let descriptor = bpf(BPF_OBJ_GET, &attributes)?;
    // SAFETY: the kernel has just made this descriptor, for us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

fn detach_now(link: &OwnedFd) -> io::Result<()> {
    let attributes = LinkDetach { link_fd: link.as_raw_fd().cast_unsigned() };
    bpf(BPF_LINK_DETACH, &attributes).map(drop)
}

fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<i32> {
    // SAFETY: the commands read only the attributes and the path that they point to, and write only
    // the information that they point to; all of it is alive until the call returns.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>())
    };
    i32::try_from(Errno::result(result)?).map_err(io::Error::other)
}
