//! Where the time of a layer goes: the four projections, and the three steps of attention one after another; beside
//! them the fused kernel that takes the place of the three, and a recurrent layer of the same width.
//!
//! All on one thread, timed by its own clock, on one sequence. With `d = heads · head_dim`:
//!
//! - **projections**: q, k, v and output, `8·n·d²` FLOPs;
//! - **scores** `Q·Kᵀ`, **softmax**, **weighted sum** `P·V`, head by head, as they are composed where nothing is fused:
//!   `2·n²·d`, some ten operations per pair, and `2·n²·d`;
//! - **fused**: the same attention by [`attn_simd`];
//! - **recurrent**: `hₜ = tanh(xₜ·W + hₜ₋₁·U)` (Elman 1990), `4·n·d²`: the products with `W` all at once, those with
//!   `U` in `n` steps that wait for each other.
//!
//! Products are the caller's ([`Multiply`]), and the report names them. Where they use narrower vectors than the fused
//! kernel, it has an advantage over them that is not due to fusing.

use attn_core::{Attention, AttnError, Layout, View, ViewMut};
use attn_simd::{Level, Workspace};
use serde::{Deserialize, Serialize};

use crate::case::normal;
use crate::clock::{Repeat, both, median};
use crate::fit::PowerLaw;
use crate::journal::Journal;
use crate::naive;
use crate::product::{Multiply, Place};
use crate::progress::Progress;

/// What to measure.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Features of a token.
    pub width: usize,
    /// Heads; they divide the width.
    pub heads: usize,
    /// Lengths, ascending.
    pub sizes: Vec<usize>,
    /// Level of the fused kernel.
    pub level: Level,
    /// Products of matrices.
    pub multiply: Multiply,
    /// Rounds at each length.
    pub repeat: Repeat,
}

/// The parts at one length, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Parts {
    /// Tokens.
    pub n: usize,
    /// q, k, v and output projection.
    pub projections: f64,
    /// All heads' `Q·Kᵀ`.
    pub scores: f64,
    /// Their softmax.
    pub softmax: f64,
    /// All heads' `P·V`.
    pub weighted: f64,
    /// The fused kernel, instead of the last three.
    pub fused: f64,
    /// The recurrent layer.
    pub recurrent: f64,
}

impl Parts {
    /// Attention as it is composed.
    pub fn composed(&self) -> f64 {
        self.scores + self.softmax + self.weighted
    }
}

/// Where one cost overtakes another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Crossing {
    /// The length.
    pub n: f64,
    /// Whether it lies between two measured lengths; otherwise power laws through the largest ones were followed
    /// beyond.
    pub measured: bool,
}

/// A layer over all lengths.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Layer {
    /// Features of a token.
    pub width: usize,
    /// Heads.
    pub heads: usize,
    /// Who multiplied.
    #[serde(default)]
    pub products: String,
    /// The parts, by ascending length.
    pub points: Vec<Parts>,
}

impl Layer {
    /// Whether one part costs more than another at every length that was measured.
    pub fn is_above(&self, of: impl Fn(&Parts) -> f64, over: impl Fn(&Parts) -> f64) -> bool {
        !self.points.is_empty() && self.points.iter().all(|p| of(p) >= over(p))
    }

    /// From which length on one part costs more than another; `None` where it never does, or [always](Self::is_above).
    pub fn crossing(&self, of: impl Fn(&Parts) -> f64, over: impl Fn(&Parts) -> f64) -> Option<Crossing> {
        let logs: Vec<(f64, f64)> = self.points.iter().map(|p| ((p.n as f64).ln(), (of(p) / over(p)).ln())).collect();
        // The last change of sign: below it, fixed costs may rule.
        let between = logs.windows(2).rev().find_map(|pair| match *pair {
            [(x0, y0), (x1, y1)] if y0 < 0.0 && y1 >= 0.0 => Some(x0 + (x1 - x0) * y0 / (y0 - y1)),
            _ => None,
        });
        if let Some(x) = between {
            return Some(Crossing { n: x.exp(), measured: true });
        }
        let law = |cost: &dyn Fn(&Parts) -> f64| {
            PowerLaw::fit_large(&self.points.iter().map(|p| (p.n, cost(p))).collect::<Vec<_>>())
        };
        let (of, over) = (law(&of)?, law(&over)?);
        let steeper = of.exponent - over.exponent;
        let n = (over.factor / of.factor).powf(1.0 / steeper);
        // Already above at the smallest length, or never above: no crossing that the laws could be trusted with.
        let largest = self.points.last()?.n as f64;
        (steeper > 0.1 && n.is_finite() && n > largest).then_some(Crossing { n, measured: false })
    }
}

/// Measures a layer.
///
/// # Errors
/// A message where the heads do not divide the width, or the journal cannot be written.
pub fn measure(settings: &Settings, journal: &mut Journal, progress: &mut dyn Progress) -> Result<Layer, String> {
    let Settings { width, heads, .. } = *settings;
    if heads == 0 || width == 0 || !width.is_multiple_of(heads) {
        return Err(format!("{heads} heads do not divide a width of {width}"));
    }
    let expected: Vec<f64> = settings
        .sizes
        .iter()
        .map(|&n| (12.0 * (n * width) as f64 * (n + width) as f64 / 40e9 * 4.0).max(settings.repeat.seconds))
        .collect();
    progress.begin(&expected);
    let mut points = Vec::new();
    for &n in &settings.sizes {
        let step = format!("layer/d{width}/h{heads}/n{n}");
        let parts = match journal.get(&step) {
            Some(parts) => {
                progress.known();
                parts
            }
            None => {
                progress.step(&step);
                let parts = Bench::new(n, settings).measure(settings).map_err(|error| error.to_string())?;
                journal.put(&step, &parts).map_err(|error| format!("the journal of the run: {error}"))?;
                parts
            }
        };
        points.push(parts);
    }
    progress.end();
    Ok(Layer { width, heads, products: settings.multiply.name.into(), points })
}

/// Buffers for one length: matrices row by row, a token each.
struct Bench {
    n: usize,
    width: usize,
    heads: usize,
    multiply: Multiply,
    x: Vec<f32>,
    weights: [Vec<f32>; 4],
    qkv: [Vec<f32>; 3],
    scores: Vec<f32>,
    out: Vec<f32>,
    y: Vec<f32>,
    workspace: Workspace,
}

impl Bench {
    fn new(n: usize, settings: &Settings) -> Self {
        let Settings { width, heads, multiply, .. } = *settings;
        // A deviation of 1/√d keeps projections of normal tokens normal.
        let deviation = (width as f32).sqrt().recip();
        let weight = |seed, by: f32| normal(seed, width * width).into_iter().map(|w| w * by).collect();
        let scale = ((width / heads) as f32).sqrt().recip();
        Self {
            n,
            width,
            heads,
            multiply,
            x: normal(1, n * width),
            // The scale of the scores is in the first of them: nobody multiplies n² numbers by it.
            weights: [(2, scale), (3, 1.0), (4, 1.0), (5, 1.0)].map(|(seed, by)| weight(seed, by * deviation)),
            qkv: [(); 3].map(|()| vec![0.0; n * width]),
            scores: vec![0.0; n * n],
            out: vec![0.0; n * width],
            y: vec![0.0; n * width],
            workspace: Workspace::new(),
        }
    }

    /// The tokens' features.
    fn tokens(&self) -> Place {
        Place::whole(self.n, self.width)
    }

    /// The columns of a head.
    fn head(&self, head: usize) -> Place {
        let dim = self.width / self.heads;
        self.tokens().columns(head * dim, dim)
    }

    /// q, k and v from x, and y from the attention's output.
    fn project(&mut self) {
        let (tokens, square, product) = (self.tokens(), Place::whole(self.width, self.width), self.multiply.product);
        let [wq, wk, wv, wo] = &self.weights;
        for (w, to) in [wq, wk, wv].into_iter().zip(&mut self.qkv) {
            product((to, tokens), (&self.x, tokens), (w, square));
        }
        product((&mut self.y, tokens), (&self.out, tokens), (wo, square));
    }

    /// `Q·Kᵀ` of a head.
    fn score(&mut self, head: usize) {
        let (head, square) = (self.head(head), Place::whole(self.n, self.n));
        let [q, k, _] = &self.qkv;
        (self.multiply.product)((&mut self.scores, square), (q, head), (k, head.transposed()));
    }

    /// The softmax of its rows.
    fn softmax(&mut self) {
        for row in self.scores.chunks_exact_mut(self.n) {
            naive::softmax(row);
        }
    }

    /// `P·V` of a head.
    fn weigh(&mut self, head: usize) {
        let (head, square) = (self.head(head), Place::whole(self.n, self.n));
        (self.multiply.product)((&mut self.out, head), (&self.scores, square), (&self.qkv[2], head));
    }

    /// The fused kernel, on the projections as they lie: no copy.
    fn fuse(&mut self, level: Level) -> Result<(), AttnError> {
        let sizes = [1, self.heads, self.n, self.width / self.heads];
        let view = |x| View::new(x, Layout::Bshd, sizes);
        let [q, k, v] = &self.qkv;
        let out = ViewMut::new(&mut self.out, Layout::Bshd, sizes)?;
        attn_simd::forward_at(
            level,
            &Attention::new().scale(1.0),
            view(q)?,
            view(k)?,
            view(v)?,
            out,
            &mut self.workspace,
        )
    }

    /// The recurrent layer over all tokens, into y. What its weights hold does not matter to its time.
    fn recur(&mut self) {
        let (tokens, square) = (self.tokens(), Place::whole(self.width, self.width));
        let [w, u, ..] = &self.weights;
        (self.multiply.product)((&mut self.y, tokens), (&self.x, tokens), (w, square));
        // Rows of `u` are taken as columns of U: one dot product per feature.
        let mut state = vec![0.0f32; self.width];
        for row in self.y.chunks_exact_mut(self.width) {
            for (h, u) in row.iter_mut().zip(u.chunks_exact(self.width)) {
                *h = (*h + naive::dot(u, &state)).tanh();
            }
            state.copy_from_slice(row);
        }
    }

    /// Takes rounds over all parts, so that a slower moment hits all of them.
    fn measure(&mut self, settings: &Settings) -> Result<Parts, AttnError> {
        let mut samples: [Vec<f64>; 6] = Default::default();
        let mut spent = 0.0;
        // Once for cold caches and pages.
        self.project();
        self.fuse(settings.level)?;
        while settings.repeat.goes_on(samples[0].len(), spent, false) {
            let mut round = [0.0; 6];
            let mut add = |part: usize, (wall, ran): (f64, f64)| {
                spent += wall;
                round[part] += ran;
            };
            add(0, timed(|| self.project()));
            for head in 0..self.heads {
                add(1, timed(|| self.score(head)));
                add(2, timed(|| self.softmax()));
                add(3, timed(|| self.weigh(head)));
            }
            add(4, both(1, || self.fuse(settings.level))?);
            add(5, timed(|| self.recur()));
            samples.iter_mut().zip(round).for_each(|(samples, seconds)| samples.push(seconds));
        }
        let [projections, scores, softmax, weighted, fused, recurrent] = samples.map(|samples| median(&samples));
        Ok(Parts { n: self.n, projections, scores, softmax, weighted, fused, recurrent })
    }
}

/// One call that cannot fail.
fn timed(mut call: impl FnMut()) -> (f64, f64) {
    match both(1, || {
        call();
        Ok::<(), std::convert::Infallible>(())
    }) {
        Ok(times) => times,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::product::NDARRAY;
    use crate::progress::Silent;

    fn settings() -> Settings {
        let repeat = Repeat { at_least: 1, at_most: 1, seconds: 0.0 };
        Settings { width: 24, heads: 3, sizes: vec![5, 20], level: Level::detect(), multiply: NDARRAY, repeat }
    }

    #[test]
    fn composed_and_fused_attention_agree() {
        let mut bench = Bench::new(19, &settings());
        bench.project();
        for head in 0..bench.heads {
            bench.score(head);
            bench.softmax();
            bench.weigh(head);
        }
        let composed = bench.out.clone();
        bench.out.fill(f32::NAN);
        bench.fuse(Level::detect()).unwrap();
        let worst = composed.iter().zip(&bench.out).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 2e-6 && composed.iter().any(|&x| x != 0.0), "{worst}");
    }

    #[test]
    fn the_recurrent_layer_is_its_formula() {
        let mut bench = Bench::new(4, &settings());
        bench.recur();
        let [w, u, ..] = &bench.weights;
        let mut state = vec![0.0f32; 24];
        for (x, y) in bench.x.chunks(24).zip(bench.y.chunks(24)) {
            let from = |i: usize| (0..24).map(|j| x[j] * w[j * 24 + i] + u[i * 24 + j] * state[j]).sum::<f32>().tanh();
            state = (0..24).map(from).collect();
            assert!(state.iter().zip(y).all(|(a, b)| (a - b).abs() < 1e-5), "{state:?} {y:?}");
        }
    }

    #[test]
    fn every_part_is_measured_once_per_length_and_remembered() {
        let path = std::env::temp_dir().join(format!("attn-bench-parts-{}", std::process::id()));
        let mut journal = Journal::open(&path, "key", true).unwrap();
        let layer = measure(&settings(), &mut journal, &mut Silent).unwrap();
        assert_eq!(layer.points.iter().map(|p| p.n).collect::<Vec<_>>(), [5, 20]);
        for p in &layer.points {
            assert!([p.projections, p.scores, p.softmax, p.weighted, p.fused, p.recurrent].iter().all(|&t| t > 0.0));
        }
        assert_eq!(measure(&settings(), &mut journal, &mut Silent).unwrap(), layer, "measured again");
        journal.finish().unwrap();
        let wrong = Settings { heads: 5, ..settings() };
        let error = measure(&wrong, &mut Journal::none(), &mut Silent).unwrap_err();
        assert!(error.contains('5') && error.contains("24"), "{error}");
    }

    #[test]
    fn crossings_are_between_lengths_or_beyond_them() {
        let point = |n: usize| Parts {
            n,
            projections: 8.0 * n as f64 * 1e6,
            fused: 4.0 * (n * n) as f64 * 1e3,
            recurrent: 40.0 * n as f64 * 1e6,
            ..Parts::default()
        };
        let layer = |sizes: &[usize]| Layer {
            width: 1000,
            heads: 1,
            products: String::new(),
            points: sizes.iter().map(|&n| point(n)).collect(),
        };
        let near = layer(&[500, 1000, 1500, 3000]).crossing(|p| p.fused, |p| p.projections).unwrap();
        assert!(near.measured && (near.n / 2000.0 - 1.0).abs() < 1e-9, "{near:?}");
        let far = layer(&[500, 1000, 1500, 3000]).crossing(|p| p.fused, |p| p.recurrent).unwrap();
        assert!(!far.measured && (far.n / 10_000.0 - 1.0).abs() < 1e-9, "{far:?}");
        assert_eq!(layer(&[500, 1000]).crossing(|p| p.projections, |p| p.recurrent), None, "parallel lines");
        assert_eq!(layer(&[5000, 6000]).crossing(|p| p.fused, |p| p.projections), None, "above from the start");
        assert!(layer(&[5000, 6000]).is_above(|p| p.fused, |p| p.projections));
        assert!(!layer(&[500, 6000]).is_above(|p| p.fused, |p| p.projections));
    }
}
