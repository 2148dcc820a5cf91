//! The report as one self-contained page: no scripts, no other files, readable on light and dark screens.

use std::fmt::Write;

use super::plot::{self, Axis, Ink, Marker, Plot, Series};
use super::{Report, grouped, table};
use crate::clock::Samples;
use crate::curve::{Curve, Point, Who, seconds};
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
        figures(&mut html, plots(curve));
    }
    figures(&mut html, report.curves.first().and_then(layer_plot));
    section(&mut html, "How the cost grows", GROWTH_NOTE, &table::growth(report));
    section(&mut html, "Against the linear parts of a layer", CROSSOVER_NOTE, &table::crossovers(report));
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
    put(&mut html, format_args!("</table>\n<h2>How it was measured</h2>\n{METHOD}\n</body>\n</html>\n"));
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

fn look(engine: Engine) -> (Ink, Marker) {
    match engine {
        Engine::Naive => (plot::NAIVE, Marker::Cross),
        Engine::Streaming => (plot::STREAMING, Marker::Triangle),
        Engine::Simd => (plot::SIMD, Marker::Disc),
        Engine::Parallel => (plot::PARALLEL, Marker::Square),
        Engine::Windowed => (plot::WINDOWED, Marker::Disc),
        Engine::Linear => (plot::LINEAR, Marker::Triangle),
    }
}

fn lines(curve: &Curve, which: impl Fn(Who) -> bool, value: impl Fn(&Point) -> f64) -> Vec<Series> {
    let lines = curve.lines().into_iter().filter(|&who| which(who));
    lines
        .map(|who| {
            let (ink, marker) = look(who.engine);
            let points = curve.of(who).map(|p| (p.n as f64, value(p))).collect();
            Series { label: who.to_string(), ink, marker, points }
        })
        .collect()
}

/// Title, note and picture of each plot of a curve.
fn plots(curve: &Curve) -> Vec<(&'static str, String, Plot)> {
    let all = |_: Who| true;
    let mut time = lines(curve, all, |p| p.seconds);
    let simd = Who::alone(Engine::Simd);
    if let (Some(law), Some(simd)) = (curve.time_law(simd), curve.of(simd).last()) {
        // A guide of slope 2 below the SIMD engine's last point.
        let at = |n: f64| (n, simd.seconds / 8.0 * (n / simd.n as f64).powi(2));
        let points = vec![at(law.from_n as f64), at(law.to_n as f64)];
        time.push(Series { label: "slope of n²".into(), ink: plot::GUIDE, marker: Marker::Dashed, points });
    }
    // What needs nothing at all still gets a point, at one byte, or a logarithmic axis could not show it.
    let memory = lines(curve, all, |p| p.extra_bytes.max(1) as f64);
    let share = lines(curve, |who| who.engine != Engine::Linear, |p| p.share_of_peak);
    vec![
        (
            "Time per call",
            "against sequence length. Both axes are logarithmic: a straight line of slope 2 is O(n²), one of slope 1 is \
             O(n). <i>windowed</i> and <i>linear</i> compute something else, cheaper."
                .into(),
            Plot {
                title: "Time per call against sequence length".into(),
                axis: Axis::Log { base: 10.0, label: seconds_tick },
                series: time,
            },
        ),
        (
            "Extra memory",
            "held at the worst moment of a call, beyond inputs and output.".into(),
            Plot {
                title: "Extra memory against sequence length".into(),
                axis: Axis::Log { base: 16.0, label: bytes_tick },
                series: memory,
            },
        ),
        (
            "Share of the FMA peak",
            "measured right beside each sample; parallel against all of its threads.".into(),
            Plot {
                title: "Share of the measured peak against sequence length".into(),
                axis: Axis::Share,
                series: share,
            },
        ),
    ]
}

/// One layer of a common width, from the curve's fit.
fn layer_plot(curve: &Curve) -> Option<(&'static str, String, Plot)> {
    const WIDTH: usize = 768;
    let linear = curve.linear()?;
    let ns: Vec<f64> = curve.sizes().into_iter().map(|n| n as f64).collect();
    let line = |label: &str, ink, marker, f: &dyn Fn(f64) -> f64| Series {
        label: label.into(),
        ink,
        marker,
        points: ns.iter().map(|&n| (n, f(n))).collect(),
    };
    let series = vec![
        line("attention", plot::SIMD, Marker::Disc, &|n| linear.attention_seconds(n, WIDTH)),
        line("projections", plot::NAIVE, Marker::Cross, &|n| linear.projection_seconds(n, WIDTH)),
        line("recurrent", plot::STREAMING, Marker::Triangle, &|n| linear.recurrent_seconds(n, WIDTH)),
    ];
    let note = "attention (fitted) against the projections q, k, v, output and against a recurrent layer (computed at the \
                SIMD engine's rate).";
    let title = "Time of attention, projections and a recurrent layer".into();
    let plot = Plot { title, axis: Axis::Log { base: 10.0, label: seconds_tick }, series };
    Some(("One layer of width 768", note.into(), plot))
}

fn seconds_tick(t: f64) -> String {
    seconds(t * 1.000_001).replace(".00", "").replace(".0", "")
}

fn bytes_tick(bytes: f64) -> String {
    human(bytes.round() as usize).replace(".00", "").replace(".0", "")
}

/// A table that the terminal shows too.
fn section(html: &mut String, title: &str, note: &str, table: &comfy_table::Table) {
    if table.row_count() == 0 {
        return;
    }
    put(html, format_args!("<h2>{title}</h2>\n<p>{note}</p>\n<div class=\"wide\"><table>\n<thead><tr>"));
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

const GROWTH_NOTE: &str = "Power laws fitted by least squares on the logarithms, over the larger lengths (from a sixteenth of \
    an engine's largest on), where the quadratic part rules. Memory is beyond inputs and output; n<sup>0</sup> is flat.";

const CROSSOVER_NOTE: &str = "The sequence length from which attention takes longer than the parts of a layer that grow \
    linearly in n. Attention: the SIMD engine's fitted curve, scaled to the width. The others: their FLOPs at the SIMD \
    engine's measured rate, not timed. (At one rate the closed forms are n = 2d and n = d.) A real recurrent layer is \
    slower than that, because its steps wait for each other.";

const METHOD: &str = "<p>Times are medians over samples; a sample is one call, or the mean of several where a call is short. \
    Engines on one thread are timed by the thread's own clock, which on an idle machine is the wall's and on a busy one leaves \
    out what other programs take; parallel engines by the wall's. All cases are gone through in several passes. The single-thread engines and the peak probe take turns within a round; the parallel engine has rounds of its own \
    against a probe on all of its threads. Spread is the distance between the quartiles relative to the median. FLOPs \
    count 4·heads·n²·dimension, halved where causal. Extra memory is the peak of the program's counted heap during a first call on \
    empty scratch, worker threads included, stacks not; \
    resident is the growth of the process's resident set over the same call. The naive engine builds the whole score matrix of a head in plain \
    f32, compiled for the build's own instruction set; streaming keeps one output row and takes one key at a time.</p>";

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1c1f23; --soft: #667079; --grid: #dfe3e7; --page: #ffffff; --card: #f5f7f9;
  --naive: #c04a00; --streaming: #a8428a; --simd: #0063a8; --parallel: #007a58;
  --windowed: #6b5bd0; --linear: #8a6d00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #9aa4ad; --grid: #343a41; --page: #15181b;
  --card: #1f2428; --naive: #ff9a56; --streaming: #e89bd0; --simd: #63b8ff; --parallel: #3fd0a0;
  --windowed: #b3a6ff; --linear: #e0c040; } }
body { margin: 2.5rem auto; padding: 0 1.2rem; max-width: 52rem; background: var(--page); color: var(--ink);
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
        assert_eq!(html.matches("<svg").count(), 2 * 3 + 1);
        assert!(html.contains("A &lt;fast&gt; &amp; quiet CPU") && !html.contains("<fast>"));
        assert!(
            !html.contains("http://") || html.matches("http://").count() == html.matches("http://www.w3.org").count()
        );
        assert!(!html.contains("<script") && !html.contains("https://"));
        assert!(html.contains("prefers-color-scheme: dark"));
        assert!(html.contains("dimension 64: not run at n = 2048"));
        for who in report.curves[0].lines() {
            assert_eq!(html.matches(&format!("<tr><td>{who}</td><td>128</td>")).count(), 2, "{who}");
        }
        let opened = |tag: &str| html.matches(&format!("<{tag}>")).count() + html.matches(&format!("<{tag} ")).count();
        for tag in ["table", "tr", "tbody", "figure", "ul", "li", "svg", "p"] {
            assert_eq!(opened(tag), html.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }

    #[test]
    fn an_empty_curve_still_makes_a_page() {
        let mut report = report();
        report.curves[0].points.clear();
        report.curves.truncate(1);
        let html = page(&Report::new(report.machine, report.curves));
        assert!(html.contains("Machine") && !html.contains("<svg"));
    }

    #[test]
    fn ticks_are_short() {
        assert_eq!(
            [1e-6, 1e-3, 0.01, 0.1, 1.0, 10.0].map(seconds_tick),
            ["1 µs", "1 ms", "10 ms", "100 ms", "1 s", "10 s"]
        );
        assert_eq!([1.0, 256.0, 4096.0, 1048576.0].map(bytes_tick), ["1 B", "256 B", "4 KiB", "1 MiB"]);
    }
}
