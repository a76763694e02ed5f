//! Taking a pinned link off its device at once (bpf(2), `BPF_LINK_DETACH`).
//!
//! A link whose pin and descriptors are gone detaches too, but some milliseconds later, when the
//! kernel frees it. aya has no call for doing it now.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use nix::errno::Errno;

use super::{EbpfError, pin};

const BPF_OBJ_GET: libc::c_long = 7;
const BPF_LINK_DETACH: libc::c_long = 34;

/// The kernel's `union bpf_attr` for `BPF_OBJ_GET`.
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

fn open(path: &Path) -> io::Result<OwnedFd> {
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
    // SAFETY: both commands read only the attributes, and the path that they point to.
    let result = unsafe {
        libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of::<T>())
    };
    i32::try_from(Errno::result(result)?).map_err(io::Error::other)
}
