//! What 4 to 1024 nodes would do: the ring and the all-to-all of the heads by the α–β model, drawn as SVG.
//!
//! ```sh
//! cargo run --release --example simulate -- OUT.svg [GFLOP/s of a node] [latency in µs]
//! ```
//!
//! No message is sent. The speed of a node and the latency are yours to state: measure the first with
//! `cargo xtask bench`, on one node, for the type and the head of the model. One panel for each number of tokens: the
//! share of perfect scaling for links of 25, 100 and 400 Gb/s, solid for the ring, dashed for the heads. The
//! model: 64 query heads over 8 key/value heads of 128, bf16, causal with zig-zag shards. The crossovers are printed.

use attn_core::AttnShape;
use attn_mpi::{Cost, Explain, Link, predict};
use plotters::element::DashedPathElement;
use plotters::prelude::*;

/// Tokens of the panels.
const TOKENS: [(usize, &str); 6] = [
    (8 << 10, "8 k tokens"),
    (32 << 10, "32 k tokens"),
    (128 << 10, "128 k tokens"),
    (1 << 20, "1 M tokens"),
    (4 << 20, "4 M tokens"),
    (16 << 20, "16 M tokens"),
];
/// Gigabits a second of a link, and its colour (Okabe and Ito's, distinct for the colour-blind).
const LINKS: [(f64, RGBColor); 3] =
    [(25.0, RGBColor(213, 94, 0)), (100.0, RGBColor(0, 114, 178)), (400.0, RGBColor(0, 158, 115))];
/// Query heads, key/value heads, size of a head.
const HEADS: [usize; 3] = [64, 8, 128];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let out = args.first().ok_or("simulate OUT.svg [GFLOP/s of a node] [latency in µs]")?;
    let number = |n: usize, default: f64| args.get(n).map_or(Ok(default), |arg| arg.parse());
    let (gflops, micros) = (number(1, 2000.0)?, number(2, 2.0)?);
    let nodes: Vec<usize> = (2..=10).map(|n| 1 << n).collect();
    let cost = |tokens: usize, nodes: usize, gigabits: f64| -> Result<Explain, attn_core::AttnError> {
        let [q_heads, kv_heads, dim] = HEADS;
        let kv = [1, kv_heads, tokens, dim];
        let shape = AttnShape::new([1, q_heads, tokens, dim], kv, kv)?;
        // Causal: half of the pairs, on every node, is a node of twice the speed.
        Ok(predict(&shape, nodes, [2, 2], Link::gigabits(gigabits, micros).flops(2e9 * gflops)))
    };
    let root = SVGBackend::new(out, (1200, 1320)).into_drawing_area();
    root.fill(&WHITE)?;
    let title = format!("Causal prefill, 64/8 heads of 128, bf16; a node of {gflops} GFLOP/s, {micros} µs a message");
    let root = root.titled(&title, ("sans-serif", 20))?;
    for (area, (tokens, name)) in root.split_evenly((3, 2)).into_iter().zip(TOKENS) {
        let mut chart = ChartBuilder::on(&area)
            .caption(name, ("sans-serif", 18))
            .margin(10)
            .x_label_area_size(40)
            .y_label_area_size(70)
            .build_cartesian_2d((4f64..1024f64).log_scale(), 0f64..104f64)?;
        chart
            .configure_mesh()
            .x_desc("nodes")
            .y_desc("% of perfect scaling")
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|y| format!("{y:.0}"))
            .light_line_style(TRANSPARENT)
            .draw()?;
        let line = |of: &dyn Fn(usize) -> Option<f64>| -> Vec<(f64, f64)> {
            nodes.iter().filter_map(|&n| Some((n as f64, of(n)?))).collect()
        };
        for (gigabits, colour) in LINKS {
            let ring = line(&|n| cost(tokens, n, gigabits).ok().map(|explain| share(explain.ring)));
            let heads = line(&|n| cost(tokens, n, gigabits).ok()?.heads.map(share));
            chart
                .draw_series(LineSeries::new(ring, colour.stroke_width(2)))?
                .label(format!("ring, {gigabits} Gb/s"))
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], colour.stroke_width(2)));
            chart
                .draw_series(DashedLineSeries::new(heads, 6, 4, colour.stroke_width(2)))?
                .label(format!("heads, {gigabits} Gb/s"))
                .legend(move |(x, y)| DashedPathElement::new([(x, y), (x + 24, y)], 6, 4, colour.stroke_width(2)));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerLeft)
            .background_style(WHITE.mix(0.85))
            .border_style(RGBColor(200, 200, 200))
            .draw()?;
        for (gigabits, _) in LINKS {
            report(name, gigabits, &nodes, |n| cost(tokens, n, gigabits))?;
        }
    }
    root.present()?;
    Ok(())
}

/// Percent of perfect scaling.
fn share(cost: Cost) -> f64 {
    100.0 * cost.compute / cost.seconds
}

/// Prints where the faster method changes, and how well both scale at the end.
fn report(
    name: &str,
    gigabits: f64,
    nodes: &[usize],
    cost: impl Fn(usize) -> Result<Explain, attn_core::AttnError>,
) -> Result<(), attn_core::AttnError> {
    let mut last = None;
    print!("{name}, {gigabits} Gb/s:");
    for &n in nodes {
        let explain = cost(n)?;
        if last != Some(explain.method) {
            print!(" {:?} from {n} nodes,", explain.method);
            last = Some(explain.method);
        }
    }
    let efficiency = |n: usize| cost(n).map(|explain| share(explain.ring));
    println!(" ring at {:.0} % of perfect scaling on 64 nodes, {:.0} % on 1024", efficiency(64)?, efficiency(1024)?);
    Ok(())
}
