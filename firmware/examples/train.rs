//! Trains the gesture classifier on a host and writes `src/gesture/weights.rs`: `cargo run --release --example train`.
//!
//! Adam (Kingma & Ba 2015, arXiv 1412.6980) in f64 over windows that are drawn as it goes; gradients by attn-core. Then
//! the weights become int8 (symmetric, one scale for each matrix) and the activations get the scale that covers what is
//! seen over some hundred windows. All draws come from fixed seeds.

use std::fmt::Write;
use std::ops::Range;

use attn_core::int8::Quant;
use attn_core::{Attention, Result, View, ViewMut};
use attn_firmware::gesture::data::draw;
use attn_firmware::gesture::*;
use attn_firmware::paint::Paint;
use attn_layers::module::{InputGradients, ModuleGradients, MultiHeadAttention, Reference, Sources, Streaming};
use attn_layers::{Linear, LinearGradients};

const ROUNDS: i32 = 4000;
const BATCH: usize = 32;
const RATE: f64 = 4e-3;

fn main() -> Result<()> {
    let mut paint = Paint::new(1);
    let mut weights: Vec<f64> = (0..WEIGHTS).map(|_| f64::from(paint.real()) * 0.12).collect();
    let (mut first, mut second) = (vec![0.0; WEIGHTS], vec![0.0; WEIGHTS]);
    for round in 1..=ROUNDS {
        let (mut gradient, mut loss, mut right) = (vec![0.0; WEIGHTS], 0.0, 0);
        for _ in 0..BATCH {
            let (window, class) = draw(&mut paint);
            let seen = forward(&weights, &window)?;
            right += usize::from(best(&seen.scores) == class);
            loss += backward(&weights, &seen, class, &mut gradient)?;
        }
        let rate = RATE * (1.0 - f64::from(round - 1) / f64::from(ROUNDS));
        for n in 0..WEIGHTS {
            let g = gradient[n] / BATCH as f64;
            first[n] = 0.9 * first[n] + 0.1 * g;
            second[n] = 0.999 * second[n] + 0.001 * g * g;
            let (m, v) = (first[n] / (1.0 - 0.9f64.powi(round)), second[n] / (1.0 - 0.999f64.powi(round)));
            weights[n] -= rate * (m / (v.sqrt() + 1e-8) + 1e-3 * weights[n]);
        }
        if round % 500 == 0 {
            println!("round {round}: loss {:.3}, {right} of {BATCH} right", loss / BATCH as f64);
        }
    }
    let text = write(&weights, &mut paint)?;
    std::fs::write("src/gesture/weights.rs", text).expect("run in the package's folder");
    Ok(())
}

/// All tensors of a window.
struct Seen {
    x: Vec<f64>,
    h: Vec<f64>,
    qkv: [Vec<f64>; 3],
    /// After the attention.
    r: Vec<f64>,
    /// Before ReLU, and after.
    hidden: [Vec<f64>; 2],
    y: Vec<f64>,
    mean: Vec<f64>,
    scores: Vec<f64>,
}

fn matrix(w: &[f64], at: Range<usize>, d_in: usize, d_out: usize) -> Result<Linear<'_, f64>> {
    Linear::new(&w[at], d_in, d_out)
}

fn layer(w: &[f64]) -> Result<MultiHeadAttention<'_, f64>> {
    let square = |at| matrix(w, at, WIDTH, WIDTH);
    MultiHeadAttention::new(HEADS, HEADS, square(QUERY)?, square(KEY)?, square(VALUE)?)?.output(square(JOIN)?)
}

fn apply(linear: Linear<'_, f64>, x: &[f64], rows: usize) -> Result<Vec<f64>> {
    let mut y = vec![0.0; rows * linear.d_out()];
    linear.forward(View::matrix(x, rows, linear.d_in())?, &mut ViewMut::matrix(&mut y, rows, linear.d_out())?)?;
    Ok(y)
}

fn added(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn forward(w: &[f64], window: &Window) -> Result<Seen> {
    let x: Vec<f64> = window.as_flattened().iter().map(|&x| f64::from(x) * f64::from(STEP)).collect();
    let embed = matrix(w, EMBED, AXES, WIDTH)?.bias(&w[EMBED_BIAS])?;
    let h = added(&apply(embed, &x, STEPS)?, &w[POSITION]);
    let mut projected = [QUERY, KEY, VALUE].into_iter().map(|at| apply(matrix(w, at, WIDTH, WIDTH)?, &h, STEPS));
    let qkv = [(); 3].map(|()| projected.next().expect("three of them").expect("sizes fit"));
    let layer = layer(w)?;
    let (mut attended, mut scratch) =
        (vec![0.0; STEPS * WIDTH], vec![0.0; layer.scratch_len(&Streaming, 1, STEPS, STEPS)?]);
    let sources = Sources::same(View::matrix(&h, STEPS, WIDTH)?);
    let to = ViewMut::matrix(&mut attended, STEPS, WIDTH)?;
    layer.forward(&mut Streaming, &Attention::new(), sources, to, &mut scratch)?;
    let r = added(&h, &attended);
    let raw = apply(matrix(w, UP, WIDTH, HIDDEN)?.bias(&w[UP_BIAS])?, &r, STEPS)?;
    let hidden: Vec<f64> = raw.iter().map(|x| x.max(0.0)).collect();
    let y = added(&r, &apply(matrix(w, DOWN, HIDDEN, WIDTH)?.bias(&w[DOWN_BIAS])?, &hidden, STEPS)?);
    let mean: Vec<f64> = (0..WIDTH).map(|d| y.iter().skip(d).step_by(WIDTH).sum::<f64>() / STEPS as f64).collect();
    let scores = apply(matrix(w, CLASS, WIDTH, CLASSES.len())?.bias(&w[CLASS_BIAS])?, &mean, 1)?;
    Ok(Seen { x, h, qkv, r, hidden: [raw, hidden], y, mean, scores })
}

/// Adds the gradient of the cross entropy; gives the loss.
fn backward(w: &[f64], seen: &Seen, class: usize, to: &mut [f64]) -> Result<f64> {
    let max = seen.scores.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = seen.scores.iter().map(|s| (s - max).exp()).sum();
    let mut d_scores: Vec<f64> = seen.scores.iter().map(|s| (s - max).exp() / sum).collect();
    let loss = -d_scores[class].ln();
    d_scores[class] -= 1.0;

    let d_mean =
        back(matrix(w, CLASS, WIDTH, CLASSES.len())?, &seen.mean, &d_scores, 1, (CLASS, Some(CLASS_BIAS)), to)?;
    let d_y: Vec<f64> = (0..STEPS * WIDTH).map(|n| d_mean[n % WIDTH] / STEPS as f64).collect();
    let [raw, hidden] = &seen.hidden;
    let mut d_hidden = back(matrix(w, DOWN, HIDDEN, WIDTH)?, hidden, &d_y, STEPS, (DOWN, Some(DOWN_BIAS)), to)?;
    d_hidden.iter_mut().zip(raw).for_each(|(d, x)| *d = if *x > 0.0 { *d } else { 0.0 });
    let d_r = added(&d_y, &back(matrix(w, UP, WIDTH, HIDDEN)?, &seen.r, &d_hidden, STEPS, (UP, Some(UP_BIAS)), to)?);

    let layer = layer(w)?;
    let mut d_h = vec![0.0; STEPS * WIDTH];
    let mut parts = [(); 4].map(|()| vec![0.0; WIDTH * WIDTH]);
    let [dq, dk, dv, dj] = &mut parts;
    let square = |x| LinearGradients::new(x, WIDTH, WIDTH);
    let gradients = ModuleGradients::new()
        .inputs(InputGradients::Same(ViewMut::matrix(&mut d_h, STEPS, WIDTH)?))
        .q(square(dq)?)
        .k(square(dk)?)
        .v(square(dv)?)
        .out(square(dj)?);
    let mut scratch = vec![0.0; layer.backward_scratch_len(&Reference, 1, STEPS, STEPS)?];
    let (x, dy) = (View::matrix(&seen.h, STEPS, WIDTH)?, View::matrix(&d_r, STEPS, WIDTH)?);
    layer.backward(&mut Reference, &Attention::new(), x, dy, gradients, &mut scratch)?;
    for (at, part) in [QUERY, KEY, VALUE, JOIN].into_iter().zip(&parts) {
        to[at].iter_mut().zip(part).for_each(|(a, b)| *a += b);
    }
    let d_h = added(&d_h, &d_r);
    to[POSITION].iter_mut().zip(&d_h).for_each(|(a, b)| *a += b);
    back(matrix(w, EMBED, AXES, WIDTH)?, &seen.x, &d_h, STEPS, (EMBED, Some(EMBED_BIAS)), to)?;
    Ok(loss)
}

/// Back through one matrix: adds to its gradient and its bias's, gives that of its input.
fn back(
    linear: Linear<'_, f64>,
    x: &[f64],
    dy: &[f64],
    rows: usize,
    (at, bias): (Range<usize>, Option<Range<usize>>),
    to: &mut [f64],
) -> Result<Vec<f64>> {
    let (d_in, d_out) = (linear.d_in(), linear.d_out());
    let (mut dx, mut dw, mut db) = (vec![0.0; rows * d_in], vec![0.0; d_in * d_out], vec![0.0; d_out]);
    let mut gradients = LinearGradients::new(&mut dw, d_in, d_out)?.bias(&mut db);
    let to_x = &mut ViewMut::matrix(&mut dx, rows, d_in)?;
    linear.backward(View::matrix(x, rows, d_in)?, View::matrix(dy, rows, d_out)?, Some(to_x), Some(&mut gradients))?;
    to[at].iter_mut().zip(&dw).for_each(|(a, b)| *a += b);
    if let Some(bias) = bias {
        to[bias].iter_mut().zip(&db).for_each(|(a, b)| *a += b);
    }
    Ok(dx)
}

/// The generated file: weights in both forms, scales, windows to show.
fn write(weights: &[f64], paint: &mut Paint) -> Result<String> {
    // What each tensor reaches.
    let mut reached: [Vec<f32>; 7] = Default::default();
    for _ in 0..400 {
        let seen = forward(weights, &draw(paint).0)?;
        let [q, k, v] = &seen.qkv;
        for (all, tensor) in reached.iter_mut().zip([&seen.h, q, k, v, &seen.r, &seen.hidden[1], &seen.y]) {
            all.extend(tensor.iter().map(|&x| x as f32));
        }
    }
    let quants = reached.map(|values| Quant::covering(&values));
    let [h, _, _, _, r, u, y] = quants;
    let matrices = [EMBED, QUERY, KEY, VALUE, JOIN, UP, DOWN, CLASS];
    let scales = matrices.clone().map(|at| weights[at].iter().fold(0.0f64, |m, x| m.max(x.abs())) as f32 / 127.0);
    let mut int8 = vec![0i8; WEIGHTS];
    for (at, scale) in matrices.into_iter().zip(scales) {
        for n in at {
            int8[n] = (weights[n] / f64::from(scale)).round() as i8;
        }
    }
    // Biases in units of the products that they are added to.
    let unit = |from: f32, matrix: usize| f64::from(from) * f64::from(scales[matrix]);
    let in_units = |x: f64, unit: f64| (x / unit).round() as i32;
    let mut biases: Vec<i32> = (0..STEPS * WIDTH)
        .map(|n| in_units(weights[POSITION][n] + weights[EMBED_BIAS][n % WIDTH], unit(STEP, 0)))
        .collect();
    biases.extend(weights[UP_BIAS].iter().map(|&x| in_units(x, unit(r.scale(), 5))));
    biases.extend(weights[DOWN_BIAS].iter().map(|&x| in_units(x, unit(u.scale(), 6))));
    biases.extend(weights[CLASS_BIAS].iter().map(|&x| in_units(x, unit(y.scale(), 7) / STEPS as f64)));
    let _ = h;

    let mut text = String::from(
        "//! Written by `examples/train.rs`; not to be changed by hand.\n#![cfg_attr(rustfmt, rustfmt_skip)]\n\n\
         use super::scales::Scales;\nuse super::{WEIGHTS, Window};\n\n",
    );
    let names = ["h", "q", "k", "v", "r", "u", "y"];
    text.push_str("/// Scales and zero points.\npub const SCALES: Scales = Scales {\n");
    for (name, quant) in names.into_iter().zip(quants) {
        writeln!(text, "    {name}: ({:?}, {}),", quant.scale(), quant.zero_point()).expect("memory");
    }
    writeln!(text, "    weights: {scales:?},\n}};\n").expect("memory");
    let reals: Vec<String> = weights.iter().map(|&x| format!("{:?}", x as f32)).collect();
    array(&mut text, "All weights in f32.", "REALS: [f32; WEIGHTS]", &reals);
    let of = |values: &[i32]| values.iter().map(i32::to_string).collect::<Vec<_>>();
    let numbers: Vec<i32> = int8.iter().map(|&x| i32::from(x)).collect();
    array(&mut text, "The matrices in int8, where the weights in f32 lie.", "INT8: [i8; WEIGHTS]", &of(&numbers));
    let name = format!("BIASES: [i32; {}]", biases.len());
    array(&mut text, "Biases in int8's units: of each step, hidden, back, classes.", &name, &of(&biases));
    let windows: Vec<String> = (0..16)
        .map(|_| {
            let (window, class) = draw(paint);
            format!("({window:?}, {class})").replace(", ", ",")
        })
        .collect();
    array(&mut text, "Windows to show, and their classes.", "WINDOWS: [(Window, usize); 16]", &windows);
    Ok(text)
}

fn array(text: &mut String, what: &str, name: &str, items: &[String]) {
    writeln!(text, "/// {what}\npub static {name} = [").expect("memory");
    let mut line = String::new();
    for item in items {
        if line.len() + item.len() > 116 {
            writeln!(text, "    {}", line.trim_end()).expect("memory");
            line.clear();
        }
        line.push_str(item);
        line.push_str(", ");
    }
    writeln!(text, "    {}\n];\n", line.trim_end()).expect("memory");
}
