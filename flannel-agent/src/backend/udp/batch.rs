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
    /// How many slots each header sends.
    runs: [usize; BATCH],
    /// What tells the kernel where to cut a header's bytes into datagrams.
    cuts: Vec<Cut>,
    /// Whether the kernel takes runs here.
    cuts_work: bool,
}

/// The longest payload of a UDP datagram over IPv4, and of a run.
const MAX_RUN: usize = 65_507;

/// A control message `UDP_SEGMENT` (udp(7)).
#[repr(C)]
#[derive(Clone, Copy)]
struct Cut {
    header: libc::cmsghdr,
    size: u16,
    padding: [u8; 6],
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
            runs: [0; BATCH],
            cuts: vec![CUT; BATCH],
            cuts_work: true,
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

    /// Points the headers at all slots, to be filled; no address is wanted.
    fn point(&mut self) {
        for index in 0..BATCH {
            let vector = &mut self.vectors[index];
            vector.iov_base = self.buffer[index * SLOT..].as_mut_ptr().cast();
            vector.iov_len = SLOT;
            let header = &mut self.headers[index].msg_hdr;
            header.msg_iov = ptr::from_mut(vector);
            header.msg_iovlen = 1;
            (header.msg_name, header.msg_namelen) = (ptr::null_mut(), 0);
            (header.msg_control, header.msg_controllen) = (ptr::null_mut(), 0);
        }
    }

    /// Points headers at the slots from `first` to `end`, and returns how many headers that takes.
    /// With `runs`, packets of one length to one peer, and a shorter one behind them, share a
    /// header: they cross the stack as one, and are cut where the NIC or the wire wants it.
    fn gather(&mut self, first: usize, end: usize, runs: bool) -> usize {
        let (mut count, mut start) = (0, first);
        while start < end {
            let size = self.lengths[start];
            let (mut next, mut whole) = (start, 0);
            while next < end {
                let length = self.lengths[next];
                let joins = next == start
                    || (runs
                        && self.names[next].sin_addr.s_addr == self.names[start].sin_addr.s_addr
                        && self.lengths[next - 1] == size
                        && (1..=size).contains(&length)
                        && whole + length <= MAX_RUN);
                if !joins {
                    break;
                }
                let vector = &mut self.vectors[next];
                vector.iov_base = self.buffer[next * SLOT..].as_mut_ptr().cast();
                vector.iov_len = length;
                (next, whole) = (next + 1, whole + length);
            }
            let cut = &mut self.cuts[count];
            // A run's packets are shorter than that.
            cut.size = u16::try_from(size).unwrap_or(u16::MAX);
            let header = &mut self.headers[count].msg_hdr;
            header.msg_iov = ptr::from_mut(&mut self.vectors[start]);
            header.msg_iovlen = next - start;
            (header.msg_name, header.msg_namelen) =
                (ptr::from_mut(&mut self.names[start]).cast(), NAME);
            (header.msg_control, header.msg_controllen) = if next - start > 1 {
                (ptr::from_mut(cut).cast(), size_of::<Cut>())
            } else {
                (ptr::null_mut(), 0)
            };
            self.runs[count] = next - start;
            (count, start) = (count + 1, next);
        }
        count
    }

    /// Receives what is waiting. Returns how many slots were filled.
    ///
    /// # Errors
    /// The kernel's; `WouldBlock` if nothing is waiting.
    pub fn receive(&mut self, socket: &UdpSocket) -> io::Result<usize> {
        self.point();
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
        let (mut next, mut taken, mut waited, mut runs) = (0, 0, false, self.cuts_work);
        while next < count {
            let headers = self.gather(next, count, runs);
            // SAFETY: as in `receive`; the vectors' lengths lie within their slots, those of a run
            // lie side by side, and addresses and control messages are complete.
            let sent = unsafe {
                libc::sendmmsg(
                    socket.as_raw_fd(),
                    self.headers.as_mut_ptr(),
                    u32::try_from(headers).unwrap_or(COUNT),
                    libc::MSG_DONTWAIT,
                )
            };
            if let Ok(sent @ 1..) = usize::try_from(sent) {
                let packets: usize = self.runs[..sent].iter().sum();
                (next, taken, waited) = (next + packets, taken + packets, false);
                continue;
            }
            let err = io::Error::last_os_error();
            if err.kind() == io::ErrorKind::WouldBlock && !waited {
                let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)];
                // However it ends: another try tells.
                let _ = poll(&mut fds, PollTimeout::from(FULL));
                waited = true;
                continue;
            }
            if self.runs[0] > 1 {
                // One of them is refused, or all because they are a run: a device that computes no
                // checksums (EIO), an old kernel (EINVAL).
                runs = false;
                self.cuts_work &= !matches!(err.raw_os_error(), Some(libc::EIO | libc::EINVAL));
                continue;
            }
            // As on any link: what cannot be sent now is lost, and the sender notices.
            (next, waited) = (next + 1, false);
        }
        taken
    }
}

/// A control message without its size.
const CUT: Cut = Cut {
    header: libc::cmsghdr {
        cmsg_len: size_of::<libc::cmsghdr>() + size_of::<u16>(),
        cmsg_level: libc::SOL_UDP,
        cmsg_type: libc::UDP_SEGMENT,
    },
    size: 0,
    padding: [0; 6],
};

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
    fn packets_of_one_length_share_a_header_and_arrive_one_by_one() {
        let (from, to, address) = pair();
        let mut batch = Batch::new();
        let lengths = [1400, 1400, 1400, 900, 900, 1400, 10, 0, 0, 1400, 1400];
        for (index, length) in lengths.into_iter().enumerate() {
            batch.slot(index)[..length].fill(u8::try_from(index).expect("small"));
            batch.address(index, length, address);
        }
        assert_eq!(batch.gather(0, lengths.len(), true), 6);
        assert_eq!(batch.runs[..6], [4, 1, 2, 1, 1, 2]);
        assert_eq!(batch.send(&from, lengths.len()), lengths.len());
        assert!(batch.cuts_work, "this kernel takes no runs");
        let mut buffer = [0; 2000];
        for (index, length) in lengths.into_iter().enumerate() {
            assert_eq!(to.recv(&mut buffer).expect("received"), length, "packet {index}");
            let number = u8::try_from(index).expect("small");
            assert!(buffer[..length].iter().all(|byte| *byte == number), "packet {index}");
        }
    }

    #[test]
    fn packets_to_several_peers_share_no_header() {
        let (_, _, address) = pair();
        let mut batch = Batch::new();
        let other = SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, 2), address.port());
        for (index, to) in [address, other, other, address].into_iter().enumerate() {
            batch.address(index, 1000, to);
        }
        assert_eq!(batch.gather(0, 4, true), 3);
        assert_eq!(batch.gather(0, 4, false), 4);
        // No more than a datagram holds: the last ones begin another.
        for index in 0..BATCH {
            batch.address(index, 1400, address);
        }
        assert_eq!(batch.gather(0, BATCH, true), 2);
        assert_eq!(batch.runs[..2], [46, 18]);
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
