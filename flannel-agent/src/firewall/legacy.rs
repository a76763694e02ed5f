//! The tables of legacy iptables, read from the kernel without a program to start and without
//! the xtables lock: `linux/netfilter_ipv4/ip_tables.h` and its IPv6 twin.

use std::{collections::BTreeMap, ffi::c_void, fs, io, net::UdpSocket, os::fd::AsRawFd};

use super::rules::Family;

/// `IPT_SO_GET_INFO` and `IPT_SO_GET_ENTRIES`, the same for both families.
const GET_INFO: i32 = 64;
const GET_ENTRIES: i32 = 65;

/// Size of `struct ipt_getinfo`.
const INFO_SIZE: usize = 84;
/// Where the entries begin in `struct ipt_get_entries`.
const ENTRIES_AT: usize = 40;
/// Bytes of the header of a match or target.
const HEADER: usize = 32;

/// Bytes of a table that may be read every second: some thousand rules.
const READ_WHOLE: usize = 256 << 10;

/// The built-in chain at each hook.
const BUILT_IN: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// The verdicts that drop, accept and return.
pub const DROP: i32 = -1;
pub const ACCEPT: i32 = -2;
pub const RETURN: i32 = -5;

/// How an entry of a family is laid out, in bytes.
struct Layout {
    /// Addresses, interfaces, protocol.
    head: usize,
    /// `target_offset`, with `next_offset` behind it.
    offsets: usize,
    /// Where the matches begin.
    matches: usize,
    /// Flags within the head, and the one that says "go" rather than "jump".
    flags: usize,
    goto: u8,
}

const fn layout(family: Family) -> Layout {
    match family {
        Family::V4 => Layout { head: 84, offsets: 88, matches: 112, flags: 82, goto: 2 },
        Family::V6 => Layout { head: 136, offsets: 140, matches: 168, flags: 131, goto: 4 },
    }
}

/// A rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rule {
    /// Everything that stays the same while packets pass and other chains change.
    pub content: Vec<u8>,
    /// The chain it jumps to.
    pub jump: Option<String>,
    /// Whether every packet meets it.
    pub unconditional: bool,
    /// What it does by itself: [`DROP`], accept, return.
    pub verdict: Option<i32>,
    /// Name of its target; empty for verdicts and jumps.
    pub target: String,
    /// `struct ipt_ip` or `struct ip6t_ip6`.
    pub head: Vec<u8>,
    /// Each `struct xt_entry_match`, in order.
    pub matches: Vec<u8>,
    /// Whether its jump does not come back.
    pub goes: bool,
}

/// The chains of a table. The last rule of a built-in chain is its policy.
pub type Chains = BTreeMap<String, Vec<Rule>>;

/// The names of a family's tables that exist. Looking does not make them exist.
pub fn tables(family: Family) -> Vec<String> {
    let path = match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// What tells one state of a table from another, cheaply: number of rules and size, and the rules
/// themselves unless they are many. A table of many rules can be changed unnoticed only by putting
/// rules of the same size in the place of others.
pub fn outline(family: Family, table: &str) -> io::Result<Vec<u8>> {
    let mut outline = info(&socket(family)?, family, table)?;
    if size(&outline) <= READ_WHOLE {
        for (chain, rules) in read(family, table)? {
            outline.extend(chain.into_bytes());
            for rule in rules {
                outline.push(0);
                outline.extend(rule.content);
            }
        }
    }
    Ok(outline)
}

/// Reads a table. Looking at one that does not exist makes it: ask [`tables`] first.
pub fn read(family: Family, table: &str) -> io::Result<Chains> {
    let socket = socket(family)?;
    // The table may grow between the two questions.
    for _ in 0..10 {
        let info = info(&socket, family, table)?;
        let size = size(&info);
        let mut buffer = vec![0; ENTRIES_AT + size];
        write_name(&mut buffer, table);
        buffer[32..36].copy_from_slice(&u32::try_from(size).unwrap_or(0).to_ne_bytes());
        match get(&socket, family, GET_ENTRIES, &mut buffer) {
            Ok(()) => {
                let chains = parse(family, &info, &buffer[ENTRIES_AT..]);
                return chains.ok_or_else(|| io::Error::other("an xtables dump of unknown form"));
            }
            Err(err) if err.raw_os_error() == Some(libc::EAGAIN) => {}
            Err(err) => return Err(err),
        }
    }
    Err(io::Error::other("the table changes faster than it can be read"))
}

fn socket(family: Family) -> io::Result<UdpSocket> {
    match family {
        Family::V4 => UdpSocket::bind("0.0.0.0:0"),
        Family::V6 => UdpSocket::bind("[::]:0"),
    }
}

fn info(socket: &UdpSocket, family: Family, table: &str) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; INFO_SIZE];
    write_name(&mut buffer, table);
    get(socket, family, GET_INFO, &mut buffer)?;
    Ok(buffer)
}

fn write_name(buffer: &mut [u8], table: &str) {
    let length = table.len().min(31);
    buffer[..length].copy_from_slice(&table.as_bytes()[..length]);
}

fn get(socket: &UdpSocket, family: Family, option: i32, buffer: &mut [u8]) -> io::Result<()> {
    let level = match family {
        Family::V4 => libc::SOL_IP,
        Family::V6 => libc::SOL_IPV6,
    };
    let mut length = libc::socklen_t::try_from(buffer.len()).map_err(io::Error::other)?;
    // SAFETY: the buffer is valid for `length` bytes, which is what the kernel may write, and
    // outlives the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            option,
            buffer.as_mut_ptr().cast::<c_void>(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Bytes of a table's entries, as `struct ipt_getinfo` has them.
fn size(info: &[u8]) -> usize {
    word(info, 80).unwrap_or(0) as usize
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<usize> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?).into())
}

fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// An entry before it is known which chain its jump leads to.
struct Entry<'a> {
    bytes: &'a [u8],
    target_at: usize,
}

impl Entry<'_> {
    fn target(&self) -> String {
        text(self.bytes.get(self.target_at + 2..self.target_at + 31).unwrap_or_default())
    }

    fn data(&self) -> &[u8] {
        self.bytes.get(self.target_at + HEADER..).unwrap_or_default()
    }

    fn verdict(&self) -> Option<i32> {
        let code = self.data().get(..4)?.try_into().ok()?;
        self.target().is_empty().then(|| i32::from_ne_bytes(code))
    }
}

/// `struct ipt_getinfo`: name, valid hooks at 32, entry of each hook at 36, underflow at 56.
fn parse(family: Family, info: &[u8], blob: &[u8]) -> Option<Chains> {
    let layout = layout(family);
    let valid = word(info, 32)?;
    let mut built_in = BTreeMap::new();
    for (hook, name) in BUILT_IN.iter().enumerate().filter(|(hook, _)| valid & (1 << hook) != 0) {
        built_in.insert(word(info, 36 + 4 * hook)? as usize, *name);
    }
    let mut entries: Vec<(String, Entry<'_>)> = Vec::new();
    let mut starts: BTreeMap<usize, String> = BTreeMap::new();
    let (mut at, mut chain) = (0, String::new());
    while at < blob.len() {
        let target_at = half(blob, at + layout.offsets)?;
        let size = half(blob, at + layout.offsets + 2)?;
        let entry = Entry { bytes: blob.get(at..at + size)?, target_at };
        if size < layout.matches || target_at < layout.matches || target_at > size {
            return None;
        }
        if let Some(name) = built_in.get(&at) {
            (*name).clone_into(&mut chain);
        }
        if entry.target() == "ERROR" {
            // The head of a chain of somebody's, or the end of the table.
            chain = text(entry.data());
            starts.insert(at + size, chain.clone());
        } else {
            entries.push((chain.clone(), entry));
        }
        at += size;
    }
    let mut chains = Chains::new();
    for (chain, entry) in &entries {
        chains.entry(chain.clone()).or_default().push(rule(&layout, entry, &starts));
    }
    Some(chains)
}

fn rule(layout: &Layout, entry: &Entry<'_>, starts: &BTreeMap<usize, String>) -> Rule {
    let (target, verdict) = (entry.target(), entry.verdict());
    let jump = verdict
        .and_then(|verdict| usize::try_from(verdict).ok())
        .and_then(|to| starts.get(&to))
        .cloned();
    let head = &entry.bytes[..layout.head];
    let matches = &entry.bytes[layout.matches..entry.target_at];
    let mut content = [head, matches, target.as_bytes()].concat();
    match &jump {
        // The offset of a chain moves with others' rules; its name does not.
        Some(chain) => content.extend(chain.as_bytes()),
        None => content.extend(entry.data()),
    }
    let name = matches.get(2..HEADER - 1).map(text).unwrap_or_default();
    let only_comment = half(matches, 0) == Some(matches.len()) && name == "comment";
    let unconditional = head.iter().all(|byte| *byte == 0) && (matches.is_empty() || only_comment);
    // `IPT_F_GOTO`, `IP6T_F_GOTO`.
    let goes = head.get(layout.flags).is_some_and(|flags| flags & layout.goto != 0);
    Rule {
        content,
        verdict: verdict.filter(|_| jump.is_none()),
        jump,
        unconditional,
        target,
        head: head.to_vec(),
        matches: matches.to_vec(),
        goes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table with one rule in FORWARD that jumps to a chain of ours with one rule.
    fn blob() -> (Vec<u8>, Vec<u8>) {
        let entry = |target: &[u8], data: &[u8]| {
            let mut bytes = vec![0; 112 + HEADER];
            bytes[114..114 + target.len()].copy_from_slice(target);
            bytes.extend(data);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
            let size = u16::try_from(bytes.len()).unwrap();
            bytes[88..90].copy_from_slice(&112_u16.to_ne_bytes());
            bytes[90..92].copy_from_slice(&size.to_ne_bytes());
            bytes
        };
        let verdict = |code: i32| entry(b"", &code.to_ne_bytes());
        let name = |name: &[u8]| entry(b"ERROR", &[name, &[0; 24]].concat());
        let size = i32::try_from(verdict(0).len()).unwrap();
        let head = i32::try_from(name(b"FLANNEL-FWD").len()).unwrap();
        let blob = [
            verdict(2 * size + head),
            verdict(DROP),
            name(b"FLANNEL-FWD"),
            verdict(-2),
            verdict(-5),
            name(b"ERROR"),
        ]
        .concat();
        let mut info = vec![0; INFO_SIZE];
        info[32..36].copy_from_slice(&4_u32.to_ne_bytes());
        (info, blob)
    }

    #[test]
    fn chains_and_jumps_are_found() {
        let (info, blob) = blob();
        let chains = parse(Family::V4, &info, &blob).unwrap();
        let forward = &chains["FORWARD"];
        assert_eq!(forward[0].jump.as_deref(), Some("FLANNEL-FWD"));
        assert_eq!((forward[1].verdict, forward[1].unconditional), (Some(DROP), true));
        assert_eq!(chains["FLANNEL-FWD"].len(), 2);
    }

    #[test]
    fn broken_tables_are_refused() {
        let (info, blob) = blob();
        for cut in 1..blob.len() {
            // Cut between entries it may be read; it must not panic anywhere.
            let _ = parse(Family::V4, &info, &blob[..cut]);
        }
        assert_eq!(parse(Family::V4, &info, &[0; 200]), None);
        assert_eq!(parse(Family::V4, &[], &blob), None);
    }
}
