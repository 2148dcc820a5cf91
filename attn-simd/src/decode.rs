//! Attention with few queries over many keys, at the speed of reading keys and values once.
//!
//! A model generates text with one query, or a few, against all earlier keys. In the prefill kernel lanes are queries:
//! with so few of them most lanes would idle, and it would read keys and values once per query head. In this kernel
//! lanes are channels. All query heads of a group and all queries share one pass over keys and values, up to `MAX_ROWS`
//! rows of them. The pass can be cut over the keys:
//!
//! ```text
//! plan        DecodePlan, a checked call over a cache: sequences of any lengths, decode steps and prefill chunks
//! tensors     a call without a cache, as crate::Plan makes it; states over a part of the keys, for several processes
//! call        the data that all pieces read: Sequences, the RowGroups that share a pass, CHUNK, sizes of scratch
//! run         DecodeCall: computes pieces, on any threads; merges their states; writes
//! rounds      Round: which queries are computed together, so that memory stays bounded
//! pieces      Piece: a row group over some chunks of its keys, and their order
//! kernel      computes one piece
//! phases      the steps of one tile of keys, compiled per level
//! rows        where the rows of a tile are, in place or in a copy
//! scales      int8 and fp8 keys and values; rope applied to keys
//! widen       rows in packed formats that the products cannot read in place: widened into scratch, tile by tile
//! (gemv)      the products: a vector of a key or value meets all rows in registers
//! score       soft-cap, bias, ALiBi, mods
//! mask        which keys rows see
//! softmax     maxima, sums and factors of a tile, where lanes are keys
//! tree        merges states of chunks in a fixed tree, so that no bit depends on how a call is cut
//! output      writes rows once
//! ```
//!
//! At one level, an output row is a function of the row's query, the keys it sees, their values and the options. The
//! number of queries, the other rows, the threads and the layout of the cache change no bit. So this kernel also
//! computes [`Attention::reproducible`](attn_core::Attention::reproducible), for any number of queries.

mod call;
mod kernel;
mod mask;
mod output;
mod phases;
mod pieces;
mod plan;
mod rounds;
mod rows;
mod run;
mod scales;
mod score;
mod softmax;
mod tensors;
mod tree;
mod widen;

pub use crate::dtype::{RowTarget, Source};
pub use pieces::{Piece, Pieces};
pub use plan::DecodePlan;
pub use rounds::Round;
pub use run::DecodeCall;

pub(crate) use call::{CHUNK, MAX_ROWS};
pub(crate) use output::Write;
pub(crate) use tensors::{MAX_QUERIES, is_few, lines, split, states};
