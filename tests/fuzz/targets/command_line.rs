//! A command line and an environment, in lines: `NAME=value` are variables, the others words.

#![no_main]

use std::ffi::{OsStr, OsString};

use flannel_agent::cli;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let (variables, words): (Vec<&str>, Vec<&str>) =
        text.lines().partition(|line| line.starts_with("FLANNELD_"));
    let variable = |name: &str| {
        let mut pairs = variables.iter().filter_map(|line| line.split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
    };
    if let Err(exit) = cli::parse(words.iter().map(OsString::from), &variable) {
        assert!(!exit.message.is_empty());
        assert!(OsStr::new(&exit.message).to_str().is_some());
    }
});
