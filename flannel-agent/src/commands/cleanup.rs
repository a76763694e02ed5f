//! `flannel-agent cleanup`: what was removed, what was left and why.

use std::{
    collections::BTreeMap,
    io::{self, Write},
};

use anyhow::Context;

use crate::{
    cleanup::{self, Places, Report},
    cli::{CleanupArgs, Output},
};

/// Kinds of which there may be thousands: counted for people, listed for machines.
const COUNTED: [&str; 3] = ["route", "neighbour", "fdb"];

/// Removes, and prints what came of it. Exit status 0 if nothing of an agent's is left.
pub fn run(args: &CleanupArgs, out: &mut impl Write) -> anyhow::Result<u8> {
    let places = Places {
        subnet_file: args.subnet_file.clone(),
        state_dir: args.state_dir.clone(),
        pin_dir: args.bpf_pin_dir.clone(),
        control_socket: args.client.control_socket.clone(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let report = runtime.context("cannot start")?.block_on(cleanup::run(&places))?;
    match args.client.output {
        Output::Json => writeln!(out, "{}", serde_json::to_string(&report)?)?,
        Output::Text => print(&report, out)?,
    }
    Ok(u8::from(!report.problems.is_empty()))
}

fn print(report: &Report, out: &mut impl Write) -> io::Result<()> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for thing in &report.removed {
        if COUNTED.contains(&thing.kind) {
            *counts.entry(thing.kind).or_default() += 1;
        } else {
            writeln!(out, "removed {} {}", thing.kind, thing.name)?;
        }
    }
    for (kind, count) in counts {
        writeln!(out, "removed {count} {kind} {}", if count == 1 { "entry" } else { "entries" })?;
    }
    for left in &report.left {
        writeln!(out, "left: {left}")?;
    }
    for problem in &report.problems {
        writeln!(out, "{problem}")?;
    }
    if *report == Report::default() {
        writeln!(out, "nothing to remove")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cleanup::Thing;

    #[test]
    fn many_of_a_kind_are_counted() {
        let thing = |kind, name: &str| Thing { kind, name: name.to_owned() };
        let report = Report {
            removed: vec![
                thing("route", "10.77.2.0/24 via 10.77.2.0 dev flannel.1"),
                thing("route", "10.77.3.0/24 via 10.77.3.0 dev flannel.1"),
                thing("device", "flannel.1"),
            ],
            left: vec!["device flannel.9 is somebody's".to_owned()],
            problems: Vec::new(),
        };
        let mut out = Vec::new();
        print(&report, &mut out).expect("written");
        let text = String::from_utf8(out).expect("text");
        assert_eq!(
            text,
            "removed device flannel.1\nremoved 2 route entries\nleft: device flannel.9 is \
             somebody's\n"
        );
        let mut out = Vec::new();
        print(&Report::default(), &mut out).expect("written");
        assert_eq!(out, b"nothing to remove\n");
    }
}
