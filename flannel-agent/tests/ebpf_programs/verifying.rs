//! What the kernel's verifier has to go through: loading takes time, and a million is the end.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use aya::{maps::MapInfo, programs::loaded_programs};

use super::{load, namespace::in_namespace};

/// The bound of instructions that the verifier goes through for a program, on all ways together.
/// A loop or a branch too many multiplies them.
const AT_MOST: u32 = 30_000;

/// All programs that use one of the pinned maps; the self test uses none.
const PROGRAMS: [&str; 6] = [
    "pod_egress",
    "pod_guard",
    "pod_ingress",
    "tunnel_egress",
    "tunnel_ingress",
    "underlay_ingress",
];

/// The identifiers of the maps that are pinned below a directory.
fn pinned_maps(directory: &Path, found: &mut BTreeSet<u32>) {
    for entry in fs::read_dir(directory).expect("a directory") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            pinned_maps(&path, found);
        } else if let Ok(map) = MapInfo::from_pin(&path) {
            found.insert(map.id());
        }
    }
}

/// How many instructions were gone through, by program. Others may have loaded the same programs;
/// ours use our maps.
fn verified(directory: &Path) -> BTreeMap<String, u32> {
    let mut ours = BTreeSet::new();
    pinned_maps(directory, &mut ours);
    loaded_programs()
        // One of somebody else may be gone meanwhile.
        .filter_map(Result::ok)
        .filter(|program| {
            let maps = program.map_ids().ok().flatten().unwrap_or_default();
            maps.iter().any(|map| ours.contains(map))
        })
        .filter_map(|program| {
            let name = program.name_as_str()?.to_owned();
            Some((name, program.verified_instruction_count().expect("Linux 5.16")))
        })
        .collect()
}

#[test]
#[ignore = "needs root"]
fn no_program_is_too_long_to_verify() {
    in_namespace(|dir| {
        let _datapath = load(dir);
        let verified = verified(dir);
        println!("{verified:?}");
        let names: Vec<&str> = verified.keys().map(String::as_str).collect();
        assert_eq!(names.len(), PROGRAMS.len(), "{names:?}");
        // Without BTF the kernel knows only the first 15 characters.
        let same = names.iter().zip(PROGRAMS).all(|(name, program)| program.starts_with(name));
        assert!(same, "{names:?}");
        for (name, count) in verified {
            assert!(count <= AT_MOST, "{name}: {count} instructions");
        }
    });
}
