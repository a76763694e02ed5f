//! Candidates side by side, measured in turn.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use super::{
    arguments,
    candidate::{self, Candidate},
    cpu_time::CpuUsage,
    generators::udp_flood::Flow,
    priority,
    report::{self, Row},
    site::{Outcome, Profile, Site},
    statistics::{median, ratio_by_round},
    workload::{Traffic, Workload},
};

/// What everything is compared with.
const BASE: Candidate = Candidate::KernelVxlan;

/// All workloads, in the order of reports.
const WORKLOADS: [Workload; 9] = [
    Workload::Tcp1,
    Workload::Tcp8,
    Workload::Udp64,
    Workload::Udp1400,
    Workload::RrP50,
    Workload::RrP99,
    Workload::Crr,
    Workload::CpuGb,
    Workload::CpuMpkt,
];

/// How often something small goes both ways in a UDP flow.
const GREETING_PAUSE: Duration = Duration::from_millis(100);

/// How old UDP flows are before the first turn: conntrack calls one established after two seconds.
const FLOW_AGE: Duration = Duration::from_millis(2600);

/// One figure's value in each round; none where a turn failed.
type Series = BTreeMap<(Candidate, Workload), Vec<Option<f64>>>;

/// What was measured.
#[derive(Debug)]
pub struct Measured {
    /// A row for each candidate and workload that has values.
    pub rows: Vec<Row>,
    /// Candidates that could not be measured, and why.
    pub skipped: Vec<(Candidate, String)>,
    /// Turns that gave no value, and why.
    pub failures: Vec<String>,
}

/// Measures, and prints progress and results. An error if turns failed.
pub fn run(arguments: &arguments::Datapath) -> Result<()> {
    let measured = measure(arguments)?;
    println!(
        "\n{} underlay, medians of {} rounds; ratio to {BASE}, median of rounds:\n",
        arguments.profile.name(),
        arguments.rounds
    );
    print!("{}", report::matrix(&measured.rows));
    println!("\nless is better: rr_p50, rr_p99, cpu_gb, cpu_mpkt");
    for (candidate, reason) in &measured.skipped {
        println!("skipped {candidate}: {reason}");
    }
    if let Some(path) = &arguments.json {
        report::write_json(path, &measured.rows)?;
    }
    for failure in &measured.failures {
        println!("FAILED {failure}");
    }
    ensure!(measured.failures.is_empty(), "{} turn(s) failed", measured.failures.len());
    ensure!(!measured.rows.is_empty(), "nothing was measured");
    Ok(())
}

/// Sets the candidates up, measures, and removes everything.
pub fn measure(arguments: &arguments::Datapath) -> Result<Measured> {
    let candidates = chosen(&arguments.candidates, &candidate::ALL);
    let workloads = chosen(&arguments.workloads, &WORKLOADS);
    let (mut sites, mut skipped) = (Vec::new(), Vec::new());
    for candidate in candidates {
        let start = Instant::now();
        let built = Site::build(candidate, arguments.profile, arguments.flanneld.as_deref())
            .with_context(|| format!("cannot set up {candidate}"))?;
        match built {
            Outcome::Ready(site) => {
                let seconds = start.elapsed().as_secs_f64();
                println!("{candidate}: set up in {seconds:.1} s, namespaces {}-*", site.prefix());
                sites.push((candidate, site));
            }
            Outcome::Skipped(reason) => {
                println!("{candidate}: skipped: {reason}");
                skipped.push((candidate, reason));
            }
        }
    }
    let (mut series, failures) = take_turns(arguments, &workloads, &sites)?;
    sites.retain(|(candidate, site)| {
        let reason = match (site.why_not_in_use(), site.why_not_used()) {
            (Ok(None), Ok(None)) => return true,
            (Ok(Some(reason)), _) | (_, Ok(Some(reason))) => reason,
            (Err(error), _) | (_, Err(error)) => format!("{error:#}"),
        };
        println!("{candidate}: not what it stands for after the rounds: {reason}");
        skipped.push((*candidate, format!("after the rounds: {reason}")));
        series.retain(|(of, _), _| of != candidate);
        false
    });
    Ok(Measured { rows: rows(arguments.profile, &workloads, &series), skipped, failures })
}

/// All rounds. Meanwhile something small goes both ways in every UDP flow now and then.
fn take_turns(
    arguments: &arguments::Datapath,
    workloads: &[Workload],
    sites: &[(Candidate, Box<Site>)],
) -> Result<(Series, Vec<String>)> {
    let traffics: BTreeSet<Traffic> = workloads.iter().map(|w| w.traffic()).collect();
    let cpus = two_cpus()?;
    let usage = CpuUsage::of_cpus(&cpus)?;
    let time = Duration::from_millis(arguments.turn);
    let flows: Vec<&Flow> = sites.iter().map(|(_, site)| site.flow()).collect();
    let (mut series, mut failures) = (Series::new(), Vec::new());
    priority::raise_group()?;
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let small_talk = scope.spawn(|| {
            while !over.load(Ordering::Acquire) {
                flows.iter().try_for_each(|flow| flow.greet())?;
                thread::sleep(GREETING_PAUSE);
            }
            anyhow::Ok(())
        });
        if traffics.iter().any(|traffic| matches!(traffic, Traffic::Flood(_))) {
            thread::sleep(FLOW_AGE);
        }
        for round in 0..arguments.rounds as usize {
            for traffic in &traffics {
                for turn in 0..sites.len() {
                    let (candidate, site) = &sites[(turn + round) % sites.len()];
                    match traffic.measure(&site.ends(cpus), site.flow(), &usage, time) {
                        Ok(figures) => note(&mut series, *candidate, round, figures),
                        Err(error) => {
                            failures.push(format!("{candidate}, round {}: {error:#}", round + 1));
                        }
                    }
                }
            }
            println!("round {} of {}", round + 1, arguments.rounds);
        }
        over.store(true, Ordering::Release);
        match small_talk.join() {
            Ok(result) => result.context("the UDP flows' small talk"),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })?;
    Ok((series, failures))
}

/// Adds a turn's figures. Rounds without any are filled up with nothing.
fn note(series: &mut Series, candidate: Candidate, round: usize, figures: Vec<(Workload, f64)>) {
    for (workload, value) in figures {
        let values = series.entry((candidate, workload)).or_default();
        values.resize(round, None);
        values.push(Some(value));
    }
}

fn rows(profile: Profile, workloads: &[Workload], series: &Series) -> Vec<Row> {
    series
        .iter()
        .filter(|((_, workload), _)| workloads.contains(workload))
        .filter_map(|((candidate, workload), values)| {
            let present: Vec<f64> = values.iter().copied().flatten().collect();
            let base = series.get(&(BASE, *workload));
            Some(Row {
                profile: profile.name().to_owned(),
                candidate: candidate.name(),
                workload: workload.name(),
                median: median(&present)?,
                unit: workload.unit().to_owned(),
                ratio: base.and_then(|base| ratio_by_round(values, base)),
                rounds: present.len(),
            })
        })
        .collect()
}

/// What was asked for, in the order of reports; all if nothing was.
fn chosen<T: Copy + PartialEq>(asked: &[T], all: &[T]) -> Vec<T> {
    all.iter().filter(|one| asked.is_empty() || asked.contains(one)).copied().collect()
}

/// The client's and the server's CPU: 0 and 1, or both 0 if there is no other.
fn two_cpus() -> Result<[usize; 2]> {
    match thread::available_parallelism().context("cannot count the CPUs")?.get() {
        0 => bail!("no CPU"),
        1 => {
            println!("only one CPU: both ends share it");
            Ok([0, 0])
        }
        _ => Ok([0, 1]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_for_each_figure_asked_for_with_its_ratio() {
        let series = Series::from([
            ((Candidate::KernelVxlan, Workload::Udp64), vec![Some(10.0), Some(100.0), Some(1.0)]),
            ((Candidate::OursStack, Workload::Udp64), vec![Some(20.0), None, Some(4.0)]),
            ((Candidate::OursStack, Workload::CpuMpkt), vec![Some(1.0)]),
        ]);
        let rows = rows(Profile::Wire, &[Workload::Udp64], &series);
        assert_eq!(rows.len(), 2, "{rows:?}");
        assert_eq!(rows[0].ratio, Some(1.0));
        let ours = &rows[1];
        assert_eq!((ours.candidate.as_str(), ours.workload.as_str()), ("ours-stack", "udp64"));
        assert_eq!((ours.median, ours.ratio, ours.rounds), (12.0, Some(3.0), 2));
        assert_eq!((ours.profile.as_str(), ours.unit.as_str()), ("wire", "packets/s"));
    }

    #[test]
    fn without_the_base_there_is_no_ratio() {
        let series = Series::from([((Candidate::Host, Workload::Tcp1), vec![Some(20.0)])]);
        let rows = rows(Profile::Virtual, &[Workload::Tcp1], &series);
        assert_eq!(rows[0].ratio, None);
    }

    #[test]
    fn the_order_is_that_of_reports() {
        assert_eq!(
            chosen(&[Workload::Crr, Workload::Tcp1], &WORKLOADS),
            [Workload::Tcp1, Workload::Crr]
        );
        assert_eq!(chosen(&[], &WORKLOADS), WORKLOADS);
    }
}
