//! The embedded object: loading it, or saying why that cannot be.

use std::{fs, path::Path};

use aya::{
    Ebpf, EbpfLoader,
    programs::{ProgramError, SchedClassifier},
};

use super::{EbpfError, hook::HOOKS, pin, self_test::SELF_TEST};

/// The object that the build found.
static EMBEDDED: Option<&[u8]> = include!(concat!(env!("OUT_DIR"), "/embedded_object.rs"));

/// Capabilities by their bit numbers (linux/capability.h): each, or `CAP_SYS_ADMIN`. Without
/// `CAP_PERFMON` the verifier refuses the variable stack offsets that the compiler makes.
const NEEDED: [(u32, &str); 3] = [(39, "CAP_BPF"), (12, "CAP_NET_ADMIN"), (38, "CAP_PERFMON")];
const SYS_ADMIN: u32 = 21;

/// How much of a verifier's complaint fits into a message; the end tells the reason.
const VERIFIER_TAIL: usize = 600;

/// Loads maps and programs. Maps pinned in `maps` are adopted, the others created and pinned.
pub(super) fn load(maps: &Path, log: bool) -> Result<Ebpf, EbpfError> {
    let object = EMBEDDED.ok_or(EbpfError::NotBuilt)?;
    let level = if log { aya_log::Level::Info as u8 } else { 0 };
    let mut loader = EbpfLoader::new();
    // A constant that the verifier sees, so that what logs less is not even there.
    loader.override_global(aya_log::LEVEL, &level, true);
    for shape in &pin::MAPS {
        loader.map_pin_path(shape.name, maps.join(shape.name));
    }
    let mut ebpf = loader.load(object).map_err(|error| EbpfError::Load(chain(&error)))?;
    for name in HOOKS.map(|hook| hook.program).into_iter().chain([SELF_TEST]) {
        program(&mut ebpf, name)?.load().map_err(|error| match error {
            ProgramError::LoadError { io_error, verifier_log } => EbpfError::Verifier {
                program: name,
                reason: io_error,
                tail: tail(&verifier_log.to_string()),
            },
            other => EbpfError::Load(chain(&other)),
        })?;
    }
    Ok(ebpf)
}

/// A program of the object.
pub(super) fn program<'a>(
    ebpf: &'a mut Ebpf,
    name: &str,
) -> Result<&'a mut SchedClassifier, EbpfError> {
    let program = ebpf.program_mut(name);
    program
        .and_then(|program| program.try_into().ok())
        .ok_or_else(|| EbpfError::Load(format!("no program {name} in the object")))
}

/// Whether there is an object at all.
pub(super) fn check_built() -> Result<(), EbpfError> {
    EMBEDDED.map(|_| ()).ok_or(EbpfError::NotBuilt)
}

/// Whether this process may load programs and attach them.
pub(super) fn check_capabilities() -> Result<(), EbpfError> {
    let status = fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    // Where there is no /proc, the kernel's own answer to the attempt has to do.
    let missing = effective(&status).map(missing).unwrap_or_default();
    if missing.is_empty() { Ok(()) } else { Err(EbpfError::Capabilities(missing.join(" and "))) }
}

fn effective(status: &str) -> Option<u64> {
    let field = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    u64::from_str_radix(field.trim(), 16).ok()
}

fn missing(effective: u64) -> Vec<&'static str> {
    let has = |bit: u32| effective >> bit & 1 == 1;
    NEEDED.iter().filter(|(bit, _)| !has(*bit) && !has(SYS_ADMIN)).map(|(_, name)| *name).collect()
}

/// An error with its causes in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// The end of a verifier's complaint, in one line.
pub(super) fn tail(text: &str) -> String {
    last(text, VERIFIER_TAIL)
}

/// The last `max` bytes or a little less, in one line.
fn last(text: &str, max: usize) -> String {
    let text = text.trim();
    let mut start = text.len().saturating_sub(max);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    text[start..].lines().map(str::trim).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_are_named() {
        let status = "Name:\tx\nCapPrm:\t0\nCapEff:\t0000004000001000\n";
        assert_eq!(missing(effective(status).expect("a set")), ["CAP_BPF"]);
        assert_eq!(missing(0), ["CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON"]);
        assert_eq!(missing(1 << 39 | 1 << 12), ["CAP_PERFMON"]);
        assert_eq!(missing(1 << 39 | 1 << 12 | 1 << 38), [""; 0]);
        assert_eq!(missing(1 << 21), [""; 0]);
        assert_eq!(effective("Name:\tx\n"), None);
    }

    #[test]
    fn the_end_of_a_complaint_is_kept() {
        assert_eq!(last("one\n  two\nthree\n", 100), "one; two; three");
        assert_eq!(last("ääää", 3), "ä");
        assert_eq!(last("", 3), "");
    }
}
