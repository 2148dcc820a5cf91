//! Plots as SVG text that follows the page's colours.
//!
//! plotters draws with placeholder colours, which CSS variables (`var(--simd)`) then replace: one picture is right on a
//! light and on a dark page. Each engine has a marker shape, and its name at the end of its line, so that colour is
//! never the only difference.

use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// A colour by its meaning: a placeholder while it is drawn, then a CSS variable or the colour of a theme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ink {
    placeholder: RGBColor,
    variable: &'static str,
    light: &'static str,
    dark: &'static str,
}

const fn ink(number: u8, variable: &'static str, light: &'static str, dark: &'static str) -> Ink {
    Ink { placeholder: RGBColor(number, number, number), variable, light, dark }
}

/// Text.
pub const TEXT: Ink = ink(1, "ink", "#1c1f23", "#e8eaed");
/// Lines of the grid.
pub const GRID: Ink = ink(2, "grid", "#dfe3e7", "#343a41");
/// Guides, such as the slope of n².
pub const GUIDE: Ink = ink(3, "soft", "#667079", "#9aa4ad");
/// The naive engine.
pub const NAIVE: Ink = ink(4, "naive", "#c04a00", "#ff9a56");
/// The streaming engine.
pub const STREAMING: Ink = ink(5, "streaming", "#a8428a", "#e89bd0");
/// The SIMD engine.
pub const SIMD: Ink = ink(6, "simd", "#0063a8", "#63b8ff");
/// The parallel engine.
pub const PARALLEL: Ink = ink(7, "parallel", "#007a58", "#3fd0a0");
/// The window.
pub const WINDOWED: Ink = ink(8, "windowed", "#6b5bd0", "#b3a6ff");
/// Linear attention.
pub const LINEAR: Ink = ink(9, "linear", "#8a6d00", "#e0c040");

const INKS: [Ink; 9] = [TEXT, GRID, GUIDE, NAIVE, STREAMING, SIMD, PARALLEL, WINDOWED, LINEAR];

/// The background of a picture in a file of its own.
const PAGE: [&str; 2] = ["#ffffff", "#15181b"];

/// For which background a picture is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Theme {
    /// Dark on light.
    Light,
    /// Light on dark.
    Dark,
}

impl Theme {
    /// Both, and how names of files call them.
    pub const ALL: [(Self, &'static str); 2] = [(Self::Light, "light"), (Self::Dark, "dark")];
}

/// The CSS variables of all colours in a theme.
pub fn variables(theme: Theme) -> String {
    INKS.map(|ink| format!("--{}: {};", ink.variable, ink.of(theme))).join(" ")
}

impl Ink {
    const fn of(self, theme: Theme) -> &'static str {
        match theme {
            Theme::Light => self.light,
            Theme::Dark => self.dark,
        }
    }
}

/// How points are marked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// Not at all; the line is dashed.
    Dashed,
    /// A disc.
    Disc,
    /// A ring, wide enough to be seen around a disc.
    Ring,
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
    /// The place of the label.
    pub label_at: LabelAt,
}

/// The place of a line's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LabelAt {
    /// Beside its last point.
    End,
    /// Above the middle of its first stretch: for lines that end together.
    Start,
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
    if x < 0.9 { format!("1/{}", (1.0 / x).round()) } else { super::table::grouped(x.round() as usize) }
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
    /// The picture in the colours of the page around it; empty if there is no point.
    pub fn svg(&self) -> String {
        let title = super::escape::html(&self.title);
        self.painted(|ink| format!("var(--{})", ink.variable)).replacen(
            &format!("<svg width=\"{}\" height=\"{}\"", SIZE.0, SIZE.1),
            &format!("<svg role=\"img\" aria-label=\"{title}\" class=\"plot\""),
            1,
        )
    }

    /// The picture as a file of its own; empty if there is no point.
    pub fn file(&self, theme: Theme) -> String {
        let page = PAGE[usize::from(theme == Theme::Dark)];
        let title = super::escape::html(&self.title);
        let background = format!("><title>{title}</title><rect width=\"100%\" height=\"100%\" fill=\"{page}\"/>\n");
        self.painted(|ink| ink.of(theme).to_string()).replacen(">\n", &background, 1)
    }

    /// The picture with each placeholder replaced.
    fn painted(&self, colour: impl Fn(Ink) -> String) -> String {
        let mut text = String::new();
        // Drawing into a string fails only if a coordinate is not a number, which `bounds` rules out.
        if self.draw(&mut text).is_none() {
            return String::new();
        }
        for ink in INKS {
            let RGBColor(r, g, b) = ink.placeholder;
            text = text.replace(&format!("#{r:02X}{g:02X}{b:02X}"), &colour(ink));
        }
        text
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
                (range, y_ticks_of(base, range), label)
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

        // The first line is drawn last: it is the one that matters if lines overlap.
        for series in self.series.iter().rev() {
            let color = series.ink.placeholder;
            let points: Vec<_> = series.points.iter().map(|&(x, y)| (x_pixel(x), y_pixel(y))).collect();
            if series.marker == Marker::Dashed {
                root.draw(&DashedPathElement::new(points, 6, 5, color.stroke_width(1))).ok()?;
                continue;
            }
            root.draw(&PathElement::new(points.clone(), color.stroke_width(2))).ok()?;
            points.into_iter().try_for_each(|at| mark(&root, series, at))?;
        }

        // Names beside the last points, pushed apart if they would overlap: those at the right edge with their mark,
        // and those of lines that end earlier without.
        let edge = LEFT + width - 60;
        let (mut right, mut inside) = (Vec::new(), Vec::new());
        for series in &self.series {
            let (Some(&first), Some(&(x, y))) = (series.points.first(), series.points.last()) else { continue };
            let (x, y) = (x_pixel(x), y_pixel(y));
            match series.label_at {
                LabelAt::Start => {
                    let second = series.points.get(1).copied().unwrap_or(first);
                    let at = (
                        (x_pixel(first.0) + x_pixel(second.0)) / 2 - 8,
                        (y_pixel(first.1) + y_pixel(second.1)) / 2 - 4,
                    );
                    let style = font(series.ink, HPos::Right, VPos::Bottom);
                    root.draw(&Text::new(series.label.clone(), at, style)).ok()?;
                }
                LabelAt::End if x < edge => inside.push((y - 8, (x, series))),
                LabelAt::End => right.push((y, series)),
            }
        }
        inside.sort_by_key(|n| n.0);
        spread_apart(&mut inside, 15, TOP + height);
        for (y, (x, series)) in inside {
            let style = font(series.ink, HPos::Left, VPos::Center);
            root.draw(&Text::new(series.label.clone(), (x + 11, y), style)).ok()?;
        }
        right.sort_by_key(|n| n.0);
        spread_apart(&mut right, 16, TOP + height);
        for (y, series) in right {
            let x = LEFT + width + 12;
            mark(&root, series, (x, y))?;
            root.draw(&Text::new(series.label.clone(), (x + 11, y), font(series.ink, HPos::Left, VPos::Center)))
                .ok()?;
        }
        root.present().ok()
    }
}

/// Moves sorted positions down until they are `gap` apart, and back up if the last would be below `bottom`.
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
        Marker::Ring => root.draw(&Circle::new(at, 7, color.stroke_width(2))),
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

/// Ticks of a logarithmic axis: powers of `base`, and where that leaves fewer than three of ten also twice and five
/// times as much.
fn y_ticks_of(base: f64, range: (f64, f64)) -> Vec<f64> {
    let ticks = powers(base, range, 10);
    if ticks.len() >= 3 || base != 10.0 {
        return ticks;
    }
    let wide = powers(base, (range.0 / base, range.1), 12);
    let all = wide.into_iter().flat_map(|power| [power, 2.0 * power, 5.0 * power]);
    all.filter(|tick| (range.0..=range.1).contains(tick)).collect()
}

/// The place of `x` in a range on a logarithmic axis: 0 at its start, 1 at its end.
fn log_share(x: f64, (low, high): (f64, f64)) -> f64 {
    (x / low).ln() / (high / low).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(points: Vec<(f64, f64)>) -> Plot {
        let series = Series { label: "simd".into(), ink: SIMD, marker: Marker::Disc, points, label_at: LabelAt::End };
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
    fn a_file_has_the_colours_of_its_theme() {
        let plot = plot(vec![(64.0, 1.0), (128.0, 4.0), (256.0, 16.0)]);
        for (theme, page, simd) in [(Theme::Light, "#ffffff", "#0063a8"), (Theme::Dark, "#15181b", "#63b8ff")] {
            let svg = plot.file(theme);
            assert!(svg.contains(page) && svg.contains(simd) && !svg.contains("var(--"), "{}", &svg[..300]);
            assert!(svg.starts_with("<svg width=") && svg.contains("<title>a &lt; b</title>"));
        }
        assert!(variables(Theme::Dark).contains("--simd: #63b8ff;"));
    }

    #[test]
    fn an_axis_has_three_ticks_at_least() {
        assert_eq!(y_ticks_of(10.0, (3.0, 300.0)), [5.0, 10.0, 20.0, 50.0, 100.0, 200.0]);
        assert_eq!(y_ticks_of(10.0, (0.9, 1100.0)), [1.0, 10.0, 100.0, 1000.0]);
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
