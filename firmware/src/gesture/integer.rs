//! The layer in int8: integers from the sensor to the classes, every factor between two tensors a constant.

use attn_core::int8::{self, Int8Attention, Quant, Rescale};
use attn_core::score::default_scale;
use attn_core::{Layout, Result, View, ViewMut};

use super::weights::{BIASES, INT8, SCALES};
use super::*;

const fn quant((scale, zero_point): (f32, i8)) -> Quant {
    match Quant::new(scale, zero_point) {
        Ok(quant) => quant,
        Err(_) => panic!("a scale is not above 0"),
    }
}

/// A factor between two scales.
const fn rescale(from: f64, to: f32) -> Rescale {
    match Rescale::new(from / to as f64) {
        Ok(rescale) => rescale,
        Err(_) => panic!("a factor is not finite"),
    }
}

/// From sums of products of a tensor and a matrix to another tensor.
const fn through(from: f32, matrix: usize, to: f32) -> Rescale {
    rescale(from as f64 * SCALES.weights[matrix] as f64, to)
}

const TO_H: Rescale = through(STEP, 0, SCALES.h.0);
const TO_Q: Rescale = through(SCALES.h.0, 1, SCALES.q.0);
const TO_K: Rescale = through(SCALES.h.0, 2, SCALES.k.0);
const TO_V: Rescale = through(SCALES.h.0, 3, SCALES.v.0);
const H_TO_R: Rescale = rescale(SCALES.h.0 as f64, SCALES.r.0);
const JOIN_TO_R: Rescale = through(SCALES.v.0, 4, SCALES.r.0);
const TO_U: Rescale = through(SCALES.r.0, 5, SCALES.u.0);
const R_TO_Y: Rescale = rescale(SCALES.r.0 as f64, SCALES.y.0);
const DOWN_TO_Y: Rescale = through(SCALES.u.0, 6, SCALES.y.0);

const ATTENTION: Int8Attention<'static> = match Int8Attention::new(
    [quant(SCALES.q), quant(SCALES.k), quant(SCALES.v), quant(SCALES.v)],
    default_scale(WIDTH / HEADS),
) {
    Ok(attn) => attn,
    Err(_) => panic!("a scale is not finite"),
};

/// Scores of the classes of a window, in steps of `s_y·s_class/16`.
#[inline(never)]
pub fn classify(window: &Window) -> Result<[i32; CLASSES.len()]> {
    let mut h = [[0i8; WIDTH]; STEPS];
    for (n, (x, h)) in window.iter().zip(&mut h).enumerate() {
        // The bias of the embedding and the position are one bias for each step.
        dense(x, 0, &INT8[EMBED], &BIASES[n * WIDTH..], |o, sum| h[o] = narrow(TO_H.apply(sum), SCALES.h.1));
    }
    let [mut q, mut k, mut v] = [[[0i8; WIDTH]; STEPS]; 3];
    for (matrix, factor, zero, to) in
        [(QUERY, TO_Q, SCALES.q.1, &mut q), (KEY, TO_K, SCALES.k.1, &mut k), (VALUE, TO_V, SCALES.v.1, &mut v)]
    {
        for (h, to) in h.iter().zip(to) {
            dense(h, SCALES.h.1, &INT8[matrix.clone()], &[], |o, sum| to[o] = narrow(factor.apply(sum), zero));
        }
    }
    let sizes = [1, HEADS, STEPS, WIDTH / HEADS];
    let (mut heads, mut scratch) = ([[0i8; WIDTH]; STEPS], [0i32; WIDTH / HEADS]);
    let [q, k, v] = [&q, &k, &v].map(|x| View::new(x.as_flattened(), Layout::Bshd, sizes));
    let to = ViewMut::new(heads.as_flattened_mut(), Layout::Bshd, sizes)?;
    int8::forward(&ATTENTION, q?, k?, v?, to, &mut scratch)?;

    let mut sums = [0i32; WIDTH];
    for (h, heads) in h.iter().zip(&heads) {
        let (mut r, mut u) = ([0i8; WIDTH], [0i8; HIDDEN]);
        dense(heads, SCALES.v.1, &INT8[JOIN], &[], |o, sum| {
            r[o] = narrow(JOIN_TO_R.apply(sum) + H_TO_R.apply(i32::from(h[o]) - i32::from(SCALES.h.1)), SCALES.r.1);
        });
        let biases = &BIASES[STEPS * WIDTH..];
        // Saturating at the zero point from below is ReLU.
        dense(&r, SCALES.r.1, &INT8[UP], biases, |o, sum| u[o] = narrow(TO_U.apply(sum).max(0), SCALES.u.1));
        dense(&u, SCALES.u.1, &INT8[DOWN], &biases[HIDDEN..], |o, sum| {
            let x = DOWN_TO_Y.apply(sum) + R_TO_Y.apply(i32::from(r[o]) - i32::from(SCALES.r.1));
            sums[o] += i32::from(narrow(x, SCALES.y.1)) - i32::from(SCALES.y.1);
        });
    }
    let mut scores = [0i32; CLASSES.len()];
    let (matrix, biases) = (&INT8[CLASS], &BIASES[STEPS * WIDTH + HIDDEN + WIDTH..]);
    for (o, score) in scores.iter_mut().enumerate() {
        *score = biases[o] + (0..WIDTH).map(|i| sums[i] * i32::from(matrix[i * CLASSES.len() + o])).sum::<i32>();
    }
    Ok(scores)
}

/// Calls `set` with each output's sum of products; no biases count as 0.
fn dense(x: &[i8], zero: i8, matrix: &[i8], biases: &[i32], mut set: impl FnMut(usize, i32)) {
    let width = matrix.len() / x.len();
    for o in 0..width {
        let products =
            x.iter().enumerate().map(|(i, &x)| (i32::from(x) - i32::from(zero)) * i32::from(matrix[i * width + o]));
        set(o, products.sum::<i32>() + biases.get(o).copied().unwrap_or(0));
    }
}

/// To the stored form: saturated.
fn narrow(x: i32, zero: i8) -> i8 {
    (x + i32::from(zero)).clamp(-128, 127) as i8
}
