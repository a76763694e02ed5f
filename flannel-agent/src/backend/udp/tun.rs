//! The TUN device: IP packets that the kernel routes to us, by file.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::OpenOptionsExt},
};

/// Where the kernel hands out TUN devices.
pub const CLONE_DEVICE: &str = "/dev/net/tun";

/// The kernel puts the first free number in the place of `%d`.
const NAME_PATTERN: &[u8] = b"flannel%d";

/// A device that lives as long as its file is open.
#[derive(Debug)]
pub struct Tun {
    /// Every read is one packet, every write too. Neither blocks.
    pub file: File,
    /// The name that the kernel gave.
    pub name: String,
}

impl Tun {
    /// Makes a device in the network namespace of the calling thread: down, without addresses.
    pub fn create() -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(CLONE_DEVICE)?;
        // SAFETY: an `ifreq` is plain old data, for which all zeroes are a value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name.iter_mut().zip(NAME_PATTERN) {
            *to = from.cast_signed();
        }
        let flags = libc::IFF_TUN | libc::IFF_NO_PI;
        request.ifr_ifru.ifru_flags = i16::try_from(flags).map_err(io::Error::other)?;
        // SAFETY: the descriptor is open, and TUNSETIFF reads and writes one `ifreq`.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        nix::errno::Errno::result(result)?;
        let name = request.ifr_name.iter().map(|byte| byte.cast_unsigned());
        let name: Vec<u8> = name.take_while(|byte| *byte != 0).collect();
        Ok(Self { file, name: String::from_utf8(name).map_err(io::Error::other)? })
    }
}
