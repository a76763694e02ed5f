//! `subnet.env`: what CNI plugins and Docker are told about this node's subnet. Specification §6.

use std::{
    fmt::Write as _,
    fs, io,
    io::{Read as _, Write as _},
    net::{Ipv4Addr, Ipv6Addr},
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tracing::warn;

use crate::{config::NetworkConfig, go_json, lease::Subnets};

pub(crate) mod dotenv;

/// No more than this many bytes are read of what stands in the file's place.
const LONGEST: u64 = 1 << 20;

/// The cluster's network and our subnet in it, for one address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family<N> {
    /// The cluster's network.
    pub network: N,
    /// Our subnet, host bits zero.
    pub subnet: N,
}

/// What the file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubnetEnv {
    /// IPv4, if enabled.
    pub v4: Option<Family<Ipv4Net>>,
    /// IPv6, if enabled.
    pub v6: Option<Family<Ipv6Net>>,
    /// MTU for pods, in bytes.
    pub mtu: u32,
    /// Whether the agent masquerades (`--ip-masq`).
    pub ip_masq: bool,
}

impl SubnetEnv {
    /// What the file has to say for a lease. A family that is enabled but has no subnet in the
    /// lease is left out.
    pub fn new(config: &NetworkConfig, subnets: Subnets, mtu: u32, ip_masq: bool) -> Self {
        let v4 = config.ipv4.zip(subnets.v4);
        let v6 = config.ipv6.zip(subnets.v6);
        Self {
            v4: v4.map(|(settings, subnet)| Family { network: settings.network, subnet }),
            v6: v6.map(|(settings, subnet)| Family { network: settings.network, subnet }),
            mtu,
            ip_masq,
        }
    }

    /// The file's text. `FLANNEL_SUBNET` is the subnet's first host address, the bridge's.
    pub fn render(&self) -> String {
        let mut text = String::with_capacity(256);
        // Writing to a string cannot fail.
        if let Some(Family { network, subnet }) = self.v4 {
            let first = Ipv4Addr::from_bits(subnet.network().to_bits().wrapping_add(1));
            let _ = writeln!(text, "FLANNEL_NETWORK={network}");
            let _ = writeln!(text, "FLANNEL_SUBNET={first}/{}", subnet.prefix_len());
        }
        if let Some(Family { network, subnet }) = self.v6 {
            let first = Ipv6Addr::from_bits(subnet.network().to_bits().wrapping_add(1));
            let _ = writeln!(text, "FLANNEL_IPV6_NETWORK={network}");
            let _ = writeln!(text, "FLANNEL_IPV6_SUBNET={first}/{}", subnet.prefix_len());
        }
        let _ = writeln!(text, "FLANNEL_MTU={}", self.mtu);
        let _ = writeln!(text, "FLANNEL_IPMASQ={}", self.ip_masq);
        text
    }
}

/// What an earlier run left in the file. Host bits are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PreviousSubnets {
    /// Our subnet (`FLANNEL_SUBNET`).
    pub v4: Option<Ipv4Net>,
    /// Our IPv6 subnet (`FLANNEL_IPV6_SUBNET`).
    pub v6: Option<Ipv6Net>,
    /// The cluster's network (`FLANNEL_NETWORK`).
    pub network_v4: Option<Ipv4Net>,
    /// The cluster's IPv6 network (`FLANNEL_IPV6_NETWORK`).
    pub network_v6: Option<Ipv6Net>,
}

impl PreviousSubnets {
    /// Our subnets, as a lease request wants them.
    pub fn subnets(&self) -> Subnets {
        Subnets { v4: self.v4, v6: self.v6 }
    }

    fn parse(text: &str, path: &Path) -> Self {
        let vars = dotenv::parse(text);
        Self {
            v4: single(&vars, "FLANNEL_SUBNET", path, go_json::parse_ipv4_net),
            v6: single(&vars, "FLANNEL_IPV6_SUBNET", path, go_json::parse_ipv6_net),
            network_v4: single(&vars, "FLANNEL_NETWORK", path, go_json::parse_ipv4_net),
            network_v6: single(&vars, "FLANNEL_IPV6_NETWORK", path, go_json::parse_ipv6_net),
        }
    }
}

/// The one network in a comma-separated list; none if there are several or the key is absent.
fn single<N>(
    vars: &dotenv::Vars,
    key: &str,
    path: &Path,
    parse: impl Fn(&str) -> Option<N>,
) -> Option<N> {
    let value = vars.get(key)?;
    let mut nets = Vec::new();
    for entry in value.split(',') {
        if let Some(net) = parse(entry.trim()) {
            nets.push(net);
        } else {
            warn!("{}: {key} {entry:?} is not a network; ignored", path.display());
        }
    }
    if nets.len() > 1 {
        warn!("{}: {key} {value} names more than one network; ignored", path.display());
        return None;
    }
    nets.pop()
}

/// Why the file could not be written or removed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}{hint}", path.display())]
pub struct SubnetFileError {
    action: &'static str,
    path: PathBuf,
    hint: &'static str,
    source: io::Error,
}

impl SubnetFileError {
    fn new(action: &'static str, path: &Path, source: io::Error) -> Self {
        let hint = match source.kind() {
            io::ErrorKind::ReadOnlyFilesystem => {
                "; mount its directory writable or name another file with --subnet-file"
            }
            io::ErrorKind::PermissionDenied => {
                "; run as root or name another file with --subnet-file"
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "; make room there",
            io::ErrorKind::NotADirectory
            | io::ErrorKind::IsADirectory
            | io::ErrorKind::AlreadyExists => {
                "; something else is in the way, move it or name another file with --subnet-file"
            }
            _ => "",
        };
        Self { action, path: path.to_owned(), hint, source }
    }
}

/// The file at its place.
#[derive(Clone, Debug)]
pub struct SubnetFile {
    path: PathBuf,
}

impl SubnetFile {
    /// The file at this path; nothing is touched yet.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Replaces the file in one step: readers see the old text or the new, never a part. Makes
    /// missing directories. A new file gets mode 0644, an existing one keeps its own.
    pub fn write(&self, env: &SubnetEnv) -> Result<(), SubnetFileError> {
        let dir = parent(&self.path);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(dir)
            .map_err(|e| SubnetFileError::new("create the directory", dir, e))?;
        let mode = match fs::symlink_metadata(&self.path) {
            Ok(meta) if meta.is_file() => meta.permissions().mode() & 0o7777,
            _ => 0o644,
        };
        self.replace(dir, env.render().as_bytes(), mode)
            .map_err(|e| SubnetFileError::new("write", &self.path, e))
    }

    fn replace(&self, dir: &Path, text: &[u8], mode: u32) -> io::Result<()> {
        let mut temp = tempfile::Builder::new().prefix(".subnet.env").tempfile_in(dir)?;
        temp.write_all(text)?;
        temp.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
        temp.as_file().sync_all()?;
        temp.persist(&self.path)?;
        fs::File::open(dir)?.sync_all()
    }

    /// Removes the file, so that nobody goes by what is no longer right. A missing file is fine.
    pub fn remove(&self) -> Result<(), SubnetFileError> {
        match fs::remove_file(&self.path) {
            Err(e) if !matches!(e.kind(), io::ErrorKind::NotFound) => {
                Err(SubnetFileError::new("remove", &self.path, e))
            }
            _ => Ok(()),
        }
    }

    /// What an earlier run wrote. A missing, unreadable or senseless file counts as none.
    pub fn read_previous(&self) -> PreviousSubnets {
        read(&self.path).unwrap_or_default()
    }

    /// Reads what an earlier run wrote and takes the file out of sight, so that nobody goes by it
    /// before it is known to be right again. An agent that dies before it writes the file anew
    /// still finds here what it needs to ask for the same subnet.
    pub fn set_aside(&self) -> PreviousSubnets {
        let aside = self.beside(".previous");
        match fs::rename(&self.path, &aside) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => warn!(
                "cannot take the old {} out of sight: {e}; until it is written anew, pods may get \
                 addresses of an old subnet",
                self.path.display()
            ),
        }
        read(&aside).or_else(|| read(&self.path)).unwrap_or_default()
    }

    /// Makes sure that no other agent works on this file for as long as the result lives. Waits
    /// a little for one that is just stopping.
    ///
    /// # Errors
    /// If another agent runs with the same file, or the lock cannot be made.
    pub async fn lock(&self, patience: Duration) -> Result<SubnetFileLock, SubnetFileError> {
        let path = self.lock_path();
        let dir = parent(&self.path);
        let failed = |action, path: &Path, e| SubnetFileError::new(action, path, e);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(dir)
            .map_err(|e| failed("create the directory", dir, e))?;
        let file = fs::File::create(&path).map_err(|e| failed("create", &path, e))?;
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(SubnetFileLock { _file: file }),
                Err(fs::TryLockError::WouldBlock) if tokio::time::Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                Err(fs::TryLockError::WouldBlock) => {
                    let taken = io::Error::other(
                        "another agent runs with the same subnet file; stop it, or give this one \
                         a --subnet-file of its own",
                    );
                    return Err(failed("lock", &self.path, taken));
                }
                Err(fs::TryLockError::Error(e)) => return Err(failed("lock", &path, e)),
            }
        }
    }

    /// The file that is locked while an agent runs.
    pub fn lock_path(&self) -> PathBuf {
        self.beside(".lock")
    }

    /// The cluster's networks that this file, or the one before it, names.
    pub fn networks(&self) -> Vec<IpNet> {
        let files = [read(&self.path), read(&self.beside(".previous"))];
        let of = |previous: PreviousSubnets| {
            let v4 = previous.network_v4.map(IpNet::from);
            v4.into_iter().chain(previous.network_v6.map(IpNet::from))
        };
        files.into_iter().flatten().flat_map(of).collect()
    }

    /// Every file that an agent makes for this one.
    pub fn all_files(&self) -> [PathBuf; 3] {
        [self.path.clone(), self.beside(".previous"), self.lock_path()]
    }

    /// A hidden file in the same directory.
    fn beside(&self, suffix: &str) -> PathBuf {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        self.path.with_file_name(format!(".{name}{suffix}"))
    }
}

/// Held by the one agent that works on a subnet file.
#[derive(Debug)]
pub struct SubnetFileLock {
    _file: fs::File,
}

/// `None` if there is nothing to read.
fn read(path: &Path) -> Option<PreviousSubnets> {
    let read = fs::File::open(path).and_then(|file| {
        let mut bytes = Vec::new();
        file.take(LONGEST).read_to_end(&mut bytes).map(|_| bytes)
    });
    match read {
        Ok(bytes) => Some(PreviousSubnets::parse(&String::from_utf8_lossy(&bytes), path)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        Err(e) => {
            warn!("cannot read {}: {e}; going on without it", path.display());
            None
        }
    }
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn env(v6: bool) -> SubnetEnv {
        SubnetEnv {
            v4: Some(Family {
                network: "10.244.0.0/16".parse().expect("a network"),
                subnet: "10.244.1.0/24".parse().expect("a network"),
            }),
            v6: v6.then(|| Family {
                network: "2001:cafe:42::/56".parse().expect("a network"),
                subnet: "2001:cafe:42::/64".parse().expect("a network"),
            }),
            mtu: 1450,
            ip_masq: true,
        }
    }

    fn file() -> (tempfile::TempDir, SubnetFile) {
        let dir = tempfile::tempdir().expect("a directory");
        let file = SubnetFile::new(dir.path().join("run/flannel/subnet.env"));
        (dir, file)
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).expect("the file").permissions().mode() & 0o7777
    }

    #[test]
    fn text_is_what_plugins_expect() {
        assert_eq!(
            env(true).render(),
            "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/24\n\
             FLANNEL_IPV6_NETWORK=2001:cafe:42::/56\nFLANNEL_IPV6_SUBNET=2001:cafe:42::1/64\n\
             FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
        );
        let v6_only = SubnetEnv { v4: None, ip_masq: false, ..env(true) };
        assert!(v6_only.render().starts_with("FLANNEL_IPV6_NETWORK="), "{}", v6_only.render());
        assert!(v6_only.render().ends_with("FLANNEL_IPMASQ=false\n"), "{}", v6_only.render());
    }

    #[test]
    fn written_whole_with_the_right_mode_and_read_back() {
        let (_dir, file) = file();
        assert_eq!(file.read_previous(), PreviousSubnets::default());
        file.write(&env(true)).expect("written");
        assert_eq!(mode(file.path()), 0o644);
        assert_eq!(mode(parent(file.path())), 0o755);
        assert_eq!(fs::read_to_string(file.path()).ok(), Some(env(true).render()));
        let read = file.read_previous();
        assert_eq!(read.v4, "10.244.1.0/24".parse().ok());
        assert_eq!(read.v6, "2001:cafe:42::/64".parse().ok());
        assert_eq!(read.network_v4, "10.244.0.0/16".parse().ok());
        assert_eq!(read.network_v6, "2001:cafe:42::/56".parse().ok());

        fs::set_permissions(file.path(), fs::Permissions::from_mode(0o600)).expect("mode set");
        file.write(&env(false)).expect("written");
        assert_eq!(mode(file.path()), 0o600, "an existing file keeps its mode");
        let left: Vec<_> = fs::read_dir(parent(file.path())).expect("the directory").collect();
        assert_eq!(left.len(), 1, "no temporary file is left: {left:?}");

        file.remove().expect("removed");
        file.remove().expect("gone already");
        assert!(!file.path().exists());
    }

    #[test]
    fn errors_name_path_and_reason() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("run"), "").expect("written");
        let file = SubnetFile::new(dir.path().join("run/subnet.env"));
        let error = file.write(&env(false)).expect_err("run is a file").to_string();
        assert!(error.contains(&dir.path().join("run").display().to_string()), "{error}");
        assert!(error.contains("--subnet-file"), "{error}");
        fs::create_dir_all(dir.path().join("dir/subnet.env")).expect("made");
        let file = SubnetFile::new(dir.path().join("dir/subnet.env"));
        assert!(file.write(&env(false)).is_err());
        assert!(file.remove().is_err());
        assert_eq!(file.read_previous(), PreviousSubnets::default());
    }

    #[test]
    fn odd_files_are_read_tolerantly() {
        let read = |text: &str| PreviousSubnets::parse(text, Path::new("subnet.env"));
        let want: Option<Ipv4Net> = "10.5.52.0/24".parse().ok();
        for text in [
            "FLANNEL_SUBNET=10.5.52.1/24",
            "# a comment\n\n export FLANNEL_SUBNET = \"10.5.52.1/24\" # ours\r\n",
            "FLANNEL_SUBNET: '10.5.52.1/24'\n",
            "LEN=24\nFLANNEL_SUBNET=10.5.52.1/${LEN}\n",
            "junk\n=\nFLANNEL_SUBNET=bad,10.5.52.1/24\n",
            "FLANNEL_SUBNET=10.5.1.1/24\nFLANNEL_SUBNET=10.5.52.1/24\n",
        ] {
            assert_eq!(read(text).v4, want, "{text}");
        }
        for text in [
            "",
            "FLANNEL_SUBNET",
            "FLANNEL_SUBNET=",
            "FLANNEL_SUBNET=10.5.52.1/24,10.5.53.1/24",
            "FLANNEL_SUBNET=fd00::1/64",
            "FLANNEL_SUBNET=10.5.52.1",
            "#FLANNEL_SUBNET=10.5.52.1/24",
        ] {
            assert_eq!(read(text), PreviousSubnets::default(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "([A-Z_$={}:\"'\\\\# ]|\\PC)*") {
            let _ = PreviousSubnets::parse(&text, Path::new("x"));
        }
    }
}
