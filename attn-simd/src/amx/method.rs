//! Which split a call uses, and why it may not run on AMX at all: pure functions of types, options and sizes.

use attn_core::{AttnShape, Dtype, Precision};

use super::product::{Products, SIDE};
use crate::decode::MAX_QUERIES;

/// How the two products of a call are computed on AMX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Method {
    /// A = keys, B = queries.
    pub(crate) scores: Products,
    /// A = values, B = weights.
    pub(crate) values: Products,
    /// Whether weights need not be as good as f32: their exponential is coarser.
    pub(crate) fast: bool,
}

impl Method {
    /// By the types of inputs and output.
    ///
    /// A score must be as good as one computed in f32, because its error is multiplied by its size: `Exact` leaves out
    /// nothing that a float would show. Weights and values need no more digits than the output shows: weights of 16
    /// bits are enough for a narrow output. Weights of 8, which `Fast` takes of bf16, show in every output but bf16.
    pub(crate) const fn of(input: Dtype, output: Dtype, precision: Precision) -> Self {
        use Products::{Five, Four, One, OneByThree, OneByTwo, Six, Three};
        let wide = matches!(output, Dtype::F32) || !same(input, output);
        let (scores, values) = match (input, precision) {
            (Dtype::Bf16, Precision::Fast) if wide => (One, OneByTwo),
            (Dtype::Bf16, Precision::Fast) => (One, One),
            (Dtype::Bf16, _) if wide => (One, OneByThree),
            (Dtype::Bf16, _) => (One, OneByTwo),
            (Dtype::F16, Precision::Fast) => (Three, Three),
            (Dtype::F16, _) if wide => (Four, Five),
            (Dtype::F16, _) => (Four, Three),
            (_, Precision::Fast) => (Three, Three),
            (_, _) => (Six, Six),
        };
        Self { scores, values, fast: matches!(precision, Precision::Fast) }
    }

    /// Products of parts, of scores and of values together.
    pub(crate) const fn products(self) -> usize {
        self.scores.steps().len() + self.values.steps().len()
    }

    /// Whether products of pairs, which take twice as many numbers at a time, are faster than one product each in f32.
    /// Channels are padded to whole steps. Measured on Zen 5, exact bf16 against f32: 1.31 times as fast for 64
    /// channels (by this count 1.33), 1.10 for 80 (1.11), 0.84 for 40 (0.83).
    pub(crate) const fn pays(self, shape: &AttnShape) -> bool {
        let [head_dim, value_dim] = [shape.head_dim, shape.value_dim];
        let (scores, values) = (self.scores.steps().len(), self.values.steps().len());
        scores * head_dim.next_multiple_of(SIDE) + values * value_dim.next_multiple_of(SIDE)
            < 2 * (head_dim + value_dim)
    }

    /// Parts of a query, and of a key.
    pub(crate) const fn qk_parts(self) -> usize {
        self.scores.parts().0
    }

    /// Parts of a value.
    pub(crate) const fn v_parts(self) -> usize {
        self.values.parts().0
    }

    /// Parts of a weight.
    pub(crate) const fn p_parts(self) -> usize {
        self.values.parts().1
    }

    /// Tiles of keys that the value product takes at a time. One product per tile would be lost in loading and
    /// storing its sums; with many, the operands of two tiles would not stay in L1.
    pub(crate) const fn tiles(self) -> usize {
        1 << self.tiles_log2()
    }

    /// The same as a power of 2, because every tile divides by it, and divisions take long.
    pub(crate) const fn tiles_log2(self) -> u32 {
        if self.v_parts() == 1 { 1 } else { 0 }
    }
}

const fn same(a: Dtype, b: Dtype) -> bool {
    matches!((a, b), (Dtype::F32, Dtype::F32) | (Dtype::F16, Dtype::F16) | (Dtype::Bf16, Dtype::Bf16))
}

/// Longest rows that run on AMX: beyond, the packed keys would fall out of the cache.
pub(crate) const MAX_DIM: usize = 512;

/// Fewest queries of a head that are worth 32 columns of sums and the packing of all keys: the first number that is
/// never decoded. Up to [`MAX_QUERIES`] a call is decoded, or runs on vectors if its heads have too many rows for one
/// pass.
pub(crate) const MIN_QUERIES: usize = MAX_QUERIES + 1;

/// Why a call does not run on AMX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Obstacle {
    /// The level has none.
    Level,
    /// Fewer than [`MIN_QUERIES`].
    FewQueries(usize),
    /// A row longer than [`MAX_DIM`].
    LongRows(usize),
    /// The scale is so large that products of ordinary numbers would leave the range of f32.
    Scale,
    /// So many products that vectors of f32 are faster.
    Products(usize),
    /// Rows so far from whole steps that vectors of f32 are faster.
    Padding(usize, usize),
}

impl core::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Level => write!(f, "this level has no AMX"),
            Self::FewQueries(n) => write!(f, "{n} queries a head, fewer than {MIN_QUERIES}"),
            Self::LongRows(n) => write!(f, "rows of {n}, longer than {MAX_DIM}"),
            Self::Scale => write!(f, "a scale above 2^16"),
            Self::Products(n) => write!(f, "{n} products of bf16 parts, which f32 is faster than"),
            Self::Padding(head_dim, value_dim) => write!(
                f,
                "head_dim {head_dim} and value_dim {value_dim} are padded to multiples of {SIDE}, which f32 is faster than"
            ),
        }
    }
}

/// What keeps a shape and a scale from AMX, if anything does.
pub(crate) fn obstacle(shape: &AttnShape, few_are_enough: bool, log2_scale: f32, scale: f64) -> Option<Obstacle> {
    let dim = shape.head_dim.max(shape.value_dim);
    if dim > MAX_DIM {
        Some(Obstacle::LongRows(dim))
    } else if shape.q_len < MIN_QUERIES && !few_are_enough {
        Some(Obstacle::FewQueries(shape.q_len))
    } else if scale.abs() > 65536.0 || log2_scale > 65536.0 {
        Some(Obstacle::Scale)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decode::is_few;

    /// A call that is decoded does not run on AMX, and one query more than is ever decoded does: no number of queries
    /// belongs to both kernels, and the shape alone says which one runs.
    #[test]
    fn decoding_ends_where_amx_begins() {
        for (q_heads, kv_heads) in [(1, 1), (2, 1), (3, 1), (8, 2), (32, 1)] {
            for q_len in 0..40 {
                let kv = [1, kv_heads, 100, 64];
                let shape = AttnShape::new([1, q_heads, q_len, 64], kv, kv).expect("sizes agree");
                let obstacle = obstacle(&shape, false, 0.125, 0.125);
                let want = (q_len <= MAX_QUERIES).then_some(Obstacle::FewQueries(q_len));
                assert_eq!(obstacle, want, "{q_len} queries, {q_heads} heads over {kv_heads}");
                assert!(!is_few(&shape) || obstacle.is_some(), "{q_len}: both kernels");
            }
        }
    }
}
