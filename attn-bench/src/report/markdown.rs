//! A document as Markdown, and its place in a file that holds those of several machines.
//!
//! In such a file (docs/figures.md) each run has a block between two comments that name the machine and the kind of
//! run. A newer run of the same kind replaces its block; the rest of the file stays.

use std::fmt::Write;

use comfy_table::Table;
use textwrap::WordSplitter;

use super::document::{Document, Part, Section, Weight};
use super::escape::markdown as escape;

/// A paragraph in lines of at most 118 columns, as the house's Markdown has them.
fn wrapped(text: &str) -> String {
    let options = textwrap::Options::new(118).break_words(false).word_splitter(WordSplitter::NoHyphenation);
    textwrap::fill(text, options)
}

/// The block of a run.
fn block(document: &Document) -> String {
    let machine = &document.machine;
    let what = format!("{}. `{}`, {}, {}.", escape(&document.subject), machine.command, machine.date, machine.rustc);
    let mut out = format!("### {}\n\n{}\n", escape(&document.title), wrapped(&what));
    if let Some(warning) = machine.disturbed() {
        let quoted = wrapped(&escape(&warning)).replace('\n', "\n> ");
        let _ = write!(out, "\n> {quoted}\n");
    }
    if !document.cards.is_empty() {
        out.push('\n');
    }
    for card in &document.cards {
        let _ = writeln!(out, "- **{}** {}", escape(&card.value), escape(&card.text));
    }
    for part in &document.parts {
        match part {
            Part::Table(section) if section.weight != Weight::Folded && section.table.row_count() > 0 => {
                out += &titled(section);
            }
            Part::List { title, lines } if !lines.is_empty() => {
                let _ = write!(out, "\n#### {}\n\n", escape(title));
                lines.iter().for_each(|line| out += &format!("- {}\n", escape(line)));
            }
            _ => {}
        }
    }
    out
}

fn titled(section: &Section) -> String {
    format!("\n#### {}\n\n{}\n\n{}", escape(&section.title), wrapped(&escape(&section.note)), rows(&section.table))
}

/// A table.
fn rows(table: &Table) -> String {
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let cells = |row: &comfy_table::Row| row.cell_iter().map(|cell| escape(&cell.content())).collect::<Vec<_>>();
    let mut out = table.header().map(|header| line(cells(header))).unwrap_or_default();
    // The first column names the row; numbers are aligned to the right.
    let rule = table.column_iter().enumerate().map(|(at, _)| if at == 0 { "---".into() } else { "---:".into() });
    out += &line(rule.collect());
    table.row_iter().for_each(|row| out += &line(cells(row)));
    out
}

/// The file with this run in it: at the place of an earlier run of the same `kind` on the same machine, or at the end
/// of the machine's section, or in a new section at the end.
pub fn put(file: &str, kind: &str, document: &Document) -> String {
    let cpu = &document.machine.cpu;
    let (begin, end) = (format!("<!-- begin: {kind}, {cpu} -->"), format!("<!-- end: {kind}, {cpu} -->"));
    let text = format!("{begin}\n{}{end}\n", block(document));
    if let (Some(from), Some(to)) = (file.find(&begin), file.find(&end))
        && from < to
    {
        let rest = file[to + end.len()..].trim_start_matches('\n');
        let gap = if rest.is_empty() { "" } else { "\n" };
        return format!("{}{text}{gap}{rest}", &file[..from]);
    }
    let heading = format!("## {}\n", escape(cpu));
    let Some(section) = file.find(&heading) else {
        let facts = format!("{}, {} cores, {}.", document.machine.system, document.machine.cores, caches(document));
        return format!("{}\n\n{heading}\n{}\n\n{text}", file.trim_end(), escape(&facts));
    };
    let after = section + heading.len();
    let to = file[after..].find("\n## ").map_or(file.len(), |at| after + at);
    let rest = file[to..].trim_start_matches('\n');
    let gap = if rest.is_empty() { "" } else { "\n" };
    format!("{}\n\n{text}{gap}{rest}", file[..to].trim_end())
}

fn caches(document: &Document) -> String {
    match document.machine.caches.as_slice() {
        [] => "caches unknown".into(),
        caches => caches.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve_report::tests::report;
    use crate::report::curve;

    #[test]
    fn every_table_has_as_many_cells_in_every_row() {
        let document = curve::document(&report(), None);
        let text = put("# Figures\n", "curve", &document);
        let mut columns = None;
        let mut tables = 0;
        for line in text.lines() {
            let count = line.starts_with('|').then(|| line.replace("\\|", "").matches('|').count());
            tables += usize::from(count.is_some() && columns.is_none());
            assert!(columns.is_none() || count.is_none() || columns == count, "{line}");
            columns = count;
        }
        let shown = |part: &&Part| matches!(part, Part::Table(section) if section.weight != Weight::Folded);
        assert_eq!(tables, document.parts.iter().filter(shown).count());
        assert!(text.contains("## A \\<fast\\> & quiet CPU\n") && text.contains("not run at n = 2048"), "{text}");
        assert!(text.contains("---:"), "numbers stand to the right");
    }

    #[test]
    fn a_run_replaces_its_predecessor_and_nothing_else() {
        let (mut document, mut other) = (curve::document(&report(), None), curve::document(&report(), None));
        let first = put("# Figures\n\nWords.\n", "curve", &document);
        assert!(first.starts_with("# Figures\n\nWords.\n\n## A "), "{first}");
        let two = put(&first, "kernels, 1 thread", &document);
        other.machine.cpu = "B".into();
        let three = put(&two, "curve", &other);
        assert_eq!(three.matches("\n## ").count(), 2);
        document.title = "Something newer".into();
        let newer = put(&three, "curve", &document);
        assert_eq!(newer.matches("Something newer").count(), 1);
        assert_eq!(newer.matches("<!-- begin").count(), 3);
        assert_eq!(put(&newer, "curve", &document), newer, "again the same");
        let late = put(&newer, "decode", &document);
        assert!(late.find("begin: decode, A") < late.find("## B"), "in the section of its machine");
        assert!(late.contains("Words.") && late.ends_with("-->\n"));
    }
}
