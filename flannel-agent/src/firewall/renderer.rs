//! The two ways to write and read the rules, behind one face.

use std::io;

use super::{
    child::ChildError,
    fingerprint::{self, Fingerprint, Key},
    iptables::{self, PLACES},
    nfnetlink::NfTables,
    nftables,
    removal::Realm,
    rules::{Family, ForwardPosition, RuleSet},
    variant::{Kind, Variant},
};

/// Which tool writes the rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Renderer {
    /// `nft`.
    Nftables,
    /// The host's iptables.
    Iptables(Variant),
}

/// What a look at the rules came to.
#[derive(Default)]
pub struct Look {
    /// What makes them as wanted; empty if they are.
    pub writes: Vec<Write>,
    /// Rules of others that keep packets from ours.
    pub barriers: Vec<String>,
}

/// One transaction.
pub enum Write {
    /// A script for `nft`.
    Nft(String),
    /// A family's input for `iptables-restore`.
    Restore(Family, String),
}

impl Renderer {
    /// What the configuration and the host say.
    pub async fn choose(nftables: bool, nf: &mut NfTables) -> Result<Self, String> {
        if nftables {
            return Ok(Self::Nftables);
        }
        let variant = Variant::of_host(nf).await;
        variant.map(Self::Iptables).ok_or_else(|| {
            "iptables is not installed; install it or set \"EnableNFTables\": true".to_owned()
        })
    }

    /// Where its rules are.
    pub fn realm(&self) -> Realm {
        match self {
            Self::Nftables => Realm::Nftables,
            Self::Iptables(variant) => Realm::Iptables(variant.kind),
        }
    }

    /// Whether its rules are where nobody tells of changes.
    pub fn is_legacy(&self) -> bool {
        self.realm() == Realm::Iptables(Kind::Legacy)
    }

    /// The kernel's account of our rules.
    pub async fn fingerprint(&self, nf: &mut NfTables) -> io::Result<Fingerprint> {
        match self.realm() {
            Realm::Nftables => fingerprint::of_nftables(nf),
            Realm::Iptables(Kind::Nft) => fingerprint::of_iptables_nft(nf),
            // Megabytes on a host with many services.
            Realm::Iptables(Kind::Legacy) => tokio::task::spawn_blocking(fingerprint::of_legacy)
                .await
                .unwrap_or_else(|err| Err(io::Error::other(err))),
        }
    }

    /// Has the tool show what is there, and finds what to write. A place without anything of ours
    /// where nothing is wanted is not looked at: its tool may not even be installed.
    pub async fn look(
        &self,
        sets: &[RuleSet],
        position: ForwardPosition,
        print: &Fingerprint,
    ) -> Result<Look, ChildError> {
        let mut look = Look::default();
        match self {
            Self::Nftables => {
                let mut script = String::new();
                for set in sets {
                    let there = if print.contains_key(&(set.family, nftables::table(set.family))) {
                        Some(nftables::list(set.family).await?)
                    } else {
                        None
                    };
                    let wanted = nftables::wanted_listing(set);
                    let right = match &there {
                        Some(there) => !wanted.is_empty() && nftables::same(there, &wanted),
                        None => wanted.is_empty(),
                    };
                    if !right {
                        script += &nftables::transaction(set, there.as_ref());
                    }
                }
                look.writes.extend((!script.is_empty()).then_some(Write::Nft(script)));
            }
            Self::Iptables(variant) => {
                for set in sets {
                    let mut input = String::new();
                    for place in PLACES {
                        let wanted = !iptables::wanted_chain(set, place).is_empty();
                        if !wanted && !print.contains_key(&(set.family, place.chain)) {
                            continue;
                        }
                        let found = iptables::read(variant, set.family, place).await?;
                        if !iptables::right(set, place, position, &found) {
                            input += &iptables::restore_input(set, place, position, &found);
                        }
                        if place == iptables::FORWARD
                            && let Some(rule) = iptables::barrier(&found)
                        {
                            look.barriers.push(format!(
                                "{} rule `{rule}` stands before ours and lets nothing through; \
                                 --forward-position=first puts ours before it",
                                set.family
                            ));
                        }
                    }
                    look.writes
                        .extend((!input.is_empty()).then_some(Write::Restore(set.family, input)));
                }
            }
        }
        Ok(look)
    }

    /// Makes transactions, in order, up to the first that fails.
    pub async fn write(&self, writes: &[Write]) -> Result<(), ChildError> {
        for write in writes {
            match (write, self) {
                (Write::Nft(script), _) => nftables::commit(script).await?,
                (Write::Restore(family, input), Self::Iptables(variant)) => {
                    iptables::restore(variant, *family, input).await?;
                }
                // Nobody but `look` makes writes, of its own kind.
                (Write::Restore(..), Self::Nftables) => {}
            }
        }
        Ok(())
    }

    /// Writes the places of these keys anew, with as little reading as that takes.
    pub async fn rewrite(
        &self,
        sets: &[RuleSet],
        position: ForwardPosition,
        differs: impl Fn(&Key) -> bool,
    ) -> Result<(), ChildError> {
        match self {
            Self::Nftables => {
                let differs = |set: &&RuleSet| differs(&(set.family, nftables::table(set.family)));
                let sets = sets.iter().filter(differs);
                let script: String = sets.map(|set| nftables::transaction(set, None)).collect();
                nftables::commit(&script).await
            }
            Self::Iptables(variant) => {
                for set in sets {
                    let mut input = String::new();
                    for place in PLACES {
                        if differs(&(set.family, place.chain)) {
                            let found = iptables::read(variant, set.family, place).await?;
                            if !iptables::right(set, place, position, &found) {
                                input += &iptables::restore_input(set, place, position, &found);
                            }
                        }
                    }
                    if !input.is_empty() {
                        iptables::restore(variant, set.family, &input).await?;
                    }
                }
                Ok(())
            }
        }
    }
}
