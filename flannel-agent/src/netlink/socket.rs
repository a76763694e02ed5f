//! Requests to rtnetlink, many at a time.
//!
//! The kernel works through a buffer of requests inside `sendmsg` and has the answers queued when
//! that returns, so nothing here waits: a thousand routes cost a dozen system calls.

use std::io;

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use nix::sys::{
    socket::{setsockopt, sockopt},
    time::{TimeVal, TimeValLike},
};

/// Requests per `sendmsg`: few enough that their answers fit into the receive buffer.
const BATCH: usize = 64;

/// Receive buffer in bytes; the kernel counts some 800 of them per answer.
const RECEIVE_BUFFER: usize = 1 << 20;

/// The kernel answers before `sendmsg` returns. If an answer is lost all the same, an error is
/// better than an agent that waits for ever.
const ANSWER_SECONDS: i64 = 5;

/// A request and the flags beyond `NLM_F_REQUEST | NLM_F_ACK`.
#[derive(Debug)]
pub struct Request {
    /// What is asked.
    pub message: RouteNetlinkMessage,
    /// `NLM_F_CREATE`, `NLM_F_REPLACE`, `NLM_F_EXCL`, …
    pub flags: u16,
}

/// A socket for requests. One at a time uses it.
pub struct Requests {
    socket: Socket,
    sequence: u32,
}

impl Requests {
    /// Opens a socket in the network namespace of the calling thread.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        socket.set_rx_buf_sz(RECEIVE_BUFFER)?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER_SECONDS))?;
        // Older than 4.20: the kernel filters nothing, and we do anyway.
        let _ = socket.set_netlink_get_strict_chk(true);
        // Acknowledgements without the request in them.
        let _ = socket.set_cap_ack(true);
        Ok(Self { socket, sequence: 0 })
    }

    /// Sends all requests in order and returns each one's outcome in the same order.
    pub fn run(&mut self, requests: Vec<Request>) -> io::Result<Vec<io::Result<()>>> {
        let mut results = Vec::with_capacity(requests.len());
        let mut requests = requests.into_iter().peekable();
        while requests.peek().is_some() {
            let first = self.sequence.wrapping_add(1);
            let mut buffer = Vec::with_capacity(BATCH * 128);
            let mut count = 0;
            for request in requests.by_ref().take(BATCH) {
                self.append(&mut buffer, request.message, NLM_F_ACK | request.flags);
                count += 1;
            }
            self.socket.send(&buffer, 0)?;
            let mut answers: Vec<Option<io::Result<()>>> = (0..count).map(|_| None).collect();
            let mut open = count;
            while open > 0 {
                for message in self.receive()? {
                    let at = message.header.sequence_number.wrapping_sub(first) as usize;
                    let NetlinkPayload::Error(error) = message.payload else { continue };
                    if let Some(slot @ None) = answers.get_mut(at) {
                        *slot = Some(match error.code {
                            None => Ok(()),
                            Some(_) => Err(error.to_io()),
                        });
                        open -= 1;
                    }
                }
            }
            results.extend(answers.into_iter().flatten());
        }
        Ok(results)
    }

    /// Sends one request.
    pub fn run_one(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.run(vec![Request { message, flags }])?.pop().unwrap_or(Ok(()))
    }

    /// Everything the kernel answers to a dump request, through `take`.
    ///
    /// # Errors
    /// `Interrupted` if the kernel's tables changed too much meanwhile: worth repeating.
    pub fn dump(
        &mut self,
        message: RouteNetlinkMessage,
        mut take: impl FnMut(RouteNetlinkMessage),
    ) -> io::Result<()> {
        const NLM_F_DUMP_INTR: u16 = 0x10;
        let mut buffer = Vec::with_capacity(128);
        self.append(&mut buffer, message, NLM_F_DUMP);
        self.socket.send(&buffer, 0)?;
        let mut interrupted = false;
        loop {
            for message in self.receive()? {
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                interrupted |= message.header.flags & NLM_F_DUMP_INTR != 0;
                match message.payload {
                    NetlinkPayload::InnerMessage(inner) => take(inner),
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(error.to_io());
                    }
                    NetlinkPayload::Done(_) if interrupted => {
                        return Err(io::ErrorKind::Interrupted.into());
                    }
                    NetlinkPayload::Done(_) => return Ok(()),
                    _ => {}
                }
            }
        }
    }

    /// The single answer to a request that asks for one object.
    pub fn get(&mut self, message: RouteNetlinkMessage) -> io::Result<RouteNetlinkMessage> {
        let mut buffer = Vec::with_capacity(128);
        self.append(&mut buffer, message, 0);
        self.socket.send(&buffer, 0)?;
        loop {
            for message in self.receive()? {
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::InnerMessage(inner) => return Ok(inner),
                    NetlinkPayload::Error(error) if error.code.is_some() => {
                        return Err(error.to_io());
                    }
                    _ => {}
                }
            }
        }
    }

    fn append(&mut self, buffer: &mut Vec<u8>, message: RouteNetlinkMessage, flags: u16) {
        self.sequence = self.sequence.wrapping_add(1);
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let start = buffer.len();
        buffer.resize(start + message.buffer_len().next_multiple_of(4), 0);
        message.serialize(&mut buffer[start..]);
    }

    fn receive(&mut self) -> io::Result<Vec<NetlinkMessage<RouteNetlinkMessage>>> {
        let (bytes, _) = self.socket.recv_from_full()?;
        Ok(parse(&bytes))
    }
}

/// The messages in a datagram. One that cannot be understood is passed over: kernels newer than
/// the parser send attributes it does not know in messages that do not matter to us.
pub(super) fn parse(mut bytes: &[u8]) -> Vec<NetlinkMessage<RouteNetlinkMessage>> {
    const HEADER: usize = 16;
    let mut messages = Vec::new();
    while bytes.len() >= HEADER {
        let length = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        if length < HEADER || length > bytes.len() {
            break;
        }
        match NetlinkMessage::deserialize(&bytes[..length]) {
            Ok(message) => messages.push(message),
            Err(error) => tracing::trace!("passing over a netlink message: {error}"),
        }
        bytes = &bytes[length.next_multiple_of(4).min(bytes.len())..];
    }
    messages
}
