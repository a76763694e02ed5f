//! What stands in the image: our two programs, and of Debian what the firewall needs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::{debian, tree::Tree};

/// `PATH` inside.
pub const PATH: &str = "/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What the image's program is called where flannel's `DaemonSet` starts it.
pub const ENTRYPOINT: &str = "/opt/bin/flanneld";

/// Our programs.
#[derive(Clone, Debug)]
pub struct Binaries {
    /// `flannel-agent`.
    pub agent: PathBuf,
    /// The CNI plugin. Hosts run it, so it should need no libraries of theirs.
    pub plugin: PathBuf,
}

/// nft, both kinds of iptables, and a shell with `cp`, which flannel's init container calls.
const PROGRAMS: [&str; 4] = [
    "/usr/sbin/nft",
    "/usr/sbin/xtables-nft-multi",
    "/usr/sbin/xtables-legacy-multi",
    "/bin/busybox",
];

/// Names under which busybox is of use in a container.
const APPLETS: [&str; 14] = [
    "cat", "cp", "env", "grep", "ip", "ls", "mkdir", "mv", "ping", "ps", "rm", "sh", "sleep",
    "wget",
];

/// The authorities that sign etcd's and API servers' certificates.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The layers: Debian's part, which seldom changes, then ours.
pub fn layers(binaries: &Binaries) -> Result<[Tree; 2]> {
    Ok([tools(binaries)?, ours(binaries)?])
}

fn tools(binaries: &Binaries) -> Result<Tree> {
    let mut tree = Tree::new();
    let extensions = debian::xtables_extensions()?;
    let mut roots: Vec<PathBuf> = PROGRAMS.iter().map(PathBuf::from).collect();
    roots.extend(extensions.iter().cloned());
    let mut sources = roots.clone();
    // Those of our own programs too: a static one has none.
    roots.extend([binaries.agent.clone(), binaries.plugin.clone()]);
    sources.extend(debian::libraries(&roots)?);
    sources.push(CERTIFICATES.into());
    sources.sort();
    sources.dedup();
    for source in &sources {
        tree.copy(source, inside(source)?)?;
    }
    for family in ["iptables", "ip6tables"] {
        for (kind, program) in [("nft", "xtables-nft-multi"), ("legacy", "xtables-legacy-multi")] {
            for action in ["", "-save", "-restore"] {
                tree.symlink(&format!("usr/sbin/{family}-{kind}{action}"), program);
            }
        }
        for action in ["", "-save", "-restore"] {
            tree.symlink(&format!("usr/sbin/{family}{action}"), "xtables-nft-multi");
        }
    }
    for applet in APPLETS {
        tree.symlink(&format!("bin/{applet}"), "busybox");
    }
    for (path, mode) in [("dev", 0o755), ("proc", 0o555), ("sys", 0o555), ("tmp", 0o1777)] {
        tree.directory(path, mode);
    }
    // Places for mounts, which a read-only root has to have.
    for path in ["etc/cni/net.d", "etc/kube-flannel", "opt/cni/bin", "run/flannel"] {
        tree.directory(path, 0o755);
    }
    tree.directory("var/lib/flannel", 0o755);
    tree.file("run/xtables.lock", 0o600, "");
    tree.file("etc/passwd", 0o644, "root:x:0:0:root:/:/bin/sh\n");
    tree.file("etc/group", 0o644, "root:x:0:\n");
    let mut list = String::new();
    for package in debian::packages_of(&sources)? {
        list.extend([&*package.name, " ", &package.version, "\n"]);
        if let Some(copyright) = &package.copyright {
            tree.copy(copyright, inside(copyright)?)?;
        }
    }
    tree.file("usr/share/doc/flannel-agent/debian-packages", 0o644, list);
    Ok(tree)
}

fn ours(binaries: &Binaries) -> Result<Tree> {
    let mut tree = Tree::new();
    tree.copy(&binaries.agent, "opt/bin/flannel-agent")?;
    tree.copy(&binaries.plugin, "opt/bin/flannel")?;
    // What flannel's own DaemonSet starts in flannel's images.
    for name in ["flanneld", "install-conf", "mk-docker-opts.sh"] {
        tree.symlink(&format!("opt/bin/{name}"), "flannel-agent");
    }
    tree.symlink("flannel", "opt/bin/flannel");
    Ok(tree)
}

/// A path of this machine as one of the image.
fn inside(path: &Path) -> Result<&str> {
    let text = path.to_str().with_context(|| format!("{} is no text", path.display()))?;
    Ok(text.trim_start_matches('/'))
}
