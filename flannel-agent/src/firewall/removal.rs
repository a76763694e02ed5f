//! Taking our rules away: those of the renderer that is not in use, or all of them. What is in
//! `nf_tables` goes by one netlink transaction, whatever programs are installed.

use std::io;

use super::{
    fingerprint,
    iptables::{self, PLACES, Place},
    nfnetlink::{Chain, Deletion, NfTables, POLICY_DROP, number},
    nftables,
    rules::{Family, ForwardPosition, RuleSet},
    variant::{Kind, Variant},
};

/// Where rules of ours can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Realm {
    /// Our own tables in `nf_tables`.
    Nftables,
    /// iptables' tables in `nf_tables`, or the legacy ones.
    Iptables(Kind),
}

impl Realm {
    /// All there are.
    pub const ALL: [Self; 3] =
        [Self::Nftables, Self::Iptables(Kind::Nft), Self::Iptables(Kind::Legacy)];
}

/// Removes what is ours in a realm. Returns the tables or chains that went.
pub async fn remove(nf: &mut NfTables, realm: Realm) -> Result<Vec<String>, String> {
    let told = |err: io::Error| format!("cannot remove our rules from {}: {err}", name(realm));
    let deletions = match realm {
        Realm::Nftables => tables(nf),
        Realm::Iptables(Kind::Nft) => chains(nf),
        Realm::Iptables(Kind::Legacy) => return remove_legacy().await,
    };
    let deletions = deletions.map_err(told)?;
    nf.delete(&deletions).map_err(told)?;
    Ok(deletions.iter().filter_map(Deletion::named).collect())
}

/// How people call a realm.
pub fn name(realm: Realm) -> &'static str {
    match realm {
        Realm::Nftables => "nftables",
        Realm::Iptables(Kind::Nft) => "iptables (nf_tables)",
        Realm::Iptables(Kind::Legacy) => "iptables (legacy)",
    }
}

fn tables(nf: &mut NfTables) -> io::Result<Vec<Deletion>> {
    let ours = |(family, name): &(u8, String)| {
        Family::ALL.iter().any(|ours| number(*ours) == *family && nftables::table(*ours) == name)
    };
    let there = nf.tables()?.into_iter().filter(ours);
    Ok(there.map(|(family, name)| Deletion::Table(family, name)).collect())
}

/// Jumps first, then the chains. A flanneld of the past left its chains in either table.
fn chains(nf: &mut NfTables) -> io::Result<Vec<Deletion>> {
    let mut deletions = Vec::new();
    for family in Family::ALL.map(number) {
        for table in PLACES.map(|place| place.table) {
            for Place { chain, from, .. } in PLACES {
                if nf.chain(family, table, chain)?.is_none() {
                    continue;
                }
                let of = |name: &str| (family, table.to_owned(), name.to_owned());
                for rule in nf.rules(family, table, Some(from))? {
                    if rule.jump().as_deref() == Some(chain) {
                        let (family, table, from) = of(from);
                        deletions.push(Deletion::Rule(family, table, from, rule.handle));
                    }
                }
                let (family, table, chain) = of(chain);
                deletions.push(Deletion::Rules(family, table.clone(), chain.clone()));
                deletions.push(Deletion::Chain(family, table, chain));
            }
        }
    }
    Ok(deletions)
}

/// The chains that `iptables` makes; a table with others is an administrator's.
const BUILT_IN: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// iptables' tables that hold nothing and refuse nothing: `iptables` made them for our rules, and
/// makes them anew for whoever asks.
fn empty_tables(nf: &mut NfTables) -> io::Result<Vec<Deletion>> {
    let all = nf.chains()?;
    let mut deletions = Vec::new();
    for family in Family::ALL.map(number) {
        for table in PLACES.map(|place| place.table) {
            let chains: Vec<_> =
                all.iter().filter(|chain| chain.family == family && chain.table == table).collect();
            let bare = |chain: &Chain| {
                BUILT_IN.contains(&chain.name.as_str())
                    && chain.base.as_ref().is_some_and(|base| base.policy != POLICY_DROP)
            };
            let is_empty =
                chains.iter().all(|chain| bare(chain)) && nf.rules(family, table, None)?.is_empty();
            if chains.is_empty() || !is_empty {
                continue;
            }
            let chain =
                |chain: &Chain| Deletion::Chain(family, table.to_owned(), chain.name.clone());
            deletions.extend(chains.into_iter().map(chain));
            deletions.push(Deletion::Table(family, table.to_owned()));
        }
    }
    Ok(deletions)
}

/// Legacy tables are written as a whole by their own programs only.
async fn remove_legacy() -> Result<Vec<String>, String> {
    let there = fingerprint::of_legacy()
        .map_err(|err| format!("cannot read the legacy iptables tables: {err}"))?;
    if there.is_empty() {
        return Ok(Vec::new());
    }
    let variant = Variant::of_kind(Kind::Legacy).await.ok_or(
        "rules of ours are left in the legacy iptables tables, and iptables-legacy, which could \
         remove them, is not installed",
    )?;
    let mut removed = Vec::new();
    for (family, chain) in there.into_keys() {
        let Some(place) = fingerprint::place_of(chain) else { continue };
        let nothing = RuleSet { family, masquerade: Vec::new(), forward: Vec::new() };
        let work = async {
            let found = iptables::read(&variant, family, place).await?;
            let input = iptables::restore_input(&nothing, place, ForwardPosition::None, &found);
            iptables::restore(&variant, family, &input).await
        };
        work.await.map_err(|err| format!("cannot remove {chain}: {err}"))?;
        removed.push(format!("legacy {family} chain {chain}"));
    }
    Ok(removed)
}

fn remove_empty_tables(nf: &mut NfTables) -> io::Result<()> {
    let deletions = empty_tables(nf)?;
    nf.delete(&deletions)
}

/// Removes all rules of ours from this host, whichever renderer made them. Returns the tables and
/// chains that went, and what could not be removed.
pub async fn remove_all() -> (Vec<String>, Vec<String>) {
    let mut nf = match NfTables::open() {
        Ok(nf) => nf,
        Err(err) => return (Vec::new(), vec![format!("cannot open a netfilter socket: {err}")]),
    };
    let (mut removed, mut problems) = (Vec::new(), Vec::new());
    for realm in Realm::ALL {
        match remove(&mut nf, realm).await {
            Ok(names) => {
                let left_empty = !names.is_empty() && realm == Realm::Iptables(Kind::Nft);
                removed.extend(names);
                if left_empty && let Err(err) = remove_empty_tables(&mut nf) {
                    problems.push(format!("cannot remove iptables' empty tables: {err}"));
                }
            }
            Err(problem) => problems.push(problem),
        }
    }
    (removed, problems)
}
