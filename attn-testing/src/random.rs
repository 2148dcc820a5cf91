//! Random calls against float64: shapes, options, layouts, types and kinds of data drawn from a seed, rows held to the
//! documented bound.
//!
//! Call `n` of a seed is the same on every machine and needs no other call before it, so that one that fails can be run
//! alone. [`Call::draw`] draws it, [`Ready`] makes its tensors and takes some rows of [`exact`](crate::exact),
//! [`Ready::check`] runs an engine. Constants and wide magnitudes are there because ordinary data hide errors: sums of
//! numbers of both signs forgive most of them.

mod check;
mod data;
mod options;

use attn_core::{AttnShape, Dtype};

pub use check::{Found, Ready, Target, Verdict};
pub use data::{Scores, Values};

use crate::cases::{DIMS, Drop, Memory, Options, OwnedTerm};
use crate::paint::Paint;

/// The layout of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In tensors.
    Tensors,
    /// In a cache of one slot per sequence: a step over it.
    Slots,
    /// In pages of so many tokens, in any order: a step over them.
    Pages(usize),
}

/// One call, without its numbers.
#[derive(Clone, Debug)]
pub struct Call {
    /// Which call of which seed.
    pub name: (u64, u64),
    /// Sizes.
    pub shape: AttnShape,
    /// The type of q, k and v.
    pub dtype: Dtype,
    /// Whether a half comes out as f32.
    pub wide: bool,
    /// The layout of q, k and v.
    pub memory: [Memory; 3],
    /// Options and mask.
    pub options: Options,
    /// Whether the order of sums is pinned.
    pub reproducible: bool,
    /// Tensors or a cache.
    pub place: Place,
    /// Where scores come from.
    pub scores: Scores,
    /// What the values are.
    pub values: Values,
    /// Seed of the numbers.
    pub seed: u64,
    /// Drawn for whoever chooses threads and rare engines.
    pub lot: u64,
}

impl Call {
    /// Call `n` of a seed.
    pub fn draw(seed: u64, n: u64) -> Self {
        let mut paint = Paint::new(Paint::new(seed ^ n.wrapping_mul(0xd134_2543_de82_ef95)).next());
        let mut shape = sizes(&mut paint);
        let dtype = paint.pick(&[Dtype::F32, Dtype::F32, Dtype::F32, Dtype::F32, Dtype::F16, Dtype::Bf16]);
        let place = match paint.below(12) {
            0 => Place::Slots,
            1 => Place::Pages(paint.pick(&[1, 3, 16, 64])),
            _ => Place::Tensors,
        };
        let mut options = Options::default();
        if place != Place::Tensors {
            // The queries of a step are the last tokens: each sees those before it.
            shape.q_len = shape.q_len.min(shape.kv_len);
            options.terms.push(OwnedTerm::Causal(attn_core::Align::BottomRight));
        }
        options::draw(&mut options, &shape, &mut paint);
        if place != Place::Tensors {
            options.dropout = Drop::None; // it has no place there
        }
        let memory = match (place, paint.chance(0.5)) {
            (Place::Pages(_), _) | (_, true) => [paint.pick(&Memory::ALL); 3],
            _ => core::array::from_fn(|_| paint.pick(&Memory::ALL)),
        };
        Self {
            name: (seed, n),
            shape,
            dtype,
            wide: dtype != Dtype::F32 && place == Place::Tensors && paint.chance(0.5),
            memory,
            options,
            reproducible: paint.chance(0.1),
            place,
            scores: Scores::draw(&mut paint),
            values: Values::draw(&mut paint),
            seed: paint.next(),
            lot: paint.next(),
        }
    }

    /// The kernel that a plan chooses at a level, for tables: `many` queries in a block, `few` decoded, or a step over
    /// a `cache`.
    pub fn kernel(&self, level: &str) -> &'static str {
        let few = self.shape.q_len <= 16 && self.shape.group() * self.shape.q_len <= 32;
        match self.place {
            Place::Tensors if self.reproducible || (few && !level.ends_with("-model")) => "few",
            Place::Tensors => "many",
            _ => "cache",
        }
    }

    /// The types in and out, for tables.
    pub fn types(&self) -> String {
        let dtype = format!("{:?}", self.dtype);
        if self.wide { format!("{dtype} to F32") } else { dtype }
    }

    /// Multiplications of both products, if every query sees every key.
    pub fn work(&self) -> usize {
        work(&self.shape)
    }
}

fn work(shape: &AttnShape) -> usize {
    shape.rows() * shape.kv_len * (shape.head_dim + shape.value_dim)
}

/// Sizes: mostly some hundred keys, now and then thousands, rarely up to 70 000; never more than a call may cost.
fn sizes(paint: &mut Paint) -> AttnShape {
    let dim = |paint: &mut Paint| if paint.chance(0.5) { paint.pick(&DIMS) } else { 1 + paint.below(130) };
    let kv_heads = paint.pick(&[1, 1, 2, 3]);
    let mut shape = AttnShape {
        batch: 1 + paint.below(2),
        q_heads: kv_heads * paint.pick(&[1, 1, 2, 4, 7]),
        kv_heads,
        q_len: match paint.below(10) {
            0..3 => 1,
            3 => 2 + paint.below(15),
            4 => 15 + paint.below(4),
            _ => 17 + paint.below(134),
        },
        kv_len: 1 + paint.below(300),
        head_dim: dim(paint),
        value_dim: dim(paint),
    };
    match paint.below(400) {
        0 => {
            (shape.kv_len, shape.q_len) = (5000 + paint.below(65_001), shape.q_len.min(24));
            (shape.batch, shape.q_heads, shape.kv_heads) = (1, 1, 1);
            (shape.head_dim, shape.value_dim) = (shape.head_dim.min(12), shape.value_dim.min(20));
            return shape;
        }
        1..25 => shape.kv_len = 300 + paint.below(4701),
        _ => {}
    }
    let most = if paint.chance(0.05) { 20_000_000 } else { 2_000_000 };
    while work(&shape) > most {
        if shape.batch > 1 {
            shape.batch = 1;
        } else if shape.q_heads > shape.kv_heads && shape.q_len > 4 {
            shape.q_heads = shape.kv_heads;
        } else if shape.kv_heads > 1 {
            (shape.q_heads, shape.kv_heads) = (shape.group(), 1);
        } else if shape.q_len > 34 {
            shape.q_len /= 2;
        } else {
            (shape.head_dim, shape.value_dim) = (shape.head_dim.div_ceil(2), shape.value_dim.div_ceil(2));
        }
    }
    shape
}
