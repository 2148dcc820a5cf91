//! The report as Markdown, for a README or an issue: the tables of the page and the facts of the machine.

use std::fmt::Write;

use comfy_table::Table;

use super::section::{METHOD, sections};
use super::{Report, table};

/// The whole report.
pub fn page(report: &Report) -> String {
    let mut out = String::from("# The cost of exact attention\n");
    if let Some(warning) = report.machine.disturbed() {
        let _ = write!(out, "\n> {}\n", escape(&warning));
    }
    for section in sections(report).iter().filter(|section| section.table.row_count() > 0) {
        let (title, note) = (escape(&section.title), escape(&section.note));
        let _ = write!(out, "\n## {title}\n\n{note}\n\n{}", rows(&section.table));
    }
    let skipped = table::skipped(report);
    if !skipped.is_empty() {
        out += "\n## Not measured\n\n";
        skipped.iter().for_each(|line| out += &format!("- {}\n", escape(line)));
    }
    out += "\n## Machine\n\n| | |\n|---|---|\n";
    for (name, value) in report.machine.facts() {
        let _ = writeln!(out, "| {name} | {} |", escape(&value));
    }
    let _ = write!(out, "\n## How it was measured\n\n{}\n", escape(METHOD));
    out
}

/// Text outside of code: what Markdown or HTML would take for itself is escaped.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        if matches!(c, '|' | '*' | '_' | '<' | '>' | '`' | '[' | ']' | '\\') {
            out.push('\\');
        }
        out.push(c);
    }
    out
}

/// A table.
fn rows(table: &Table) -> String {
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let cells = |row: &comfy_table::Row| row.cell_iter().map(|cell| escape(&cell.content())).collect::<Vec<_>>();
    let mut out = table.header().map(|header| line(cells(header))).unwrap_or_default();
    // The first column names the row; numbers stand to the right.
    let rule = table.column_iter().enumerate().map(|(at, _)| if at == 0 { "---".into() } else { "---:".into() });
    out += &line(rule.collect());
    table.row_iter().for_each(|row| out += &line(cells(row)));
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::report;

    #[test]
    fn every_table_has_as_many_cells_in_every_row() {
        let report = report();
        let text = page(&report);
        let mut columns = None;
        let mut tables = 0;
        for line in text.lines() {
            let count = line.starts_with('|').then(|| line.replace("\\|", "").matches('|').count());
            tables += usize::from(count.is_some() && columns.is_none());
            assert!(columns.is_none() || count.is_none() || columns == count, "{line}");
            columns = count;
        }
        assert_eq!(tables, sections(&report).len() + 1);
        assert!(text.contains("| engine |") || text.contains("| case | engine |"), "{text}");
        assert!(text.contains("A \\<fast\\> & quiet CPU") && text.contains("not run at n = 2048"));
        assert!(text.contains("---:"), "numbers stand to the right");
    }
}
