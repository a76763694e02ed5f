//! `cargo xtask test [unit|lab|all]`.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::{image, tool};

/// Arguments of `test`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Which tests
    #[arg(value_enum, default_value_t = Part::All)]
    part: Part,
    /// Only tests whose name contains this
    #[arg(long)]
    filter: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Unit and property tests; no privileges needed
    Unit,
    /// Stories with the real agent in namespaces; as root
    Lab,
    /// Both
    All,
}

/// How often a test that failed is tried again: stories have deadlines, and the machine may stall.
const RETRIES: &str = "2";

/// Lab stories wait more than they compute.
const LAB_THREADS: &str = "4";

/// One run of the test runner.
struct Suite {
    name: &'static str,
    packages: &'static [&'static str],
    /// Also the tests that are ignored without root.
    ignored: bool,
    threads: Option<&'static str>,
}

const UNIT: Suite = Suite {
    name: "unit",
    packages: &["flannel-agent", "flannel-common", "xtask"],
    ignored: false,
    threads: None,
};

const LAB: Suite =
    Suite { name: "lab", packages: &["flannel-lab"], ignored: true, threads: Some(LAB_THREADS) };

/// Tests of the agent's own that need root.
const PRIVILEGED: Suite = Suite {
    name: "privileged",
    packages: &["flannel-agent"],
    ignored: true,
    threads: Some(LAB_THREADS),
};

/// Runs the tests; the error says which part failed.
pub fn run(arguments: &Arguments) -> Result<()> {
    let suites: &[&Suite] = match arguments.part {
        Part::Unit => &[&UNIT],
        Part::Lab => &[&PRIVILEGED, &LAB],
        Part::All => &[&UNIT, &PRIVILEGED, &LAB],
    };
    if arguments.part != Part::Unit && !tool::is_root()? {
        bail!("the lab makes network namespaces: run as root, or run `cargo xtask test unit`");
    }
    let agent = tool::build_agent(false)?;
    let image = if arguments.part == Part::Unit { None } else { Some(image::for_tests(&agent)?) };
    let nextest = has_nextest();
    let mut closing = Vec::new();
    let mut failed = Vec::new();
    for suite in suites {
        let start = Instant::now();
        let (passed, lines) =
            suite.run(nextest, &agent, image.as_deref(), arguments.filter.as_deref())?;
        for line in lines {
            closing.push(format!("{:<10} {line}", suite.name));
        }
        closing.push(format!("{:<10} took {:.1} s", suite.name, start.elapsed().as_secs_f64()));
        if !passed {
            failed.push(suite.name);
        }
    }
    // What a killed test left is removed by the next run; there may be none.
    flannel_lab::run::sweep()?;
    println!();
    for line in closing {
        println!("{line}");
    }
    if !failed.is_empty() {
        bail!("tests failed: {}", failed.join(", "));
    }
    Ok(())
}

impl Suite {
    /// Runs it; whether it passed, and the runner's closing lines.
    fn run(
        &self,
        nextest: bool,
        agent: &Path,
        image: Option<&Path>,
        filter: Option<&str>,
    ) -> Result<(bool, Vec<String>)> {
        let mut command = tool::cargo();
        if nextest {
            // A story that passes only at another try is reported as flaky, not hidden.
            command.args(["nextest", "run", "--no-fail-fast", "--retries", RETRIES]);
        } else {
            command.args(["test", "--no-fail-fast"]);
        }
        for package in self.packages {
            command.args(["-p", package]);
        }
        if let (true, Some(threads)) = (nextest, self.threads) {
            command.args(["--test-threads", threads]);
        }
        if nextest && self.ignored {
            let which = if self.packages == UNIT_ONLY_IGNORED { "only" } else { "all" };
            command.args(["--run-ignored", which]);
        }
        if nextest {
            command.arg("--no-tests=pass");
        }
        command.args(filter);
        if !nextest {
            command.arg("--");
            if self.ignored {
                command.arg(if self.packages == UNIT_ONLY_IGNORED {
                    "--ignored"
                } else {
                    "--include-ignored"
                });
            }
            if let Some(threads) = self.threads {
                command.arg(format!("--test-threads={threads}"));
            }
        }
        // A story's error says where it stands; its backtrace is the test runner's.
        command.env("RUST_LIB_BACKTRACE", "0");
        if let Some(image) = image {
            command.env("FLANNEL_IMAGE", image);
        }
        command.env("FLANNEL_AGENT", agent).stderr(Stdio::piped()).stdout(Stdio::piped());
        let (passed, lines) = watch(command)?;
        Ok((passed, lines))
    }
}

/// Of this package the tests that need no root have run as unit tests.
const UNIT_ONLY_IGNORED: &[&str] = PRIVILEGED.packages;

/// Runs a command, shows its output as it comes, and picks the runners' closing lines.
fn watch(mut command: Command) -> Result<(bool, Vec<String>)> {
    let mut child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
    let stdout = child.stdout.take().context("no standard output")?;
    let stderr = child.stderr.take().context("no standard error")?;
    let lines = std::thread::scope(|scope| {
        let other = scope.spawn(move || pass_on(stdout, |line| println!("{line}")));
        let mut lines = pass_on(stderr, |line| eprintln!("{line}"));
        lines.extend(other.join().unwrap_or_default());
        lines
    });
    let status = child.wait()?;
    Ok((status.success(), lines))
}

fn pass_on(stream: impl std::io::Read, show: impl Fn(&str)) -> Vec<String> {
    let mut closing = Vec::new();
    for line in BufReader::new(stream).lines().map_while(Result::ok) {
        show(&line);
        let plain = line.trim();
        if plain.starts_with("Summary [") || line.starts_with("test result:") {
            closing.push(plain.to_owned());
        }
    }
    closing
}

fn has_nextest() -> bool {
    let mut command = tool::cargo();
    command.args(["nextest", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}
