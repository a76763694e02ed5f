//! The programs and files that the build and the lab use, and the Debian packages with them.

use std::path::Path;

use crate::{tool, toolchain};

/// Something that has to be on the system.
pub struct Need {
    /// A program's name or path, or a file's below a protobuf include directory.
    pub what: &'static str,
    /// Debian's package with it.
    pub package: &'static str,
    /// What it is for.
    pub purpose: &'static str,
}

/// Everything but the BPF toolchain.
pub const ALL: &[Need] = &[
    need("cc", "gcc", "linking"),
    need("c++", "g++", "linking with LLVM"),
    need("pkg-config", "pkg-config", "building"),
    need("protoc", "protobuf-compiler", "building the etcd client"),
    need("google/protobuf/descriptor.proto", "libprotobuf-dev", "building the etcd client"),
    need("ip", "iproute2", "lab"),
    need("bridge", "iproute2", "lab"),
    need("nsenter", "util-linux", "lab"),
    need("etcd", "etcd-server", "lab"),
    need("etcdctl", "etcd-client", "lab"),
    need("bpftool", "bpftool", "looking at eBPF maps"),
    need("ping", "iputils-ping", "lab"),
    need("nft", "nftables", "lab"),
    need("iptables", "iptables", "lab"),
    need("busybox", "busybox-static", "the image's shell"),
    need("/etc/ssl/certs/ca-certificates.crt", "ca-certificates", "the image"),
    need("ethtool", "ethtool", "lab"),
    need("tcpdump", "tcpdump", "looking at packets"),
    need("iperf3", "iperf3", "the demo's throughput figure"),
    need("kubectl", "kubernetes-client", "checking manifests"),
    need("openssl", "openssl", "lab certificates"),
    need("/usr/lib/cni/bridge", "containernetworking-plugins", "lab"),
];

const fn need(what: &'static str, package: &'static str, purpose: &'static str) -> Need {
    Need { what, package, purpose }
}

impl Need {
    /// Whether it is there.
    pub fn is_met(&self) -> bool {
        match self.what {
            path if path.starts_with('/') => Path::new(path).exists(),
            proto if proto.contains('/') => has_proto(proto),
            program => tool::has(program),
        }
    }
}

/// Where `protoc` itself looks, and where the variable for it says.
fn has_proto(name: &str) -> bool {
    let beside = toolchain::which("protoc")
        .and_then(|protoc| protoc.canonicalize().ok())
        .and_then(|protoc| Some(protoc.parent()?.parent()?.join("include")));
    let told = std::env::var_os("PROTOC_INCLUDE").map(Into::into);
    beside.into_iter().chain(told).any(|dir| Path::new(&dir).join(name).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_need_is_met_by_what_is_there_only() {
        assert!(need("sh", "dash", "").is_met());
        assert!(need("/proc/self/status", "", "").is_met());
        assert!(!need("/no/such/file", "", "").is_met());
        assert!(!need("no-such-program-anywhere", "", "").is_met());
        assert!(!need("no/such.proto", "", "").is_met());
    }
}
