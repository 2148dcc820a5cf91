//! The losses over the steps, as SVG.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use plotters::prelude::*;

/// One curve.
pub(super) struct Curve<'c> {
    pub(super) name: &'static str,
    pub(super) losses: &'c [f32],
}

const COLOURS: [RGBColor; 2] = [RGBColor(0xc0, 0x4a, 0x00), RGBColor(0x00, 0x63, 0xa8)];

/// Draws the curves; the last is the one in front, and thin where others lie below it.
pub(super) fn draw(path: &Path, curves: &[Curve<'_>]) -> Result<()> {
    let mut svg = String::new();
    picture(&mut svg, curves).map_err(|error| anyhow!("{error}"))?;
    std::fs::write(path, svg).with_context(|| path.display().to_string())
}

fn picture(svg: &mut String, curves: &[Curve<'_>]) -> Result<(), Box<dyn std::error::Error>> {
    let steps = curves.iter().map(|curve| curve.losses.len()).max().unwrap_or(1).max(1);
    let top = curves.iter().flat_map(|curve| curve.losses).copied().fold(1.0, f32::max);
    let area = SVGBackend::with_string(svg, (760, 420)).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .margin(16)
        .x_label_area_size(44)
        .y_label_area_size(56)
        .build_cartesian_2d(0..steps, 0.0f32..top * 1.05)?;
    chart.configure_mesh().x_desc("step").y_desc("loss, nats per letter").light_line_style(TRANSPARENT).draw()?;
    for (n, curve) in curves.iter().enumerate() {
        let width = if n + 1 == curves.len() { 2 } else { 5 };
        let colour = if curves.len() == 1 { COLOURS[1] } else { COLOURS[n % 2] };
        let points = curve.losses.iter().enumerate().map(|(step, &loss)| (step, loss));
        chart
            .draw_series(LineSeries::new(points, colour.stroke_width(width)))?
            .label(curve.name)
            .legend(move |(x, y)| PathElement::new(vec![(x, y), (x + 18, y)], colour.stroke_width(width)));
    }
    chart.configure_series_labels().position(SeriesLabelPosition::UpperRight).border_style(BLACK.mix(0.2)).draw()?;
    area.present()?;
    drop(chart);
    Ok(())
}
