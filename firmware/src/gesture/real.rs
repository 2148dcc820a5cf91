//! The layer in f32: attn-core's projections and attention, over buffers on the stack.

use attn_core::{Attention, Result, View, ViewMut};
use attn_layers::Linear;
use attn_layers::module::{MultiHeadAttention, Sources, Streaming};

use super::*;

/// Scratch of the attention: q, k, v, the heads' outputs, a number per row, and the engine's row.
const SCRATCH: usize = 4 * STEPS * WIDTH + HEADS * STEPS + WIDTH / HEADS;

/// Scores of the classes of a window, `weights` being [`WEIGHTS`] numbers.
#[inline(never)]
pub fn classify(weights: &[f32; WEIGHTS], window: &Window) -> Result<[f32; CLASSES.len()]> {
    let matrix = |at: Range<usize>, d_in, d_out| Linear::new(&weights[at], d_in, d_out);
    let x: [f32; STEPS * AXES] = core::array::from_fn(|n| f32::from(window.as_flattened()[n]) * STEP);
    let mut h = [0.0f32; STEPS * WIDTH];
    let embed = matrix(EMBED, AXES, WIDTH)?.bias(&weights[EMBED_BIAS])?;
    embed.forward_in::<f32, _, _>(View::matrix(&x, STEPS, AXES)?, &mut ViewMut::matrix(&mut h, STEPS, WIDTH)?)?;
    add(&mut h, &weights[POSITION]);

    let (query, key) = (matrix(QUERY, WIDTH, WIDTH)?, matrix(KEY, WIDTH, WIDTH)?);
    let layer = MultiHeadAttention::new(HEADS, HEADS, query, key, matrix(VALUE, WIDTH, WIDTH)?)?;
    let layer = layer.output(matrix(JOIN, WIDTH, WIDTH)?)?;
    let (mut attended, mut scratch) = ([0.0f32; STEPS * WIDTH], [0.0f32; SCRATCH]);
    let to = ViewMut::matrix(&mut attended, STEPS, WIDTH)?;
    let from = Sources::same(View::matrix(&h, STEPS, WIDTH)?);
    layer.forward(&mut Streaming, &Attention::new(), from, to, &mut scratch)?;
    add(&mut h, &attended);

    let up = matrix(UP, WIDTH, HIDDEN)?.bias(&weights[UP_BIAS])?;
    let down = matrix(DOWN, HIDDEN, WIDTH)?.bias(&weights[DOWN_BIAS])?;
    let mut mean = [0.0f32; WIDTH];
    for step in h.chunks(WIDTH) {
        let (mut hidden, mut out) = ([0.0f32; HIDDEN], [0.0f32; WIDTH]);
        up.forward_in::<f32, _, _>(View::matrix(step, 1, WIDTH)?, &mut ViewMut::matrix(&mut hidden, 1, HIDDEN)?)?;
        for x in &mut hidden {
            *x = if *x > 0.0 { *x } else { 0.0 };
        }
        down.forward_in::<f32, _, _>(View::matrix(&hidden, 1, HIDDEN)?, &mut ViewMut::matrix(&mut out, 1, WIDTH)?)?;
        add(&mut mean, step);
        add(&mut mean, &out);
    }
    for x in &mut mean {
        *x *= 1.0 / STEPS as f32;
    }
    let mut scores = [0.0f32; CLASSES.len()];
    let class = matrix(CLASS, WIDTH, CLASSES.len())?.bias(&weights[CLASS_BIAS])?;
    class.forward_in::<f32, _, _>(
        View::matrix(&mean, 1, WIDTH)?,
        &mut ViewMut::matrix(&mut scores, 1, CLASSES.len())?,
    )?;
    Ok(scores)
}

fn add(to: &mut [f32], x: &[f32]) {
    for (a, b) in to.iter_mut().zip(x) {
        *a += b;
    }
}
