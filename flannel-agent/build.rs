//! Embeds the object with the eBPF programs, if it has been built.
//!
//! `cargo xtask build-ebpf` puts it at `target/bpf/flannel-ebpf`; the variable
//! `FLANNEL_EBPF_OBJECT` names another one. No BPF toolchain is needed here.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

const VARIABLE: &str = "FLANNEL_EBPF_OBJECT";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={VARIABLE}");
    let named = env::var_os(VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let object = named.clone().unwrap_or_else(|| manifest.join("../target/bpf/flannel-ebpf"));
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_default()).join("embedded_object.rs");
    let source = match fs::read(&object) {
        Ok(_) => {
            println!("cargo::rerun-if-changed={}", object.display());
            if named.is_none() {
                warn_if_outdated(&object, &manifest);
            }
            // Only a string can be a path in the source; a path that is none is refused.
            match fs::canonicalize(&object).ok().as_deref().and_then(Path::to_str) {
                // The ELF parser asks for the alignment.
                Some(path) => format!(
                    "{{ #[repr(align(8))] struct Aligned<T>(T); \
                     Some(&Aligned(*include_bytes!({path:?})).0) }}"
                ),
                None => return println!("cargo::error=the path {} is not UTF-8", object.display()),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && named.is_none() => {
            watch_for(&object);
            "None".to_owned()
        }
        Err(error) => {
            return println!("cargo::error=cannot read {}: {error}", object.display());
        }
    };
    if let Err(error) = fs::write(&out, source) {
        println!("cargo::error=cannot write {}: {error}", out.display());
    }
}

/// Says if the programs' sources have changed since they were built: the agent would find no such
/// programs in the object as it looks for, or worse.
fn warn_if_outdated(object: &Path, manifest: &Path) {
    let modified = |path: &Path| fs::metadata(path).and_then(|data| data.modified()).ok();
    // When the newest source changed that is in the object, in nanoseconds since the epoch.
    let stamp = object.with_extension("built");
    let Ok(built) = fs::read_to_string(&stamp) else { return };
    println!("cargo::rerun-if-changed={}", stamp.display());
    let Ok(nanoseconds) = built.parse() else { return };
    let built = SystemTime::UNIX_EPOCH + Duration::from_nanos(nanoseconds);
    for sources in ["../flannel-ebpf/src", "../flannel-common/src"] {
        let sources = manifest.join(sources);
        println!("cargo::rerun-if-changed={}", sources.display());
        let mut directories = vec![sources];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                let path = entry.path();
                if path.is_dir() {
                    directories.push(path);
                } else if modified(&path).is_some_and(|changed| changed > built) {
                    return println!(
                        "cargo::warning={} has changed since the eBPF programs were built: run \
                         `cargo xtask build-ebpf`",
                        path.display()
                    );
                }
            }
        }
    }
}

/// Has the build run again once the object is there. A path that does not exist would make it
/// run every time, so this watches the directory in which the object will appear.
fn watch_for(object: &Path) {
    let Some(directory) = object.parent() else { return };
    if !directory.is_dir() {
        // Changed after this build began, it would make the next one run for nothing.
        let made = fs::create_dir_all(directory).and_then(|()| fs::File::open(directory));
        let long_ago = made.and_then(|made| made.set_modified(SystemTime::UNIX_EPOCH));
        if long_ago.is_err() {
            return;
        }
    }
    println!("cargo::rerun-if-changed={}", directory.display());
}
