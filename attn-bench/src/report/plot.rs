//! Plots as SVG text that follows the page's colours.
//!
//! The drawing is done by plotters with placeholder colours, which are then replaced by CSS variables (`var(--simd)`),
//! so that one picture is right on a light and on a dark page. Engines differ in marker shape and carry their name at
//! the end of their line, so that nobody has to tell them apart by colour.

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// A placeholder and the CSS variable that replaces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ink {
    placeholder: RGBColor,
    variable: &'static str,
}

/// Text.
pub const TEXT: Ink = Ink { placeholder: RGBColor(1, 1, 1), variable: "var(--ink)" };
/// Lines of the grid.
pub const GRID: Ink = Ink { placeholder: RGBColor(2, 2, 2), variable: "var(--grid)" };
/// Guides, such as the slope of n².
pub const GUIDE: Ink = Ink { placeholder: RGBColor(3, 3, 3), variable: "var(--soft)" };
/// The naive engine.
pub const NAIVE: Ink = Ink { placeholder: RGBColor(4, 4, 4), variable: "var(--naive)" };
/// The streaming engine.
pub const STREAMING: Ink = Ink { placeholder: RGBColor(5, 5, 5), variable: "var(--streaming)" };
/// The SIMD engine.
pub const SIMD: Ink = Ink { placeholder: RGBColor(6, 6, 6), variable: "var(--simd)" };
/// The parallel engine.
pub const PARALLEL: Ink = Ink { placeholder: RGBColor(7, 7, 7), variable: "var(--parallel)" };
/// The window.
pub const WINDOWED: Ink = Ink { placeholder: RGBColor(8, 8, 8), variable: "var(--windowed)" };
/// Linear attention.
pub const LINEAR: Ink = Ink { placeholder: RGBColor(9, 9, 9), variable: "var(--linear)" };

const INKS: [Ink; 9] = [TEXT, GRID, GUIDE, NAIVE, STREAMING, SIMD, PARALLEL, WINDOWED, LINEAR];

/// How points are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// Not at all; the line is dashed.
    Dashed,
    /// A disc.
    Disc,
    /// A square.
    Square,
    /// A triangle.
    Triangle,
    /// A cross.
    Cross,
}

/// One line of a plot.
#[derive(Clone, Debug)]
pub struct Series {
    /// Written at the end of the line.
    pub label: String,
    /// Its colour.
    pub ink: Ink,
    /// Its marker.
    pub marker: Marker,
    /// The points; both coordinates above 0.
    pub points: Vec<(f64, f64)>,
}

/// What the vertical axis shows.
#[derive(Clone, Copy, Debug)]
pub enum Axis {
    /// A logarithmic axis whose ticks are the powers of `base` and carry `label`.
    Log {
        /// Ratio of neighbouring ticks.
        base: f64,
        /// Text of a tick.
        label: fn(f64) -> String,
    },
    /// A linear axis from 0 to at least 1, in percent.
    Share,
}

/// What the horizontal axis shows: logarithmic, with ticks at powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum X {
    /// The sequence length.
    Length,
    /// FLOPs per byte.
    Intensity,
}

impl X {
    const fn name(self) -> &'static str {
        match self {
            Self::Length => "sequence length n",
            Self::Intensity => "FLOPs per byte moved",
        }
    }
}

/// A power of two as a tick: `1/4`, `16 384`.
fn x_tick(x: f64) -> String {
    if x < 0.9 { format!("1/{}", (1.0 / x).round()) } else { super::grouped(x.round() as usize) }
}

/// A plot.
#[derive(Clone, Debug)]
pub struct Plot {
    /// What the picture shows, for readers who do not see it.
    pub title: String,
    /// The horizontal axis.
    pub x: X,
    /// The vertical axis.
    pub axis: Axis,
    /// The lines.
    pub series: Vec<Series>,
}

const SIZE: (u32, u32) = (760, 420);
const LEFT: i32 = 74;
const RIGHT: i32 = 118;
const TOP: i32 = 14;
const BOTTOM: i32 = 46;

impl Plot {
    /// The picture; empty where there is no point.
    pub fn svg(&self) -> String {
        let mut text = String::new();
        // Drawing into a string fails only where a coordinate is not a number, which `bounds` rules out.
        if self.draw(&mut text).is_none() {
            return String::new();
        }
        for ink in INKS {
            let RGBColor(r, g, b) = ink.placeholder;
            text = text.replace(&format!("#{r:02X}{g:02X}{b:02X}"), ink.variable);
        }
        let title = super::html::escape(&self.title);
        text.replacen(
            &format!("<svg width=\"{}\" height=\"{}\"", SIZE.0, SIZE.1),
            &format!("<svg role=\"img\" aria-label=\"{title}\" class=\"plot\""),
            1,
        )
    }

    /// Smallest and largest x and y.
    fn bounds(&self) -> Option<((f64, f64), (f64, f64))> {
        let mut points = self.series.iter().flat_map(|s| &s.points).copied();
        let first = points.next()?;
        let mut bounds = ((first.0, first.0), (first.1, first.1));
        for (x, y) in std::iter::once(first).chain(points) {
            if !(x > 0.0 && y > 0.0 && x.is_finite() && y.is_finite()) {
                return None;
            }
            bounds.0 = (bounds.0.0.min(x), bounds.0.1.max(x));
            bounds.1 = (bounds.1.0.min(y), bounds.1.1.max(y));
        }
        Some(bounds)
    }

    fn draw(&self, text: &mut String) -> Option<()> {
        let ((x0, x1), (y0, y1)) = self.bounds()?;
        let root = SVGBackend::with_string(text, SIZE).into_drawing_area();
        let (width, height) = (SIZE.0 as i32 - LEFT - RIGHT, SIZE.1 as i32 - TOP - BOTTOM);
        let x_range = (x0 / 1.12, x1 * 1.12);
        let x_ticks = powers(2.0, x_range, 12);
        let (y_range, y_ticks, y_label): (_, _, fn(f64) -> String) = match self.axis {
            Axis::Log { base, label } => {
                let range = (y0 / 1.6, y1 * 1.6);
                (range, powers(base, range, 10), label)
            }
            Axis::Share => {
                let top = (y1 * 1.02).max(1.0);
                let ticks = (0..=(top * 5.0) as u32).map(|i| f64::from(i) / 5.0).collect();
                ((0.0, top), ticks, |y| format!("{:.0} %", 100.0 * y))
            }
        };
        let x_pixel = |x: f64| LEFT + (log_share(x, x_range) * f64::from(width)).round() as i32;
        let y_pixel = |y: f64| {
            let share = match self.axis {
                Axis::Log { .. } => log_share(y, y_range),
                Axis::Share => (y - y_range.0) / (y_range.1 - y_range.0),
            };
            TOP + height - (share * f64::from(height)).round() as i32
        };
        let grid = GRID.placeholder.stroke_width(1);

        for &tick in &x_ticks {
            let x = x_pixel(tick);
            root.draw(&PathElement::new([(x, TOP), (x, TOP + height)], grid)).ok()?;
            root.draw(&Text::new(x_tick(tick), (x, TOP + height + 6), font(TEXT, HPos::Center, VPos::Top))).ok()?;
        }
        for &tick in &y_ticks {
            let y = y_pixel(tick);
            root.draw(&PathElement::new([(LEFT, y), (LEFT + width, y)], grid)).ok()?;
            root.draw(&Text::new(y_label(tick), (LEFT - 8, y), font(TEXT, HPos::Right, VPos::Center))).ok()?;
        }
        let below = (LEFT + width / 2, TOP + height + 24);
        root.draw(&Text::new(self.x.name(), below, font(TEXT, HPos::Center, VPos::Top))).ok()?;

        for series in &self.series {
            let color = series.ink.placeholder;
            let points: Vec<_> = series.points.iter().map(|&(x, y)| (x_pixel(x), y_pixel(y))).collect();
            if series.marker == Marker::Dashed {
                root.draw(&DashedPathElement::new(points, 6, 5, color.stroke_width(1))).ok()?;
                continue;
            }
            root.draw(&PathElement::new(points.clone(), color.stroke_width(2))).ok()?;
            points.into_iter().try_for_each(|at| mark(&root, series, at))?;
        }

        // Names on the right, by the height at which the lines end, pushed apart where they would overlap.
        let mut names: Vec<(i32, &Series)> =
            self.series.iter().filter_map(|s| s.points.last().map(|&(_, y)| (y_pixel(y), s))).collect();
        names.sort_by_key(|n| n.0);
        spread_apart(&mut names, 16, TOP + height);
        for (y, series) in names {
            let x = LEFT + width + 12;
            mark(&root, series, (x, y))?;
            root.draw(&Text::new(series.label.clone(), (x + 10, y), font(series.ink, HPos::Left, VPos::Center)))
                .ok()?;
        }
        root.present().ok()
    }
}

/// Moves sorted positions down until they are `gap` apart, and back up where the last would lie below `bottom`.
fn spread_apart<T>(sorted: &mut [(i32, T)], gap: i32, bottom: i32) {
    let mut free = i32::MIN;
    for (y, _) in sorted.iter_mut() {
        *y = (*y).max(free);
        free = *y + gap;
    }
    let mut limit = bottom;
    for (y, _) in sorted.iter_mut().rev() {
        *y = (*y).min(limit);
        limit = *y - gap;
    }
}

/// Text of the size of labels.
fn font(ink: Ink, horizontal: HPos, vertical: VPos) -> TextStyle<'static> {
    ("sans-serif", 13).into_font().color(&ink.placeholder).pos(Pos::new(horizontal, vertical))
}

/// Draws the marker of a series at a pixel.
fn mark<'a>(
    root: &DrawingArea<SVGBackend<'a>, plotters::coord::Shift>,
    series: &Series,
    at @ (x, y): (i32, i32),
) -> Option<()> {
    let color = series.ink.placeholder;
    match series.marker {
        Marker::Disc => root.draw(&Circle::new(at, 4, color.filled())),
        Marker::Square => root.draw(&Rectangle::new([(x - 4, y - 4), (x + 4, y + 4)], color.filled())),
        Marker::Triangle => root.draw(&TriangleMarker::new(at, 6, color.filled())),
        Marker::Cross => root.draw(&Cross::new(at, 4, color.stroke_width(2))),
        Marker::Dashed => Ok(()),
    }
    .ok()
}

/// Powers of `base` within a range, thinned until at most `most` remain.
fn powers(base: f64, (low, high): (f64, f64), most: usize) -> Vec<f64> {
    let first = (low.ln() / base.ln()).ceil() as i32;
    let last = (high.ln() / base.ln()).floor() as i32;
    let count = (last - first + 1).max(0) as usize;
    (first..=last).step_by(count.div_ceil(most).max(1)).map(|e| base.powi(e)).collect()
}

/// Where `x` lies in a range on a logarithmic axis: 0 at its start, 1 at its end.
fn log_share(x: f64, (low, high): (f64, f64)) -> f64 {
    (x / low).ln() / (high / low).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<(f64, f64)>) -> Plot {
        let series = Series { label: "simd".into(), ink: SIMD, marker: Marker::Disc, points };
        Plot {
            title: "a < b".into(),
            x: X::Length,
            axis: Axis::Log { base: 10.0, label: |y| format!("{y}") },
            series: vec![series],
        }
    }

    #[test]
    fn colours_become_variables_and_every_point_a_mark() {
        let svg = plot(vec![(64.0, 1.0), (128.0, 4.0), (256.0, 16.0)]).svg();
        assert!(svg.starts_with("<svg role=\"img\" aria-label=\"a &lt; b\""), "{}", &svg[..200]);
        assert_eq!(svg.matches("<circle").count(), 3 + 1, "the points and the one beside the name");
        assert!(svg.contains("var(--simd)") && svg.contains("var(--grid)") && svg.contains("var(--ink)"));
        assert!(!svg.contains("#0"), "a placeholder is left");
        for tick in ["64", "128", "256", "10"] {
            assert!(svg.contains(&format!("\n{tick}\n")), "no tick {tick}");
        }
    }

    #[test]
    fn a_picture_of_nothing_or_of_no_numbers_is_empty() {
        assert_eq!(plot(vec![]).svg(), "");
        assert_eq!(plot(vec![(64.0, f64::NAN)]).svg(), "");
        assert_eq!(plot(vec![(64.0, 0.0)]).svg(), "");
        assert_ne!(plot(vec![(64.0, 1.0)]).svg(), "");
    }

    #[test]
    fn ticks_below_one_are_fractions() {
        assert_eq!([0.25, 1.0, 16384.0].map(x_tick), ["1/4", "1", "16\u{202f}384"]);
    }

    #[test]
    fn names_keep_their_distance() {
        let place = |ys: &[i32]| {
            let mut named: Vec<_> = ys.iter().map(|&y| (y, ())).collect();
            spread_apart(&mut named, 10, 100);
            named.into_iter().map(|(y, ())| y).collect::<Vec<_>>()
        };
        assert_eq!(place(&[5, 50, 90]), [5, 50, 90]);
        assert_eq!(place(&[5, 7, 50]), [5, 15, 50]);
        assert_eq!(place(&[50, 98, 99]), [50, 90, 100]);
    }

    #[test]
    fn ticks_are_powers_and_not_too_many() {
        assert_eq!(powers(2.0, (60.0, 1100.0), 12), [64.0, 128.0, 256.0, 512.0, 1024.0]);
        assert_eq!(powers(2.0, (60.0, 1100.0), 3), [64.0, 256.0, 1024.0]);
        assert_eq!(powers(10.0, (2.0, 5.0), 3), [0.0; 0]);
    }
}
