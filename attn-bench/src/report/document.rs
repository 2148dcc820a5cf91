//! The content of a report, without its form: cards, pictures, tables, lists, the machine.

use comfy_table::Table;

use super::plot::Plot;
use super::table;
use crate::compare::{Comparison, LEGEND, Row, Verdict};
use crate::curve::seconds;
use crate::machine::Machine;

/// The content of a run's report, in order.
#[derive(Debug)]
pub struct Document {
    /// The heading.
    pub title: String,
    /// The subject of the run, in a line.
    pub subject: String,
    /// The few facts that most readers came for.
    pub cards: Vec<Card>,
    /// Pictures, tables and lists.
    pub parts: Vec<Part>,
    /// Where it was measured.
    pub machine: Machine,
    /// How it was measured.
    pub method: &'static str,
}

/// One fact.
#[derive(Clone, Debug)]
pub struct Card {
    /// The number; `n^2.00` is shown as a power if the form can.
    pub value: String,
    /// What it says.
    pub text: String,
}

/// A part of a document.
#[derive(Debug)]
pub enum Part {
    /// The heading of several pictures.
    Heading(String),
    /// A picture; left out if it has no point, and in forms without pictures.
    Picture(Picture),
    /// A table; left out if it has no row.
    Table(Section),
    /// A list; left out if it is empty.
    List {
        /// Its heading.
        title: String,
        /// Its entries.
        lines: Vec<String>,
    },
}

/// A picture with its caption.
#[derive(Debug)]
pub struct Picture {
    /// Its heading.
    pub title: &'static str,
    /// What it shows.
    pub note: String,
    /// The picture.
    pub plot: Plot,
}

/// How prominent a table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// The table that the run was made for: shown everywhere.
    Main,
    /// It is shown on pages, and on the terminal by `--tables`.
    Detail,
    /// As `Detail`, but folded on pages, and left out of Markdown.
    Folded,
}

/// A table with its caption.
#[derive(Debug)]
pub struct Section {
    /// Its heading.
    pub title: String,
    /// What it shows.
    pub note: String,
    /// The table.
    pub table: Table,
    /// Where it is shown.
    pub weight: Weight,
}

impl Section {
    /// A table as a part of a document.
    pub fn part(weight: Weight, title: impl Into<String>, note: impl Into<String>, table: Table) -> Part {
        Part::Table(Self { title: title.into(), note: note.into(), table, weight })
    }
}

/// A run against an earlier one.
pub fn comparison(comparison: &Comparison) -> Part {
    let warnings: String = comparison.warnings.iter().map(|warning| format!("Note: {warning}. ")).collect();
    let note = format!("{}. {warnings}{LEGEND}", comparison.summary());
    Section::part(Weight::Main, "Compared with the earlier run", note, comparison_table(comparison))
}

/// A row per case that both runs have.
pub fn comparison_table(comparison: &Comparison) -> Table {
    let rows = comparison.rows.iter().map(|row: &Row| {
        let verdict = match row.verdict {
            Verdict::Slower => "SLOWER",
            Verdict::Faster => "faster",
            Verdict::Same => "same",
        };
        vec![
            row.name.clone(),
            verdict.into(),
            seconds(row.old),
            seconds(row.new),
            format!("{:.3}×", row.ratio),
            format!("± {:.1} %", 100.0 * (row.band - 1.0)),
        ]
    });
    table::table(&["case", "", "then", "now", "ratio", "band"], 2, rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comparison_shows_each_case_and_its_verdict() {
        let row = |name: &str, ratio: f64, verdict| Row {
            name: name.into(),
            old: 1e-3,
            new: 1e-3 * ratio,
            ratio,
            band: 1.062,
            verdict,
        };
        let rows = vec![row("a/n1", 1.25, Verdict::Slower), row("b/n2", 1.01, Verdict::Same)];
        let both =
            Comparison { rows, gone: vec![], added: vec![], warnings: vec!["another CPU".into()], threshold: 0.05 };
        let Part::Table(section) = comparison(&both) else { panic!("not a table") };
        assert!(section.note.starts_with("2 cases: 1 slower, 0 faster, 1 the same within 5 % and noise"));
        assert!(section.note.contains("Note: another CPU. "));
        let text = section.table.trim_fmt();
        let line = text.lines().find(|line| line.contains("a/n1")).unwrap();
        for part in ["SLOWER", "1.00 ms", "1.25 ms", "1.250×", "± 6.2 %"] {
            assert!(line.contains(part), "{line}");
        }
        assert!(text.contains("b/n2"));
    }
}
