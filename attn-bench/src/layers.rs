//! All engines on the layers of a file: the error of each against the file's outputs, and its time.

use attn_core::half::{bf16, f16};
use attn_core::{Align, Attention, AttnError, AttnShape, Layout, Mask, Outputs, View, ViewMut, reference};
use attn_simd::{KernelElement, Level};
use rayon::ThreadPool;
use serde::{Deserialize, Serialize};

use crate::clock::{Repeat, Samples, calls_for, time};
use crate::engine::{Engine, Runner};
use crate::tensors::{Data, Expected, Layer, Tensor};

/// Why a layer was not run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayerError {
    /// The sizes of q, k and v do not fit together.
    Attention(AttnError),
    /// q, k and v are not all of one type.
    MixedTypes,
}

impl std::fmt::Display for LayerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Attention(error) => error.fmt(f),
            Self::MixedTypes => f.write_str("q, k and v must all hold the same type"),
        }
    }
}

impl std::error::Error for LayerError {}

impl From<AttnError> for LayerError {
    fn from(error: AttnError) -> Self {
        Self::Attention(error)
    }
}

/// One engine on one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineResult {
    /// The engine.
    pub engine: Engine,
    /// Median seconds per call.
    pub seconds: f64,
    /// Seconds per call of each sample.
    pub samples: Samples,
    /// The error of the output, if there is something to compare with.
    pub out: Option<Distance>,
    /// The error of the log-sum-exp, if there is something to compare with.
    pub lse: Option<Distance>,
}

/// The distance of a result from the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Distance {
    /// The largest absolute difference.
    pub largest: f64,
    /// The largest difference in units of the allowed one ([`ABSOLUTE`] + [`RELATIVE`]·|value| and the precision that
    /// the expected value is stored in); up to 1 is right.
    pub of_allowed: f64,
}

/// All engines on one layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerResults {
    /// Name of the layer.
    pub name: String,
    /// Sizes of q.
    pub q: [usize; 4],
    /// Sizes of k.
    pub k: [usize; 4],
    /// Type of the numbers.
    pub dtype: String,
    /// Keys that `attention_mask` hides, over all sequences.
    pub hidden_keys: usize,
    /// Whether the expected output was stored in the file (else it is the reference engine's).
    pub stored: bool,
    /// One entry per engine.
    pub engines: Vec<EngineResult>,
}

/// Allowed absolute difference: single precision's for attention over outputs of the order of 1.
pub const ABSOLUTE: f64 = 1e-5;
/// Allowed relative difference.
pub const RELATIVE: f64 = 1e-5;

impl Distance {
    /// Compares; `None` if the lengths differ.
    pub fn between(found: &[f32], expected: &Expected) -> Option<Self> {
        if found.len() != expected.values.len() {
            return None;
        }
        let mut distance = Self { largest: 0.0, of_allowed: 0.0 };
        for (&found, &want) in found.iter().zip(&expected.values) {
            let found = f64::from(found);
            if found == want || (found.is_nan() && want.is_nan()) {
                continue; // infinities among them
            }
            let difference = (found - want).abs();
            let difference = if difference.is_nan() { f64::INFINITY } else { difference };
            let allowed = ABSOLUTE + (RELATIVE + expected.precision) * want.abs();
            distance.largest = distance.largest.max(difference);
            distance.of_allowed =
                distance.of_allowed.max(if allowed.is_finite() { difference / allowed } else { f64::INFINITY });
        }
        Some(distance)
    }
}

/// Runs all engines on a layer.
///
/// # Errors
/// [`LayerError`] if q, k and v do not fit together.
pub fn run(
    layer: &Layer,
    causal: bool,
    level: Level,
    pool: &ThreadPool,
    repeat: Repeat,
) -> Result<LayerResults, LayerError> {
    let Layer { q, k, v, .. } = layer;
    match (&q.data, &k.data, &v.data) {
        (Data::F32(qs), Data::F32(ks), Data::F32(vs)) => {
            run_as::<f32>(layer, [qs, ks, vs], causal, level, pool, repeat)
        }
        (Data::F16(qs), Data::F16(ks), Data::F16(vs)) => {
            run_as::<f16>(layer, [qs, ks, vs], causal, level, pool, repeat)
        }
        (Data::Bf16(qs), Data::Bf16(ks), Data::Bf16(vs)) => {
            run_as::<bf16>(layer, [qs, ks, vs], causal, level, pool, repeat)
        }
        _ => Err(LayerError::MixedTypes),
    }
}

fn run_as<T: KernelElement>(
    layer: &Layer,
    [q, k, v]: [&Vec<T>; 3],
    causal: bool,
    level: Level,
    pool: &ThreadPool,
    repeat: Repeat,
) -> Result<LayerResults, LayerError> {
    let view = |data, tensor: &Tensor| View::new(data, Layout::Bhsd, tensor.sizes);
    let (q, k, v) = (view(q, &layer.q)?, view(k, &layer.k)?, view(v, &layer.v)?);
    let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
    let mut mask = if causal { Mask::causal(Align::BottomRight) } else { Mask::none() };
    if let Some(real) = &layer.real {
        mask = mask.and(Mask::keep(View::new(real, Layout::Bhsd, [shape.batch, 1, 1, shape.kv_len])?));
    }
    let attn = Attention::new().mask(mask);
    let mut out = vec![0.0f32; shape.output().iter().product()];
    let mut lse = vec![0.0f32; shape.rows()];
    let stored = layer.out.is_some();
    let (want_out, want_lse) = match (&layer.out, &layer.lse) {
        (Some(out), lse) => (out.clone(), lse.clone()),
        (None, _) => {
            let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output())?).lse(&mut lse);
            reference::forward(&attn, q, k, v, outputs, &mut vec![0.0; reference::scratch_len(&shape)])?;
            (computed(&out), Some(computed(&lse)))
        }
    };

    let mut runner = Runner::new(level, pool);
    let mut results = Vec::new();
    for engine in Engine::ALL {
        out.fill(f32::NAN); // an element that an engine forgets shows
        lse.fill(f32::NAN);
        let first = time(1, || {
            let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output())?).lse(&mut lse);
            runner.run(engine, &attn, q, k, v, outputs)
        })?;
        let (out_distance, lse_distance) =
            (Distance::between(&out, &want_out), want_lse.as_ref().and_then(|want| Distance::between(&lse, want)));
        results.push((
            calls_for(first),
            EngineResult {
                engine,
                seconds: f64::NAN,
                samples: Samples::default(),
                out: out_distance,
                lse: lse_distance,
            },
        ));
    }
    let (mut taken, mut spent) = (0, 0.0);
    while repeat.goes_on(taken, spent, false) {
        for (calls, result) in &mut results {
            let seconds = time(*calls, || {
                let out = ViewMut::new(&mut out, Layout::Bhsd, shape.output())?;
                runner.run(result.engine, &attn, q, k, v, out)
            })?;
            *calls = calls_for(seconds);
            spent += seconds * f64::from(*calls);
            result.samples.0.push(seconds);
        }
        taken += 1;
    }
    let hidden_keys = layer.real.as_ref().map_or(0, |real| real.iter().filter(|&&real| !real).count());
    let engines = results.into_iter().map(|(_, r)| EngineResult { seconds: r.samples.median(), ..r }).collect();
    let (name, dtype) = (layer.name.clone(), T::DTYPE.name().to_string());
    Ok(LayerResults { name, q: layer.q.sizes, k: layer.k.sizes, dtype, hidden_keys, stored, engines })
}

/// What the reference engine computed, as something to compare with.
fn computed(values: &[f32]) -> Expected {
    Expected { values: values.iter().copied().map(f64::from).collect(), precision: 2f64.powi(-24) }
}

impl LayerResults {
    /// Whether every engine is as close as it must be.
    pub fn right(&self) -> bool {
        self.engines.iter().flat_map(|r| [r.out, r.lse]).flatten().all(|d| d.of_allowed <= 1.0)
    }

    /// The largest difference of outputs and of lse over all engines.
    pub fn largest(&self) -> (Option<f64>, Option<f64>) {
        let largest = |pick: fn(&EngineResult) -> Option<Distance>| {
            self.engines.iter().filter_map(pick).map(|d| d.largest).reduce(f64::max)
        };
        (largest(|r| r.out), largest(|r| r.lse))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::pool;
    use crate::tensors::tests::{f32s, file};
    use crate::tensors::{Names, layers};
    use safetensors::Dtype;

    const ONCE: Repeat = Repeat { at_least: 1, at_most: 1, seconds: 0.0 };

    fn one_layer(extra: &[(&str, Dtype, &[usize], Vec<u8>)]) -> Layer {
        // Grouped heads (4 over 2), 5 queries against 7 keys.
        let normal = |seed, n| f32s(crate::case::normal(seed, n));
        let mut tensors = vec![
            ("x.q", Dtype::F32, &[2usize, 4, 5, 8][..], normal(1, 320)),
            ("x.k", Dtype::F32, &[2, 2, 7, 8], normal(2, 224)),
            ("x.v", Dtype::F32, &[2, 2, 7, 8], normal(3, 224)),
        ];
        tensors.extend_from_slice(extra);
        layers(&file(&tensors), &Names::Find).unwrap().remove(0)
    }

    #[test]
    fn engines_agree_with_the_reference_under_masks() {
        let pool = pool(2).unwrap();
        let mask: Vec<u8> = [[1; 7], [1, 1, 0, 1, 1, 0, 0]].concat();
        let layer = one_layer(&[("attention_mask", Dtype::U8, &[2, 7], mask)]);
        for causal in [false, true] {
            let results = run(&layer, causal, Level::detect(), &pool, ONCE).unwrap();
            assert!(results.right() && !results.stored, "{results:?}");
            assert_eq!((results.engines.len(), results.hidden_keys), (4, 3));
            assert!(results.engines.iter().all(|r| r.seconds > 0.0 && r.out.is_some() && r.lse.is_some()));
        }
    }

    #[test]
    fn a_wrong_stored_output_is_seen() {
        let pool = pool(1).unwrap();
        let layer = one_layer(&[("x.attn_out", Dtype::F32, &[2, 4, 5, 8], f32s([0.5; 320]))]);
        let results = run(&layer, false, Level::detect(), &pool, ONCE).unwrap();
        assert!(results.stored && !results.right());
        assert!(results.largest().0.unwrap() > 0.01 && results.largest().1.is_none());
    }

    #[test]
    fn distances_count_what_is_allowed_and_what_is_not_a_number() {
        let want = |values: &[f64]| Expected { values: values.to_vec(), precision: 0.0 };
        let d = Distance::between(&[1.0, 2.0 + 2e-5], &want(&[1.0, 2.0])).unwrap();
        assert!(d.largest > 1.9e-5 && d.of_allowed < 1.0, "{d:?}");
        assert!(Distance::between(&[1.1], &want(&[1.0])).unwrap().of_allowed > 1.0);
        assert!(Distance::between(&[f32::NAN], &want(&[1.0])).unwrap().of_allowed > 1.0);
        assert!(Distance::between(&[1.0], &want(&[f64::NEG_INFINITY])).unwrap().of_allowed > 1.0);
        assert_eq!(Distance::between(&[f32::NEG_INFINITY], &want(&[f64::NEG_INFINITY])).unwrap().of_allowed, 0.0);
        assert_eq!(Distance::between(&[1.0], &want(&[])), None);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let pool = pool(1).unwrap();
        let mut layer = one_layer(&[]);
        layer.k.data = Data::F16(vec![f16::ONE; 224]);
        assert_eq!(run(&layer, false, Level::detect(), &pool, ONCE), Err(LayerError::MixedTypes));
        let mut layer = one_layer(&[]);
        layer.v.sizes = [2, 2, 6, 8];
        assert!(matches!(run(&layer, false, Level::detect(), &pool, ONCE), Err(LayerError::Attention(_))));
    }
}
