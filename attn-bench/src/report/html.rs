//! A document as one self-contained page: no scripts, no other files, readable on light and dark screens, wide and
//! narrow ones.

use std::fmt::Write;

use super::document::{Card, Document, Part, Picture, Section, Weight};
use super::escape::html as escape;
use super::plot::{Theme, variables};

/// The page.
pub fn page(document: &Document) -> String {
    let mut html = String::new();
    let title = escape(&document.title);
    let (light, dark) = (variables(Theme::Light), variables(Theme::Dark));
    put(&mut html, format_args!("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"));
    put(&mut html, format_args!("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"));
    put(
        &mut html,
        format_args!(
            "<title>{title}</title>\n<style>\n:root {{ color-scheme: light dark; {light} --page: #ffffff; --card: #f5f7f9; }}\n\
             @media (prefers-color-scheme: dark) {{ :root {{ {dark} --page: #15181b; --card: #1f2428; }} }}{STYLE}</style>\n\
             </head>\n<body>\n"
        ),
    );
    let (subject, cpu) = (escape(&document.subject), escape(&document.machine.cpu));
    put(&mut html, format_args!("<h1>{title}</h1>\n<p class=\"sub\">{subject}<br>{cpu}</p>\n"));
    if let Some(warning) = document.machine.disturbed() {
        put(&mut html, format_args!("<p class=\"warning\">{}</p>\n", escape(&warning)));
    }
    cards(&mut html, &document.cards);
    document.parts.iter().for_each(|one| part(&mut html, one));
    put(&mut html, format_args!("<h2>Machine</h2>\n<table class=\"facts\">\n"));
    for (name, value) in document.machine.facts() {
        put(&mut html, format_args!("<tr><th scope=\"row\">{name}</th><td>{}</td></tr>\n", escape(&value)));
    }
    let method = escape(document.method);
    put(&mut html, format_args!("</table>\n<h2>How it was measured</h2>\n<p>{method}</p>\n</body>\n</html>\n"));
    html
}

/// Writing into a string cannot fail.
fn put(html: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = html.write_fmt(text);
}

fn cards(html: &mut String, cards: &[Card]) {
    put(html, format_args!("<ul class=\"headline\">\n"));
    for card in cards {
        let value = match card.value.strip_prefix("n^") {
            Some(exponent) => format!("n<sup>{}</sup>", escape(exponent)),
            None => escape(&card.value),
        };
        put(html, format_args!("<li><b>{value}</b> {}</li>\n", escape(&card.text)));
    }
    put(html, format_args!("</ul>\n"));
}

fn part(html: &mut String, part: &Part) {
    match part {
        Part::Heading(text) => put(html, format_args!("<h2>{}</h2>\n", escape(text))),
        Part::Picture(picture) => figure(html, picture),
        Part::Table(section) => table(html, section),
        Part::List { title, lines } if !lines.is_empty() => {
            put(html, format_args!("<h2>{}</h2>\n<ul>\n", escape(title)));
            lines.iter().for_each(|line| put(html, format_args!("<li>{}</li>\n", escape(line))));
            put(html, format_args!("</ul>\n"));
        }
        Part::List { .. } => {}
    }
}

/// A picture with its caption; it scrolls if the screen is too narrow to read it.
fn figure(html: &mut String, Picture { title, note, plot }: &Picture) {
    let (svg, note) = (plot.svg(), escape(note));
    if !svg.is_empty() {
        put(html, format_args!("<figure>\n<figcaption><b>{title}</b> {note}</figcaption>\n"));
        put(html, format_args!("<div class=\"picture\">{svg}</div></figure>\n"));
    }
}

/// A table with its caption.
fn table(html: &mut String, section: &Section) {
    let table = &section.table;
    if table.row_count() == 0 {
        return;
    }
    let (title, note) = (escape(&section.title), escape(&section.note));
    let folded = section.weight == Weight::Folded;
    match folded {
        true => put(html, format_args!("<details>\n<summary>{title}</summary>\n")),
        false => put(html, format_args!("<h2>{title}</h2>\n")),
    }
    put(html, format_args!("<p>{note}</p>\n<div class=\"wide\"><table>\n<thead><tr>"));
    for cell in table.header().into_iter().flat_map(comfy_table::Row::cell_iter) {
        put(html, format_args!("<th scope=\"col\">{}</th>", escape(&cell.content())));
    }
    put(html, format_args!("</tr></thead>\n<tbody>\n"));
    for row in table.row_iter() {
        put(html, format_args!("<tr>"));
        row.cell_iter().for_each(|cell| put(html, format_args!("<td>{}</td>", escape(&cell.content()))));
        put(html, format_args!("</tr>\n"));
    }
    put(html, format_args!("</tbody></table></div>\n{}", if folded { "</details>\n" } else { "" }));
}

const STYLE: &str = "
body { margin: 2.5rem auto; padding: 0 1.2rem; max-width: 58rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .4rem; }
.sub { color: var(--soft); margin: .3rem 0 1.4rem; }
.headline { list-style: none; padding: 0; display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); }
.headline li { background: var(--card); border-radius: .5rem; padding: .8rem 1rem; color: var(--soft); font-size: .9rem; }
.headline b { display: block; font-size: 1.5rem; color: var(--ink); }
figure { margin: 2rem 0; } figcaption { color: var(--soft); margin-bottom: .4rem; } figcaption b { color: var(--ink); }
.picture { overflow-x: auto; } svg.plot { width: 100%; min-width: 40rem; height: auto; } svg.plot text { font-family: inherit; }
.warning { border-left: .3rem solid var(--naive); background: var(--card); padding: .6rem 1rem; }
summary { cursor: pointer; font-size: 1.15rem; font-weight: bold; margin: 2.4rem 0 .4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child, .facts td { text-align: left; }
.facts td { white-space: normal; } .facts { width: auto; }
tbody + tbody tr:first-child td { border-top: 2px solid var(--soft); }
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve_report::{CurveReport, tests::report};
    use crate::report::curve;

    #[test]
    fn the_page_is_whole_and_stands_alone() {
        let report = report();
        let html = page(&curve::document(&report, None));
        assert_eq!(html.matches("<svg").count(), 2 * 3 + 1);
        assert!(html.contains("A &lt;fast&gt; &amp; quiet CPU") && !html.contains("<fast>"));
        assert!(
            !html.contains("http://") || html.matches("http://").count() == html.matches("http://www.w3.org").count()
        );
        assert!(!html.contains("<script") && !html.contains("https://"));
        assert!(html.contains("prefers-color-scheme: dark"));
        assert!(html.contains("dimension 64: not run at n = 2048") && html.contains("<b>n<sup>2.00</sup></b>"));
        assert_eq!((html.matches("<details>").count(), html.matches("</details>").count()), (2, 2));
        for who in report.curves[0].lines() {
            let rows = html.matches(&format!("<tr><td>{who}</td><td>128</td>")).count();
            assert_eq!(rows, 2, "{who}: each curve has one");
        }
        let opened = |tag: &str| html.matches(&format!("<{tag}>")).count() + html.matches(&format!("<{tag} ")).count();
        for tag in ["table", "tr", "tbody", "figure", "ul", "li", "svg", "p", "div"] {
            assert_eq!(opened(tag), html.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }

    #[test]
    fn a_comparison_stands_first() {
        use crate::compare::{Comparison, Run, THRESHOLD};
        let report = report();
        assert!(!page(&curve::document(&report, None)).contains("Compared with the earlier run"));
        let run = Run::of_curves(&report.machine, &report.curves);
        let comparison = Comparison::new(&run, &run, THRESHOLD);
        let text = page(&curve::document(&report, Some(&comparison)));
        let (at, growth) = (text.find("Compared with the earlier run"), text.find("How the cost grows"));
        assert!(at.is_some() && at < growth, "{at:?}, {growth:?}");
        let summary =
            format!("{} cases: 0 slower, 0 faster, {} the same within 5 % and noise", run.cases.len(), run.cases.len());
        assert!(text.contains(&summary), "{text}");
    }

    #[test]
    fn an_empty_curve_still_makes_a_page() {
        let mut report = report();
        report.curves[0].points.clear();
        report.curves.truncate(1);
        let level = attn_simd::Level::portable();
        let report = CurveReport::new(report.machine, level, report.curves, report.roofs);
        let html = page(&curve::document(&report, None));
        assert!(html.contains("Machine") && !html.contains("<svg"));
    }
}
