//! The tables of a report with what they show, in the order of the page and of the Markdown.

use comfy_table::Table;

use super::{Report, table};
use crate::compare::LEGEND;

/// A table.
pub(super) struct Section {
    /// Its heading.
    pub(super) title: String,
    /// What it shows, in plain text.
    pub(super) note: String,
    /// The table; left out where it has no row.
    pub(super) table: Table,
}

impl Section {
    fn new(title: impl Into<String>, note: impl Into<String>, table: Table) -> Self {
        Self { title: title.into(), note: note.into(), table }
    }
}

/// All tables but that of all points.
pub(super) fn sections(report: &Report) -> Vec<Section> {
    let mut sections = Vec::new();
    if let Some(comparison) = &report.comparison {
        let warnings: String = comparison.warnings.iter().map(|warning| format!("Note: {warning}. ")).collect();
        let note = format!("{}. {warnings}{LEGEND}", comparison.summary());
        sections.push(Section::new("Against the earlier run", note, table::comparison(comparison, true)));
    }
    sections.push(Section::new("How the cost grows", GROWTH, table::growth(report)));
    for curve in &report.curves {
        sections.push(Section::new(format!("Time per call: {}", curve.title()), TIMES, table::times(curve)));
    }
    if let Some(layer) = &report.layer {
        let title = format!("The parts of a layer of width {}", layer.width);
        let note = format!("One thread. Products by {}, the fused kernel at the level measured.", layer.products);
        sections.push(Section::new(title, note, table::parts(layer)));
        sections.push(Section::new("Where attention overtakes the rest", CROSSINGS, table::crossings(layer)));
    }
    sections.push(Section::new("At other widths", CROSSOVERS, table::crossovers(report)));
    sections.push(Section::new("Memory up to 100 000 tokens", FOOTPRINTS, table::footprints(report)));
    sections.push(Section::new("Measured against the cost model", PREDICTIONS, table::predictions(report)));
    sections.push(Section::new("Roofs", ROOFS, table::roofs(report)));
    sections
}

const GROWTH: &str = "Power laws fitted by least squares on the logarithms, over the larger lengths (from a sixteenth of an engine's \
    largest on), where the quadratic part rules; ± is the 95 % confidence interval of the exponent. Memory is beyond inputs and \
    output; n^0 is flat.";

const TIMES: &str = "Medians. Windowed and linear compute something else.";

const CROSSINGS: &str = "Both sides measured; between two lengths the crossing is interpolated, beyond them the power laws through \
    the larger ones are followed and the result is marked as predicted.";

const CROSSOVERS: &str = "The sequence length from which attention takes longer than the parts of a layer that grow linearly in n. \
    Attention: the SIMD engine's fitted curve, scaled to the width. The others: their FLOPs at the SIMD engine's measured rate, not \
    timed. At one rate the closed forms are n = 2d and n = d.";

const FOOTPRINTS: &str = "Beyond inputs and output, one call. Counted where the length was run; elsewhere predicted: four bytes a score, \
    and the size of the workspace that the plan asks for.";

const PREDICTIONS: &str = "FLOPs and bytes moved by attn_layers::cost, one thread; the least time is the larger of FLOPs over the FMA peak \
    (probed beside each sample) and bytes over the rate of reading memory. Keys that stay in a cache make the bytes an upper bound.";

const ROOFS: &str = "The best piece of several; all threads at once in the last column.";

/// How times and memory were measured.
pub(super) const METHOD: &str = "Times are medians over samples; a sample is one call, or the mean of several where a call is short. \
    Engines on one thread are timed by the thread's own clock, which on an idle machine is the wall's and on a busy one leaves \
    out what other programs take; parallel engines by the wall's. All cases are gone through in several passes. The single-thread \
    engines and the peak probe take turns within a round; the parallel engine has rounds of its own against a probe on all of its \
    threads. Spread is the distance between the quartiles relative to the median. FLOPs count 4·heads·n²·dimension, halved where \
    causal. Extra memory is the peak of the program's counted heap during a first call on empty scratch, worker threads included, \
    stacks not; resident is the growth of the process's resident set over the same call. The naive engine builds the whole score \
    matrix of a head in plain f32, compiled for the build's own instruction set; streaming keeps one output row and takes one key at \
    a time; windowed is the SIMD engine where a query sees 256 keys around itself; linear is attention without a softmax.";
