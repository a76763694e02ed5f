//! Many datagrams per system call.

use std::{
    io,
    net::{SocketAddrV4, UdpSocket},
    os::fd::{AsFd, AsRawFd},
    ptr,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Datagrams per call.
pub const BATCH: usize = 64;

/// Longest IPv4 packet. Only the pages that packets reach into are ever touched.
const SLOT: usize = 65_535;

/// How long a full socket is waited for before packets are dropped, in milliseconds.
const FULL: u8 = 5;

/// Room for [`BATCH`] packets, and what the kernel has to be told of them.
pub struct Batch {
    buffer: Vec<u8>,
    lengths: [usize; BATCH],
    names: Vec<libc::sockaddr_in>,
    vectors: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
}

impl Batch {
    /// All slots empty.
    pub fn new() -> Self {
        // SAFETY: all three are plain old data, for which all zeroes are a value.
        let (name, vector, header) = unsafe { std::mem::zeroed() };
        Self {
            buffer: vec![0; BATCH * SLOT],
            lengths: [0; BATCH],
            names: vec![name; BATCH],
            vectors: vec![vector; BATCH],
            headers: vec![header; BATCH],
        }
    }

    /// The whole room of a slot, to be filled.
    pub fn slot(&mut self, index: usize) -> &mut [u8] {
        &mut self.buffer[index * SLOT..(index + 1) * SLOT]
    }

    /// The packet that was received into a slot.
    pub fn received(&mut self, index: usize) -> &mut [u8] {
        let length = self.lengths[index];
        &mut self.slot(index)[..length]
    }

    /// Says that the first `length` bytes of a slot go to `to`.
    pub fn address(&mut self, index: usize, length: usize, to: SocketAddrV4) {
        self.lengths[index] = length.min(SLOT);
        let name = &mut self.names[index];
        name.sin_family = FAMILY;
        name.sin_port = to.port().to_be();
        name.sin_addr.s_addr = u32::from_ne_bytes(to.ip().octets());
    }

    /// Points the headers of the first `count` slots at them. `send`: with lengths and addresses
    /// as told, else with all room and no address wanted.
    fn point(&mut self, count: usize, send: bool) {
        for index in 0..count {
            let vector = &mut self.vectors[index];
            vector.iov_base = self.buffer[index * SLOT..].as_mut_ptr().cast();
            vector.iov_len = if send { self.lengths[index] } else { SLOT };
            let header = &mut self.headers[index].msg_hdr;
            header.msg_iov = ptr::from_mut(vector);
            header.msg_iovlen = 1;
            (header.msg_name, header.msg_namelen) = if send {
                (ptr::from_mut(&mut self.names[index]).cast(), NAME)
            } else {
                (ptr::null_mut(), 0)
            };
        }
    }

    /// Receives what is waiting. Returns how many slots were filled.
    ///
    /// # Errors
    /// The kernel's; `WouldBlock` if nothing is waiting.
    pub fn receive(&mut self, socket: &UdpSocket) -> io::Result<usize> {
        self.point(BATCH, false);
        // SAFETY: every header points at a vector, and every vector at a slot of `self`, none of
        // which moves during the call; there are as many as said; no address is asked for.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                COUNT,
                libc::MSG_DONTWAIT,
                ptr::null_mut(),
            )
        };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error())?;
        for index in 0..count {
            self.lengths[index] = (self.headers[index].msg_len as usize).min(SLOT);
        }
        Ok(count)
    }

    /// Sends the first `count` slots in order. Returns how many the kernel took; one that it
    /// refuses (no route, too long) is passed over.
    pub fn send(&mut self, socket: &UdpSocket, count: usize) -> usize {
        self.point(count, true);
        let (mut next, mut taken, mut waited) = (0, 0, false);
        while next < count {
            let left = &mut self.headers[next..count];
            // SAFETY: as in `receive`; the vectors' lengths lie within their slots, and the
            // addresses are complete.
            let sent = unsafe {
                libc::sendmmsg(
                    socket.as_raw_fd(),
                    left.as_mut_ptr(),
                    u32::try_from(left.len()).unwrap_or(COUNT),
                    libc::MSG_DONTWAIT,
                )
            };
            if let Ok(sent @ 1..) = usize::try_from(sent) {
                (next, taken, waited) = (next + sent, taken + sent, false);
                continue;
            }
            let full = io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock;
            if full && !waited {
                let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
                // However it ends: another try tells.
                let _ = poll(&mut fds, PollTimeout::from(FULL));
                waited = true;
                continue;
            }
            // As on any link: what cannot be sent now is lost, and the sender notices.
            (next, waited) = (next + 1, false);
        }
        taken
    }
}

/// [`BATCH`] as the kernel takes it.
#[expect(clippy::cast_possible_truncation, reason = "64")]
const COUNT: libc::c_uint = BATCH as libc::c_uint;

/// Length of an IPv4 socket address, in bytes.
#[expect(clippy::cast_possible_truncation, reason = "16")]
const NAME: libc::socklen_t = size_of::<libc::sockaddr_in>() as libc::socklen_t;

/// Family of an IPv4 socket address.
#[expect(clippy::cast_possible_truncation, reason = "2")]
const FAMILY: libc::sa_family_t = libc::AF_INET as libc::sa_family_t;

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn pair() -> (UdpSocket, UdpSocket, SocketAddrV4) {
        let [a, b] = [(); 2].map(|()| UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("bound"));
        let port = b.local_addr().expect("bound").port();
        (a, b, SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))
    }

    #[test]
    fn datagrams_of_all_lengths_arrive_in_order() {
        let (from, to, address) = pair();
        let mut batch = Batch::new();
        let lengths: Vec<usize> = (0..10).map(|n| n * n * 17).collect();
        for (index, length) in lengths.iter().enumerate() {
            batch.slot(index)[..*length].fill(u8::try_from(index).expect("small"));
            batch.address(index, *length, address);
        }
        assert_eq!(batch.send(&from, lengths.len()), lengths.len());
        let mut other = Batch::new();
        let mut got = Vec::new();
        while got.len() < lengths.len() {
            let Ok(count) = other.receive(&to) else { continue };
            for index in 0..count {
                let bytes = other.received(index);
                let number = u8::try_from(got.len()).expect("small");
                assert!(bytes.iter().all(|byte| *byte == number));
                got.push(bytes.len());
            }
        }
        assert_eq!(got, lengths);
        let error = other.receive(&to).expect_err("nothing is left");
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn one_that_is_refused_costs_only_itself() {
        let (from, to, address) = pair();
        let mut batch = Batch::new();
        for (index, length) in [10, 65_530, 12].into_iter().enumerate() {
            batch.address(index, length, address);
        }
        assert_eq!(batch.send(&from, 3), 2);
        let mut buffer = [0; 100];
        assert_eq!(to.recv(&mut buffer).ok(), Some(10));
        assert_eq!(to.recv(&mut buffer).ok(), Some(12));
    }
}
