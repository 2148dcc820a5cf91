//! Scores of a tile before the softmax, if options change them by more than the scale: soft-cap, bias, ALiBi, mods.

use attn_core::Bias;

use super::job::Job;
use crate::dtype::Input;
use crate::isa::{Isa, MAX_LANES};
use crate::math::tanh;
use crate::pack;
use crate::scoring::{TileAt, narrow, pick};

/// Turns products `s[key][query]` into finished scores, in the order that `attn_core::score::Problem::score` fixes
/// (temperature is left to the exponent). `scratch` gets the tile of the bias, transposed. Returns whether the bias may
/// hide scores: whether `scratch` holds a −∞, be it left over in a lane without a row. A function of its own, so that
/// it is compiled once per width.
#[inline(never)]
pub(crate) fn finish<I: Isa, const NQ: usize>(
    isa: I,
    job: &Job<'_>,
    scale: f32,
    tile: TileAt,
    scores: &mut [f32],
    scratch: &mut [f32],
) -> bool {
    isa.vectorize(
        #[inline(always)]
        || finish_inlined::<I, NQ>(isa, job, scale, tile, scores, scratch),
    )
}

#[inline(always)]
fn finish_inlined<I: Isa, const NQ: usize>(
    isa: I,
    job: &Job<'_>,
    scale: f32,
    tile: TileAt,
    scores: &mut [f32],
    scratch: &mut [f32],
) -> bool {
    let width = NQ * I::LANES;
    let scores = &mut scores[..tile.keys * width];
    let bias = job.bias.map(|bias| {
        of_tile(isa, job, bias, tile, width, scratch);
        &*scratch
    });
    let scale = isa.splat(scale);
    let may_hide = match job.softcap {
        None => each(
            isa,
            scores,
            bias,
            #[inline(always)]
            |s| isa.mul(s, scale),
        ),
        Some((cap, in_caps)) => {
            let (cap, in_caps) = (isa.splat(cap), isa.splat(in_caps));
            each(
                isa,
                scores,
                bias,
                #[inline(always)]
                |s| isa.mul(cap, tanh(isa, isa.mul(s, in_caps))),
            )
        }
    };
    if let Some(alibi) = job.alibi {
        let slope = isa.splat(-alibi.slopes[tile.head]);
        let first = alibi.align.offset(job.shape.q_len, job.shape.kv_len).saturating_add_unsigned(tile.query);
        let mut lane = [0.0f32; MAX_LANES];
        let distance: [I::F; NQ] = core::array::from_fn(|n| {
            for (l, x) in lane.iter_mut().enumerate() {
                *x = (first.saturating_add_unsigned(n * I::LANES + l)).saturating_sub_unsigned(tile.key) as f32;
            }
            isa.load(&lane)
        });
        for (key, row) in scores.chunks_exact_mut(width).enumerate() {
            for (s, from) in row.chunks_exact_mut(I::LANES).zip(distance) {
                let d = isa.abs(isa.sub(from, isa.splat(key as f32)));
                isa.store(isa.mul_add(slope, d, isa.load(s)), s);
            }
        }
    }
    may_hide
}

/// Scales or caps each score, and adds the tile's bias. An entry of −∞ hides the score, even one that is NaN. Returns
/// whether there is one, in any lane.
#[inline(always)]
fn each<I: Isa>(isa: I, scores: &mut [f32], bias: Option<&[f32]>, scaled: impl Fn(I::F) -> I::F) -> bool {
    let Some(bias) = bias else {
        for s in scores.chunks_exact_mut(I::LANES) {
            isa.store(scaled(isa.load(s)), s);
        }
        return false;
    };
    let hidden = isa.splat(f32::NEG_INFINITY);
    let mut found = isa.splat(0.0); // in each lane −∞ once there was one
    for (s, b) in scores.chunks_exact_mut(I::LANES).zip(bias.chunks_exact(I::LANES)) {
        let b = isa.load(b);
        let hides = isa.eq(b, hidden);
        found = isa.select(hides, hidden, found);
        isa.store(isa.select(hides, hidden, isa.add(scaled(isa.load(s)), b)), s);
    }
    let mut lanes = [0.0; MAX_LANES];
    isa.store(found, &mut lanes);
    lanes.contains(&f32::NEG_INFINITY)
}

/// The rows of a bias that a tile transposes, and the first of them; `None` if its queries or keys share entries, or if
/// it is in `f64`.
pub(super) fn rows_of<'j>(job: &Job<'j>, tile: TileAt) -> Option<(Input<'j>, [usize; 3])> {
    let bias = job.bias?;
    let [nb, nh, nq, nk] = bias.sizes();
    let wide = (nk != 1 || job.shape.kv_len == 1) && (nq != 1 || job.shape.q_len == 1);
    let input = Input::of_bias(bias).filter(|_| wide)?;
    Some((input, [pick(tile.batch, nb), pick(tile.head, nh), tile.query]))
}

/// Writes a tile of the bias, transposed.
#[inline(always)]
fn of_tile<I: Isa>(isa: I, job: &Job<'_>, bias: &Bias<'_>, tile: TileAt, width: usize, scratch: &mut [f32]) {
    let [nb, nh, nq, nk] = bias.sizes();
    match rows_of(job, tile) {
        // A tile of the tensor, transposed like the queries: its "channels" are keys.
        Some((input, row)) => {
            pack::transposed(isa, &input, row, tile.rows, tile.key..tile.key + tile.keys, width, scratch);
        }
        // The same for all queries: a number a key.
        _ if nq == 1 => {
            for (n, row) in scratch.chunks_exact_mut(width).take(tile.keys).enumerate() {
                row.fill(narrow(bias.at(tile.position(0, n))));
            }
        }
        // The same for all keys: one row of numbers.
        _ if nk == 1 => {
            let Some((first, others)) = scratch[..tile.keys * width].split_at_mut_checked(width) else { return };
            for (lane, x) in first.iter_mut().enumerate().take(tile.rows) {
                *x = narrow(bias.at(tile.position(lane, 0)));
            }
            others.chunks_exact_mut(width).for_each(|row| row.copy_from_slice(first));
        }
        _ => {
            if let Bias::F64(view) = bias {
                let [sb, sh, sq, sk] = view.strides();
                let row = [(pick(tile.batch, nb), sb), (pick(tile.head, nh), sh), (tile.query, sq), (tile.key, sk)];
                let start = row.iter().fold(view.offset() as isize, |at, &(i, stride)| at + i as isize * stride);
                for (n, row) in scratch.chunks_exact_mut(width).take(tile.keys).enumerate() {
                    for (lane, x) in row.iter_mut().enumerate().take(tile.rows) {
                        *x = narrow(view.data()[(start + lane as isize * sq + n as isize * sk) as usize]);
                    }
                }
            }
        }
    }
}
