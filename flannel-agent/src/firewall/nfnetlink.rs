//! `nf_tables` as the kernel shows it over netlink: dumps, deletions and notifications, without a
//! program to start. `linux/netfilter/nf_tables.h` names the numbers.

mod wire;

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use nix::sys::{
    socket::{setsockopt, sockopt},
    time::{TimeVal, TimeValLike},
};
use tokio::io::unix::AsyncFd;

pub use self::wire::{Attributes, attribute};
use self::wire::{Header, messages, zero_terminated};
use super::rules::Family;

/// `NFNL_SUBSYS_NFTABLES`.
const SUBSYSTEM: u16 = 10;
/// `NFNLGRP_NFTABLES`.
const GROUP: u32 = 7;

const NFT_MSG_NEWTABLE: u8 = 0;
const NFT_MSG_GETTABLE: u8 = 1;
const NFT_MSG_DELTABLE: u8 = 2;
const NFT_MSG_NEWCHAIN: u8 = 3;
const NFT_MSG_GETCHAIN: u8 = 4;
const NFT_MSG_DELCHAIN: u8 = 5;
const NFT_MSG_NEWRULE: u8 = 6;
const NFT_MSG_GETRULE: u8 = 7;
const NFT_MSG_DELRULE: u8 = 8;

const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;

const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// Bytes of a netlink header and the netfilter header behind it.
const HEADERS: usize = 20;

/// Receive buffer in bytes, for a burst of changes of others.
const RECEIVE_BUFFER: usize = 4 << 20;

/// The kernel answers before `send` returns; an error is better than to wait for ever.
const ANSWER_SECONDS: i64 = 5;

/// How often a dump is repeated that a change interrupted.
const DUMP_TRIES: usize = 10;

/// `NFPROTO_*` of the families whose rules see IP packets.
pub mod protocol {
    /// Both families.
    pub const INET: u8 = 1;
    /// IPv4.
    pub const IPV4: u8 = 2;
    /// IPv6.
    pub const IPV6: u8 = 10;
    /// One device's packets, whatever they are.
    pub const NETDEV: u8 = 5;
    /// What a bridge forwards, or takes from and to the host.
    pub const BRIDGE: u8 = 7;
}

/// The kernel's number of a family.
pub const fn number(family: Family) -> u8 {
    match family {
        Family::V4 => protocol::IPV4,
        Family::V6 => protocol::IPV6,
    }
}

/// A chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// `NFPROTO_*`.
    pub family: u8,
    /// The table it is in.
    pub table: String,
    /// Its name.
    pub name: String,
    /// Where it is hooked in, if it is a base chain.
    pub base: Option<Base>,
}

/// What makes a chain a base chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Base {
    /// `NF_INET_*`.
    pub hook: u32,
    /// The smaller the earlier.
    pub priority: i32,
    /// `NF_DROP` (0) or `NF_ACCEPT` (1).
    pub policy: u32,
    /// `filter`, `nat`, `route`.
    pub kind: String,
    /// The devices that it is about, if not all.
    pub devices: Vec<String>,
}

/// `NF_INET_FORWARD`.
pub const HOOK_FORWARD: u32 = 2;
/// `NF_DROP`.
pub const POLICY_DROP: u32 = 0;

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The chain it is in.
    pub chain: String,
    /// Its handle within the table.
    pub handle: [u8; 8],
    /// Its expressions, as the kernel codes them.
    pub expressions: Vec<u8>,
}

impl Rule {
    /// Name and data of each expression.
    pub fn expressions(&self) -> impl Iterator<Item = (String, Attributes<'_>)> {
        Attributes::new(&self.expressions).map(|(_, element)| {
            let element = Attributes::new(element);
            (element.text(1), element.nested(2))
        })
    }

    /// The chain that this rule jumps or goes to.
    pub fn jump(&self) -> Option<String> {
        self.verdict().map(|(_, chain)| chain).filter(|chain| !chain.is_empty())
    }

    /// The verdict of its `immediate` expression: the kernel's code and the chain.
    pub fn verdict(&self) -> Option<(i32, String)> {
        self.expressions().find(|(name, _)| name == "immediate").and_then(|(_, data)| {
            let verdict = data.nested(2).nested(2);
            let code = verdict.get(1)?.try_into().ok()?;
            Some((i32::from_be_bytes(code), verdict.text(2)))
        })
    }

    /// Everything about the rule that stays the same while packets pass.
    pub fn content(&self) -> Vec<u8> {
        let mut content = Vec::with_capacity(self.expressions.len());
        for (_, element) in Attributes::new(&self.expressions) {
            let element_attributes = Attributes::new(element);
            if element_attributes.text(1) == "counter" {
                content.extend_from_slice(b"counter");
            } else {
                content.extend_from_slice(element);
            }
            content.push(0);
        }
        content
    }
}

/// A socket for dumps and deletions in the network namespace of the thread that opened it.
pub struct NfTables {
    socket: Socket,
    sequence: u32,
}

/// A message's type within the subsystem, family and attributes.
struct Message<'a> {
    kind: u8,
    family: u8,
    attributes: Attributes<'a>,
}

impl NfTables {
    /// Opens the socket.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER_SECONDS))?;
        Ok(Self { socket, sequence: 0 })
    }

    /// Family and name of all tables.
    pub fn tables(&mut self) -> io::Result<Vec<(u8, String)>> {
        self.dump(0, NFT_MSG_GETTABLE, &[], |message| {
            (message.kind == NFT_MSG_NEWTABLE).then(|| (message.family, message.attributes.text(1)))
        })
    }

    /// All chains of all tables.
    pub fn chains(&mut self) -> io::Result<Vec<Chain>> {
        self.dump(0, NFT_MSG_GETCHAIN, &[], |message| {
            (message.kind == NFT_MSG_NEWCHAIN).then(|| chain(message))
        })
    }

    /// One chain, if it is there.
    pub fn chain(&mut self, family: u8, table: &str, name: &str) -> io::Result<Option<Chain>> {
        let (mut request, mut attributes) = (Vec::new(), Vec::new());
        attribute(&mut attributes, 1, &zero_terminated(table));
        attribute(&mut attributes, 3, &zero_terminated(name));
        self.append(&mut request, subsystem(NFT_MSG_GETCHAIN), 0, (family, 0), &attributes);
        self.socket.send(&request, 0)?;
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            for (header, payload) in messages(&bytes) {
                if header.sequence != self.sequence {
                    continue;
                }
                if header.kind == NLMSG_ERROR {
                    return match error(payload) {
                        Err(err) if err.kind() == io::ErrorKind::NotFound => Ok(None),
                        Err(err) if no_nf_tables(&err) => Ok(None),
                        outcome => outcome.map(|()| None),
                    };
                }
                if let Some(message) = message(&header, payload) {
                    return Ok(Some(chain(&message)));
                }
            }
        }
    }

    /// The rules of a table or of one chain of it, in order; none if it is not there.
    pub fn rules(&mut self, family: u8, table: &str, chain: Option<&str>) -> io::Result<Vec<Rule>> {
        let mut filter = Vec::new();
        attribute(&mut filter, 1, &zero_terminated(table));
        if let Some(chain) = chain {
            attribute(&mut filter, 2, &zero_terminated(chain));
        }
        self.dump(family, NFT_MSG_GETRULE, &filter, |message| {
            let attributes = &message.attributes;
            let name = attributes.text(2);
            // Old kernels do not filter.
            let asked = message.kind == NFT_MSG_NEWRULE
                && attributes.text(1) == table
                && chain.is_none_or(|chain| name == chain);
            asked.then(|| Rule {
                chain: name,
                handle: attributes.get(3).and_then(|h| h.try_into().ok()).unwrap_or_default(),
                expressions: attributes.get(4).unwrap_or_default().to_vec(),
            })
        })
    }

    fn dump<T>(
        &mut self,
        family: u8,
        kind: u8,
        filter: &[u8],
        take: impl Fn(&Message<'_>) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        for _ in 0..DUMP_TRIES {
            match self.dump_once(family, kind, filter, &take) {
                Err(err) if err.kind() == io::ErrorKind::Interrupted => {}
                Err(err) if no_nf_tables(&err) => return Ok(Vec::new()),
                done => return done,
            }
        }
        Err(io::Error::other("nf_tables change faster than they can be read"))
    }

    fn dump_once<T>(
        &mut self,
        family: u8,
        kind: u8,
        filter: &[u8],
        take: &impl Fn(&Message<'_>) -> Option<T>,
    ) -> io::Result<Vec<T>> {
        let mut request = Vec::new();
        self.append(&mut request, subsystem(kind), NLM_F_DUMP, (family, 0), filter);
        self.socket.send(&request, 0)?;
        let (mut taken, mut interrupted) = (Vec::new(), false);
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            for (header, payload) in messages(&bytes) {
                if header.sequence != self.sequence {
                    continue;
                }
                interrupted |= header.flags & NLM_F_DUMP_INTR != 0;
                match header.kind {
                    NLMSG_ERROR => error(payload)?,
                    NLMSG_DONE if interrupted => return Err(io::ErrorKind::Interrupted.into()),
                    NLMSG_DONE => {
                        error(payload)?;
                        return Ok(taken);
                    }
                    _ => taken.extend(message(&header, payload).and_then(|m| take(&m))),
                }
            }
        }
    }

    /// Makes all deletions in one transaction: all or none.
    pub fn delete(&mut self, deletions: &[Deletion]) -> io::Result<()> {
        if deletions.is_empty() {
            return Ok(());
        }
        let mut batch = Vec::new();
        self.append(&mut batch, NFNL_MSG_BATCH_BEGIN, 0, (0, SUBSYSTEM), &[]);
        let first = self.sequence;
        for deletion in deletions {
            let (kind, family, attributes) = deletion.message();
            self.append(&mut batch, subsystem(kind), NLM_F_ACK, (family, 0), &attributes);
        }
        self.append(&mut batch, NFNL_MSG_BATCH_END, 0, (0, SUBSYSTEM), &[]);
        self.socket.send(&batch, 0)?;
        let mut open = deletions.len();
        while open > 0 {
            let (bytes, _) = self.socket.recv_from_full()?;
            for (header, payload) in messages(&bytes) {
                // What refuses the whole batch comes under the number of its beginning or end.
                let at = header.sequence.wrapping_sub(first) as usize;
                if header.kind == NLMSG_ERROR && at <= deletions.len() + 1 {
                    error(payload)?;
                    open = open.saturating_sub(1);
                }
            }
        }
        Ok(())
    }

    fn append(
        &mut self,
        buffer: &mut Vec<u8>,
        kind: u16,
        flags: u16,
        (family, resource): (u8, u16),
        attributes: &[u8],
    ) {
        self.sequence = self.sequence.wrapping_add(1);
        let length = u32::try_from(HEADERS + attributes.len()).unwrap_or(u32::MAX);
        buffer.extend(length.to_ne_bytes());
        buffer.extend(kind.to_ne_bytes());
        buffer.extend((NLM_F_REQUEST | flags).to_ne_bytes());
        buffer.extend(self.sequence.to_ne_bytes());
        buffer.extend([0; 4]);
        buffer.extend([family, 0]);
        buffer.extend(resource.to_be_bytes());
        buffer.extend(attributes);
    }
}

/// One thing to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Deletion {
    /// A table with all in it.
    Table(u8, String),
    /// The rules of a chain, then the chain.
    Rules(u8, String, String),
    /// An empty chain.
    Chain(u8, String, String),
    /// One rule.
    Rule(u8, String, String, [u8; 8]),
}

impl Deletion {
    /// What goes, in nft's words; `None` for a part of something else that goes.
    pub fn named(&self) -> Option<String> {
        let word = |family: u8| if family == protocol::IPV4 { "ip" } else { "ip6" };
        match self {
            Self::Table(family, table) => Some(format!("table {} {table}", word(*family))),
            Self::Chain(family, table, chain) => {
                Some(format!("chain {} {table} {chain}", word(*family)))
            }
            Self::Rules(..) | Self::Rule(..) => None,
        }
    }

    fn message(&self) -> (u8, u8, Vec<u8>) {
        let mut attributes = Vec::new();
        let mut add = |kind, content: &[u8]| attribute(&mut attributes, kind, content);
        let (kind, family) = match self {
            Self::Table(family, table) => {
                add(1, &zero_terminated(table));
                (NFT_MSG_DELTABLE, *family)
            }
            Self::Rules(family, table, chain) => {
                add(1, &zero_terminated(table));
                add(2, &zero_terminated(chain));
                (NFT_MSG_DELRULE, *family)
            }
            Self::Chain(family, table, chain) => {
                add(1, &zero_terminated(table));
                add(3, &zero_terminated(chain));
                (NFT_MSG_DELCHAIN, *family)
            }
            Self::Rule(family, table, chain, handle) => {
                add(1, &zero_terminated(table));
                add(2, &zero_terminated(chain));
                add(3, handle);
                (NFT_MSG_DELRULE, *family)
            }
        };
        (kind, family, attributes)
    }
}

/// What a notification is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// `NFPROTO_*`.
    pub family: u8,
    /// The table.
    pub table: String,
    /// The chain; empty if the table itself is meant.
    pub chain: String,
    /// Whether the chain itself is meant, and is a base chain.
    pub base_chain: bool,
}

/// A socket that hears of every change of `nf_tables` in its namespace.
pub struct Monitor(AsyncFd<Socket>);

impl Monitor {
    /// Opens the socket.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind(&SocketAddr::new(0, 0))?;
        if setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
            // What is missed is noticed: only slower.
            let _ = socket.set_rx_buf_sz(RECEIVE_BUFFER);
        }
        socket.add_membership(GROUP)?;
        socket.set_non_blocking(true)?;
        // SAFETY: the socket owns its descriptor and closes it only when it is dropped.
        Ok(Self(unsafe { AsyncFd::register(socket) }?))
    }

    /// Waits for changes. `None` if some were missed. Cancel-safe.
    pub async fn next(&self) -> Option<Vec<Notice>> {
        loop {
            // An error here means that the runtime is going down.
            let Ok(mut guard) = self.0.readable().await else {
                return std::future::pending().await;
            };
            match guard.try_io(|socket| socket.get_ref().recv_from_full()) {
                // Only the kernel's word counts.
                Ok(Ok((bytes, sender))) if sender.port_number() == 0 => {
                    return Some(notices(&bytes));
                }
                Ok(Ok(_)) | Err(_) => {}
                Ok(Err(err)) => {
                    tracing::debug!("nf_tables notifications lost: {err}");
                    return None;
                }
            }
        }
    }
}

fn notices(bytes: &[u8]) -> Vec<Notice> {
    let notice = |(header, payload): (Header, &[u8])| {
        let message = message(&header, payload)?;
        let attributes = &message.attributes;
        let (chain, base_chain) = match message.kind {
            NFT_MSG_NEWTABLE | NFT_MSG_DELTABLE => (String::new(), false),
            NFT_MSG_NEWCHAIN | NFT_MSG_DELCHAIN => {
                (attributes.text(3), attributes.get(4).is_some())
            }
            NFT_MSG_NEWRULE | NFT_MSG_DELRULE => (attributes.text(2), false),
            _ => return None,
        };
        Some(Notice { family: message.family, table: attributes.text(1), chain, base_chain })
    };
    messages(bytes).filter_map(notice).collect()
}

/// `NFTA_CHAIN_*`: table 1, handle 2, name 3, hook 4 (number 1, priority 2), policy 5, type 7.
fn chain(message: &Message<'_>) -> Chain {
    let attributes = &message.attributes;
    let hook = attributes.nested(4);
    let base = hook.number(1).map(|number| Base {
        hook: number,
        priority: hook.number(2).unwrap_or_default().cast_signed(),
        policy: attributes.number(5).unwrap_or(1),
        kind: attributes.text(7),
        devices: devices(&hook),
    });
    Chain { family: message.family, table: attributes.text(1), name: attributes.text(3), base }
}

/// `NFTA_HOOK_DEV`, or each `NFTA_DEVICE_NAME` in `NFTA_HOOK_DEVS`.
fn devices(hook: &Attributes<'_>) -> Vec<String> {
    let one = hook.text(3);
    if !one.is_empty() {
        return vec![one];
    }
    let several = hook.nested(4).map(|(_, name)| {
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        String::from_utf8_lossy(&name[..end]).into_owned()
    });
    several.collect()
}

fn message<'a>(header: &Header, payload: &'a [u8]) -> Option<Message<'a>> {
    let [subsystem, kind] = header.kind.to_be_bytes();
    (u16::from(subsystem) == SUBSYSTEM).then_some(())?;
    Some(Message {
        kind,
        family: *payload.first()?,
        attributes: Attributes::new(payload.get(4..)?),
    })
}

/// The outcome in an error or done message: zero is success.
fn error(payload: &[u8]) -> io::Result<()> {
    let code = payload.get(..4).and_then(|code| code.try_into().ok());
    match code.map_or(0, i32::from_ne_bytes) {
        0 => Ok(()),
        code if code == -libc::ENOENT => Err(io::ErrorKind::NotFound.into()),
        code if code == -libc::EINTR => Err(io::ErrorKind::Interrupted.into()),
        code => Err(io::Error::from_raw_os_error(code.saturating_neg())),
    }
}

/// Whether a kernel says that it has no such thing as `nf_tables`: then nothing is there.
fn no_nf_tables(err: &io::Error) -> bool {
    matches!(err.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP))
}

fn subsystem(kind: u8) -> u16 {
    (SUBSYSTEM << 8) | u16::from(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_no_content() {
        let rule = |packets: u8| {
            let mut counter = Vec::new();
            attribute(&mut counter, 1, b"counter\0");
            attribute(&mut counter, 2, &[packets; 8]);
            let mut expressions = Vec::new();
            attribute(&mut expressions, 1, &counter);
            Rule { chain: String::new(), handle: [packets; 8], expressions }
        };
        assert_eq!(rule(1).content(), rule(2).content());
        assert_ne!(rule(1).content(), Rule { expressions: Vec::new(), ..rule(1) }.content());
    }
}
