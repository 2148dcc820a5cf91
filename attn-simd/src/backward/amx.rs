//! Gradients of bf16 on AMX: all five products, a block of 128 queries over its tiles of 64 keys.
//!
//! ```text
//! layout    sizes of a block's scratch
//! buffers   that scratch, by name
//! operands  weights and gradients of scores, in parts, become operands
//! odd       what rows add that parts cannot hold
//! sweep     a block of queries over its tiles of keys
//! ```
//! Scores, masks and weights are those of the vectors ([`scores`](super::scores), [`weights`](super::weights)). The
//! unit and the packing of inputs are those of the forward kernel ([`amx`](crate::amx)). A block has four groups of 32
//! queries:
//!
//! ```text
//! S = K·Qᵀ   dP = V·dYᵀ        of a group and a tile; q, k, v and dy are one part each, so that products are exact
//! dQᵀ += Kᵀ·dS                 of a group and a tile
//! dV += P·dY   dK += dS·Q      of all groups and a tile: sums are loaded and stored once
//! ```
//! `P` and `dS` are cut into two parts, or three for gradients wider than bf16, or one for `Precision::Fast`
//! ([`Job::parts`](super::job::Job)).
//!
//! AMX takes numbers below 2⁻¹²⁶ for 0, and products too. The last three products meet none in k, q and dy: rows with
//! such numbers, and with NaN, infinities and numbers above 2⁶⁴, are 0 there and are added in f32 ([`odd`]). So a
//! hidden NaN changes no bit. Terms of the sums that are below 2⁻¹²⁶ are lost.

mod buffers;
pub(crate) mod layout;
mod odd;
mod operands;
mod sweep;

pub(super) use buffers::Buffers;
pub(super) use sweep::block;
