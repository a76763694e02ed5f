//! What the kernel holds of ours, read in microseconds and without a program to start: enough to
//! tell whether anything was changed, not what it means.

use std::{collections::BTreeMap, io};

use super::{
    iptables::{FORWARD, PLACES, Place},
    legacy,
    nfnetlink::{NfTables, number},
    nftables,
    rules::Family,
};

/// A place: the family and the name of our table or chain.
pub type Key = (Family, &'static str);

/// The content of each place that holds something of ours.
pub type Fingerprint = BTreeMap<Key, Vec<u8>>;

/// Our own tables of `nf_tables`.
pub fn of_nftables(nf: &mut NfTables) -> io::Result<Fingerprint> {
    let mut found = Fingerprint::new();
    for (family, name) in nf.tables()? {
        let ours = Family::ALL
            .into_iter()
            .find(|ours| number(*ours) == family && nftables::table(*ours) == name);
        let Some(ours) = ours else { continue };
        let mut content = b"table".to_vec();
        for chain in nftables::CHAIN_NAMES {
            content.extend(format!("{:?}", nf.chain(family, &name, chain)?).into_bytes());
        }
        for rule in nf.rules(family, &name, None)? {
            content.extend(rule.chain.as_bytes());
            content.push(0);
            content.extend(rule.content());
        }
        found.insert((ours, nftables::table(ours)), content);
    }
    Ok(found)
}

/// Our chains in the tables that iptables keeps in `nf_tables`.
pub fn of_iptables_nft(nf: &mut NfTables) -> io::Result<Fingerprint> {
    let mut found = Fingerprint::new();
    for family in Family::ALL {
        for place in PLACES {
            let Place { table, chain, from, .. } = place;
            let mut content = Vec::new();
            if nf.chain(number(family), table, chain)?.is_some() {
                content.extend(b"chain");
                for rule in nf.rules(number(family), table, Some(chain))? {
                    content.push(0);
                    content.extend(rule.content());
                }
            }
            let jumps = nf.rules(number(family), table, Some(from))?;
            for (at, rule) in jumps.iter().enumerate() {
                if rule.jump().as_deref() == Some(chain) {
                    content.extend(jump(place, at, &rule.content()));
                }
            }
            if !content.is_empty() {
                found.insert((family, chain), content);
            }
        }
    }
    Ok(found)
}

/// Our chains in the legacy tables.
pub fn of_legacy() -> io::Result<Fingerprint> {
    let mut found = Fingerprint::new();
    for family in Family::ALL {
        let tables = legacy::tables(family);
        for place in PLACES {
            let Place { table, chain, from, .. } = place;
            if !tables.iter().any(|name| name == table) {
                continue;
            }
            let chains = legacy::read(family, table)?;
            let mut content = Vec::new();
            if let Some(rules) = chains.get(chain) {
                content.extend(b"chain");
                for rule in rules {
                    content.push(0);
                    content.extend(&rule.content);
                }
            }
            for (at, rule) in chains.get(from).into_iter().flatten().enumerate() {
                if rule.jump.as_deref() == Some(chain) {
                    content.extend(jump(place, at, &rule.content));
                }
            }
            if !content.is_empty() {
                found.insert((family, chain), content);
            }
        }
    }
    Ok(found)
}

/// What changes when a legacy table does that has a place of ours.
pub fn outline_of_legacy() -> io::Result<Vec<Vec<u8>>> {
    let mut outlines = Vec::new();
    for family in Family::ALL {
        for table in legacy::tables(family) {
            if PLACES.iter().any(|place| place.table == table) {
                outlines.push(legacy::outline(family, &table)?);
            }
        }
    }
    Ok(outlines)
}

/// A jump to our chain, and whether it is the first rule, where that matters.
fn jump(place: Place, at: usize, content: &[u8]) -> Vec<u8> {
    let mark: &[u8] = if at == 0 && place == FORWARD { b"first" } else { b"" };
    [&[0], mark, content].concat()
}

/// The place that an entry is about, if it is one of iptables.
pub fn place_of(chain: &str) -> Option<Place> {
    PLACES.into_iter().find(|place| place.chain == chain)
}
