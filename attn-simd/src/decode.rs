//! Attention with few queries over many keys, at the speed of reading keys and values once.
//!
//! Generating text asks for one query, or a few, against everything before. The tiled kernel, whose lanes are queries,
//! would leave most lanes idle and read keys and values once per query head. Here lanes are channels, all query heads
//! of a group and all queries (up to `MAX_ROWS` rows) share one pass over keys and values, and the pass can be cut over
//! the keys:
//!
//! ```text
//! isa::rows   the products: a vector of a key or value meets all rows in registers
//! softmax     maxima, sums and factors of a tile, where lanes are keys
//! score       scale, soft-cap, bias, ALiBi, mods
//! sight       what rows see
//! chunk       the kernel: one unit of rows over some chunks of CHUNK keys
//! phases      what happens to a tile, compiled per level
//! tree        merges chunks in a fixed tree, so that no bit depends on the cut
//! split       a call as pieces for any number of threads
//! round       which queries are computed together, so that memory stays bounded
//! parts       the pieces, in order
//! step        a call over a cache: sequences of different lengths, decode steps and prefill chunks together
//! partial     a call over a part of the keys, for several processes
//! source      where rows lie: tensors, rings, pages
//! scales      int8 keys and values; rope applied to keys
//! output      writes rows once
//! ```
//!
//! An output row is a function of the row's query, the keys it sees, their values and the options, at one level:
//! neither the number of queries, nor the rows beside it, nor threads, nor the layout of the cache change a bit. That
//! makes it the kernel of [`Attention::reproducible`](attn_core::Attention::reproducible) for every number of queries.

mod chunk;
mod output;
mod partial;
mod parts;
mod phases;
mod round;
mod scales;
mod score;
mod sight;
mod softmax;
mod source;
mod split;
mod step;
mod tree;

pub use output::RowTarget;
pub use parts::{Part, Parts};
pub use round::Cut;
pub use source::Source;
pub use split::Split;
pub use step::Step;

use attn_core::kv_cache::CacheView;
use attn_core::{AttnShape, Outputs, Result, View};

use crate::input::KernelElement;
use crate::job::Scoring;
use crate::level::Level;
use chunk::Sizes;
use split::{Call, Calls};

/// Keys of a chunk: a leaf of the tree in which parts of a row are merged. A multiple of a tile. Small enough that a
/// sequence of a few thousand keys keeps several cores busy, large enough that closing a chunk costs a hundredth of
/// reading it.
pub(crate) const CHUNK: usize = 512;

/// Most rows that share one pass.
pub(crate) const MAX_ROWS: usize = 32;

/// Most queries for which a plan decodes by itself. One more, and a call may run on matrix tiles: the two limits are
/// one number.
pub(crate) const MAX_QUERIES: usize = 16;

/// Whether a call of this shape is decoded: few enough rows for each key/value head.
pub(crate) fn is_few(shape: &AttnShape) -> bool {
    shape.q_len <= MAX_QUERIES && shape.group().saturating_mul(shape.q_len) <= MAX_ROWS
}

/// Lines of scratch of one thread for a shape.
pub(crate) fn lines(level: Level, shape: &AttnShape) -> usize {
    if shape.rows() == 0 {
        return 0; // no piece will ask for it, and the dims of a tensor without rows may be anything
    }
    sizes(level, shape).lines() + split::state_lines(shape.value_dim)
}

/// Scratch of one thread for a shape.
fn sizes(level: Level, shape: &AttnShape) -> Sizes {
    let rows = shape.group().saturating_mul(shape.q_len).min(MAX_ROWS);
    let slots = tree::slots_for(shape.kv_len.div_ceil(CHUNK));
    Sizes::new(level.lanes(), rows, [shape.head_dim, shape.value_dim], slots)
}

/// A call on tensors.
pub(crate) fn split<'w, T: KernelElement, O: KernelElement>(
    scoring: Scoring<'w>,
    q: View<'w, T>,
    k: View<'w, T>,
    v: View<'w, T>,
    outputs: Outputs<'w, O>,
) -> Result<Split<'w>> {
    let Outputs { out, lse, .. } = outputs;
    let call = Call {
        level: scoring.level,
        heads: [scoring.shape.kv_heads, scoring.shape.group()],
        value_dim: scoring.shape.value_dim,
        sizes: if scoring.shape.rows() == 0 { Sizes::default() } else { sizes(scoring.level, &scoring.shape) },
        calls: Calls::Alike(scoring),
        source: T::source(CacheView::of_tensors(k, v)?),
        prefix: None,
        q: T::input(q),
    };
    Ok(Split::new(call, O::row_target(out), lse))
}
