//! Asking the kernel for one TC filter (rtnetlink(7), `RTM_GETTFILTER`).
//!
//! aya attaches and detaches filters but cannot look for one by priority and handle.

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::hook::{Hook, Side};

/// Our place among the filters of a hook: the same at every start, so that a restart replaces.
pub(super) const PRIORITY: u16 = 0x464c;

const ETH_P_ALL: u16 = 3;

pub(super) const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
pub(super) const NLM_F_REQUEST: u16 = 1;
const NLM_F_DUMP: u16 = 0x300;
const RTM_NEWTFILTER: u16 = 44;
const RTM_GETTFILTER: u16 = 46;
pub(super) const HEADER_LEN: usize = 16;
pub(super) const TCMSG_LEN: usize = 20;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_ID: u16 = 11;

/// A BPF filter.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Filter {
    /// The name that its owner gave it.
    pub(super) name: String,
    /// The kernel's number of the program.
    pub(super) program: u32,
}

/// The filter at a hook's place of an interface; `None` if there is none.
pub(super) fn find(hook: Hook, ifindex: u32) -> io::Result<Option<Filter>> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    socket.send(&request(hook.side, hook.handle, ifindex), 0)?;
    let (answer, _) = socket.recv_from_full()?;
    parse(&answer)
}

/// Whether anybody else has a filter at a side of an interface.
pub(super) fn has_others(side: Side, ifindex: u32) -> io::Result<bool> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut question = request(side, 0, ifindex);
    // All filters of the hook: no handle, no priority, no protocol.
    let flags = (NLM_F_REQUEST | NLM_F_DUMP).to_ne_bytes();
    question[6..8].copy_from_slice(&flags);
    question[HEADER_LEN + 16..].fill(0);
    socket.send(&question, 0)?;
    let mut others = false;
    loop {
        let (answer, _) = socket.recv_from_full()?;
        match scan(&answer)? {
            Scanned::More(found) => others |= found,
            Scanned::End(found) => return Ok(others | found),
        }
    }
}

/// What one datagram of a dump has: whether a filter of somebody else, and whether more follows.
#[derive(Debug, PartialEq, Eq)]
enum Scanned {
    More(bool),
    End(bool),
}

fn scan(mut answer: &[u8]) -> io::Result<Scanned> {
    let odd = || io::Error::new(io::ErrorKind::InvalidData, "odd answer about TC filters");
    let mut others = false;
    while !answer.is_empty() {
        let length = answer.first_chunk().ok_or_else(odd)?;
        let length = usize::try_from(u32::from_ne_bytes(*length)).map_err(|_| odd())?;
        let message = answer.get(..length).filter(|_| length >= HEADER_LEN).ok_or_else(odd)?;
        match u16::from_ne_bytes([message[4], message[5]]) {
            NLMSG_DONE => return Ok(Scanned::End(others)),
            NLMSG_ERROR => {
                parse(message)?;
                // Nothing there to have filters.
                return Ok(Scanned::End(others));
            }
            RTM_NEWTFILTER => {
                let info = message.get(HEADER_LEN + 16..).and_then(|info| info.first_chunk());
                let priority = u32::from_ne_bytes(*info.ok_or_else(odd)?) >> 16;
                others |= priority != u32::from(PRIORITY);
            }
            _ => {}
        }
        answer = answer.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(Scanned::More(others))
}

fn request(side: Side, handle: u32, ifindex: u32) -> Vec<u8> {
    let info = u32::from(PRIORITY) << 16 | u32::from(ETH_P_ALL.to_be());
    message(RTM_GETTFILTER, NLM_F_REQUEST, [ifindex, handle, side.clsact(), info])
}

/// A request about traffic control: interface, handle, parent and info of a `tcmsg`.
pub(super) fn message(kind: u16, flags: u16, fields: [u32; 4]) -> Vec<u8> {
    let length = HEADER_LEN + TCMSG_LEN;
    let mut message = Vec::with_capacity(length);
    message.extend(u32::try_from(length).unwrap_or_default().to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    // Sequence number and sender: one question, one answer.
    message.extend([0; 8]);
    // Address family, padding.
    message.extend([0; 4]);
    for field in fields {
        message.extend(field.to_ne_bytes());
    }
    message
}

fn parse(answer: &[u8]) -> io::Result<Option<Filter>> {
    let odd = || io::Error::new(io::ErrorKind::InvalidData, "odd answer about a TC filter");
    let kind = answer.get(4..6).and_then(|kind| kind.first_chunk()).ok_or_else(odd)?;
    match u16::from_ne_bytes(*kind) {
        NLMSG_ERROR => {
            let code = answer.get(HEADER_LEN..).and_then(|body| body.first_chunk());
            match i32::from_ne_bytes(*code.ok_or_else(odd)?).saturating_neg() {
                // No such filter; no clsact qdisc.
                libc::ENOENT | libc::EINVAL => Ok(None),
                code => Err(io::Error::from_raw_os_error(code)),
            }
        }
        RTM_NEWTFILTER => {
            let attributes = answer.get(HEADER_LEN + TCMSG_LEN..).ok_or_else(odd)?;
            let options = attribute(attributes, TCA_OPTIONS).unwrap_or_default();
            let name = attribute(options, TCA_BPF_NAME).unwrap_or_default();
            let program = attribute(options, TCA_BPF_ID).and_then(|id| id.first_chunk());
            Ok(Some(Filter {
                name: String::from_utf8_lossy(name).trim_end_matches('\0').to_owned(),
                program: program.map_or(0, |id| u32::from_ne_bytes(*id)),
            }))
        }
        _ => Err(odd()),
    }
}

/// The value of the first attribute of a kind.
pub(super) fn attribute(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let [l0, l1, k0, k1] = *bytes.first_chunk()?;
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        // The two upper bits say how to read the value, not what it is.
        let kind = u16::from_ne_bytes([k0, k1]) & 0x3fff;
        let value = bytes.get(4..length)?;
        if kind == wanted {
            return Some(value);
        }
        bytes = bytes.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn attribute_bytes(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = u16::try_from(4 + value.len()).expect("short").to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn answer(kind: u16, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.resize(HEADER_LEN, 0);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn a_filter_is_read() {
        let mut options = attribute_bytes(TCA_BPF_NAME, b"ours\0");
        options.extend(attribute_bytes(TCA_BPF_ID, &77_u32.to_ne_bytes()));
        let mut body = vec![0; TCMSG_LEN];
        body.extend(attribute_bytes(1, b"bpf\0"));
        body.extend(attribute_bytes(TCA_OPTIONS | 0x8000, &options));
        let filter = Filter { name: "ours".to_owned(), program: 77 };
        assert_eq!(parse(&answer(RTM_NEWTFILTER, &body)).expect("read"), Some(filter));
    }

    #[test]
    fn no_filter_and_refusals_are_told_apart() {
        let error = |code: i32| parse(&answer(NLMSG_ERROR, &(-code).to_ne_bytes()));
        assert_eq!(error(libc::ENOENT).expect("none"), None);
        assert_eq!(error(libc::EINVAL).expect("none"), None);
        assert_eq!(error(libc::EPERM).expect_err("refused").raw_os_error(), Some(libc::EPERM));
        assert!(parse(&answer(99, &[])).is_err());
    }

    #[test]
    fn filters_of_others_are_told_from_ours() {
        let filter = |priority: u16| {
            let mut body = vec![0; 16];
            body.extend((u32::from(priority) << 16).to_ne_bytes());
            let mut message = answer(RTM_NEWTFILTER, &body);
            let length = u32::try_from(message.len()).expect("short").to_ne_bytes();
            message[..4].copy_from_slice(&length);
            message
        };
        let mut done = answer(NLMSG_DONE, &[0; 4]);
        done[..4].copy_from_slice(&20_u32.to_ne_bytes());
        let ours = [filter(PRIORITY), done.clone()].concat();
        assert_eq!(scan(&ours).expect("read"), Scanned::End(false));
        let both = [filter(PRIORITY), filter(1), done].concat();
        assert_eq!(scan(&both).expect("read"), Scanned::End(true));
        assert_eq!(scan(&filter(1)).expect("read"), Scanned::More(true));
        assert!(scan(&[1, 0, 0, 0]).is_err());
    }

    proptest! {
        #[test]
        fn any_dump_is_survived(bytes: Vec<u8>) {
            let _ = scan(&bytes);
        }

        #[test]
        fn any_answer_is_survived(body: Vec<u8>, kind in prop::sample::select(vec![2_u16, 44])) {
            let _ = parse(&answer(kind, &body));
            let _ = parse(&body);
        }
    }
}
