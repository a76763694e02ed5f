//! Prometheus' own text format (version 0.0.4), made of `OpenMetrics` text.
//!
//! The two differ in how a counter's family is named, in the `info` and `unknown` types, which the
//! older format does not have, and in `# UNIT` and `# EOF`.

/// Media type of this format.
pub const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Rewrites a page of `OpenMetrics` text. Samples stay as they are.
pub fn from_open_metrics(page: &str) -> String {
    let mut text = String::with_capacity(page.len() + 256);
    // It goes before the type, which decides the name it is given under.
    let mut help = None;
    for line in page.lines() {
        let Some(comment) = line.strip_prefix("# ") else {
            text.extend([line, "\n"]);
            continue;
        };
        let mut words = comment.splitn(3, ' ');
        match (words.next(), words.next(), words.next()) {
            (Some("HELP"), Some(_), words) => help = words,
            (Some("TYPE"), Some(family), Some(kind)) => {
                let (suffix, kind) = match kind {
                    "counter" => ("_total", "counter"),
                    "info" => ("_info", "gauge"),
                    "unknown" => ("", "untyped"),
                    kind => ("", kind),
                };
                if let Some(help) = help.take() {
                    text.extend(["# HELP ", family, suffix, " ", help, "\n"]);
                }
                text.extend(["# TYPE ", family, suffix, " ", kind, "\n"]);
            }
            _ => {}
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_get_the_names_of_their_samples() {
        let page = "# HELP f_build Version of it.\n# TYPE f_build info\nf_build_info{version=\"1\"} 1\n\
                    # HELP f_repairs Things undone.\n# TYPE f_repairs counter\nf_repairs_total 3\n\
                    # HELP f_age Age.\n# TYPE f_age gauge\n# UNIT f_age seconds\nf_age 1\n\
                    # TYPE f_odd unknown\nf_odd 2\n# EOF\n";
        let wanted = "# HELP f_build_info Version of it.\n# TYPE f_build_info gauge\n\
                      f_build_info{version=\"1\"} 1\n\
                      # HELP f_repairs_total Things undone.\n# TYPE f_repairs_total counter\n\
                      f_repairs_total 3\n\
                      # HELP f_age Age.\n# TYPE f_age gauge\nf_age 1\n\
                      # TYPE f_odd untyped\nf_odd 2\n";
        assert_eq!(from_open_metrics(page), wanted);
    }
}
