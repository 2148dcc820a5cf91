//! What 4 to 1024 nodes would do: the ring and the all-to-all of the heads by the model of `predict`, drawn as SVG.
//!
//! ```sh
//! cargo run --release --example simulate -- OUT.svg [GFLOP/s of a node] [latency in µs]
//! ```
//!
//! No message is sent. The model is LogGP's with two numbers: a message of `n` bytes takes `α + n·β`, where `α` is
//! LogGP's `o + L + o`, and `β` its `G`; a rank sends one message at a time. You give the speed of a node and `α`;
//! `cargo xtask bench --kernels` measures the speed. The model has 64 query heads over 8 key/value heads of 128, bf16,
//! causal with zig-zag shards. Crossovers are printed too.

use attn_core::{AttnError, AttnShape};
use attn_mpi::{Cost, Explain, Link, Method, predict};
use plotters::coord::Shift;
use plotters::coord::ranged1d::ValueFormatter;
use plotters::element::DashedPathElement;
use plotters::prelude::*;

/// Gigabits a second of a link, and its colour (Okabe and Ito's, distinct for the colour-blind).
const LINKS: [(f64, RGBColor); 3] =
    [(25.0, RGBColor(213, 94, 0)), (100.0, RGBColor(0, 114, 178)), (400.0, RGBColor(0, 158, 115))];
/// Tokens of the panels of seconds and memory, and their colours.
const TOKENS: [(usize, RGBColor); 4] = [
    (128 << 10, RGBColor(213, 94, 0)),
    (1 << 20, RGBColor(0, 114, 178)),
    (4 << 20, RGBColor(0, 158, 115)),
    (16 << 20, RGBColor(160, 80, 140)),
];
/// Tokens of the panels of scaling.
const SCALED: [usize; 3] = [16 << 10, 128 << 10, 1 << 20];
/// Query heads, key/value heads, size of a head.
const HEADS: [usize; 3] = [64, 8, 128];
/// Nodes, on axes.
const NODES: std::ops::Range<f64> = 4.0..1024.0;
const BLACK_TEXT: RGBColor = RGBColor(28, 31, 35);
const GREY: RGBColor = RGBColor(205, 210, 215);
const PERFECT: RGBColor = RGBColor(102, 112, 121);

type Area<'b> = DrawingArea<SVGBackend<'b>, Shift>;
type Logs = LogCoord<f64>;
type Chart<'a, 'b, Y> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<Logs, Y>>;
type Done = Result<(), Box<dyn std::error::Error>>;

fn main() -> Done {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let out = args.first().ok_or("simulate OUT.svg [GFLOP/s of a node] [latency in µs]")?;
    let number = |n: usize, default: f64| args.get(n).map_or(Ok(default), |arg| arg.parse());
    let machine = Machine { gflops: number(1, 2000.0)?, micros: number(2, 2.0)? };
    let mut drawn = String::new();
    draw_all(&machine, &mut drawn)?;
    // Opaque is what an element is anyhow: the picture is smaller without it.
    std::fs::write(out, drawn.replace(" opacity=\"1\"", "").replace(" stroke-width=\"1\"", ""))?;
    report(&machine)
}

/// Draws the six panels.
fn draw_all(machine: &Machine, drawn: &mut String) -> Done {
    let root = SVGBackend::with_string(drawn, (1200, 1360)).into_drawing_area();
    root.fill(&WHITE)?;
    let Machine { gflops, micros } = machine;
    let title =
        format!("Causal prefill, 64 heads over 8 of 128, bf16; nodes of {gflops} GFLOP/s, {micros} µs a message");
    let root = root.titled(&title, ("sans-serif", 22).into_font().color(&BLACK_TEXT))?;
    let areas = root.split_evenly((3, 2));
    seconds(machine, &areas[0])?;
    memory(machine, &areas[1])?;
    for (tokens, area) in SCALED.into_iter().zip([&areas[2], &areas[3], &areas[4]]) {
        scaling(machine, tokens, area)?;
    }
    crossover(machine, &areas[5])?;
    root.present()?;
    Ok(())
}

/// What is stated of the machine.
struct Machine {
    gflops: f64,
    micros: f64,
}

impl Machine {
    fn cost(&self, tokens: usize, nodes: usize, gigabits: f64) -> Result<Explain, AttnError> {
        let [q_heads, kv_heads, dim] = HEADS;
        let kv = [1, kv_heads, tokens, dim];
        let shape = AttnShape::new([1, q_heads, tokens, dim], kv, kv)?;
        // Causal: half of the pairs, on every node, is a node of twice the speed.
        Ok(predict(&shape, nodes, [2, 2], Link::gigabits(gigabits, self.micros).flops(2e9 * self.gflops)))
    }

    /// A line over the nodes; the heads' ends where there are more nodes than heads.
    fn line(&self, tokens: usize, gigabits: f64, way: Method, of: impl Fn(Cost) -> f64) -> Vec<(f64, f64)> {
        let point = |n: usize| {
            let explain = self.cost(tokens, n, gigabits).ok()?;
            let cost = if way == Method::Ring { Some(explain.ring) } else { explain.heads };
            cost.map(|cost| (n as f64, of(cost)))
        };
        nodes().filter_map(point).collect()
    }
}

/// 4 to 1024.
fn nodes() -> impl Iterator<Item = usize> {
    (2..=10).map(|n| 1 << n)
}

/// Percent of perfect scaling.
fn share(cost: Cost) -> f64 {
    100.0 * cost.compute / cost.seconds
}

/// `128 k`, `4 M`.
fn short(tokens: usize) -> String {
    if tokens >= 1 << 20 { format!("{} M", tokens >> 20) } else { format!("{} k", tokens >> 10) }
}

/// Seconds over nodes.
fn seconds(machine: &Machine, area: &Area<'_>) -> Done {
    let mut chart = builder(area, "Seconds, ring, links of 100 Gb/s")
        .build_cartesian_2d(NODES.log_scale().base(4.0), (1e-3f64..1e6f64).log_scale())?;
    mesh(&mut chart, "nodes", "seconds", &power)?;
    for (n, (tokens, colour)) in TOKENS.into_iter().enumerate() {
        let perfect = machine.line(tokens, 100.0, Method::Ring, |cost| cost.compute);
        draw(&mut chart, perfect, PERFECT, true, if n == 0 { "perfect scaling" } else { "" })?;
        let line = machine.line(tokens, 100.0, Method::Ring, |cost| cost.seconds);
        draw(&mut chart, line, colour, false, &format!("{} tokens", short(tokens)))?;
    }
    legend(&mut chart, SeriesLabelPosition::UpperRight)
}

/// Memory of a rank over nodes.
fn memory(machine: &Machine, area: &Area<'_>) -> Done {
    let mut chart = builder(area, "Memory of a rank: tensors and buffers, GiB")
        .build_cartesian_2d(NODES.log_scale().base(4.0), (1e-4f64..1e3f64).log_scale())?;
    mesh(&mut chart, "nodes", "GiB", &power)?;
    for (tokens, colour) in TOKENS {
        for (way, name) in [(Method::Ring, "ring"), (Method::Heads, "heads")] {
            let line = machine.line(tokens, 100.0, way, |cost| cost.memory / (1u64 << 30) as f64);
            draw(&mut chart, line, colour, way == Method::Heads, &format!("{name}, {} tokens", short(tokens)))?;
        }
    }
    legend(&mut chart, SeriesLabelPosition::LowerLeft)
}

/// The share of perfect scaling over nodes, for one number of tokens.
fn scaling(machine: &Machine, tokens: usize, area: &Area<'_>) -> Done {
    let title = format!("% of perfect scaling, {} tokens", short(tokens));
    let mut chart = builder(area, &title).build_cartesian_2d(NODES.log_scale().base(4.0), 0f64..104f64)?;
    mesh(&mut chart, "nodes", "%", &|y| format!("{y:.0}"))?;
    for (gigabits, colour) in LINKS {
        for (way, name) in [(Method::Ring, "ring"), (Method::Heads, "heads")] {
            let line = machine.line(tokens, gigabits, way, share);
            draw(&mut chart, line, colour, way == Method::Heads, &format!("{name}, {gigabits} Gb/s"))?;
        }
    }
    legend(&mut chart, SeriesLabelPosition::LowerLeft)
}

/// For each number of tokens: up to how many nodes the ring hides all communication, and from how many on the heads are
/// faster.
fn crossover(machine: &Machine, area: &Area<'_>) -> Done {
    let mut chart = builder(area, "Nodes up to which the ring hides messages (●: heads are faster)")
        .build_cartesian_2d((4096f64..4_194_304f64).log_scale().base(4.0), (4f64..2048f64).log_scale().base(4.0))?;
    let tokens = || (12..=22).map(|n| 1usize << n);
    chart
        .configure_mesh()
        .x_desc("tokens")
        .y_desc("nodes")
        .label_style(("sans-serif", 15).into_font().color(&BLACK_TEXT))
        .x_label_formatter(&|x| short(x.round() as usize))
        .y_label_formatter(&|y| format!("{y:.0}"))
        .bold_line_style(GREY.mix(0.7))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (gigabits, colour) in LINKS {
        let hidden = tokens().filter_map(|n| Some((n as f64, machine.hidden(n, gigabits)?)));
        draw(&mut chart, hidden.collect(), colour, false, &format!("{gigabits} Gb/s"))?;
        let first = |n: usize| Some((n as f64, machine.crossing(n, gigabits)? as f64));
        chart.draw_series(tokens().filter_map(first).map(|at| Circle::new(at, 5, colour.filled())))?;
    }
    legend(&mut chart, SeriesLabelPosition::LowerRight)
}

impl Machine {
    /// The number of nodes at which a step takes as long as its transfer, by bisection on the logarithm; between 4 and
    /// 1024.
    fn hidden(&self, tokens: usize, gigabits: f64) -> Option<f64> {
        let hides = |n: f64| {
            let cost = self.cost(tokens, n.round() as usize, gigabits).ok()?.ring;
            Some(cost.seconds <= 1.001 * cost.compute)
        };
        if !hides(4.0)? {
            return None;
        }
        let (mut low, mut high) = (4.0f64, 1024.0f64);
        for _ in 0..40 {
            let middle = (low * high).sqrt();
            if hides(middle)? { low = middle } else { high = middle }
        }
        Some(high)
    }

    /// The first power of two of nodes at which the heads are faster.
    fn crossing(&self, tokens: usize, gigabits: f64) -> Option<usize> {
        nodes().find(|&n| self.cost(tokens, n, gigabits).is_ok_and(|explain| explain.method == Method::Heads))
    }
}

/// `0.001`, `10`, `1000`.
fn power(y: &f64) -> String {
    if *y < 1.0 { format!("{y}") } else { format!("{y:.0}") }
}

fn builder<'a, 'b>(area: &'a Area<'b>, caption: &str) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder
        .caption(caption, ("sans-serif", 18).into_font().color(&BLACK_TEXT))
        .margin(12)
        .margin_right(32)
        .x_label_area_size(44)
        .y_label_area_size(66);
    builder
}

fn mesh<Y>(chart: &mut Chart<'_, '_, Y>, x: &str, y: &str, label: &dyn Fn(&f64) -> String) -> Done
where
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    chart
        .configure_mesh()
        .x_desc(x)
        .y_desc(y)
        .label_style(("sans-serif", 15).into_font().color(&BLACK_TEXT))
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(label)
        .bold_line_style(GREY.mix(0.7))
        .light_line_style(TRANSPARENT)
        .draw()?;
    Ok(())
}

/// A line, dashed or not, with its name in the legend if it has one.
fn draw<Y>(chart: &mut Chart<'_, '_, Y>, line: Vec<(f64, f64)>, colour: RGBColor, dashed: bool, name: &str) -> Done
where
    Y: Ranged<ValueType = f64>,
{
    let style = colour.stroke_width(if colour == PERFECT { 1 } else { 2 });
    if dashed {
        let series = chart.draw_series(DashedLineSeries::new(line, 16, 8, style))?;
        if !name.is_empty() {
            series.label(name).legend(move |(x, y)| DashedPathElement::new([(x, y), (x + 24, y)], 10, 4, style));
        }
    } else {
        let series = chart.draw_series(LineSeries::new(line, style))?;
        series.label(name).legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], style));
    }
    Ok(())
}

fn legend<'b: 'a, 'a, Y: Ranged<ValueType = f64>>(chart: &mut Chart<'a, 'b, Y>, at: SeriesLabelPosition) -> Done {
    chart
        .configure_series_labels()
        .position(at)
        .label_font(("sans-serif", 14).into_font().color(&BLACK_TEXT))
        .background_style(WHITE.mix(0.85))
        .border_style(GREY)
        .draw()?;
    Ok(())
}

/// Prints where the ring stops hiding its messages, where the heads are faster, and how both scale at the end.
fn report(machine: &Machine) -> Done {
    for tokens in SCALED.into_iter().chain([4 << 20, 16 << 20]) {
        for (gigabits, _) in LINKS {
            let hidden = machine.hidden(tokens, gigabits).map_or("no number of".into(), |n| format!("{n:.0}"));
            let heads = machine.crossing(tokens, gigabits);
            let heads = heads.map_or("never".into(), |n| format!("from {n} nodes on (to {})", HEADS[0]));
            let end = share(machine.cost(tokens, 1024, gigabits)?.ring);
            println!(
                "{} tokens, {gigabits} Gb/s: the ring hides its messages up to {hidden} nodes, and has {end:.0} % of \
                 perfect scaling on 1024; heads are faster {heads}",
                short(tokens)
            );
        }
    }
    Ok(())
}
