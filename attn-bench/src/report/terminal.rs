//! A document on the terminal: tables if wanted, then the facts that most readers want, last, where they are read.

use std::fmt::Write;

use super::document::{Document, Part, Weight};

/// The document as text; with `tables` all of its tables, otherwise those that the run was made for.
pub fn text(document: &Document, tables: bool) -> String {
    let mut out = String::new();
    for part in &document.parts {
        match part {
            Part::Table(section) if section.table.row_count() > 0 && (tables || section.weight == Weight::Main) => {
                let _ = write!(out, "\n{}\n{}\n", section.title, section.table);
                if section.weight == Weight::Main {
                    let _ = writeln!(out, "{}", section.note);
                }
            }
            Part::List { title, lines } if !lines.is_empty() => {
                let _ = writeln!(out, "\n{title}:");
                lines.iter().for_each(|line| out += &format!("  {line}\n"));
            }
            _ => {}
        }
    }
    let width = document.cards.iter().map(|card| card.value.chars().count()).max().unwrap_or(0);
    if !document.cards.is_empty() {
        let _ = writeln!(out, "\nOn this machine ({}):", document.machine.cpu);
    }
    for card in &document.cards {
        let _ = writeln!(out, "  {:>width$}  {}", card.value, card.text);
    }
    if let Some(warning) = document.machine.disturbed() {
        let _ = writeln!(out, "{warning}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve_report::tests::report;
    use crate::report::curve;

    #[test]
    fn cards_come_last_and_tables_on_request() {
        let document = curve::document(&report(), None);
        let short = text(&document, false);
        assert!(short.contains("On this machine (A <fast> & quiet CPU):") && !short.contains("Roofs"), "{short}");
        assert!(short.lines().count() < 12, "{short}");
        let long = text(&document, true);
        assert!(long.contains("Roofs") && long.ends_with(&short[short.find("On this").unwrap()..]), "{long}");
    }
}
