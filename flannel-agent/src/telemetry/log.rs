//! The log: standard error, one line per event.

use std::{fmt, io::IsTerminal};

use tracing::{Event, Level, Subscriber};
use tracing_log::NormalizeEvent;
use tracing_subscriber::{
    EnvFilter, Layer,
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    layer::SubscriberExt,
    registry::LookupSpan,
    util::SubscriberInitExt,
};

use crate::cli::flags::{LogFlags, LogFormat};

/// Starts logging, for good. The variable `RUST_LOG` overrides the verbosity. Records of the
/// `log` crate (the BPF programs' among them) come along. A second call changes nothing.
pub fn init(flags: &LogFlags) {
    let variable = std::env::var(EnvFilter::DEFAULT_ENV).ok().filter(|text| !text.is_empty());
    let parsed = variable.as_deref().map(EnvFilter::try_new);
    let (filter, complaint) = match parsed {
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (default_filter(flags), Some(error)),
        None => (default_filter(flags), None),
    };
    let ansi = std::io::stderr().is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(ansi);
    let layer = match flags.format {
        LogFormat::Text => layer.event_format(TextLine).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    let started = tracing_subscriber::registry().with(layer.with_filter(filter)).try_init();
    if started.is_ok()
        && let Some(error) = complaint
    {
        tracing::warn!(
            "{} is not a filter and is ignored: {error}; an example is flannel_agent=debug",
            EnvFilter::DEFAULT_ENV
        );
    }
}

fn default_filter(flags: &LogFlags) -> EnvFilter {
    EnvFilter::new(directives(flags.verbosity))
}

/// The filter of a verbosity. Libraries keep to warnings until the verbosity is high; the one
/// that parses netlink warns about every attribute newer than itself, which nobody can act on.
fn directives(verbosity: i64) -> String {
    let (libraries, netlink, ours) = match verbosity {
        ..=2 => ("warn", "error", "info"),
        3 => ("warn", "error", "debug"),
        4 | 5 => ("info", "warn", "trace"),
        6.. => ("debug", "debug", "trace"),
    };
    format!(
        "{libraries},netlink_packet_route={netlink},flannel_agent={ours},flannel_common={ours},\
         flannel_ebpf={ours}"
    )
}

/// `2026-11-30T05:13:02.123456Z  WARN backend::vxlan: text key=value`
struct TextLine;

impl<S, N> FormatEvent<S, N> for TextLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        // An event that came from the `log` crate carries its true origin in fields.
        let normalised = event.normalized_metadata();
        let metadata = normalised.as_ref().unwrap_or_else(|| event.metadata());
        SystemTime.format_time(&mut writer)?;
        let level = *metadata.level();
        if writer.has_ansi_escapes() {
            write!(writer, " \x1b[{}m{level:>5}\x1b[0m ", colour(level))?;
        } else {
            write!(writer, " {level:>5} ")?;
        }
        let target = metadata.target();
        write!(writer, "{}: ", target.strip_prefix("flannel_agent::").unwrap_or(target))?;
        // Texts of others (a lease, a server's answer) may hold line breaks or a terminal's codes.
        let mut text = String::new();
        context.format_fields(Writer::new(&mut text), event)?;
        for piece in text.split_inclusive(char::is_control) {
            match piece.char_indices().next_back() {
                Some((at, last)) if last.is_control() => {
                    write!(writer, "{}{}", piece.get(..at).unwrap_or(""), last.escape_default())?;
                }
                _ => writer.write_str(piece)?,
            }
        }
        writeln!(writer)
    }
}

/// The terminal's code for a level's colour.
fn colour(level: Level) -> u8 {
    match level {
        Level::ERROR => 31,
        Level::WARN => 33,
        Level::INFO => 32,
        Level::DEBUG => 34,
        Level::TRACE => 35,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io,
        sync::{Arc, Mutex, PoisonError},
    };

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn text_at(verbosity: i64, emit: impl FnOnce()) -> String {
        let sink = Sink::default();
        let made = sink.clone();
        let layer = tracing_subscriber::fmt::layer()
            .with_writer(move || made.clone())
            .with_ansi(false)
            .event_format(TextLine)
            .with_filter(EnvFilter::new(directives(verbosity)));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), emit);
        let bytes = sink.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        String::from_utf8(bytes).expect("UTF-8")
    }

    #[test]
    fn a_line_has_time_level_module_text_and_fields() {
        let text = text_at(2, || tracing::warn!(peer = "10.77.3.0/24", "two peers claim a MAC"));
        let words: Vec<_> = text.split_whitespace().collect();
        assert!(words[0].ends_with('Z') && words[0].contains('T'), "{text}");
        assert_eq!(words[1], "WARN");
        assert_eq!(words[2], "telemetry::log::tests:");
        assert!(text.contains("two peers claim a MAC peer=\"10.77.3.0/24\""), "{text}");
        assert!(text.ends_with('\n') && !text.contains('\x1b'), "{text}");
    }

    #[test]
    fn an_event_is_one_line_whatever_its_text_holds() {
        let text = text_at(2, || tracing::warn!("a\nERROR b\u{1b}[2Jc\0d \u{2603}\n"));
        assert!(text.contains("a\\nERROR b") && text.contains("\\u{0}d \u{2603}"), "{text}");
        assert!(!text.trim_end_matches('\n').contains(char::is_control), "{text:?}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }

    #[test]
    fn verbosity_decides_what_is_seen() {
        let emit = || {
            tracing::info!("ours-info");
            tracing::debug!("ours-debug");
            tracing::trace!("ours-trace");
            tracing::info!(target: "rtnetlink", "theirs-info");
            tracing::warn!(target: "rtnetlink", "theirs-warn");
            tracing::warn!(target: "netlink_packet_route::link", "unknown-attribute");
        };
        let seen = |verbosity| {
            let text = text_at(verbosity, emit);
            let mut seen: Vec<_> = text
                .lines()
                .filter_map(|l| l.split_whitespace().last())
                .map(String::from)
                .collect();
            seen.sort();
            seen
        };
        assert_eq!(seen(0), ["ours-info", "theirs-warn"]);
        assert_eq!(seen(2), ["ours-info", "theirs-warn"]);
        assert_eq!(seen(3), ["ours-debug", "ours-info", "theirs-warn"]);
        assert_eq!(seen(4).len(), 6);
        assert_eq!(seen(-1), seen(0));
    }
}
