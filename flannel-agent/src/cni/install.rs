//! `install-cni`: puts the plugin and its configuration list into the host's directories, the job
//! of the `DaemonSet`'s init container; and `install-conf`, the same for one file.

use std::{
    ffi::OsString,
    fs,
    io::{self, Read, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The plugin's name, which configurations name as its `type`.
const PLUGIN: &str = "flannel";

/// A file of ours under another name this old was left by a run that was killed.
const ABANDONED_AFTER: Duration = Duration::from_mins(10);

/// What to install, from where to where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The plugin; by default the file `flannel` beside this program.
    pub plugin: Option<PathBuf>,
    /// The runtime's directory of plugins; `None` installs no plugin.
    pub bin_dir: Option<PathBuf>,
    /// The configuration list.
    pub conflist: PathBuf,
    /// Where the runtime reads it; `None` installs no configuration.
    pub conf_file: Option<PathBuf>,
}

/// What became of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was written.
    Written,
    /// It was there already, with this content and mode.
    Unchanged,
}

/// Installs the plugin, then the configuration: a runtime takes the configuration's appearance as
/// the sign that the network is there.
pub fn run(plan: &Plan, out: &mut impl Write) -> Result<u8> {
    if let Some(dir) = &plan.bin_dir {
        let source = match &plan.plugin {
            Some(path) => path.clone(),
            None => std::env::current_exe()
                .context("cannot tell where this program is; name the plugin with --plugin")?
                .with_file_name(PLUGIN),
        };
        ensure!(
            is_program(&source)?,
            "{} is no program for Linux: name the plugin with --plugin",
            source.display()
        );
        report(out, &dir.join(PLUGIN), install(&source, &dir.join(PLUGIN), Some(0o755))?)?;
    }
    if let Some(target) = &plan.conf_file {
        let text = fs::read_to_string(&plan.conflist)
            .with_context(|| format!("cannot read {}", plan.conflist.display()))?;
        check_configuration(&text)
            .with_context(|| format!("{} is not installed", plan.conflist.display()))?;
        report(out, target, install(&plan.conflist, target, Some(0o644))?)?;
    }
    Ok(0)
}

/// `install-conf SOURCE TARGET`, as flannel's image has it: one file, with its mode.
pub fn run_conf(words: &[OsString], out: &mut impl Write) -> Result<u8> {
    let [source, target] = words else { bail!("usage: install-conf SOURCE TARGET") };
    report(out, Path::new(target), install(Path::new(source), Path::new(target), None)?)?;
    Ok(0)
}

fn report(out: &mut impl Write, target: &Path, outcome: Outcome) -> Result<()> {
    let word = match outcome {
        Outcome::Written => "written",
        Outcome::Unchanged => "up to date",
    };
    writeln!(out, "{}: {word}", target.display()).context("cannot write to standard output")
}

/// Copies a file in one step: who looks sees the old content or the new, and one that is running
/// goes on running. Makes missing directories. Without a mode it takes the source's.
fn install(source: &Path, target: &Path, mode: Option<u32>) -> Result<Outcome> {
    let content = fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
    let mode = match mode {
        Some(mode) => mode,
        None => fs::metadata(source)?.permissions().mode() & 0o7777,
    };
    let same_mode = || {
        fs::symlink_metadata(target)
            .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o7777 == mode)
    };
    let dir = target.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = target.file_name().with_context(|| format!("{} names no file", target.display()))?;
    let prefix = format!(".{}.tmp", name.display());
    if same_mode() && fs::read(target).is_ok_and(|old| old == content) {
        return Ok(Outcome::Unchanged);
    }
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    sweep(dir, &prefix);
    replace(dir, &prefix, target, &content, mode).with_context(|| {
        format!("cannot write {}; is its directory mounted writable?", target.display())
    })?;
    Ok(Outcome::Written)
}

fn replace(dir: &Path, prefix: &str, target: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    // Runtimes read no files with such a name.
    let mut temp = tempfile::Builder::new().prefix(prefix).tempfile_in(dir)?;
    temp.write_all(content)?;
    temp.as_file().set_permissions(fs::Permissions::from_mode(mode))?;
    temp.as_file().sync_all()?;
    temp.persist(target)?;
    fs::File::open(dir)?.sync_all()
}

/// Removes what earlier runs left half written. Failing is harmless: nobody reads those files.
fn sweep(dir: &Path, prefix: &str) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let ours = entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix));
        let old = || {
            let changed = entry.metadata().ok()?.modified().ok()?;
            Some(SystemTime::now().duration_since(changed).ok()? > ABANDONED_AFTER)
        };
        if ours && old() == Some(true) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn is_program(path: &Path) -> Result<bool> {
    let mut magic = [0; 4];
    let mut file =
        fs::File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    Ok(file.read_exact(&mut magic).is_ok() && magic == *b"\x7fELF")
}

/// A configuration that the runtime could not read would take every pod's network away.
fn check_configuration(text: &str) -> Result<()> {
    let value: Value = serde_json::from_str(text).context("it is not JSON")?;
    ensure!(value["name"].is_string(), "it has no name");
    let plugins: Vec<&Value> = match value["plugins"].as_array() {
        Some(plugins) => plugins.iter().collect(),
        None => vec![&value],
    };
    ensure!(
        !plugins.is_empty() && plugins.iter().all(|plugin| plugin["type"].is_string()),
        "a plugin in it has no type"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFLIST: &str = r#"{"name":"cbr0","plugins":[{"type":"flannel"}]}"#;

    fn setting() -> (tempfile::TempDir, Plan) {
        let dir = tempfile::tempdir().expect("a directory");
        let path = |name: &str| dir.path().join(name);
        fs::write(path("plugin"), b"\x7fELF one").expect("written");
        fs::write(path("cni-conf.json"), CONFLIST).expect("written");
        let plan = Plan {
            plugin: Some(path("plugin")),
            bin_dir: Some(path("bin")),
            conflist: path("cni-conf.json"),
            conf_file: Some(path("net.d/10-flannel.conflist")),
        };
        (dir, plan)
    }

    fn text(plan: &Plan) -> Result<String> {
        let mut out = Vec::new();
        run(plan, &mut out)?;
        Ok(String::from_utf8(out)?)
    }

    #[test]
    fn it_writes_once_and_leaves_others_files_alone() {
        let (dir, plan) = setting();
        let bin = dir.path().join("bin");
        fs::create_dir(&bin).expect("made");
        fs::write(bin.join("bridge"), "another's").expect("written");
        fs::write(bin.join(".flannel.tmpold"), "half").expect("written");
        let long_ago = SystemTime::now() - 2 * ABANDONED_AFTER;
        let half = fs::File::options().write(true).open(bin.join(".flannel.tmpold"));
        half.and_then(|file| file.set_modified(long_ago)).expect("made old");

        assert_eq!(text(&plan).expect("installed").matches(": written").count(), 2);
        let mut names: Vec<_> =
            fs::read_dir(&bin).expect("there").flatten().map(|e| e.file_name()).collect();
        names.sort();
        assert_eq!(names, ["bridge", "flannel"]);
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!(mode(&bin.join("flannel")), 0o755);
        assert_eq!(mode(&dir.path().join("net.d/10-flannel.conflist")), 0o644);

        assert_eq!(text(&plan).expect("again").matches(": up to date").count(), 2);
        fs::write(plan.plugin.as_ref().expect("named"), b"\x7fELF two").expect("written");
        let third = text(&plan).expect("updated");
        assert_eq!((third.matches(": written").count(), third.lines().count()), (1, 2), "{third}");
        assert_eq!(fs::read(bin.join("flannel")).ok().as_deref(), Some(&b"\x7fELF two"[..]));
    }

    #[test]
    fn nothing_broken_is_installed() {
        let (dir, plan) = setting();
        for bad in ["", "{", r#"{"plugins":[]}"#, r#"{"name":"x","plugins":[{}]}"#] {
            fs::write(&plan.conflist, bad).expect("written");
            text(&plan).expect_err(bad);
            assert!(!dir.path().join("net.d").exists(), "{bad}");
        }
        fs::write(plan.plugin.as_ref().expect("named"), "#!/bin/sh").expect("written");
        let error = format!("{:#}", text(&plan).expect_err("a script"));
        assert!(error.contains("no program"), "{error}");
    }

    #[test]
    fn one_file_is_installed_with_its_mode() {
        let (dir, plan) = setting();
        fs::set_permissions(&plan.conflist, fs::Permissions::from_mode(0o600)).expect("set");
        let target = dir.path().join("x/10-flannel.conflist");
        let words = [plan.conflist.clone().into(), target.clone().into()];
        run_conf(&words, &mut Vec::new()).expect("installed");
        assert_eq!(fs::read_to_string(&target).ok().as_deref(), Some(CONFLIST));
        assert_eq!(fs::metadata(&target).expect("there").permissions().mode() & 0o777, 0o600);
        run_conf(&words[..1], &mut Vec::new()).expect_err("one word");
    }
}
