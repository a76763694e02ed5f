//! Single connections as the kernel tracks them (ctnetlink, `linux/netfilter/nfnetlink_conntrack.h`).

use std::{io, net::SocketAddr};

use netlink_packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_REQUEST, NetlinkBuffer, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
    conntrack::{
        ConntrackAttribute, ConntrackMessage, IPTuple, ProtoInfo, ProtoInfoTCP, ProtoTuple,
        Protocol, Status, Tuple,
    },
};
use netlink_sys::{Socket, SocketAddr as NetlinkAddress, protocols::NETLINK_NETFILTER};
use nix::sys::{
    socket::{setsockopt, sockopt},
    time::{TimeVal, TimeValLike},
};

/// The kernel answers before `sendmsg` returns; an answer that is lost must not hold us up.
const ANSWER_SECONDS: i64 = 2;

/// `TCP_CONNTRACK_ESTABLISHED`.
const ESTABLISHED: u8 = 3;

/// `CTA_PROTOINFO_TCP_FLAGS_ORIGINAL` and `…_REPLY`: flags and which of them to change.
const TCP_FLAGS_ORIGINAL: u16 = 4;
const TCP_FLAGS_REPLY: u16 = 5;

/// `IP_CT_TCP_FLAG_BE_LIBERAL`: sequence numbers beyond the window are not invalid.
const BE_LIBERAL: u8 = 0x08;

/// A connection, seen from either end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    /// One end.
    pub from: SocketAddr,
    /// The other end, of the same family.
    pub to: SocketAddr,
    /// TCP; else UDP.
    pub tcp: bool,
}

/// What the kernel knows of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tracked {
    /// Packets went both ways and it is in the table: of TCP `IPS_ASSURED`; of UDP, which the kernel
    /// assures after two seconds, `IPS_SEEN_REPLY` and `IPS_CONFIRMED`, what suffices for flows that
    /// the kernel offloads itself.
    pub answered: bool,
    /// Addresses, ports or sequence numbers are rewritten, or a helper reads along.
    pub altered: bool,
    /// It is not ending; of TCP, it is established.
    pub open: bool,
    /// Both directions are judged without regard to the window. Always of UDP.
    pub liberal: bool,
}

impl Tracked {
    /// Whether its packets pass the stack as they are and will go on doing so.
    pub fn is_settled(&self) -> bool {
        self.answered && !self.altered && self.open
    }
}

/// A socket for questions about connections.
pub struct Conntrack {
    socket: Socket,
    sequence: u32,
}

impl Conntrack {
    /// Opens a socket in the network namespace of the calling thread.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.connect(&NetlinkAddress::new(0, 0))?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER_SECONDS))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// What is known of the connection; `None` if it is not tracked.
    pub fn find(&mut self, connection: &Connection) -> io::Result<Option<Tracked>> {
        let attributes = vec![ConntrackAttribute::CtaTupleOrig(tuple(connection))];
        let answer = self.ask(connection, ConntrackMessage::Get(attributes), 0);
        match answer {
            Ok(Some(attributes)) => Ok(Some(tracked(&attributes, connection.tcp))),
            Ok(None) => Err(io::Error::new(io::ErrorKind::InvalidData, "no answer in the answer")),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Has both directions of a TCP connection judged without regard to the window, as the
    /// kernel does for flows that it offloads. Packets that went past conntrack would else make
    /// the next one that it sees look invalid.
    ///
    /// # Errors
    /// `NotFound` if the connection is not tracked.
    pub fn be_liberal(&mut self, connection: &Connection) -> io::Result<()> {
        let flags = |kind| ProtoInfoTCP::Other(DefaultNla::new(kind, vec![BE_LIBERAL, BE_LIBERAL]));
        let attributes = vec![
            ConntrackAttribute::CtaTupleOrig(tuple(connection)),
            ConntrackAttribute::CtaProtoInfo(vec![ProtoInfo::TCP(vec![
                flags(TCP_FLAGS_ORIGINAL),
                flags(TCP_FLAGS_REPLY),
            ])]),
        ];
        self.ask(connection, ConntrackMessage::New(attributes), NLM_F_ACK).map(drop)
    }

    /// One request and its one answer: the connection, or an acknowledgement.
    fn ask(
        &mut self,
        connection: &Connection,
        message: ConntrackMessage,
        flags: u16,
    ) -> io::Result<Option<Vec<ConntrackAttribute>>> {
        self.sequence = self.sequence.wrapping_add(1);
        let family = match connection.from {
            SocketAddr::V4(_) => NetfilterProtoFamily::IPv4,
            SocketAddr::V6(_) => NetfilterProtoFamily::IPv6,
        };
        let message = NetfilterMessage::new(NetfilterHeader::new(family, 0, 0), message);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let mut buffer = vec![0; message.buffer_len()];
        message.serialize(&mut buffer);
        self.socket.send(&buffer, 0)?;
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            // An answer to an earlier question that came too late.
            let answers = NetlinkBuffer::new_checked(bytes.as_slice())
                .is_ok_and(|answer| answer.sequence_number() == self.sequence);
            if !answers {
                continue;
            }
            let answer = NetlinkMessage::<NetfilterMessage>::deserialize(&bytes)
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
            return match answer.payload {
                NetlinkPayload::Error(error) if error.code.is_some() => Err(error.to_io()),
                NetlinkPayload::InnerMessage(NetfilterMessage {
                    inner: NetfilterMessageInner::Conntrack(ConntrackMessage::New(attributes)),
                    ..
                }) => Ok(Some(attributes)),
                _ => Ok(None),
            };
        }
    }
}

fn tuple(connection: &Connection) -> Vec<Tuple> {
    let protocol = if connection.tcp { Protocol::Tcp } else { Protocol::Udp };
    vec![
        Tuple::Ip(vec![
            IPTuple::SourceAddress(connection.from.ip()),
            IPTuple::DestinationAddress(connection.to.ip()),
        ]),
        Tuple::Proto(vec![
            ProtoTuple::Protocol(protocol),
            ProtoTuple::SourcePort(connection.from.port()),
            ProtoTuple::DestinationPort(connection.to.port()),
        ]),
    ]
}

fn tracked(attributes: &[ConntrackAttribute], tcp: bool) -> Tracked {
    let mut status = Status::empty();
    let (mut state, mut original, mut reply) = (None, 0, 0);
    for attribute in attributes {
        match attribute {
            ConntrackAttribute::CtaStatus(bits) => status = *bits,
            ConntrackAttribute::CtaProtoInfo(infos) => {
                for info in infos {
                    let ProtoInfo::TCP(fields) = info else { continue };
                    for field in fields {
                        match field {
                            ProtoInfoTCP::State(value) => state = Some(*value),
                            ProtoInfoTCP::OriginalFlags(flags) => original = flags.flags,
                            ProtoInfoTCP::ReplyFlags(flags) => reply = flags.flags,
                            _ => {}
                        }
                    }
                }
            }
            _ => {}
        }
    }
    let altering = Status::NatMask | Status::SeqAdjust | Status::Helper;
    let answered = if tcp { Status::Assured } else { Status::SeenReply | Status::Confirmed };
    Tracked {
        answered: status.contains(answered),
        altered: status.intersects(altering),
        open: !status.intersects(Status::Dying) && (!tcp || state == Some(ESTABLISHED)),
        liberal: !tcp || original & reply & BE_LIBERAL != 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(status: Status, state: u8) -> Tracked {
        let tcp = ProtoInfo::TCP(vec![ProtoInfoTCP::State(state)]);
        let attributes =
            [ConntrackAttribute::CtaStatus(status), ConntrackAttribute::CtaProtoInfo(vec![tcp])];
        tracked(&attributes, true)
    }

    #[test]
    fn only_an_assured_open_unaltered_connection_is_settled() {
        let good = Status::Assured | Status::SeenReply | Status::Confirmed;
        // The kernel says of every connection, once NAT is in use, that NAT is done with it.
        assert!(of(good | Status::NatDoneMask, ESTABLISHED).is_settled());
        assert!(!of(Status::SeenReply, ESTABLISHED).is_settled());
        assert!(!of(good, ESTABLISHED + 1).is_settled());
        for bad in
            [Status::SrcNat, Status::DstNat, Status::SeqAdjust, Status::Helper, Status::Dying]
        {
            assert!(!of(good | bad, ESTABLISHED).is_settled(), "{bad:?}");
        }
        assert!(!tracked(&[], true).is_settled());
    }

    #[test]
    fn udp_is_settled_once_it_is_answered() {
        let of = |status| tracked(&[ConntrackAttribute::CtaStatus(status)], false);
        assert!(of(Status::SeenReply | Status::Confirmed).is_settled());
        assert!(!of(Status::Confirmed).is_settled());
        assert!(!of(Status::SeenReply | Status::Confirmed | Status::DstNat).is_settled());
    }
}
