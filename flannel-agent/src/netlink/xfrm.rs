//! Whether the host has `IPsec` policies (`linux/xfrm.h`): then outer packets have to pass them,
//! which only the kernel's device sees to.

use std::io;

use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_XFRM};
use nix::{
    libc::EPROTONOSUPPORT,
    sys::{
        socket::{setsockopt, sockopt},
        time::{TimeVal, TimeValLike},
    },
};
use tokio::io::unix::AsyncFd;
use tracing::debug;

/// `XFRMNLGRP_POLICY`.
const POLICY_GROUP: u32 = 4;

/// `XFRM_MSG_NEWPOLICY`, the answer to the following.
const NEW_POLICY: u16 = 0x13;
/// `XFRM_MSG_GETPOLICY`.
const GET_POLICY: u16 = 0x15;

/// `sizeof(struct xfrm_userpolicy_id)`; a dump asks for all, so all of it is zero.
const POLICY_ID_LEN: u16 = 64;

/// The length of `struct nlmsghdr`, and where its type begins.
const HEADER_LEN: u16 = 16;
const TYPE_OFFSET: usize = 4;

/// The kernel answers before `sendmsg` returns; an answer that is lost must not hold us up.
const ANSWER_SECONDS: i64 = 2;

/// The host's `IPsec` policies, as far as we care: are there any?
pub struct IpsecPolicies {
    /// `None` on a kernel without `IPsec`.
    monitor: Option<AsyncFd<Socket>>,
    /// What was found since the last notification.
    found: Option<bool>,
}

impl IpsecPolicies {
    /// Listens in the network namespace of the calling thread. Who may not listen is in doubt for
    /// good.
    pub fn open() -> Self {
        match listen() {
            Ok(monitor) => Self { monitor: Some(monitor), found: None },
            Err(err) => {
                debug!("cannot listen to IPsec policies: {err}");
                let none = err.raw_os_error() == Some(EPROTONOSUPPORT);
                Self { monitor: None, found: Some(!none) }
            }
        }
    }

    /// Whether there are any. In doubt there are.
    pub fn any(&mut self) -> bool {
        *self.found.get_or_insert_with(|| {
            look().unwrap_or_else(|err| {
                debug!("cannot list IPsec policies: {err}");
                true
            })
        })
    }

    /// What [`any`](Self::any) said last.
    pub fn found(&self) -> bool {
        self.found.unwrap_or(true)
    }

    /// Resolves when policies came or went. Cancel-safe.
    pub async fn changed(&mut self) {
        let Some(monitor) = &self.monitor else { return std::future::pending().await };
        let mut heard = false;
        while !heard {
            // An error here means that the runtime is going down.
            let Ok(mut guard) = monitor.readable().await else {
                return std::future::pending().await;
            };
            // An error means that something was missed, which is as good: it is looked up.
            while let Ok(said) = guard.try_io(|socket| socket.get_ref().recv_from_full()) {
                heard = true;
                if said.is_err() {
                    break;
                }
            }
        }
        self.found = None;
    }
}

fn listen() -> io::Result<AsyncFd<Socket>> {
    let mut socket = Socket::new(NETLINK_XFRM)?;
    socket.bind_auto()?;
    socket.add_membership(POLICY_GROUP)?;
    socket.set_non_blocking(true)?;
    // SAFETY: the socket owns its descriptor and closes it only when it is dropped.
    Ok(unsafe { AsyncFd::register(socket) }?)
}

fn look() -> io::Result<bool> {
    let mut socket = Socket::new(NETLINK_XFRM)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::seconds(ANSWER_SECONDS))?;
    socket.send(&request(), 0)?;
    let (answer, _) = socket.recv_from_full()?;
    Ok(kind(&answer) == Some(NEW_POLICY))
}

fn request() -> Vec<u8> {
    /// `NLM_F_REQUEST | NLM_F_DUMP`.
    const FLAGS: u16 = 0x301;
    let mut request = Vec::new();
    request.extend(u32::from(HEADER_LEN + POLICY_ID_LEN).to_ne_bytes());
    request.extend(GET_POLICY.to_ne_bytes());
    request.extend(FLAGS.to_ne_bytes());
    request.resize(usize::from(HEADER_LEN + POLICY_ID_LEN), 0);
    request
}

/// The type of the first message.
fn kind(bytes: &[u8]) -> Option<u16> {
    bytes.get(TYPE_OFFSET..)?.first_chunk().map(|kind| u16::from_ne_bytes(*kind))
}
