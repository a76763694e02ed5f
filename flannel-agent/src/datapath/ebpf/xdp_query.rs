//! Asking the kernel whose XDP program is at a device (rtnetlink(7), `RTM_GETLINK`), and which driver
//! would run ours (ethtool(8), `ETHTOOL_GDRVINFO`).

use std::{io, mem, net::UdpSocket, os::fd::AsRawFd};

use aya::programs::loaded_programs;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::errno::Errno;

use super::tc_filter::{HEADER_LEN, NLM_F_REQUEST, NLMSG_ERROR, attribute};

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const IFINFOMSG_LEN: usize = 16;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_PROG_ID: u16 = 4;

const ETHTOOL_GDRVINFO: u32 = 3;

/// The program at a device's XDP hook, in whatever mode, as a message can name it; `None` if there is
/// none.
pub(super) fn occupant(ifindex: u32) -> io::Result<Option<String>> {
    let Some(id) = program_at(ifindex)? else { return Ok(None) };
    // Names take CAP_SYS_ADMIN.
    let mut programs = loaded_programs().flatten();
    let name = programs.find(|program| program.id() == id);
    let name = name.as_ref().and_then(|program| program.name_as_str()).filter(|n| !n.is_empty());
    Ok(Some(match name {
        Some(name) => format!("{name:?} (id {id})"),
        None => format!("with id {id}"),
    }))
}

/// Its number.
pub(super) fn program_at(ifindex: u32) -> io::Result<Option<u32>> {
    program(&ask(ifindex)?)
}

fn ask(ifindex: u32) -> io::Result<Vec<u8>> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let length = HEADER_LEN + IFINFOMSG_LEN;
    let mut question = Vec::with_capacity(length);
    question.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    question.extend(RTM_GETLINK.to_ne_bytes());
    question.extend(NLM_F_REQUEST.to_ne_bytes());
    // Sequence number and sender; address family and type.
    question.extend([0; 12]);
    question.extend(ifindex.to_ne_bytes());
    question.resize(length, 0);
    socket.send(&question, 0)?;
    socket.recv_from_full().map(|(answer, _)| answer)
}

/// The number of the program in an answer.
fn program(answer: &[u8]) -> io::Result<Option<u32>> {
    let odd = || io::Error::new(io::ErrorKind::InvalidData, "odd answer about a link");
    let kind = answer.get(4..6).and_then(|kind| kind.first_chunk()).ok_or_else(odd)?;
    match u16::from_ne_bytes(*kind) {
        NLMSG_ERROR => {
            let code = answer.get(HEADER_LEN..).and_then(|body| body.first_chunk());
            let code = i32::from_ne_bytes(*code.ok_or_else(odd)?).saturating_neg();
            Err(io::Error::from_raw_os_error(code))
        }
        RTM_NEWLINK => {
            let attributes = answer.get(HEADER_LEN + IFINFOMSG_LEN..).ok_or_else(odd)?;
            let id = attribute(attributes, IFLA_XDP)
                .and_then(|xdp| attribute(xdp, IFLA_XDP_PROG_ID))
                .and_then(|id| id.first_chunk());
            Ok(id.map(|id| u32::from_ne_bytes(*id)).filter(|id| *id != 0))
        }
        _ => Err(odd()),
    }
}

/// The kernel's `struct ethtool_drvinfo`.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; 32],
    rest: [u8; 160],
}

/// The name of a device's driver.
pub(super) fn driver(name: &str) -> io::Result<String> {
    let socket = UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
    let mut info = DriverInfo { command: ETHTOOL_GDRVINFO, driver: [0; 32], rest: [0; 160] };
    // SAFETY: all zeros are a valid ifreq.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    // One byte stays zero: the end of the name.
    let room = request.ifr_name.len() - 1;
    for (place, byte) in request.ifr_name.iter_mut().take(room).zip(name.bytes()) {
        *place = byte.cast_signed();
    }
    request.ifr_ifru.ifru_data = (&raw mut info).cast();
    // SAFETY: the kernel reads the ifreq and the command and writes one `ethtool_drvinfo`; both live
    // until the call returns.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL, &raw mut request) };
    Errno::result(result)?;
    let text = String::from_utf8_lossy(&info.driver);
    Ok(text.split('\0').next().unwrap_or_default().to_owned())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn answer(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.resize(HEADER_LEN, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn the_structure_is_as_long_as_the_kernels() {
        assert_eq!(size_of::<DriverInfo>(), 196);
    }

    #[test]
    fn a_program_is_found_and_none_is_none() {
        let mut body = vec![0; IFINFOMSG_LEN];
        assert_eq!(program(&answer(RTM_NEWLINK, &body)).expect("read"), None);
        // IFLA_XDP: attached in the driver, program 77.
        body.extend([20, 0, 43, 0x80, 5, 0, 2, 0, 1, 0, 0, 0, 8, 0, 4, 0]);
        body.extend(77_u32.to_ne_bytes());
        assert_eq!(program(&answer(RTM_NEWLINK, &body)).expect("read"), Some(77));
        let refused = answer(NLMSG_ERROR, &(-libc::ENODEV).to_ne_bytes());
        assert_eq!(program(&refused).expect_err("no device").raw_os_error(), Some(libc::ENODEV));
    }

    proptest! {
        #[test]
        fn any_answer_is_survived(body: Vec<u8>, kind in prop::sample::select(vec![2_u16, 16])) {
            let _ = program(&answer(kind, &body));
            let _ = program(&body);
        }
    }
}
