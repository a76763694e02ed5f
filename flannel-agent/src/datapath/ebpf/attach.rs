//! Keeping a program attached to devices, once each.
//!
//! By TCX (since Linux 6.6), whose link is pinned and outlives the agent, else as a filter of
//! the clsact qdisc, which outlives it anyhow. The next agent puts its program into the link or
//! the filter that it finds, in one step. Programs of others are never touched.

use std::{collections::BTreeMap, io, mem};

use aya::programs::{
    LinkOrder, ProgramError, SchedClassifier, TcHandle,
    links::{FdLink, PinnedLink},
    tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions},
};
use nix::errno::Errno;

use super::{
    AttachMode, EbpfError,
    hook::Hook,
    link,
    object::chain,
    pin::{self, PinDirectory},
    tc_filter, tcx_query,
};

/// How a program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rung {
    Tcx,
    Clsact,
}

impl Rung {
    /// The word for it in the status and the log.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Tcx => "tcx",
            Self::Clsact => "clsact",
        }
    }
}

/// What holds the program at a device.
enum Hold {
    /// The descriptor keeps the link if its pin vanishes.
    Tcx(PinnedLink),
    Clsact,
}

/// The devices to which the program is attached.
pub(super) struct Attachments {
    hook: Hook,
    mode: AttachMode,
    why_not_tcx: Option<String>,
    held: BTreeMap<u32, (String, Hold)>,
    /// Whether what an earlier agent left at unwanted devices has been looked for.
    swept: bool,
}

impl Attachments {
    pub(super) fn new(hook: Hook, mode: AttachMode) -> Self {
        let forced = mode == AttachMode::Clsact;
        let why_not_tcx = forced.then(|| "switched off".to_owned());
        Self { hook, mode, why_not_tcx, held: BTreeMap::new(), swept: false }
    }

    /// Attaches to exactly these devices; returns the number of changes. Every device is tried;
    /// the first failure is the answer.
    pub(super) fn apply(
        &mut self,
        program: &mut SchedClassifier,
        pins: &PinDirectory,
        wanted: &[u32],
    ) -> Result<usize, EbpfError> {
        let id = program.info().map_err(|error| EbpfError::Load(chain(&error)))?.id();
        let mut changes = 0;
        let mut failure = None;
        let unwanted: Vec<u32> =
            self.held.keys().filter(|index| !wanted.contains(index)).copied().collect();
        for ifindex in unwanted {
            changes += 1;
            failure = failure.or(self.release(pins, ifindex).err());
        }
        if !mem::replace(&mut self.swept, true) {
            for ifindex in pins.linked(self.hook.program) {
                if !wanted.contains(&ifindex) {
                    changes += 1;
                    failure =
                        failure.or(link::detach(&pins.link(self.hook.program, ifindex)).err());
                }
            }
        }
        for &ifindex in wanted {
            match self.ensure(program, id, pins, ifindex) {
                Ok(changed) => changes += usize::from(changed),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(changes), Err)
    }

    /// The devices, by what the program hangs there.
    pub(super) fn held(&self) -> impl Iterator<Item = (u32, &str, Rung)> {
        self.held.iter().map(|(ifindex, (name, hold))| {
            let rung = match hold {
                Hold::Tcx(_) => Rung::Tcx,
                Hold::Clsact => Rung::Clsact,
            };
            (*ifindex, name.as_str(), rung)
        })
    }

    /// Why TCX is not used.
    pub(super) fn why_not_tcx(&self) -> Option<&str> {
        self.why_not_tcx.as_deref()
    }

    fn ensure(
        &mut self,
        program: &mut SchedClassifier,
        id: u32,
        pins: &PinDirectory,
        ifindex: u32,
    ) -> Result<bool, EbpfError> {
        let failed = |reason: String| EbpfError::Attach { ifindex, reason };
        let name = device_name(ifindex).map_err(|error| failed(error.to_string()))?;
        // Not knowing is no reason to touch what is held.
        let attached = match self.held.get(&ifindex) {
            Some((_, Hold::Tcx(_))) => tcx_query::is_attached(self.hook.side, ifindex, id)
                .map_err(|error| failed(format!("cannot ask what is attached: {error}")))?,
            Some((_, Hold::Clsact)) => attached_by_clsact(self.hook, ifindex, id),
            None => false,
        };
        match self.held.remove(&ifindex) {
            Some((_, Hold::Tcx(link))) if attached => {
                // The pin may be gone with its file system; the link is not. As long as there is
                // no place for another pin, the descriptor has to do.
                let path = pins.link(self.hook.program, ifindex);
                let changed = pins.intact() && !path.exists();
                let link = if changed {
                    FdLink::from(link).pin(path).map_err(|error| failed(chain(&error)))?
                } else {
                    link
                };
                self.held.insert(ifindex, (name, Hold::Tcx(link)));
                return Ok(changed);
            }
            Some((_, Hold::Clsact)) if attached => {
                self.held.insert(ifindex, (name, Hold::Clsact));
                return Ok(false);
            }
            Some(_) => tracing::warn!("{name} lost {}: attaching it again", self.hook.program),
            None => (),
        }
        check_link_layer(&name).map_err(&failed)?;
        let hold = self.attach(program, id, pins, ifindex, &name).map_err(failed)?;
        let rung = if matches!(hold, Hold::Tcx(_)) { Rung::Tcx } else { Rung::Clsact };
        match &self.why_not_tcx {
            Some(why) if rung == Rung::Clsact && self.mode == AttachMode::Auto => {
                tracing::info!("{} at {name} by clsact; not by TCX: {why}", self.hook.program);
            }
            _ => tracing::info!("{} at {name} by {}", self.hook.program, rung.word()),
        }
        self.held.insert(ifindex, (name, hold));
        Ok(true)
    }

    fn attach(
        &mut self,
        program: &mut SchedClassifier,
        id: u32,
        pins: &PinDirectory,
        ifindex: u32,
        name: &str,
    ) -> Result<Hold, String> {
        if self.why_not_tcx.is_none() {
            match attach_tcx(self.hook, program, id, pins, ifindex, name) {
                Ok(link) => {
                    // An earlier agent may have attached the other way.
                    remove_filter(self.hook, ifindex, name)?;
                    return Ok(Hold::Tcx(link));
                }
                Err(error) if unsupported(&error) => {
                    self.why_not_tcx = Some("this kernel does not have it".to_owned());
                }
                Err(error) => return Err(chain(&error)),
            }
        }
        attach_clsact(self.hook, program, ifindex, name)?;
        link::detach(&pins.link(self.hook.program, ifindex)).map_err(|error| chain(&error))?;
        Ok(Hold::Clsact)
    }

    fn release(&mut self, pins: &PinDirectory, ifindex: u32) -> Result<(), EbpfError> {
        match self.held.remove(&ifindex) {
            Some((_, Hold::Tcx(_))) => link::detach(&pins.link(self.hook.program, ifindex)),
            Some((_, Hold::Clsact)) => {
                let failed = |reason| EbpfError::Attach { ifindex, reason };
                // A device that is gone took its filters along.
                let Ok(name) = device_name(ifindex) else { return Ok(()) };
                remove_filter(self.hook, ifindex, &name).map(drop).map_err(failed)
            }
            None => Ok(()),
        }
    }
}

/// Puts the program into the pinned link, or makes a link and pins it.
fn attach_tcx(
    hook: Hook,
    program: &mut SchedClassifier,
    id: u32,
    pins: &PinDirectory,
    ifindex: u32,
    name: &str,
) -> Result<PinnedLink, ProgramError> {
    let path = pins.link(hook.program, ifindex);
    if let Ok(pinned) = PinnedLink::from_pin(&path) {
        let link = FdLink::from(pinned).try_into().ok();
        let updated = link.and_then(|link| program.attach_to_link(link).ok());
        // A link of a device that is gone takes no program; nor is one ours that belongs to a
        // device with this number in another network namespace.
        if let Some(link) = updated
            && let taken = program.take_link(link)
            && tcx_query::is_attached(hook.side, ifindex, id).map_err(ProgramError::IOError)?
        {
            drop(taken?);
            return PinnedLink::from_pin(&path).map_err(|error| other(&error));
        }
        pin::remove(&path).map_err(|error| other(&error))?;
    }
    let last = TcAttachOptions::TcxOrder(LinkOrder::default());
    let link = program.attach_with_options(name, hook.side.attach_type(), last)?;
    let link = FdLink::try_from(program.take_link(link)?).map_err(|error| other(&error))?;
    link.pin(path).map_err(|error| other(&error))
}

fn attach_clsact(
    hook: Hook,
    program: &mut SchedClassifier,
    ifindex: u32,
    name: &str,
) -> Result<(), String> {
    let text = |error: ProgramError| chain(&error);
    let link = match tc_filter::find(hook, ifindex).map_err(|error| error.to_string())? {
        Some(filter) if filter.name == hook.program => {
            program.attach_to_link(clsact_link(hook, name)?).map_err(text)?
        }
        Some(filter) => {
            return Err(format!(
                "the place of our TC filter (priority {}, handle {}) is taken by {:?}",
                tc_filter::PRIORITY,
                hook.handle,
                filter.name
            ));
        }
        None => {
            // Others may have made the qdisc; if it cannot be had, the filter tells why.
            let _ = tc::qdisc_add_clsact(name);
            let place = NlOptions {
                priority: tc_filter::PRIORITY,
                handle: TcHandle::from(hook.handle),
                classid: None,
            };
            let place = TcAttachOptions::Netlink(place);
            program.attach_with_options(name, hook.side.attach_type(), place).map_err(text)?
        }
    };
    // It would detach when dropped.
    mem::forget(program.take_link(link).map_err(text)?);
    Ok(())
}

/// Our filter as aya's link, which detaches when dropped.
fn clsact_link(hook: Hook, name: &str) -> Result<SchedClassifierLink, String> {
    let handle = TcHandle::from(hook.handle);
    SchedClassifierLink::attached(name, hook.side.attach_type(), tc_filter::PRIORITY, handle, None)
        .map_err(|error| error.to_string())
}

fn attached_by_clsact(hook: Hook, ifindex: u32, id: u32) -> bool {
    matches!(tc_filter::find(hook, ifindex), Ok(Some(filter)) if filter.program == id)
}

fn filter_of_ours(hook: Hook, ifindex: u32) -> Result<Option<tc_filter::Filter>, String> {
    let found = tc_filter::find(hook, ifindex).map_err(|error| error.to_string())?;
    Ok(found.filter(|filter| filter.name == hook.program))
}

/// Removes our filter from a device. Returns whether there was one.
///
/// # Errors
/// What the kernel said.
pub(super) fn remove_filter(hook: Hook, ifindex: u32, name: &str) -> Result<bool, String> {
    let found = filter_of_ours(hook, ifindex)?.is_some();
    if found {
        drop(clsact_link(hook, name)?);
    }
    Ok(found)
}

/// Whether the kernel does not know TCX: before 6.6, `BPF_LINK_CREATE` refuses the hook.
fn unsupported(error: &ProgramError) -> bool {
    matches!(error, ProgramError::SyscallError(error)
        if matches!(error.io_error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)))
}

fn other(error: &dyn std::error::Error) -> ProgramError {
    ProgramError::IOError(io::Error::other(chain(error)))
}

fn device_name(ifindex: u32) -> Result<String, Errno> {
    let name = nix::net::if_::if_indextoname(ifindex)?;
    // Not every name is UTF-8; such a one cannot be given to aya.
    name.into_string().map_err(|_| Errno::EILSEQ)
}

/// The program expects an Ethernet header.
fn check_link_layer(name: &str) -> Result<(), String> {
    let kind = link_layer(name).map_err(|error| error.to_string())?;
    match kind {
        libc::ARPHRD_ETHER | libc::ARPHRD_LOOPBACK => Ok(()),
        _ => Err(format!("{name} is no Ethernet device (its type is {kind})")),
    }
}

/// The device's type, `ARPHRD_…` (netdevice(7), `SIOCGIFHWADDR`).
fn link_layer(name: &str) -> io::Result<u16> {
    let socket = std::net::UdpSocket::bind((std::net::Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: all zeros are a valid ifreq.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    // One byte stays zero: the end of the name.
    let room = request.ifr_name.len() - 1;
    for (place, byte) in request.ifr_name.iter_mut().take(room).zip(name.bytes()) {
        *place = byte.cast_signed();
    }
    let descriptor = std::os::fd::AsRawFd::as_raw_fd(&socket);
    // SAFETY: the kernel reads and writes one ifreq, which lives until the call returns.
    Errno::result(unsafe { libc::ioctl(descriptor, libc::SIOCGIFHWADDR, &raw mut request) })?;
    // SAFETY: this is the member that SIOCGIFHWADDR fills in.
    Ok(unsafe { request.ifr_ifru.ifru_hwaddr.sa_family })
}
