//! Which iptables this host uses: `nf_tables` underneath, or the legacy tables.

use super::{
    child, legacy,
    nfnetlink::{NfTables, number},
    rules::Family,
};

/// Chains by which kubelet shows which iptables it uses.
const HINTS: [&str; 2] = ["KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"];

/// What is underneath.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `nf_tables`.
    Nft,
    /// The legacy tables.
    Legacy,
}

impl Kind {
    /// The word iptables itself uses.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Nft => "nf_tables",
            Self::Legacy => "legacy",
        }
    }
}

/// The iptables to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant {
    /// What is underneath.
    pub kind: Kind,
    /// What stands between `ip6tables` and `-restore` in the programs' names.
    infix: &'static str,
}

impl Variant {
    /// The name of a program: `ip6tables-nft-restore`.
    pub fn program(&self, family: Family, what: &str) -> String {
        let iptables = match family {
            Family::V4 => "iptables",
            Family::V6 => "ip6tables",
        };
        format!("{iptables}{}-{what}", self.infix)
    }

    /// The variant of a kind, if its programs are installed.
    pub async fn of_kind(kind: Kind) -> Option<Self> {
        let infix = match kind {
            Kind::Nft => "-nft",
            Kind::Legacy => "-legacy",
        };
        if child::run(&format!("iptables{infix}"), &["-V"], "").await.is_ok() {
            return Some(Self { kind, infix });
        }
        let plain = Self::plain().await?;
        (plain.kind == kind).then_some(plain)
    }

    /// What plain `iptables` is.
    async fn plain() -> Option<Self> {
        let version = child::run("iptables", &["-V"], "").await.ok()?;
        let kind = if version.contains("nf_tables") { Kind::Nft } else { Kind::Legacy };
        Some(Self { kind, infix: "" })
    }

    /// What the host uses: as kubelet shows, else where rules are, else plain `iptables`.
    pub async fn of_host(nf: &mut NfTables) -> Option<Self> {
        if let Some(kind) = in_use(nf)
            && let Some(variant) = Self::of_kind(kind).await
        {
            return Some(variant);
        }
        Self::plain().await
    }
}

/// Where others keep their iptables rules.
fn in_use(nf: &mut NfTables) -> Option<Kind> {
    let chains = nf.chains().unwrap_or_default();
    let iptables = |chain: &&super::nfnetlink::Chain| {
        Family::ALL.map(number).contains(&chain.family)
            && ["nat", "filter", "mangle"].contains(&chain.table.as_str())
    };
    if chains.iter().filter(iptables).any(|chain| HINTS.contains(&chain.name.as_str())) {
        return Some(Kind::Nft);
    }
    let (mut legacy_rules, mut hint) = (false, false);
    for family in Family::ALL {
        for table in legacy::tables(family) {
            let Ok(found) = legacy::read(family, &table) else { continue };
            hint |= found.keys().any(|name| HINTS.contains(&name.as_str()));
            legacy_rules |= found.iter().any(|(name, rules)| {
                !name.starts_with("FLANNEL-") && rules.iter().any(|rule| !of_no_one(rule))
            });
        }
    }
    if hint {
        return Some(Kind::Legacy);
    }
    let nft_rules = chains.iter().filter(iptables).any(|chain| {
        let rules = nf.rules(chain.family, &chain.table, Some(&chain.name)).unwrap_or_default();
        let ours = |to: String| to.starts_with("FLANNEL-");
        !chain.name.starts_with("FLANNEL-")
            && rules.iter().any(|rule| !rule.jump().is_some_and(ours))
    });
    (legacy_rules && !nft_rules).then_some(Kind::Legacy)
}

/// A policy, the end of a chain, or a jump of ours.
fn of_no_one(rule: &legacy::Rule) -> bool {
    let ours = rule.jump.as_deref().is_some_and(|to| to.starts_with("FLANNEL-"));
    ours || (rule.unconditional && rule.verdict.is_some())
}
