//! The report as one self-contained page: no scripts, no other files, readable on light and dark screens.

use std::fmt::Write;

use super::plot::Plot;
use super::section::{METHOD, Section, sections};
use super::{Report, grouped, pictures, table};
use crate::clock::Samples;
use crate::curve::{Curve, Who, seconds};
use crate::engine::Engine;
use crate::memory::human;

/// Text for HTML.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The page.
pub fn page(report: &Report) -> String {
    let mut html = String::new();
    let sizes: Vec<usize> = report.curves.iter().flat_map(Curve::sizes).collect();
    let range = match (sizes.iter().min(), sizes.iter().max()) {
        (Some(first), Some(last)) => format!("n = {} to {}", grouped(*first), grouped(*last)),
        _ => "nothing measured".into(),
    };
    let titles: Vec<String> = report.curves.iter().map(Curve::title).collect();
    let what = format!("{range}; {}", titles.join("; "));
    put(&mut html, format_args!("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"));
    put(&mut html, format_args!("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"));
    put(
        &mut html,
        format_args!("<title>The cost of exact attention</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"),
    );
    put(
        &mut html,
        format_args!(
            "<h1>The cost of exact attention</h1>\n<p class=\"sub\">{}<br>{}</p>\n",
            escape(&what),
            escape(&report.machine.cpu)
        ),
    );
    if let Some(warning) = report.machine.disturbed() {
        put(&mut html, format_args!("<p class=\"warning\">{}</p>\n", escape(&warning)));
    }
    headline(&mut html, report);
    for curve in &report.curves {
        if report.curves.len() > 1 {
            put(&mut html, format_args!("<h2>{}</h2>\n", escape(&curve.title())));
        }
        let first = report.curves.first().is_some_and(|first| first.name() == curve.name());
        figures(&mut html, pictures::of_curve(curve, if first { &report.footprints } else { &[] }));
    }
    figures(&mut html, report.layer.as_ref().map(pictures::of_layer));
    figures(&mut html, pictures::roofline(report));
    sections(report).iter().for_each(|one| section(&mut html, one));
    points(&mut html, report);
    let skipped = table::skipped(report);
    if !skipped.is_empty() {
        put(&mut html, format_args!("<h2>Not measured</h2>\n<ul>\n"));
        skipped.iter().for_each(|line| put(&mut html, format_args!("<li>{}</li>\n", escape(line))));
        put(&mut html, format_args!("</ul>\n"));
    }
    put(&mut html, format_args!("<h2>Machine</h2>\n<table class=\"facts\">\n"));
    for (name, value) in report.machine.facts() {
        put(&mut html, format_args!("<tr><th scope=\"row\">{name}</th><td>{}</td></tr>\n", escape(&value)));
    }
    put(&mut html, format_args!("</table>\n<h2>How it was measured</h2>\n<p>{METHOD}</p>\n</body>\n</html>\n"));
    html
}

/// Pictures with their captions; those without a point are left out.
fn figures(html: &mut String, plots: impl IntoIterator<Item = (&'static str, String, Plot)>) {
    for (title, note, plot) in plots {
        let svg = plot.svg();
        if !svg.is_empty() {
            put(html, format_args!("<figure>\n<figcaption><b>{title}</b> {note}</figcaption>\n{svg}</figure>\n"));
        }
    }
}

/// Writing into a string cannot fail.
fn put(html: &mut String, text: std::fmt::Arguments<'_>) {
    let _ = html.write_fmt(text);
}

/// The three or four facts that most readers came for.
fn headline(html: &mut String, report: &Report) {
    let mut facts: Vec<(String, String)> = Vec::new();
    let Some(curve) = report.curves.first() else { return };
    let simd = Who::alone(Engine::Simd);
    if let Some(law) = curve.time_law(simd) {
        facts.push((
            format!("n<sup>{:.2}</sup>", law.exponent),
            format!("growth of the SIMD engine's time, R² {:.4}", law.r2),
        ));
    }
    if let Some(best) = curve.of(simd).max_by(|a, b| a.share_of_peak.total_cmp(&b.share_of_peak)) {
        facts.push((
            table::percent(best.share_of_peak),
            format!("of the measured FMA peak at best ({:.0} GFLOP/s, one thread)", best.gflops),
        ));
    }
    if let Some((n, times)) = curve.speedup(Engine::Simd, Engine::Naive) {
        facts
            .push((format!("{times:.1}×"), format!("faster than the textbook form at n = {}, one thread", grouped(n))));
    }
    if let Some(last) = curve.of(simd).last() {
        facts.push((human(last.extra_bytes), format!("extra memory of the SIMD engine at n = {}", grouped(last.n))));
    }
    put(html, format_args!("<ul class=\"headline\">\n"));
    for (value, text) in facts {
        put(html, format_args!("<li><b>{value}</b> {text}</li>\n"));
    }
    put(html, format_args!("</ul>\n"));
}

/// A table, with what it shows.
fn section(html: &mut String, section: &Section) {
    let table = &section.table;
    if table.row_count() == 0 {
        return;
    }
    put(
        html,
        format_args!(
            "<h2>{}</h2>\n<p>{}</p>\n<div class=\"wide\"><table>\n<thead><tr>",
            escape(&section.title),
            escape(&section.note)
        ),
    );
    for cell in table.header().into_iter().flat_map(comfy_table::Row::cell_iter) {
        put(html, format_args!("<th scope=\"col\">{}</th>", escape(&cell.content())));
    }
    put(html, format_args!("</tr></thead>\n<tbody>\n"));
    for row in table.row_iter() {
        put(html, format_args!("<tr>"));
        row.cell_iter().for_each(|cell| put(html, format_args!("<td>{}</td>", escape(&cell.content()))));
        put(html, format_args!("</tr>\n"));
    }
    put(html, format_args!("</tbody></table></div>\n"));
}

/// Every point, per curve and line.
fn points(html: &mut String, report: &Report) {
    const HEADER: [&str; 10] =
        ["engine", "n", "median", "fastest", "spread", "samples", "GFLOP/s", "of peak", "extra memory", "resident"];
    for curve in &report.curves {
        put(
            html,
            format_args!("<h2>All points: {}</h2>\n<div class=\"wide\"><table>\n<thead><tr>", escape(&curve.title())),
        );
        HEADER.iter().for_each(|name| put(html, format_args!("<th scope=\"col\">{name}</th>")));
        put(html, format_args!("</tr></thead>\n"));
        for who in curve.lines() {
            put(html, format_args!("<tbody>\n"));
            for p in curve.of(who) {
                let times = Samples(p.times().to_vec());
                let cells = [
                    who.to_string(),
                    grouped(p.n),
                    seconds(p.seconds),
                    seconds(times.min()),
                    table::percent(times.spread()),
                    times.0.len().to_string(),
                    format!("{:.1}", p.gflops),
                    table::percent(p.share_of_peak),
                    human(p.extra_bytes),
                    p.resident_bytes.map_or_else(|| "–".into(), human),
                ];
                put(html, format_args!("<tr>"));
                cells.iter().for_each(|cell| put(html, format_args!("<td>{cell}</td>")));
                put(html, format_args!("</tr>\n"));
            }
            put(html, format_args!("</tbody>\n"));
        }
        put(html, format_args!("</table></div>\n"));
    }
}

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #667079; --grid: #dfe3e7; --page: #ffffff; --card: #f5f7f9;
  --naive: #c04a00; --streaming: #a8428a; --simd: #0063a8; --parallel: #007a58;
  --windowed: #6b5bd0; --linear: #8a6d00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa4ad; --grid: #343a41; --page: #15181b;
  --card: #1f2428; --naive: #ff9a56; --streaming: #e89bd0; --simd: #63b8ff; --parallel: #3fd0a0;
  --windowed: #b3a6ff; --linear: #e0c040; } }
body { margin: 2.5rem auto; padding: 0 1.2rem; max-width: 58rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; }
h1 { font-size: 1.7rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.4rem 0 .4rem; }
.sub { color: var(--soft); margin: .3rem 0 1.4rem; }
.headline { list-style: none; padding: 0; display: grid; gap: .8rem;
  grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); }
.headline li { background: var(--card); border-radius: .5rem; padding: .8rem 1rem; color: var(--soft); font-size: .9rem; }
.headline b { display: block; font-size: 1.5rem; color: var(--ink); }
figure { margin: 2rem 0; } figcaption { color: var(--soft); margin-bottom: .4rem; } figcaption b { color: var(--ink); }
svg.plot { width: 100%; height: auto; } svg.plot text { font-family: inherit; }
.warning { border-left: .3rem solid var(--naive); background: var(--card); padding: .6rem 1rem; }
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
    use crate::report::tests::report;

    #[test]
    fn the_page_is_whole_and_stands_alone() {
        let report = report();
        let html = page(&report);
        assert_eq!(html.matches("<svg").count(), 2 * 3 + 2);
        assert!(html.contains("A &lt;fast&gt; &amp; quiet CPU") && !html.contains("<fast>"));
        assert!(
            !html.contains("http://") || html.matches("http://").count() == html.matches("http://www.w3.org").count()
        );
        assert!(!html.contains("<script") && !html.contains("https://"));
        assert!(html.contains("prefers-color-scheme: dark"));
        assert!(html.contains("dimension 64: not run at n = 2048"));
        for who in report.curves[0].lines() {
            let rows = html.matches(&format!("<tr><td>{who}</td><td>128</td>")).count();
            assert!(rows >= 2, "{who}: {rows} rows, but each curve has one");
        }
        let opened = |tag: &str| html.matches(&format!("<{tag}>")).count() + html.matches(&format!("<{tag} ")).count();
        for tag in ["table", "tr", "tbody", "figure", "ul", "li", "svg", "p"] {
            assert_eq!(opened(tag), html.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }

    #[test]
    fn a_comparison_stands_first() {
        use crate::compare::{Comparison, Run, THRESHOLD};
        let mut report = report();
        assert!(!page(&report).contains("Against the earlier run"));
        let run = Run::of_curves(&report.machine, &report.curves);
        report.comparison = Some(Comparison::new(&run, &run, THRESHOLD));
        let cases = run.cases.len();
        for text in [page(&report), crate::report::markdown::page(&report)] {
            let (at, growth) = (text.find("Against the earlier run"), text.find("How the cost grows"));
            assert!(at.is_some() && at < growth, "{at:?}, {growth:?}");
            assert!(
                text.contains(&format!("{cases} cases: 0 slower, 0 faster, {cases} the same within 5 % and noise")),
                "{text}"
            );
        }
    }

    #[test]
    fn an_empty_curve_still_makes_a_page() {
        let mut report = report();
        report.curves[0].points.clear();
        report.curves.truncate(1);
        let level = attn_simd::Level::portable();
        let html = page(&Report::new(report.machine, level, report.curves, report.roofs, None));
        assert!(html.contains("Machine") && !html.contains("<svg"));
    }
}
