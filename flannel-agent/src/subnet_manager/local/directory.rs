//! The files of the local store: reading them, replacing them in one step, the lock.

use std::{
    collections::{HashMap, hash_map},
    ffi::{OsStr, OsString},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tracing::warn;

use crate::{
    go_json::Object,
    lease::{self, LeaseAttributes, Subnets},
    telemetry::metrics::Metrics,
};

/// Temporary files start with this. They are written under the lock only, so whoever holds the
/// lock may take any it finds for the remains of a crash.
const TEMP_PREFIX: &str = ".lease-";

/// No lease is longer; a bigger file is something else.
const MAX_FILE: u64 = 64 * 1024;

/// What a lease file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StoredLease {
    pub attributes: LeaseAttributes,
    /// When it ends; `None` for a reservation.
    pub expires: Option<SystemTime>,
}

impl StoredLease {
    pub fn live_at(&self, now: SystemTime) -> bool {
        self.expires.is_none_or(|expires| expires > now)
    }

    fn parse(text: &str) -> Result<Self, lease::LeaseFormatError> {
        let object = Object::parse(text)?;
        let expires = object.get_uint("Expires")?;
        Ok(Self {
            attributes: LeaseAttributes::from_object(&object)?,
            // A time beyond what the clock can express is as good as never.
            expires: expires
                .and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds))),
        })
    }

    fn render(&self) -> String {
        let mut text = self.attributes.to_json();
        if let Some(expires) = self.expires {
            text.pop();
            text.extend([",\"Expires\":", &unix_seconds(expires).to_string(), "}"]);
        }
        text.push('\n');
        text
    }
}

/// Whole seconds since 1970.
pub(super) fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// The lock on the store, held until dropped.
#[derive(Debug)]
pub(super) struct Lock {
    _file: fs::File,
}

/// The directory.
#[derive(Clone, Debug)]
pub(super) struct Directory {
    root: PathBuf,
}

impl Directory {
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn subnets(&self) -> PathBuf {
        self.root.join("subnets")
    }

    /// Makes the place for leases anew if somebody removed it; the directory itself must exist.
    pub fn ensure_subnets(&self) -> io::Result<()> {
        match fs::create_dir(self.subnets()) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(e),
            _ => Ok(()),
        }
    }

    /// The network configuration's text and path; `None` if there is none yet.
    pub fn config(&self) -> io::Result<Option<(String, PathBuf)>> {
        for name in ["config.json", "net-conf.json"] {
            let path = self.root.join(name);
            match read_file(&path) {
                Ok(text) => return Ok(Some((text, path))),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(io::Error::new(e.kind(), format!("{}: {e}", path.display()))),
            }
        }
        Ok(None)
    }

    /// Takes the lock if nobody else has it.
    pub fn try_lock(&self) -> io::Result<Option<Lock>> {
        let path = self.root.join(".lock");
        let file = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o644)
            .open(&path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Ok(None),
            Err(fs::TryLockError::Error(e)) => return Err(e),
        }
        // Somebody may have removed the file since: then the lock on it guards nothing.
        let ours = file.metadata()?;
        match fs::metadata(&path) {
            Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => {
                Ok(Some(Lock { _file: file }))
            }
            Ok(_) => Ok(None),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Writes a lease so that readers, and a crash at any time, leave the old text or the new.
    pub fn put(&self, _lock: &Lock, subnets: Subnets, lease: &StoredLease) -> io::Result<()> {
        let dir = self.subnets();
        let mut temp = tempfile::Builder::new().prefix(TEMP_PREFIX).tempfile_in(&dir)?;
        temp.write_all(lease.render().as_bytes())?;
        temp.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
        temp.as_file().sync_all()?;
        temp.persist(dir.join(file_name(subnets)))?;
        fs::File::open(&dir)?.sync_all()
    }

    /// Deletes a lease; it may be gone already.
    pub fn delete(&self, _lock: &Lock, subnets: Subnets) -> io::Result<()> {
        match fs::remove_file(self.subnets().join(file_name(subnets))) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        }
    }

    /// Removes what crashed writers left behind.
    pub fn remove_stale_temp_files(&self, _lock: &Lock) -> io::Result<()> {
        for entry in fs::read_dir(self.subnets())? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(TEMP_PREFIX) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// The file of a lease.
pub(super) fn file_name(subnets: Subnets) -> String {
    subnets.key() + ".json"
}

/// Reads `<key>.json`. Only the one way in which we spell a key counts, so that no two files
/// can be about the same lease.
fn parse_file_name(name: &str) -> Option<Subnets> {
    let key = name.strip_suffix(".json")?;
    let subnets = Subnets::parse_key(key)
        .or_else(|| Some(Subnets { v4: None, v6: Some(lease::parse_v6_key_part(key)?) }))?;
    (subnets.key() == key).then_some(subnets)
}

fn read_file(path: &Path) -> io::Result<String> {
    // A named pipe must not keep us waiting.
    let file = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(io::Error::other("too large for a lease or configuration"));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Which files have to be read again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Dirty {
    /// All: the listing itself may be out of date.
    All,
    /// These in the subnets directory.
    Names(Vec<OsString>),
}

/// One lease file.
#[derive(Debug, Default)]
struct Entry {
    /// `None` if the name is none of a lease.
    subnets: Option<Subnets>,
    /// The last text that made sense.
    good: Option<StoredLease>,
    /// Hash of the text or error that was complained about; `None` while all is well.
    bad: Option<u64>,
}

/// Where entries that make no sense are counted; `None` to pass over them in silence, for a
/// reader that is not the one who watches.
pub(super) type Complaints<'a> = Option<&'a Metrics>;

/// All lease files, as last read.
#[derive(Debug, Default)]
pub(super) struct View(HashMap<OsString, Entry>);

/// One file of the view.
#[derive(Clone, Copy, Debug)]
pub(super) struct ViewedLease<'a> {
    pub subnets: Subnets,
    /// The last text that made sense, if any ever did.
    pub lease: Option<&'a StoredLease>,
    /// What the file holds now makes no sense.
    pub bad: bool,
}

impl ViewedLease<'_> {
    /// A file that makes no sense keeps its last lease until it is mended or deleted.
    pub fn live_at(&self, now: SystemTime) -> bool {
        self.bad || self.lease.is_some_and(|lease| lease.live_at(now))
    }
}

impl View {
    /// Reads again what may have changed. An error means that the directory cannot be listed;
    /// single files that make no sense are complained about once for each text.
    pub fn refresh(
        &mut self,
        dir: &Directory,
        dirty: &Dirty,
        complaints: Complaints<'_>,
    ) -> io::Result<()> {
        let subnets_dir = dir.subnets();
        match dirty {
            Dirty::Names(names) => {
                for name in names {
                    self.read(&subnets_dir, name, complaints);
                }
            }
            Dirty::All => {
                let names: Vec<_> = fs::read_dir(&subnets_dir)?
                    .map(|entry| entry.map(|e| e.file_name()))
                    .collect::<Result<_, _>>()?;
                for name in &names {
                    self.read(&subnets_dir, name, complaints);
                }
                let names: std::collections::HashSet<_> = names.into_iter().collect();
                self.0.retain(|name, _| names.contains(name));
            }
        }
        Ok(())
    }

    fn read(&mut self, dir: &Path, name: &OsStr, complaints: Complaints<'_>) {
        let text_name = name.to_string_lossy();
        if text_name.starts_with('.') || !text_name.ends_with(".json") {
            return;
        }
        let path = dir.join(name);
        let read = match read_file(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                self.0.remove(name);
                return;
            }
            read => read,
        };
        let entry = match self.0.entry(name.to_owned()) {
            hash_map::Entry::Occupied(entry) => entry.into_mut(),
            hash_map::Entry::Vacant(entry) => {
                entry.insert(Entry { subnets: parse_file_name(&text_name), ..Entry::default() })
            }
        };
        let parsed = match (entry.subnets, &read) {
            (None, _) => Err("its name is not that of a subnet".to_owned()),
            (Some(_), Ok(text)) => StoredLease::parse(text).map_err(|e| e.to_string()),
            (Some(_), Err(e)) => Err(e.to_string()),
        };
        match parsed {
            Ok(lease) => {
                entry.good = Some(lease);
                entry.bad = None;
            }
            Err(reason) => {
                let mut hasher = DefaultHasher::new();
                (read.as_deref().ok().filter(|_| entry.subnets.is_some()), &reason)
                    .hash(&mut hasher);
                let hash = hasher.finish();
                let new = entry.bad.replace(hash) != Some(hash);
                if let (true, Some(metrics)) = (new, complaints) {
                    metrics.store_bad_entries.inc();
                    let kept = if entry.good.is_some() {
                        "keeping the last good value"
                    } else {
                        "ignored"
                    };
                    warn!("{}: {reason}; {kept} until it is mended or deleted", path.display());
                }
            }
        }
    }

    /// All files whose name is that of a lease.
    pub fn leases(&self) -> impl Iterator<Item = ViewedLease<'_>> {
        self.0.values().filter_map(|entry| {
            Some(ViewedLease {
                subnets: entry.subnets?,
                lease: entry.good.as_ref(),
                bad: entry.bad.is_some(),
            })
        })
    }

    /// The file of one lease.
    pub fn get(&self, subnets: Subnets) -> Option<ViewedLease<'_>> {
        let entry = self.0.get(OsStr::new(&file_name(subnets)))?;
        Some(ViewedLease { subnets, lease: entry.good.as_ref(), bad: entry.bad.is_some() })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn subnets(key: &str) -> Subnets {
        Subnets::parse_key(key).expect(key)
    }

    #[test]
    fn file_names_are_spelled_one_way_only() {
        for key in ["10.5.1.0-24", "10.5.1.0-24&fd00:5:1::-64"] {
            assert_eq!(parse_file_name(&format!("{key}.json")), Some(subnets(key)));
        }
        let v6 = Subnets { v4: None, v6: "fd00:5::/64".parse().ok() };
        assert_eq!(parse_file_name(&file_name(v6)), Some(v6));
        for bad in
            ["10.5.1.0-24", "x10.5.1.0-24.json", "10.5.1.7-24.json", "10.5.1.0-024.json", ".json"]
        {
            assert_eq!(parse_file_name(bad), None, "{bad}");
        }
    }

    #[test]
    fn the_file_is_the_etcd_value_with_an_end() {
        let attributes =
            LeaseAttributes { public_ip: "192.0.2.11".parse().ok(), ..LeaseAttributes::default() };
        let mut lease =
            StoredLease { attributes, expires: UNIX_EPOCH.checked_add(Duration::from_secs(99)) };
        assert_eq!(
            lease.render(),
            "{\"PublicIP\":\"192.0.2.11\",\"PublicIPv6\":null,\"Expires\":99}\n"
        );
        assert_eq!(StoredLease::parse(&lease.render()), Ok(lease.clone()));
        lease.expires = None;
        assert_eq!(lease.render(), lease.attributes.to_json() + "\n");
        assert_eq!(StoredLease::parse(&lease.render()), Ok(lease));
    }

    #[test]
    fn a_bad_file_is_counted_once_and_keeps_the_last_good_value() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = Directory::new(root.path().to_owned());
        dir.ensure_subnets().expect("made");
        let (metrics, mut view) = (Metrics::default(), View::default());
        let file = dir.subnets().join("10.5.1.0-24.json");
        let refresh = |view: &mut View| {
            view.refresh(&dir, &Dirty::All, Some(&metrics)).expect("listed");
            metrics.store_bad_entries.get()
        };
        fs::write(&file, r#"{"PublicIP":"192.0.2.11","Expires":1}"#).expect("written");
        fs::write(dir.subnets().join(".lease-abc"), "{").expect("written");
        fs::write(dir.subnets().join("README"), "x").expect("written");
        assert_eq!(refresh(&mut view), 0);
        let now = SystemTime::now();
        assert_eq!(view.leases().filter(|l| l.live_at(now)).count(), 0, "it has expired");

        fs::write(&file, "{garbage").expect("written");
        assert_eq!(refresh(&mut view), 1);
        assert_eq!(refresh(&mut view), 1, "the same text is complained about once");
        let lease = view.leases().next().expect("kept");
        assert!(lease.bad && lease.live_at(now));
        assert_eq!(lease.lease.and_then(|l| l.attributes.public_ip), "192.0.2.11".parse().ok());
        fs::write(&file, "other garbage").expect("written");
        assert_eq!(refresh(&mut view), 2);
        fs::write(dir.subnets().join("junk.json"), "{}").expect("written");
        fs::create_dir(dir.subnets().join("10.5.2.0-24.json")).expect("made");
        assert_eq!(refresh(&mut view), 4);
        fs::remove_file(&file).expect("removed");
        assert_eq!(refresh(&mut view), 4);
        assert!(view.get(subnets("10.5.1.0-24")).is_none());
    }

    #[test]
    fn the_lock_excludes() {
        let root = tempfile::tempdir().expect("a directory");
        let dir = Directory::new(root.path().to_owned());
        let lock = dir.try_lock().expect("no error");
        assert!(lock.is_some());
        assert!(dir.try_lock().expect("no error").is_none());
        drop(lock);
        assert!(dir.try_lock().expect("no error").is_some());
    }

    proptest! {
        #[test]
        fn no_text_or_name_makes_a_reader_panic(text in any::<String>(), name in any::<String>()) {
            let _ = StoredLease::parse(&text);
            let _ = parse_file_name(&name);
        }
    }
}
