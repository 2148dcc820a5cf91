//! The options that change the scores of a call, without type parameters, decided once per call; the place of a tile.
//!
//! Every kernel takes them: prefill and amx beside the shape and the inputs of a call, decode beside the shape of each
//! sequence.

use core::sync::atomic::{AtomicBool, Ordering};

use attn_core::dropout::Dropout;
use attn_core::position::alibi::Alibi;
use attn_core::score::Problem;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, Bias, Mask, Precision, Result};

use crate::gemv::pairs;
use crate::isa::Isa;
use crate::level::{Level, Run};

/// Most keys of a tile: the width of a word of mask bits, so that one word per row says which keys of a tile it sees.
pub(crate) const KV_TILE: usize = 64;

/// The place of a tile: `rows` queries from `query` on of one head, `keys` keys from `key` on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TileAt {
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) query: usize,
    pub(crate) rows: usize,
    pub(crate) key: usize,
    pub(crate) keys: usize,
}

impl TileAt {
    /// The position in the score tensor of a lane and the tile's `n`-th key.
    pub(crate) fn position(&self, lane: usize, n: usize) -> attn_core::score::At {
        attn_core::score::At { batch: self.batch, head: self.head, query: self.query + lane, key: self.key + n }
    }
}

/// The caller's mods, called once per tile instead of once per score, so that the kernels need not be compiled for
/// them. Implementations are compiled with the caller, for the level that runs.
pub(crate) trait TileMods: Sync {
    /// Whether scores are changed.
    fn has_score_mod(&self) -> bool;
    /// Whether keys are hidden.
    fn has_mask_mod(&self) -> bool;
    /// Changes the scores of a tile, `scores[key][query]`, `width` apart. If `bits` (one word of queries per key) are
    /// given, score_mod is called only for the positions that they show.
    fn score_mod(&self, level: Level, tile: TileAt, width: usize, bits: Option<&[u64; KV_TILE]>, scores: &mut [f32]);
    /// The derivatives of score_mod at the scores of a tile, in the same places of the second array; 0 where `bits`
    /// hide a position, and where there is no query. Says whether all are known.
    fn derivatives(
        &self,
        level: Level,
        tile: TileAt,
        width: usize,
        bits: Option<&[u64; KV_TILE]>,
        at: (&[f32], &mut [f32]),
    ) -> bool;
    /// Clears the bits of the keys that are hidden: one word of keys per row.
    fn mask_mod(&self, level: Level, tile: TileAt, rows: &mut [u64]);
}

impl<M: Mods + Sync> TileMods for M {
    fn has_score_mod(&self) -> bool {
        Mods::has_score_mod(self)
    }

    fn has_mask_mod(&self) -> bool {
        Mods::has_mask_mod(self)
    }

    fn score_mod(&self, level: Level, tile: TileAt, width: usize, bits: Option<&[u64; KV_TILE]>, scores: &mut [f32]) {
        level.run(Score { mods: self, tile, width, bits, scores });
    }

    fn derivatives(
        &self,
        level: Level,
        tile: TileAt,
        width: usize,
        bits: Option<&[u64; KV_TILE]>,
        (scores, slopes): (&[f32], &mut [f32]),
    ) -> bool {
        level.run(Derivatives { mods: self, tile, width, bits, scores, slopes })
    }

    fn mask_mod(&self, level: Level, tile: TileAt, rows: &mut [u64]) {
        level.run(Visible { mods: self, tile, rows });
    }
}

/// score_mod over one tile.
struct Score<'a, M> {
    mods: &'a M,
    tile: TileAt,
    width: usize,
    bits: Option<&'a [u64; KV_TILE]>,
    scores: &'a mut [f32],
}

impl<M: Mods> Run<()> for Score<'_, M> {
    #[inline(always)]
    fn run<I: Isa>(self, _: I) {
        let Self { mods, tile, width, bits, scores } = self;
        for (n, row) in scores.chunks_exact_mut(width).enumerate().take(tile.keys) {
            let row = &mut row[..tile.rows];
            let one = |lane: usize, s: f32| narrow(mods.score_mod(f64::from(s), tile.position(lane, n)));
            match bits.map(|bits| bits[n]) {
                None | Some(u64::MAX) => row.iter_mut().enumerate().for_each(|(lane, s)| *s = one(lane, *s)),
                Some(visible) => {
                    for (lane, s) in row.iter_mut().enumerate().filter(|(lane, _)| visible >> lane & 1 == 1) {
                        *s = one(lane, *s);
                    }
                }
            }
        }
    }
}

/// Derivatives of score_mod over one tile.
struct Derivatives<'a, M> {
    mods: &'a M,
    tile: TileAt,
    width: usize,
    bits: Option<&'a [u64; KV_TILE]>,
    scores: &'a [f32],
    slopes: &'a mut [f32],
}

impl<M: Mods> Run<bool> for Derivatives<'_, M> {
    #[inline(always)]
    fn run<I: Isa>(self, _: I) -> bool {
        let Self { mods, tile, width, bits, scores, slopes } = self;
        let (mut known, rows) = (true, scores.chunks_exact(width).zip(slopes.chunks_exact_mut(width)));
        for (n, (row, to)) in rows.enumerate().take(tile.keys) {
            let visible = bits.map_or(u64::MAX, |bits| bits[n]);
            for (lane, (&s, to)) in row.iter().zip(to).enumerate() {
                *to = 0.0;
                if lane < tile.rows && visible >> lane & 1 == 1 {
                    let slope = mods.derivative(f64::from(s), tile.position(lane, n));
                    known &= slope.is_some();
                    *to = match slope {
                        Some(slope) if slope.is_finite() => finite(slope), // 0·∞ would be NaN
                        _ => slope.unwrap_or(f64::NAN) as f32,
                    };
                }
            }
        }
        known
    }
}

/// mask_mod over one tile.
struct Visible<'a, M> {
    mods: &'a M,
    tile: TileAt,
    rows: &'a mut [u64],
}

impl<M: Mods> Run<()> for Visible<'_, M> {
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Self { mods, tile, rows } = self;
        for (lane, row) in rows.iter_mut().enumerate() {
            if *row == u64::MAX {
                let visible: [bool; 64] = core::array::from_fn(|n| mods.mask_mod(tile.position(lane, n)));
                *row = isa.pack_bools(&visible);
                continue;
            }
            // Not every key is shown by the mask: mask_mod is called for those that are.
            let mut left = *row;
            while left != 0 {
                let n = left.trailing_zeros();
                if !mods.mask_mod(tile.position(lane, n as usize)) {
                    *row &= !(1 << n);
                }
                left &= left - 1;
            }
        }
    }
}

/// The options that change the scores of a call, for all kernels and all lengths of a sequence.
#[derive(Clone, Copy)]
pub(crate) struct Scoring<'j> {
    pub(crate) level: Level,
    pub(crate) mask: &'j Mask<'j>,
    /// Whether each row sees a range of keys.
    pub(crate) ranges: bool,
    pub(crate) bias: Option<&'j Bias<'j>>,
    pub(crate) alibi: Option<&'j Alibi<'j>>,
    /// The cap, and the factor that measures a product in caps: scale / cap.
    pub(crate) softcap: Option<(f32, f32)>,
    pub(crate) sinks: Option<&'j [f32]>,
    pub(crate) dropout: &'j Dropout<'j>,
    pub(crate) mods: &'j dyn TileMods,
    /// The factor of scores before soft-cap, bias and mods; `None` if there is none of them.
    pub(crate) score_scale: Option<f32>,
    /// The factor of packed queries: the sign of the scale, or 0.
    pub(crate) q_sign: f32,
    /// Turns differences of scores in a tile into natural logarithms; above 0.
    pub(crate) ln_scale: f64,
    /// Whether the caller wants `Precision::Fast`.
    pub(crate) fast: bool,
    /// The caller's request to stop, if it may make one.
    pub(crate) stop: Option<&'j AtomicBool>,
}

impl<'j> Scoring<'j> {
    /// Of checked options and the scale in force.
    pub(crate) fn new<M: Mods + Sync>(attn: &'j Attention<'j, M>, scale: f64, level: Level) -> Self {
        let Factors { score_scale, q_sign, ln_scale } = Factors::of(attn, scale);
        Self {
            level,
            mask: attn.get_mask(),
            ranges: attn.get_mask().is_ranges() && !Mods::has_mask_mod(attn.get_mods()),
            bias: attn.get_bias(),
            alibi: attn.get_alibi(),
            softcap: attn.get_softcap().map(|cap| {
                // Beyond these bounds a cap makes no difference that f32 could show, and would overflow or underflow
                // there.
                let cap = cap.clamp(f64::from_bits(0x39b0 << 48), f64::from_bits(0x4630 << 48)); // 2⁻¹⁰⁰ … 2¹⁰⁰
                (cap as f32, finite(scale / cap))
            }),
            sinks: attn.get_sinks(),
            dropout: attn.get_dropout(),
            mods: attn.get_mods(),
            score_scale,
            q_sign,
            ln_scale,
            fast: attn.get_precision() == Precision::Fast,
            stop: None,
        }
    }

    /// Whether the caller has stopped the call: the kernels skip what is left of it, and write no row that is
    /// incomplete. Never taken back during a call.
    pub(crate) fn is_stopped(&self) -> bool {
        // Relaxed is enough: the flag guards no memory, and one thread reads its changes in order.
        self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    /// [`AttnError::Stopped`] if the caller has stopped the call.
    pub(crate) fn unless_stopped(&self) -> Result<()> {
        if self.is_stopped() { Err(AttnError::Stopped) } else { Ok(()) }
    }

    /// Whether few queries in bf16 are multiplied as [pairs] with keys in bf16: the level has such products, and no
    /// factor enlarges what a score has lost. A score_mod may.
    pub(crate) fn multiplies_pairs(&self, head_dim: usize) -> bool {
        pairs::fit(self.level, head_dim)
            && pairs::holds(self.log2_scale() * self.score_scale.unwrap_or(1.0))
            && !self.mods.has_score_mod()
    }

    /// Turns differences of scores in a tile into exponents of 2; above 0 and finite.
    pub(crate) fn log2_scale(&self) -> f32 {
        in_log2(self.ln_scale)
    }
}

/// Where the scale of a call goes.
struct Factors {
    score_scale: Option<f32>,
    q_sign: f32,
    ln_scale: f64,
}

impl Factors {
    fn of<M: Mods>(attn: &Attention<'_, M>, scale: f64) -> Self {
        let score_mod = Mods::has_score_mod(attn.get_mods());
        let modified =
            attn.get_softcap().is_some() || attn.get_bias().is_some() || attn.get_alibi().is_some() || score_mod;
        let per_temperature = 1.0 / attn.get_temperature().unwrap_or(1.0);
        // If nothing comes between the product and the softmax, the scale goes into the exponent, where it costs
        // nothing. The running maximum needs it positive: its sign goes to the queries.
        let (score_scale, q_sign, ln_scale) = if modified {
            (Some(rounded(scale)), 1.0, per_temperature)
        } else if scale == 0.0 {
            (None, 0.0, per_temperature)
        } else {
            (None, scale.signum() as f32, scale.abs() * per_temperature)
        };
        // A maximum of −∞ times 0 would be NaN. (The options hold nothing that is too large.)
        Self { score_scale, q_sign, ln_scale: ln_scale.max(f64::MIN_POSITIVE) }
    }
}

/// The factor of differences of a problem's scores in a tile, before there are inputs.
pub(crate) fn log2_scale<M: Mods>(problem: &Problem<'_, '_, M>) -> f32 {
    in_log2(Factors::of(problem.attn(), problem.scale()).ln_scale)
}

fn in_log2(ln_scale: f64) -> f32 {
    rounded(ln_scale * core::f64::consts::LOG2_E)
}

/// Rounds a factor of scores to `f32`. One above 0 stays so: −∞ times it is −∞, not NaN.
fn rounded(x: f64) -> f32 {
    let factor = x as f32;
    if factor == 0.0 && x != 0.0 { f32::MIN_POSITIVE.copysign(factor) } else { factor }
}

/// Rounds a factor to `f32`. One that is too large becomes the largest number, not ∞: 0 times it must stay 0.
fn finite(x: f64) -> f32 {
    x.clamp(f64::from(f32::MIN), f64::from(f32::MAX)) as f32
}

/// The place of an entry along an axis of a mask or a bias, which may have one of its `n` entries for all.
#[inline(always)]
pub(crate) fn pick(i: usize, n: usize) -> usize {
    if n == 1 { 0 } else { i }
}

/// Rounds a score, or an entry of a bias, to `f32`. Only −∞ hides a key, in any engine: a finite one beyond `f32`, such
/// as `f64::MIN`, stays finite.
pub(crate) fn narrow(score: f64) -> f32 {
    if score.is_finite() { finite(score) } else { score as f32 }
}

/// The factor on a row's accumulated output and its log-sum-exp, with a sink in the denominator if there is one.
pub(crate) fn finish_row(max: f64, sum: f64, sink: Option<f64>, kept: f64) -> (f64, f32) {
    match sink {
        _ if max.is_nan() || sum.is_nan() => (f64::NAN, f32::NAN),
        None if sum == 0.0 => (0.0, f32::NEG_INFINITY),
        None => (kept / sum, (max + libm::log(sum)) as f32),
        Some(sink) if sum == 0.0 => (0.0, sink as f32),
        Some(sink) => {
            let top = max.max(sink);
            let scale = libm::exp(max - top);
            let sum = sum * scale + libm::exp(sink - top);
            (kept * scale / sum, (top + libm::log(sum)) as f32)
        }
    }
}
