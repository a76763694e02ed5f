//! Results, as rows for machines and as a table for people.

use std::{fmt::Write as _, fs, path::Path};

use anyhow::{Context, Result};
use serde_json::{Value, json};

/// One figure.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// What the underlay carried; `micro` or `control-plane` for what needs none.
    pub profile: String,
    /// Whose figure it is.
    pub candidate: String,
    /// What was measured.
    pub workload: String,
    /// The median of all rounds.
    pub median: f64,
    /// What it counts.
    pub unit: String,
    /// The median over the rounds of the ratio to the base; none if the base was not measured.
    pub ratio: Option<f64>,
    /// Rounds that gave a value.
    pub rounds: usize,
}

impl Row {
    fn to_json(&self) -> Value {
        json!({
            "profile": self.profile,
            "candidate": self.candidate,
            "workload": self.workload,
            "median": self.median,
            "unit": self.unit,
            "ratio": self.ratio,
            "rounds": self.rounds,
        })
    }
}

/// Writes rows as one JSON array.
pub fn write_json(path: &Path, rows: &[Row]) -> Result<()> {
    let rows: Vec<_> = rows.iter().map(Row::to_json).collect();
    let text = serde_json::to_string_pretty(&rows)? + "\n";
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// A table with a line for each candidate and a column for each workload; in a cell the median
/// and behind it the ratio.
pub fn matrix(rows: &[Row]) -> String {
    let candidates = distinct(rows, |row| &row.candidate);
    let workloads = distinct(rows, |row| &row.workload);
    let find = |candidate: &str, workload: &str| {
        rows.iter().find(|row| row.candidate == candidate && row.workload == workload)
    };
    let head = workloads.iter().map(|workload| {
        let unit = rows.iter().find(|row| row.workload == *workload).map(|row| &row.unit);
        format!("{workload} {}", unit.map_or("", String::as_str))
    });
    let mut lines = vec![[String::new()].into_iter().chain(head).collect::<Vec<_>>()];
    for candidate in candidates {
        let cells = workloads.iter().map(|workload| match find(candidate, workload) {
            Some(row) => {
                let ratio = row.ratio.map_or_else(String::new, |ratio| format!(" {ratio:5.2}x"));
                format!("{}{ratio}", short(row.median))
            }
            None => "-".to_owned(),
        });
        lines.push([candidate.to_owned()].into_iter().chain(cells).collect());
    }
    aligned(&lines)
}

/// A table with a line for each row.
pub fn list(rows: &[Row]) -> String {
    let mut lines = vec![["", "", "median", "unit", "ratio", "rounds"].map(str::to_owned).to_vec()];
    lines.extend(rows.iter().map(|row| {
        vec![
            row.candidate.clone(),
            row.workload.clone(),
            short(row.median),
            row.unit.clone(),
            row.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}x")),
            row.rounds.to_string(),
        ]
    }));
    aligned(&lines)
}

fn distinct(rows: &[Row], of: impl Fn(&Row) -> &String) -> Vec<&str> {
    let mut found: Vec<&str> = Vec::new();
    for row in rows {
        let value = of(row).as_str();
        if !found.contains(&value) {
            found.push(value);
        }
    }
    found
}

/// Three or more significant figures.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

/// Columns of the same width; the first to the left, the others to the right.
fn aligned(lines: &[Vec<String>]) -> String {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = lines.iter().filter_map(|line| line.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let mut out = String::new();
        for (column, cell) in line.iter().enumerate() {
            let width = widths[column];
            // Writing to a string does not fail.
            let _ = match column {
                0 => write!(out, "{cell:<width$}"),
                _ => write!(out, "  {cell:>width$}"),
            };
        }
        text.push_str(out.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(candidate: &str, workload: &str, median: f64, ratio: Option<f64>) -> Row {
        Row {
            profile: "virtual".into(),
            candidate: candidate.into(),
            workload: workload.into(),
            median,
            unit: "Gb/s".into(),
            ratio,
            rounds: 8,
        }
    }

    #[test]
    fn a_row_has_these_fields_and_no_others() {
        let text = row("host", "tcp1", 21.5, Some(1.5)).to_json().to_string();
        assert_eq!(
            text,
            r#"{"profile":"virtual","candidate":"host","workload":"tcp1","median":21.5,"unit":"Gb/s","ratio":1.5,"rounds":8}"#
        );
        assert_eq!(row("host", "tcp1", 1.0, None).to_json()["ratio"], Value::Null);
    }

    #[test]
    fn the_table_has_a_cell_for_each_pair() {
        let rows = [
            row("host", "tcp1", 21.51, Some(1.5)),
            row("host", "tcp8", 7.0, None),
            row("kernel-vxlan", "tcp1", 14.2, Some(1.0)),
        ];
        let lines: Vec<_> = matrix(&rows).lines().map(str::to_owned).collect();
        assert_eq!(
            lines,
            [
                "                tcp1 Gb/s  tcp8 Gb/s",
                "host          21.5  1.50x       7.00",
                "kernel-vxlan  14.2  1.00x          -",
            ]
        );
    }

    #[test]
    fn figures_are_short() {
        assert_eq!(
            [0.0321, 2.34567, 23.4567, 234_567.2].map(short),
            ["0.032", "2.35", "23.5", "234567"]
        );
    }

    #[test]
    fn the_file_holds_all_rows() {
        let path = std::env::temp_dir().join(format!("bench-rows-{}.json", std::process::id()));
        write_json(&path, &[row("a", "tcp1", 1.0, None), row("b", "tcp1", 2.0, None)]).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let rows: Vec<Value> = serde_json::from_str(&text).unwrap();
        assert_eq!(rows.len(), 2);
        assert_eq!(rows[1]["candidate"], "b");
    }
}
