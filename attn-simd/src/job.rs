//! One call as the kernels see it: no type parameters, everything that can be decided once decided.

use attn_core::{Alibi, AttnShape, Bias, Dropout, Mask, Modifier, Problem};

use crate::input::Input;
use crate::kernel::visible::Tile;
use crate::tiles::Tiles;

/// The caller's closures, called once per tile rather than once per score, so that the kernels need not be compiled for them.
pub(crate) trait Closures: Sync {
    /// Whether scores are changed.
    fn has_score(&self) -> bool;
    /// Whether keys are hidden.
    fn has_visible(&self) -> bool;
    /// Changes the score of each visible position: `scores[key][query]`, `width` apart, `bits[key]` of the visible queries.
    fn score(&self, tile: Tile, width: usize, bits: &[u64], scores: &mut [f32]);
    /// Clears the bits of the hidden ones among the tile's keys, for one lane.
    fn visible(&self, tile: Tile, lane: usize, bits: u64) -> u64;
}

impl<M: Modifier + Sync> Closures for Problem<'_, '_, M> {
    fn has_score(&self) -> bool {
        M::SCORE
    }

    fn has_visible(&self) -> bool {
        M::VISIBLE
    }

    fn score(&self, tile: Tile, width: usize, bits: &[u64], scores: &mut [f32]) {
        let modifier = self.attn().get_modifier();
        for (n, (row, &bits)) in scores.chunks_exact_mut(width).zip(bits).take(tile.keys).enumerate() {
            for (lane, s) in row.iter_mut().take(tile.rows).enumerate() {
                if bits >> lane & 1 == 1 {
                    *s = modifier.score(f64::from(*s), tile.position(lane, n)) as f32;
                }
            }
        }
    }

    fn visible(&self, tile: Tile, lane: usize, mut bits: u64) -> u64 {
        let modifier = self.attn().get_modifier();
        let mut left = bits;
        while left != 0 {
            let n = left.trailing_zeros();
            if !modifier.visible(tile.position(lane, n as usize)) {
                bits &= !(1 << n);
            }
            left &= left - 1;
        }
        bits
    }
}

/// One call, ready to run.
#[derive(Clone, Copy)]
pub(crate) struct Job<'j> {
    pub(crate) shape: AttnShape,
    pub(crate) tiles: Tiles,
    pub(crate) q: Input<'j>,
    pub(crate) k: Input<'j>,
    pub(crate) v: Input<'j>,
    pub(crate) mask: &'j Mask<'j>,
    /// Whether what each row sees is a range of keys.
    pub(crate) ranges: bool,
    pub(crate) bias: Option<&'j Bias<'j>>,
    pub(crate) alibi: Option<&'j Alibi<'j>>,
    pub(crate) softcap: Option<f32>,
    pub(crate) sinks: Option<&'j [f32]>,
    pub(crate) dropout: &'j Dropout<'j>,
    pub(crate) closures: &'j dyn Closures,
    /// What scores are multiplied by before soft-cap, bias and closures; `None` where there is none of them.
    pub(crate) mod_scale: Option<f32>,
    /// What queries are multiplied by while they are packed: the sign of the scale, or 0.
    pub(crate) q_factor: f32,
    /// Turns differences of scores as they stand in a tile into natural logarithms; above 0.
    pub(crate) to_ln: f64,
}

impl<'j> Job<'j> {
    /// From a checked problem.
    pub(crate) fn new<M: Modifier + Sync>(
        problem: &'j Problem<'j, 'j, M>,
        tiles: Tiles,
        inputs: [Input<'j>; 3],
    ) -> Self {
        let attn = problem.attn();
        let modified =
            attn.get_softcap().is_some() || attn.get_bias().is_some() || attn.get_alibi().is_some() || M::SCORE;
        let (scale, per_temperature) = (problem.scale(), 1.0 / attn.get_temperature().unwrap_or(1.0));
        // Without anything between the product and the softmax the scale goes into the exponent, where it costs nothing. The
        // running maximum needs it positive: its sign goes to the queries.
        let (mod_scale, q_factor, to_ln) = if modified {
            (Some(scale as f32), 1.0, per_temperature)
        } else if scale == 0.0 {
            (None, 0.0, per_temperature)
        } else {
            (None, scale.signum() as f32, scale.abs() * per_temperature)
        };
        let [q, k, v] = inputs;
        Self {
            shape: *problem.shape(),
            tiles,
            q,
            k,
            v,
            mask: attn.get_mask(),
            ranges: attn.get_mask().is_ranges() && !M::VISIBLE,
            bias: attn.get_bias(),
            alibi: attn.get_alibi(),
            softcap: attn.get_softcap().map(|c| c as f32),
            sinks: attn.get_sinks(),
            dropout: attn.get_dropout(),
            closures: problem,
            mod_scale,
            q_factor,
            to_ln,
        }
    }

    /// Turns differences of scores in a tile into exponents of 2; above 0.
    pub(crate) fn log2_scale(&self) -> f32 {
        ((self.to_ln * core::f64::consts::LOG2_E) as f32).max(f32::MIN_POSITIVE)
    }
}
