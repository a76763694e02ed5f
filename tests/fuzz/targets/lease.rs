//! A lease as another node wrote it: the first line is its key, the rest its value. What is
//! understood is written back so that it is understood the same.

#![no_main]

use flannel_agent::lease::{LeaseAttributes, Subnets};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
    let (key, value) = bytes.split_at(end);
    if let Some(subnets) = Subnets::parse_key(&String::from_utf8_lossy(key)) {
        assert_eq!(Subnets::parse_key(&subnets.key()), Some(subnets));
    }
    if let Ok(attributes) = LeaseAttributes::from_json(value) {
        let written = attributes.to_json();
        // What is embedded is written with Go's escapes, and stays so.
        let again = LeaseAttributes::from_json(&written).map(|read| read.to_json());
        assert_eq!(again.as_ref(), Ok(&written));
    }
});
