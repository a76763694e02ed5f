//! Asking the kernel whether somebody shapes an interface (rtnetlink(7), `RTM_GETQDISC`).

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

use super::tc_filter::{HEADER_LEN, NLM_F_REQUEST, NLMSG_ERROR, TCMSG_LEN, attribute, message};

const NLM_F_ACK: u16 = 4;
/// Without it the answer goes to those only who listen to all changes.
const NLM_F_ECHO: u16 = 8;
const RTM_NEWQDISC: u16 = 36;
const RTM_GETQDISC: u16 = 38;
const TC_H_ROOT: u32 = 0xffff_ffff;
const TCA_KIND: u16 = 1;

/// Queues that only hold what cannot leave at once. A veth has none by itself.
const PLAIN: [&str; 6] = ["noqueue", "pfifo_fast", "pfifo", "fq_codel", "fq", "mq"];

/// Whether packets out of an interface wait for more than their turn.
pub(super) fn is_shaped(ifindex: u32) -> io::Result<bool> {
    let socket = Socket::new(NETLINK_ROUTE)?;
    socket.connect(&SocketAddr::new(0, 0))?;
    // Of the kernel's own queue it says nothing, but acknowledges.
    let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_ECHO;
    let question = message(RTM_GETQDISC, flags, [ifindex, 0, TC_H_ROOT, 0]);
    socket.send(&question, 0)?;
    let mut shaped = false;
    loop {
        let (answer, _) = socket.recv_from_full()?;
        match kind(&answer)? {
            Some(kind) => shaped |= !PLAIN.contains(&kind.as_str()),
            None => return Ok(shaped),
        }
    }
}

/// The kind of queue in an answer; `None` at the end.
fn kind(answer: &[u8]) -> io::Result<Option<String>> {
    let odd = || io::Error::new(io::ErrorKind::InvalidData, "odd answer about a qdisc");
    let message = answer.get(4..6).and_then(|kind| kind.first_chunk()).ok_or_else(odd)?;
    match u16::from_ne_bytes(*message) {
        NLMSG_ERROR => {
            let code = answer.get(HEADER_LEN..).and_then(|body| body.first_chunk());
            match i32::from_ne_bytes(*code.ok_or_else(odd)?).saturating_neg() {
                0 | libc::ENOENT => Ok(None),
                code => Err(io::Error::from_raw_os_error(code)),
            }
        }
        RTM_NEWQDISC => {
            let attributes = answer.get(HEADER_LEN + TCMSG_LEN..).ok_or_else(odd)?;
            let kind = attribute(attributes, TCA_KIND).ok_or_else(odd)?;
            Ok(Some(String::from_utf8_lossy(kind).trim_end_matches('\0').to_owned()))
        }
        _ => Err(odd()),
    }
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
    fn a_queue_is_named_and_the_end_is_told() {
        let mut body = vec![0; TCMSG_LEN];
        body.extend([8, 0, 1, 0]);
        body.extend(b"tbf\0");
        assert_eq!(kind(&answer(RTM_NEWQDISC, &body)).expect("read").as_deref(), Some("tbf"));
        assert_eq!(kind(&answer(NLMSG_ERROR, &[0; 4])).expect("read"), None);
        let refused = answer(NLMSG_ERROR, &(-libc::EPERM).to_ne_bytes());
        assert_eq!(kind(&refused).expect_err("refused").raw_os_error(), Some(libc::EPERM));
    }

    proptest! {
        #[test]
        fn any_answer_is_survived(body: Vec<u8>, number in prop::sample::select(vec![2_u16, 36])) {
            let _ = kind(&answer(number, &body));
            let _ = kind(&body);
        }
    }
}
