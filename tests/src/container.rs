//! A container without a container runtime: an OCI image unpacked on a node, with the mounts and
//! capabilities that a kubelet would give it.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{node::Node, process};

/// An image on a node, ready to run programs of.
#[derive(Debug)]
pub struct Container<'a> {
    node: &'a Node,
    root: PathBuf,
    /// The image's configuration.
    pub config: Value,
    capabilities: String,
}

/// What a container gets of its host.
#[derive(Clone, Copy, Debug)]
pub struct Grants<'a> {
    /// Capabilities besides the right to call chroot, by which we come in: `net_admin`.
    pub capabilities: &'a [&'a str],
    /// Paths of the host and where they are mounted. The directories are made.
    pub mounts: &'a [(&'a Path, &'a str)],
    /// Whether the root is read-only. `/sys` and `/proc/sys` always are, as in every container
    /// without privileges.
    pub read_only: bool,
}

impl<'a> Container<'a> {
    /// Unpacks the image that `$FLANNEL_IMAGE` names and mounts what it is given.
    pub fn create(node: &'a Node, grants: &Grants<'_>) -> Result<Self> {
        let Some(archive) = env::var_os("FLANNEL_IMAGE") else {
            bail!("FLANNEL_IMAGE names no image: run `cargo xtask test lab`")
        };
        let root = node.dir().join("root");
        let config = unpack(archive.as_ref(), &node.dir().join("oci"), &root)?;
        let more: Vec<_> = grants.capabilities.iter().map(|name| format!(",+{name}")).collect();
        let capabilities = format!("--bounding-set=-all,+sys_chroot{}", more.concat());
        let container = Self { node, root, config, capabilities };
        container.mount(grants)?;
        Ok(container)
    }

    fn mount(&self, grants: &Grants<'_>) -> Result<()> {
        let root = self.root.display();
        // A runtime makes the places of mounts before it closes the root.
        let places = grants.mounts.iter().map(|(host, inside)| {
            let host = host.display();
            format!(
                "if [ -d {host} ]; then mkdir -p {root}{inside}; else
                    mkdir -p $(dirname {root}{inside}); touch {root}{inside}; fi"
            )
        });
        let mounts = grants.mounts.iter().map(|(host, inside)| {
            let host = host.display();
            format!("mount --bind {host} {root}{inside}")
        });
        let read_only = |path: &str| format!("mount -o remount,bind,ro {root}{path}");
        let mut lines = vec!["set -e; mkdir -p /run/flannel; touch /run/xtables.lock".to_owned()];
        lines.extend(places);
        lines.push(format!("mount --bind {root} {root}"));
        if grants.read_only {
            lines.push(read_only(""));
        }
        for (bind, path) in [
            (format!("--rbind /proc {root}/proc"), "/proc"),
            (format!("--bind {root}/proc/sys {root}/proc/sys"), "/proc/sys"),
            (format!("--bind /sys {root}/sys"), "/sys"),
        ] {
            lines.push(format!("mount {bind}"));
            if path != "/proc" {
                lines.push(read_only(path));
            }
        }
        lines.extend(mounts);
        let script = lines.join("\n");
        let output = self.node.shell(&script)?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    /// A program of the image as the container runs it.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = self.node.command("setpriv");
        command.args([&*self.capabilities, "--inh-caps=-all", "chroot"]);
        command.arg(&self.root).args(words);
        command.env_clear().env("PATH", "/opt/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// Runs such a program to its end and returns what it said.
    pub fn run(&self, words: &[&str]) -> Result<String> {
        process::output(&mut self.command(words))
    }
}

fn sha256(path: &Path) -> Result<String> {
    let line = process::output(Command::new("sha256sum").arg(path))?;
    Ok(line.split_whitespace().next().context("no digest")?.to_owned())
}

fn json_file(path: &Path) -> Result<Value> {
    Ok(serde_json::from_str(&fs::read_to_string(path)?)?)
}

/// Unpacks an OCI archive as a runtime does, every digest checked. Returns the image's
/// configuration.
fn unpack(archive: &Path, layout: &Path, root: &Path) -> Result<Value> {
    fs::create_dir_all(layout)?;
    fs::create_dir_all(root)?;
    process::output(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(layout))?;
    let version = json_file(&layout.join("oci-layout"))?;
    ensure!(version["imageLayoutVersion"] == "1.0.0", "{version}");
    let blob = |descriptor: &Value| -> Result<PathBuf> {
        let digest = descriptor["digest"].as_str().context("no digest")?;
        let path = layout.join("blobs").join(digest.replace(':', "/"));
        ensure!(digest == format!("sha256:{}", sha256(&path)?), "{digest} is another's");
        ensure!(descriptor["size"] == fs::metadata(&path)?.len(), "{digest}: its size");
        Ok(path)
    };
    let index = json_file(&layout.join("index.json"))?;
    let manifest = json_file(&blob(&index["manifests"][0])?)?;
    let config = json_file(&blob(&manifest["config"])?)?;
    let layers = manifest["layers"].as_array().context("no layers")?;
    let contents = config["rootfs"]["diff_ids"].as_array().context("no diff_ids")?;
    ensure!(layers.len() == contents.len(), "{manifest:#} {config:#}");
    for (layer, content) in layers.iter().zip(contents) {
        let tar = layout.join("layer.tar");
        let mut unzip = Command::new("gzip");
        unzip.arg("-dc").arg(blob(layer)?).stdout(fs::File::create(&tar)?);
        ensure!(unzip.status()?.success(), "a layer is no gzip file");
        ensure!(*content == format!("sha256:{}", sha256(&tar)?), "another content: {content}");
        process::output(Command::new("tar").arg("-xpf").arg(&tar).arg("-C").arg(root))?;
    }
    Ok(config)
}
