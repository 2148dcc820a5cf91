//! The scores of a row before the softmax, where lanes are keys: soft-cap, bias, ALiBi, mods, and hidden scores.
//!
//! The order is that of `attn_core::score::Problem::score`, as in the [prefill kernel](crate::prefill::score).

use attn_core::{AttnShape, Bias};

use crate::dtype::Input;
use crate::gemv::TILE;
use crate::isa::{Isa, MAX_LANES};
use crate::level::Run;
use crate::math::tanh;
use crate::pack;
use crate::scoring::{Scoring, TileAt, narrow, pick};

/// Turns the products of one row into finished scores; the exponent applies the temperature. `tile` has one row.
/// `visible` says which of its keys the row sees; keys whose bias is −∞ leave it.
#[inline(always)]
pub(super) fn finish<I: Isa>(
    isa: I,
    (scoring, shape): (&Scoring<'_>, &AttnShape),
    scale: f32,
    tile: TileAt,
    visible: &mut u64,
    s: &mut [f32],
) {
    let s = &mut s[..tile.keys.next_multiple_of(I::LANES)];
    match scoring.softcap {
        None => {
            let scale = isa.splat(scale);
            for x in s.chunks_exact_mut(I::LANES) {
                isa.store(isa.mul(isa.load(x), scale), x);
            }
        }
        Some((cap, in_caps)) => {
            let (cap, in_caps) = (isa.splat(cap), isa.splat(in_caps));
            for x in s.chunks_exact_mut(I::LANES) {
                let capped = tanh(isa, isa.mul(isa.load(x), in_caps));
                isa.store(isa.mul(cap, capped), x);
            }
        }
    }
    if let Some(bias) = scoring.bias {
        add_bias(isa, bias, tile, visible, s);
    }
    if let Some(alibi) = scoring.alibi {
        let slope = isa.splat(-alibi.slopes[tile.head]);
        let at = alibi.align.offset(shape.q_len, shape.kv_len).saturating_add_unsigned(tile.query);
        let mut lane = [0.0f32; MAX_LANES];
        for (n, x) in s.chunks_exact_mut(I::LANES).enumerate() {
            let key = tile.key + n * I::LANES;
            for (l, d) in lane.iter_mut().enumerate().take(I::LANES) {
                *d = at.saturating_sub_unsigned(key).saturating_sub_unsigned(l) as f32;
            }
            isa.store(isa.mul_add(slope, isa.abs(isa.load(&lane)), isa.load(x)), x);
        }
    }
    if scoring.mods.has_score_mod() {
        // Mods take a tile by key; with one row that is the row itself. They are called for visible keys only.
        let mut bits = [0u64; TILE];
        bits.iter_mut().enumerate().for_each(|(n, bits)| *bits = *visible >> n & 1);
        scoring.mods.score_mod(scoring.level, tile, 1, Some(&bits), s);
    }
}

/// Adds the bias of one row. An entry of −∞ hides the score, even a NaN.
#[inline(always)]
fn add_bias<I: Isa>(isa: I, bias: &Bias<'_>, tile: TileAt, visible: &mut u64, s: &mut [f32]) {
    let mut row = [0.0f32; TILE];
    let [nb, nh, nq, nk] = bias.sizes();
    match Input::of_bias(bias).filter(|_| tile.key + tile.keys <= nk) {
        Some(input) => {
            let at = [pick(tile.batch, nb), pick(tile.head, nh), pick(tile.query, nq)];
            pack::read_row(isa, &input, at, tile.key, &mut row[..tile.keys]);
        }
        None => {
            for (n, x) in row.iter_mut().enumerate().take(tile.keys) {
                *x = narrow(bias.at(tile.position(0, n)));
            }
        }
    }
    let hidden = isa.splat(f32::NEG_INFINITY);
    for (s, b) in s.chunks_exact_mut(I::LANES).zip(row.chunks_exact(I::LANES)) {
        let b = isa.load(b);
        isa.store(isa.select(isa.eq(b, hidden), hidden, isa.add(isa.load(s), b)), s);
    }
    for (n, &b) in row.iter().enumerate() {
        *visible &= !(u64::from(b == f32::NEG_INFINITY) << n);
    }
}

/// Runs [`replace_hidden`] at a level.
pub(super) struct Replace<'a> {
    pub(super) row: &'a mut [f32],
    pub(super) visible: u64,
    pub(super) other: f32,
}

impl Run<()> for Replace<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        replace_hidden(isa, self.row, self.visible, self.other);
    }
}

/// Writes `other` to the elements whose bit is clear.
#[inline(always)]
pub(super) fn replace_hidden<I: Isa>(isa: I, row: &mut [f32], visible: u64, other: f32) {
    let other = isa.splat(other);
    for (n, x) in row.chunks_exact_mut(I::LANES).enumerate() {
        let mask = isa.mask_from_bits(visible >> (n * I::LANES));
        isa.replace(mask, x, other);
    }
}
