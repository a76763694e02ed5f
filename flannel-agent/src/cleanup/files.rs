//! Files: what remembers MACs and subnets, and the control socket.

use std::{
    collections::BTreeSet,
    fs, io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
};

use super::{Places, Report};
use crate::subnet_env::SubnetFile;

/// The devices whose MACs are kept in the state directory: `<device>@<address>.mac`.
pub fn recorded_devices(state_dir: &Path) -> BTreeSet<String> {
    mac_files(state_dir).into_iter().map(|(device, _)| device).collect()
}

fn mac_files(state_dir: &Path) -> Vec<(String, PathBuf)> {
    let Ok(entries) = fs::read_dir(state_dir) else { return Vec::new() };
    let of_device = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.strip_suffix(".mac")?;
        let (device, _) = name.split_once('@')?;
        device.starts_with("flannel").then(|| (device.to_owned(), path.clone()))
    };
    entries.flatten().filter_map(|entry| of_device(entry.path())).collect()
}

/// Removes our files, but for the records of devices that are still there (`rest`).
pub fn remove(
    places: &Places,
    subnet_file: &SubnetFile,
    rest: &BTreeSet<String>,
    report: &mut Report,
) {
    let macs = mac_files(&places.state_dir).into_iter();
    let mut files: Vec<PathBuf> =
        macs.filter(|(device, _)| !rest.contains(device)).map(|(_, path)| path).collect();
    if rest.is_empty() {
        files.extend(subnet_file.all_files());
    }
    let socket = fs::symlink_metadata(&places.control_socket);
    if socket.is_ok_and(|found| found.file_type().is_socket()) {
        files.push(places.control_socket.clone());
    }
    for file in &files {
        // The lock is made by looking whether an agent runs: not worth a word.
        let outcome = remove_file(file);
        if *file == subnet_file.lock_path() && outcome.is_ok() {
            continue;
        }
        report.note("file", &file.display().to_string(), outcome);
    }
    // Directories that others use as well are not empty.
    let directories = files.iter().filter_map(|file| file.parent());
    for directory in directories.chain([places.state_dir.as_path()]).collect::<BTreeSet<_>>() {
        if is_ours(directory) {
            let _ = fs::remove_dir(directory);
        }
    }
}

/// `/run/flannel`, `/var/lib/flannel`: an empty directory of another name may be somebody's.
fn is_ours(directory: &Path) -> bool {
    directory.file_name().is_some_and(|name| name == "flannel")
}

fn remove_file(path: &Path) -> Result<bool, String> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(err) if err.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(err) => Err(err.to_string()),
    }
}
