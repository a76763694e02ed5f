//! Telling others in this network namespace that an agent works on a device.
//!
//! A datagram socket with an abstract name: the kernel keeps such names per network namespace, as
//! it does devices, and lets go of one with the process, however that ends (unix(7)).

use std::{
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixDatagram},
    },
};

/// Held by an agent for each of its devices.
#[derive(Debug)]
pub struct DeviceClaim {
    _socket: UnixDatagram,
}

impl DeviceClaim {
    /// Claims a device.
    ///
    /// # Errors
    /// `AddrInUse` if somebody else has it.
    pub fn take(device: &str) -> io::Result<Self> {
        let address = SocketAddr::from_abstract_name(format!("flannel-agent/{device}"))?;
        UnixDatagram::bind_addr(&address).map(|socket| Self { _socket: socket })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_a_device() {
        let device = format!("flannel.{}", std::process::id());
        let claim = DeviceClaim::take(&device).expect("free");
        let refused = DeviceClaim::take(&device).expect_err("taken");
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        drop(claim);
        DeviceClaim::take(&device).expect("free again");
    }
}
