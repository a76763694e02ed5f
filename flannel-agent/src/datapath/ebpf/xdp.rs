//! The program in XDP in front of the underlay's program at TC: attached in the driver only, by a
//! pinned link, where no other program is.

use std::{
    fs::File,
    io::{self, Read},
    os::fd::{AsFd, OwnedFd},
};

use aya::{
    Ebpf,
    maps::{Array, MapData, MapError},
    programs::{ProgramError, Xdp},
};
use flannel_common::{
    map::{Cookie, XdpFront},
    outcome::Outcome,
};
use nix::net::if_::if_indextoname;
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

use super::{
    EbpfError,
    counters::{self, CounterArray},
    link,
    object::{self, chain},
    pin::{self, PinDirectory},
    take, xdp_query,
};
use crate::mac::MacAddr;

/// The program's name in the object; the pin is named after it.
pub(super) const UNDERLAY_XDP: &str = "underlay_xdp";

/// How often the front is looked at: its link may be gone, or the place of others free.
const LOOK: Duration = Duration::from_secs(1);

/// So many packets handed over between two looks, and none of them seen at TC: something in between
/// loses them, or there is no program at TC. Without one, nothing is handed over any more at the
/// next look.
const LOST: u64 = 32;

/// After so many such looks in a row XDP is given up.
const LOSSY_LOOKS: u32 = 2;

/// Whether packets are to be taken out in XDP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum XdpWanted {
    /// No; this is why.
    Off(String),
    /// At this device, which has this MAC.
    Native {
        /// The interface index.
        ifindex: u32,
        /// Its MAC.
        mac: MacAddr,
    },
}

impl Default for XdpWanted {
    fn default() -> Self {
        Self::Off(String::new())
    }
}

/// What is at the device.
struct Hold {
    ifindex: u32,
    name: String,
    link: OwnedFd,
}

/// The program and its link.
pub(super) struct Front {
    state: Array<MapData, XdpFront>,
    outcomes: CounterArray,
    cookie: Cookie,
    wanted: XdpWanted,
    /// What came of loading the program: tried once.
    loaded: Option<Result<(), String>>,
    held: Option<Hold>,
    /// Why the program is nowhere.
    why_not: String,
    /// Handed over by XDP and seen at TC, at the last look.
    counted: Option<(u64, u64)>,
    /// Looks in a row at which all packets had got lost.
    lossy_looks: u32,
    /// Set once packets got lost between XDP and TC: this driver is not to be tried again.
    lossy: Option<String>,
    /// Whether what an earlier agent left has been looked for.
    swept: bool,
    next_look: Option<Instant>,
}

impl Front {
    /// Takes the maps. Packets under way between XDP and TC stay known, for the cookie stays.
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self, EbpfError> {
        let state: Array<MapData, XdpFront> = take(ebpf, pin::XDP_FRONT.name)?;
        let found = state.get(&0, 0).map_err(|error| EbpfError::map(&error))?.cookie;
        let cookie = if found == Cookie::default() {
            new_cookie().map_err(|error| EbpfError::Load(format!("/dev/urandom: {error}")))?
        } else {
            found
        };
        Ok(Self {
            state,
            outcomes: take(ebpf, pin::XDP_OUTCOMES.name)?,
            cookie,
            wanted: XdpWanted::default(),
            loaded: None,
            held: None,
            why_not: String::new(),
            counted: None,
            lossy_looks: 0,
            lossy: None,
            swept: false,
            next_look: None,
        })
    }

    /// Attaches or detaches. What the device or its driver refuses is told by [`Self::status`], not
    /// by the result: packets go by TC then. `is_shared` tells whether others are at a device's TC.
    pub(super) fn apply(
        &mut self,
        ebpf: &mut Ebpf,
        pins: &PinDirectory,
        wanted: &XdpWanted,
        is_shared: fn(&PinDirectory, u32) -> bool,
    ) -> Result<usize, EbpfError> {
        self.wanted.clone_from(wanted);
        let at = match wanted {
            XdpWanted::Native { ifindex, .. } => *ifindex,
            XdpWanted::Off(_) => 0,
        };
        let mut changes = 0;
        if !std::mem::replace(&mut self.swept, true) {
            for ifindex in pins.linked(UNDERLAY_XDP).into_iter().filter(|found| *found != at) {
                link::detach(&pins.link(UNDERLAY_XDP, ifindex))?;
                changes += 1;
            }
        }
        if self.held.as_ref().is_some_and(|held| held.ifindex != at) {
            changes += self.release(pins)?;
        }
        let outcome = match wanted {
            XdpWanted::Off(why) => Err(why.clone()),
            XdpWanted::Native { ifindex, .. } if is_shared(pins, *ifindex) => Err(
                "another program is at the underlay's TC ingress, and would see what is inside \
                     of tunnel packets"
                    .to_owned(),
            ),
            XdpWanted::Native { .. } if self.lossy.is_some() => {
                Err(self.lossy.clone().unwrap_or_default())
            }
            XdpWanted::Native { ifindex, mac } => {
                self.tell(*ifindex, *mac).map_err(|error| EbpfError::map(&error))?;
                self.ensure(ebpf, pins, *ifindex)
            }
        };
        self.next_look = (at != 0).then(|| Instant::now() + LOOK);
        match outcome {
            Ok(changed) => {
                self.why_not.clear();
                changes += usize::from(changed);
            }
            Err(why) => {
                changes += self.release(pins)?;
                // What an earlier agent left at the very device.
                if at != 0 {
                    link::detach(&pins.link(UNDERLAY_XDP, at))?;
                }
                self.tell(0, MacAddr([0; 6])).map_err(|error| EbpfError::map(&error))?;
                if at != 0 && why != self.why_not {
                    tracing::warn!("tunnel packets are not taken out in XDP: {why}");
                }
                self.why_not = why;
            }
        }
        Ok(changes)
    }

    /// Looks whether all is as it should be, once it is time. `is_shared` as for [`Self::apply`].
    pub(super) fn tend(
        &mut self,
        ebpf: &mut Ebpf,
        pins: &PinDirectory,
        taken: &CounterArray,
        is_shared: fn(&PinDirectory, u32) -> bool,
    ) -> Result<(), EbpfError> {
        if self.next_look.is_none_or(|next| next > Instant::now()) {
            return Ok(());
        }
        self.watch(taken).map_err(|error| EbpfError::map(&error))?;
        let wanted = self.wanted.clone();
        self.apply(ebpf, pins, &wanted, is_shared).map(drop)
    }

    /// When the next look is due.
    pub(super) fn next_look(&self) -> Option<Instant> {
        self.next_look
    }

    /// The program's part of the status: `device`, `ifindex`, `mode`, `why_not`, `outcomes`.
    pub(super) fn status(&self) -> Value {
        let outcomes = counters::outcomes(&self.outcomes);
        json!({
            "mode": if self.held.is_some() { "native" } else { "off" },
            "device": self.held.as_ref().map(|held| held.name.as_str()),
            "why_not": self.why_not,
            "outcomes": outcomes.unwrap_or_else(|error| json!(chain(&error))),
        })
    }

    /// What became of packets in XDP: the outcomes that were, by their words.
    pub(super) fn packets(&self) -> Vec<(&'static str, u64)> {
        let count = |outcome: &Outcome| {
            let counted = counters::total(&self.outcomes, outcome.index()).ok()?;
            (counted.packets > 0).then_some((outcome.word(), counted.packets))
        };
        Outcome::ALL.iter().filter_map(count).collect()
    }

    /// Whether it is attached.
    pub(super) fn is_attached(&self) -> bool {
        self.held.is_some()
    }

    /// Where it is attached, as the others are listed.
    pub(super) fn attached(&self) -> Option<Value> {
        let held = self.held.as_ref()?;
        Some(json!({
            "program": UNDERLAY_XDP,
            "device": held.name,
            "ifindex": held.ifindex,
            "hook": "native",
        }))
    }

    /// Tells the programs of the front; index 0 is none.
    fn tell(&mut self, ifindex: u32, mac: MacAddr) -> Result<(), MapError> {
        let front = XdpFront { cookie: self.cookie, ifindex, mac: mac.0, reserved: 0 };
        if self.state.get(&0, 0)? != front {
            self.state.set(0, front, 0)?;
        }
        Ok(())
    }

    /// Whether what XDP hands over is seen at TC.
    fn watch(&mut self, taken: &CounterArray) -> Result<(), MapError> {
        let handed = counters::total(&self.outcomes, Outcome::Decapsulated.index())?.packets;
        let seen = counters::total(taken, Outcome::FromXdp.index())?.packets;
        let before = self.counted.replace((handed, seen));
        if let (Some(held), Some((handed_before, seen_before))) = (&self.held, before) {
            let lost = handed.wrapping_sub(handed_before);
            let lossy = lost >= LOST && seen == seen_before;
            self.lossy_looks = if lossy { self.lossy_looks + 1 } else { 0 };
            if self.lossy_looks >= LOSSY_LOOKS {
                self.lossy = Some(format!(
                    "of {lost} packets taken out in XDP at {} none was seen at TC: their metadata \
                     gets lost in between",
                    held.name
                ));
            }
        }
        Ok(())
    }

    fn ensure(
        &mut self,
        ebpf: &mut Ebpf,
        pins: &PinDirectory,
        ifindex: u32,
    ) -> Result<bool, String> {
        let name = if_indextoname(ifindex).map_err(|error| error.to_string())?;
        let name = name.to_string_lossy().into_owned();
        let program = program(ebpf)?;
        self.loaded.get_or_insert_with(|| load(program)).clone()?;
        let id = program.info().map_err(|error| chain(&error))?.id();
        let path = pins.link(UNDERLAY_XDP, ifindex);
        if let Some(held) = &mut self.held {
            let at = link::xdp_at(&held.link);
            if at.map_err(|error| format!("cannot ask what is attached: {error}"))?
                == Some((ifindex, id))
            {
                held.name = name;
                let changed = pins.intact() && !path.exists();
                if changed {
                    link::pin(&held.link, &path).map_err(|error| error.to_string())?;
                }
                return Ok(changed);
            }
            tracing::warn!("{} lost {UNDERLAY_XDP}: attaching it again", held.name);
            self.held = None;
        }
        let descriptor = program.fd().map_err(|error| chain(&error))?;
        if let Ok(link) = link::open(&path) {
            // A link of a device that is gone takes no program, and one of another network namespace
            // is not ours.
            if link::replace(&link, descriptor.as_fd()).is_ok()
                && link::xdp_at(&link).is_ok_and(|at| at == Some((ifindex, id)))
                && is_here(ifindex, id)
            {
                tracing::info!("{UNDERLAY_XDP} at {name} in its driver, taken over");
                self.held = Some(Hold { ifindex, name, link });
                return Ok(true);
            }
            pin::remove(&path).map_err(|error| error.to_string())?;
        }
        let link = link::create_xdp(descriptor.as_fd(), ifindex)
            .map_err(|error| refusal(&error, ifindex, &name))?;
        link::pin(&link, &path).map_err(|error| format!("cannot pin its link: {error}"))?;
        tracing::info!("{UNDERLAY_XDP} at {name} in its driver");
        self.held = Some(Hold { ifindex, name, link });
        Ok(true)
    }

    fn release(&mut self, pins: &PinDirectory) -> Result<usize, EbpfError> {
        let Some(held) = self.held.take() else { return Ok(0) };
        tracing::info!("{UNDERLAY_XDP} taken off {}", held.name);
        link::detach(&pins.link(UNDERLAY_XDP, held.ifindex))?;
        Ok(1)
    }
}

fn program(ebpf: &mut Ebpf) -> Result<&mut Xdp, String> {
    let program = ebpf.program_mut(UNDERLAY_XDP);
    program
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| format!("no program {UNDERLAY_XDP} in the object"))
}

fn load(program: &mut Xdp) -> Result<(), String> {
    program.load().map_err(|error| match error {
        ProgramError::LoadError { io_error, verifier_log } => {
            let log = object::tail(&verifier_log.to_string());
            format!("the kernel refuses the program {UNDERLAY_XDP} ({io_error}): {log}")
        }
        other => chain(&other),
    })
}

/// Whether the device of this namespace is the one with the program: the number alone may be that of
/// a device elsewhere.
fn is_here(ifindex: u32, program: u32) -> bool {
    xdp_query::program_at(ifindex).is_ok_and(|found| found == Some(program))
}

/// What it means that the kernel makes no link.
fn refusal(error: &io::Error, ifindex: u32, name: &str) -> String {
    if let Ok(Some(occupant)) = xdp_query::occupant(ifindex) {
        return format!("{name} has another XDP program, {occupant}, which stays");
    }
    let driver = xdp_query::driver(name).unwrap_or_else(|_| "unknown".to_owned());
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => format!("the driver {driver} of {name} has no native XDP"),
        _ => format!(
            "the driver {driver} of {name} refuses native XDP, as it may for the MTU, offloads or \
             queues in use: {error}"
        ),
    }
}

/// A number that nobody guesses, and that is not all zero.
fn new_cookie() -> io::Result<Cookie> {
    let mut source = File::open("/dev/urandom")?;
    let mut cookie = Cookie::default();
    for word in &mut cookie {
        let mut bytes = [0; 2];
        source.read_exact(&mut bytes)?;
        *word = u16::from_ne_bytes(bytes);
    }
    cookie[0] |= 1;
    Ok(cookie)
}
