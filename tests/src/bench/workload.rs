//! What is measured of a path, and the traffic it takes.

use std::{fmt, thread, time::Duration};

use anyhow::{Context, Result};
use clap::ValueEnum;

use super::{
    cpu_time::CpuUsage,
    generators::{Ends, Outcome, connections, request_response, tcp_stream, udp_flood::Flow},
    statistics::percentile,
    window::Window,
};

/// A figure of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Workload {
    /// One TCP stream
    Tcp1,
    /// Eight TCP streams
    Tcp8,
    /// UDP messages of 64 bytes that arrive
    Udp64,
    /// UDP messages of 1400 bytes that arrive
    Udp1400,
    /// TCP request and response of 64 bytes, median round trip
    RrP50,
    /// The same, the round trip that 1 in 100 exceeds
    RrP99,
    /// TCP connect, request, response, close
    Crr,
    /// CPU time of both ends for a gigabyte in one TCP stream
    CpuGb,
    /// CPU time of both ends for a million UDP messages of 64 bytes that arrive
    CpuMpkt,
}

/// Traffic that is made to get figures; one run of it can give several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Traffic {
    /// Bulk TCP over so many connections.
    Streams(usize),
    /// UDP with messages of so many bytes.
    Flood(usize),
    /// Request and response.
    RequestResponse,
    /// Connections.
    Connections,
}

impl Workload {
    /// Its name on the command line and in reports.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// What the figure counts.
    pub fn unit(self) -> &'static str {
        match self {
            Self::Tcp1 | Self::Tcp8 => "Gb/s",
            Self::Udp64 | Self::Udp1400 => "packets/s",
            Self::RrP50 | Self::RrP99 => "us",
            Self::Crr => "connections/s",
            Self::CpuGb => "s/GB",
            Self::CpuMpkt => "s/Mpacket",
        }
    }

    /// Whether a smaller figure is the better one.
    pub fn less_is_better(self) -> bool {
        matches!(self, Self::RrP50 | Self::RrP99 | Self::CpuGb | Self::CpuMpkt)
    }

    /// The traffic that shows it.
    pub fn traffic(self) -> Traffic {
        match self {
            Self::Tcp1 | Self::CpuGb => Traffic::Streams(1),
            Self::Tcp8 => Traffic::Streams(8),
            Self::Udp64 | Self::CpuMpkt => Traffic::Flood(64),
            Self::Udp1400 => Traffic::Flood(1400),
            Self::RrP50 | Self::RrP99 => Traffic::RequestResponse,
            Self::Crr => Traffic::Connections,
        }
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.name())
    }
}

impl Traffic {
    /// Makes this traffic for `time` after the warm-up; every figure that it shows. UDP goes by
    /// `flow`.
    pub fn measure(
        self,
        ends: &Ends<'_>,
        flow: &Flow,
        usage: &CpuUsage,
        time: Duration,
    ) -> Result<Vec<(Workload, f64)>> {
        let window = Window::after_warm_up(time);
        let (outcome, kernel, mut times) = thread::scope(|scope| {
            let kernel = scope.spawn(move || window.kernel_threads(usage));
            let made = match self {
                Self::Streams(count) => {
                    tcp_stream::run(ends, count, window).map(|outcome| (outcome, Vec::new()))
                }
                Self::Flood(size) => {
                    flow.flood(ends, size, window).map(|outcome| (outcome, Vec::new()))
                }
                Self::RequestResponse => request_response::run(ends, window),
                Self::Connections => {
                    connections::run(ends, window).map(|outcome| (outcome, Vec::new()))
                }
            };
            let Ok(kernel) = kernel.join() else { anyhow::bail!("a thread panicked") };
            let (outcome, times) = made?;
            anyhow::Ok((outcome, kernel?, times))
        })?;
        self.figures(&outcome, kernel, &mut times)
    }

    #[expect(clippy::cast_precision_loss, reason = "figures for people")]
    fn figures(
        self,
        outcome: &Outcome,
        kernel: Duration,
        times: &mut [u64],
    ) -> Result<Vec<(Workload, f64)>> {
        let arrived = outcome.server;
        anyhow::ensure!(arrived.count > 0, "nothing arrived");
        let cpu = (outcome.cpu() + kernel).as_secs_f64();
        let micros = |percent, times: &mut [u64]| {
            let nanos = percentile(times, percent).context("no round trip")?;
            anyhow::Ok(nanos as f64 / 1e3)
        };
        Ok(match self {
            Self::Streams(1) => vec![
                (Workload::Tcp1, arrived.rate() * 8.0 / 1e9),
                (Workload::CpuGb, cpu / (arrived.count as f64 / 1e9)),
            ],
            Self::Streams(_) => vec![(Workload::Tcp8, arrived.rate() * 8.0 / 1e9)],
            Self::Flood(64) => vec![
                (Workload::Udp64, arrived.rate()),
                (Workload::CpuMpkt, cpu / (arrived.count as f64 / 1e6)),
            ],
            Self::Flood(_) => vec![(Workload::Udp1400, arrived.rate())],
            Self::RequestResponse => {
                vec![(Workload::RrP50, micros(50, times)?), (Workload::RrP99, micros(99, times)?)]
            }
            Self::Connections => vec![(Workload::Crr, outcome.client.rate())],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::window::Counted;

    const ALL: [Workload; 9] = [
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

    fn outcome(count: u64) -> Outcome {
        let second = Duration::from_secs(1);
        let end = Counted { count, wall: second, cpu: second / 4 };
        Outcome { client: end, server: end }
    }

    #[test]
    fn names_are_those_of_the_reports() {
        let names = ALL.map(Workload::name).join(" ");
        assert_eq!(names, "tcp1 tcp8 udp64 udp1400 rr_p50 rr_p99 crr cpu_gb cpu_mpkt");
    }

    #[test]
    fn the_traffic_of_a_figure_shows_it() {
        for workload in ALL {
            let shown = workload
                .traffic()
                .figures(&outcome(1000), Duration::ZERO, &mut [1000, 2000])
                .unwrap();
            assert!(shown.iter().any(|(shown, _)| *shown == workload), "{workload}: {shown:?}");
        }
    }

    #[test]
    fn cpu_time_is_that_of_both_ends_and_of_the_kernel() {
        let kernel = Duration::from_millis(500);
        let figures = Traffic::Flood(64).figures(&outcome(2_000_000), kernel, &mut []).unwrap();
        assert_eq!(figures, [(Workload::Udp64, 2e6), (Workload::CpuMpkt, 0.5)]);
        let figures = Traffic::Streams(1).figures(&outcome(500_000_000), kernel, &mut []).unwrap();
        assert_eq!(figures, [(Workload::Tcp1, 4.0), (Workload::CpuGb, 2.0)]);
    }

    #[test]
    fn nothing_arrived_is_no_figure() {
        assert!(Traffic::Flood(64).figures(&outcome(0), Duration::ZERO, &mut []).is_err());
        assert!(Traffic::RequestResponse.figures(&outcome(1), Duration::ZERO, &mut []).is_err());
    }
}
