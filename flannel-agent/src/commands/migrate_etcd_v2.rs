//! `flannel-agent migrate-etcd-v2`: from etcd's v2 API to the keys of v3.

use std::io::Write;

use anyhow::Context;
use serde_json::{Value, json};

use super::table;
use crate::{
    cli::{MigrateArgs, Output},
    startup,
    subnet_manager::etcd::migrate::{self, Entry, Fate},
};

/// Carries everything over, or shows what would be. Exit status 0 if v3 now has (or would have)
/// everything, 1 if something was left out.
pub fn run(args: &MigrateArgs, out: &mut impl Write) -> anyhow::Result<u8> {
    let options = startup::etcd_options(&args.etcd);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let entries = runtime.block_on(migrate::migrate(&options, args.dry_run))?;
    let left_out = |entry: &&Entry| matches!(entry.action, Fate::Differs | Fate::Skip);
    let left_out = entries.iter().filter(left_out).count();
    match args.output {
        Output::Json => {
            let shown = json!({ "dry_run": args.dry_run, "entries": entries });
            writeln!(out, "{shown}")?;
        }
        Output::Text if entries.is_empty() => {
            let (prefix, endpoints) = (&options.prefix, options.endpoints.join(","));
            writeln!(out, "nothing is kept under {prefix} with the v2 API of {endpoints}")?;
        }
        Output::Text => {
            let rows = entries.iter().map(serde_json::to_value);
            let rows = rows.collect::<Result<Vec<Value>, _>>().context("no table")?;
            out.write_all(table::of_objects(&rows).as_bytes())?;
            let written = entries.iter().filter(|entry| entry.action == Fate::Write).count();
            let verb = if args.dry_run { "would be written" } else { "written" };
            writeln!(out, "{written} of {} keys {verb}, {left_out} left out", entries.len())?;
        }
    }
    Ok(u8::from(left_out > 0))
}
