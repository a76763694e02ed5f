//! The iptables renderer: chains of our own in `nat` and `filter`, written by one
//! `iptables-restore` per family, compared as a whole with what `iptables-save` prints.
//!
//! Chain names and comments are those of specification §8.1 and §8.2.

use std::fmt::Write as _;

use super::{
    child::{self, ChildError},
    rules::{Family, ForwardPosition, Match, Rule, RuleSet, Verdict},
    variant::Variant,
};

/// How long the tool waits for the xtables lock, in seconds.
const LOCK_SECONDS: &str = "5";

/// Where our rules stand: a chain of ours and the chain of others it is called from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The table.
    pub table: &'static str,
    /// Our chain.
    pub chain: &'static str,
    /// The built-in chain that jumps to it.
    pub from: &'static str,
    comment: &'static str,
}

/// What leaves the host.
pub const MASQUERADE: Place =
    Place { table: "nat", chain: "FLANNEL-POSTRTG", from: "POSTROUTING", comment: "flanneld masq" };

/// What passes through the host.
pub const FORWARD: Place =
    Place { table: "filter", chain: "FLANNEL-FWD", from: "FORWARD", comment: "flanneld forward" };

/// Both places.
pub const PLACES: [Place; 2] = [MASQUERADE, FORWARD];

/// The words of a rule as `iptables-save` prints them, from `-A` on.
pub type Words = Vec<String>;

/// What there is in one place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The rules of our chain, if it is there.
    pub chain: Option<Vec<Words>>,
    /// The rules of the built-in chain up to the last that jumps to ours.
    pub before: Vec<Words>,
    /// Those among them that jump to ours, with their index.
    pub jumps: Vec<(usize, Words)>,
}

fn rules_of(set: &RuleSet, place: Place) -> &[Rule] {
    if place == MASQUERADE { &set.masquerade } else { &set.forward }
}

/// The words of our rules in a place.
pub fn wanted_chain(set: &RuleSet, place: Place) -> Vec<Words> {
    rules_of(set, place).iter().map(|rule| words(place, rule)).collect()
}

fn words(place: Place, rule: &Rule) -> Words {
    let mut words = vec!["-A".to_owned(), place.chain.to_owned()];
    let mut add = |text: &[&str]| words.extend(text.iter().map(|&word| word.to_owned()));
    for matched in &rule.matches {
        match matched {
            Match::Source(net) => add(&["-s", &net.to_string()]),
            Match::SourceNot(net) => add(&["!", "-s", &net.to_string()]),
            Match::Destination(net) => add(&["-d", &net.to_string()]),
            Match::DestinationNot(net) => add(&["!", "-d", &net.to_string()]),
            Match::MarkBit(bit) => add(&["-m", "mark", "--mark", &format!("{bit:#x}/{bit:#x}")]),
            Match::UdpPort(port) => add(&["-p", "udp", "-m", "udp", "--dport", &port.to_string()]),
            Match::LocalSource => add(&["-m", "addrtype", "--src-type", "LOCAL"]),
        }
    }
    add(&["-m", "comment", "--comment", place.comment, "-j"]);
    match rule.verdict {
        Verdict::Return => add(&["RETURN"]),
        Verdict::Accept => add(&["ACCEPT"]),
        Verdict::Masquerade { fully_random: false } => add(&["MASQUERADE"]),
        Verdict::Masquerade { fully_random: true } => add(&["MASQUERADE", "--random-fully"]),
    }
    words
}

/// The words of the jump to our chain.
fn jump(place: Place) -> Words {
    let Place { chain, from, comment, .. } = place;
    ["-A", from, "-m", "comment", "--comment", comment, "-j", chain].map(str::to_owned).into()
}

/// Where our jump belongs: the position is a matter of the FORWARD chain only.
fn first(place: Place, position: ForwardPosition) -> bool {
    place == FORWARD && position == ForwardPosition::First
}

/// Whether a place is as wanted. Behind our jump others may have what they like.
pub fn right(set: &RuleSet, place: Place, position: ForwardPosition, found: &Found) -> bool {
    let wanted = wanted_chain(set, place);
    if wanted.is_empty() {
        return found.chain.is_none() && found.jumps.is_empty();
    }
    let jump_right = match found.jumps.as_slice() {
        [(index, words)] => *words == jump(place) && (*index == 0 || !first(place, position)),
        _ => false,
    };
    jump_right && found.chain.as_ref() == Some(&wanted)
}

/// What `iptables-restore --noflush` is to be told to make one place as wanted.
pub fn restore_input(
    set: &RuleSet,
    place: Place,
    position: ForwardPosition,
    found: &Found,
) -> String {
    let Place { table, chain, .. } = place;
    let wanted = wanted_chain(set, place);
    let mut text = format!("*{table}\n");
    let mut line = |line: &str| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{line}");
    };
    let keep = match found.jumps.as_slice() {
        [(index, words)] if !wanted.is_empty() => {
            *words == jump(place) && (*index == 0 || !first(place, position))
        }
        _ => false,
    };
    if !wanted.is_empty() || found.chain.is_some() {
        // Makes the chain, or empties it.
        line(&format!(":{chain} - [0:0]"));
    }
    for words in &wanted {
        line(&join(words));
    }
    if !keep {
        for (_, words) in &found.jumps {
            line(&join(words).replacen("-A", "-D", 1));
        }
        if !wanted.is_empty() {
            let words = join(&jump(place));
            line(&if first(place, position) { words.replacen("-A", "-I", 1) } else { words });
        }
    }
    if wanted.is_empty() && found.chain.is_some() {
        line(&format!("-X {chain}"));
    }
    line("COMMIT");
    text
}

/// Reads one table of a family as far as it concerns us.
pub async fn read(variant: &Variant, family: Family, place: Place) -> Result<Found, ChildError> {
    let program = variant.program(family, "save");
    Ok(parse(place, &child::run(&program, &["-t", place.table], "").await?))
}

fn parse(place: Place, text: &str) -> Found {
    let mut found = Found::default();
    let mut before = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix(':') {
            if rest.split(' ').next() == Some(place.chain) {
                found.chain.get_or_insert_with(Vec::new);
            }
            continue;
        }
        let mut head = line.splitn(3, ' ');
        if head.next() != Some("-A") {
            continue;
        }
        match head.next() {
            Some(chain) if chain == place.chain => {
                found.chain.get_or_insert_with(Vec::new).push(split(line));
            }
            Some(chain) if chain == place.from => {
                let words = split(line);
                let target = words.iter().rposition(|word| word == "-j" || word == "-g");
                let target = target.and_then(|at| words.get(at + 1));
                let ours = target.is_some_and(|target| target == place.chain);
                before.push(words.clone());
                if ours {
                    found.jumps.push((before.len() - 1, words));
                    found.before.clone_from(&before);
                }
            }
            _ => {}
        }
    }
    if found.jumps.is_empty() {
        found.before = before;
    }
    found
}

/// Gives `iptables-restore` of a family its input.
pub async fn restore(variant: &Variant, family: Family, input: &str) -> Result<(), ChildError> {
    let arguments = ["--noflush", "--wait", LOCK_SECONDS];
    child::run(&variant.program(family, "restore"), &arguments, input).await.map(drop)
}

/// The first rule ahead of our jump that lets nothing through to it, as text.
pub fn barrier(found: &Found) -> Option<String> {
    let (index, _) = found.jumps.first()?;
    let unconditional = |words: &&Words| {
        let rest: Vec<&str> = words.iter().skip(2).map(String::as_str).collect();
        matches!(
            rest.as_slice(),
            ["-j", "DROP" | "REJECT", ..]
                | ["-m", "comment", "--comment", _, "-j", "DROP" | "REJECT", ..]
        )
    };
    found.before[..*index].iter().find(unconditional).map(|words| join(words))
}

/// Words to a line that the tools read back as the same words.
fn join(words: &[String]) -> String {
    let quoted = words.iter().map(|word| {
        let plain = !word.is_empty()
            && word.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./:,!+=@%[]".contains(&b));
        if plain {
            word.clone()
        } else {
            format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\""))
        }
    });
    quoted.collect::<Vec<_>>().join(" ")
}

/// A line to words; double quotes and backslashes as `iptables-save` writes them.
fn split(line: &str) -> Words {
    let mut words = Vec::new();
    let (mut word, mut quoted, mut begun) = (String::new(), false, false);
    let mut chars = line.chars();
    while let Some(char) = chars.next() {
        match char {
            '"' => (quoted, begun) = (!quoted, true),
            '\\' if quoted => word.extend(chars.next()),
            ' ' if !quoted => {
                if begun {
                    words.push(std::mem::take(&mut word));
                }
                begun = false;
            }
            other => {
                word.push(other);
                begun = true;
            }
        }
    }
    if begun {
        words.push(word);
    }
    words
}

#[cfg(test)]
mod tests;
