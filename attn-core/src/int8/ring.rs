//! An int8 KV cache of fixed size for endless streams, in integers throughout.

use super::forward::{Query, write_row};
use super::options::Int8Attention;
use super::output::Int8Output;
use super::row::IntState;
use crate::error::{AttnError, Result};
use crate::kv_cache::attend::own_shape;
use crate::kv_cache::checks::{check_count, check_new, copy_token};
use crate::kv_cache::slots::{Held, Slots};
use crate::row::Row;
use crate::shape::AttnShape;
use crate::view::{View, ViewMut};

/// Sinks and a ring of the last tokens in int8, for each sequence of a batch: what
/// [`RingCache`](crate::kv_cache::RingCache) is for reals. All keys share a scale and a zero point, and all values; or
/// each head has a scale of its own ([`Int8Attention::per_head`]).
///
/// | tensor | shape |
/// |---|---|
/// | k | `[batch, kv_heads, slots, head_dim]`, `slots ≥ sinks + window`, any strides |
/// | v | `[batch, kv_heads, slots, value_dim]`, any strides |
/// | seen | `[batch]`: tokens seen so far |
///
/// ```
/// use attn_core::int8::{Int8Attention, Int8RingCache, Quant};
/// use attn_core::{View, ViewMut};
/// let attn = Int8Attention::new([Quant::new(1.0, 0)?; 4], 1.0)?;
/// let (mut k, mut v, mut seen) = ([0i8; 3], [0i8; 3], [0]);
/// let (k, v) = (ViewMut::matrix(&mut k, 3, 1)?, ViewMut::matrix(&mut v, 3, 1)?);
/// let mut cache = Int8RingCache::new(k, v, &mut seen, 1, 2)?; // one sink, a window of two
/// let x = [0i8, 10, 20, 31, 44];
/// let zero = View::matrix(&[0i8; 5], 5, 1)?; // every score 0: outputs are means
/// let mut out = [0i8; 5];
/// cache.advance(&attn, zero, zero, View::matrix(&x, 5, 1)?, ViewMut::matrix(&mut out, 5, 1)?, &mut [0])?;
/// assert_eq!(out, [0, 5, 10, 17, 25]); // the last: (0 + 31 + 44)/3
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Debug)]
pub struct Int8RingCache<'c> {
    k: ViewMut<'c, i8>,
    v: ViewMut<'c, i8>,
    seen: &'c mut [usize],
    slots: Slots,
}

impl<'c> Int8RingCache<'c> {
    /// Takes the memory as it is: `seen` of zeros for an empty cache.
    ///
    /// # Errors
    /// [`AttnError::Size`] if k, v and seen disagree; [`AttnError::Option`] for a window of 0;
    /// [`AttnError::TooShort`] for too few slots.
    pub fn new(
        k: ViewMut<'c, i8>,
        v: ViewMut<'c, i8>,
        seen: &'c mut [usize],
        sinks: usize,
        window: usize,
    ) -> Result<Self> {
        let [batch, kv_heads, slots, head_dim] = k.sizes();
        AttnShape::new([batch, kv_heads, 0, head_dim], k.sizes(), v.sizes())?;
        AttnError::check_size("seen against batch", batch, seen.len())?;
        Ok(Self { k, v, seen, slots: Slots::new(sinks, window, slots)? })
    }

    /// Tokens seen of each sequence, held or not.
    pub fn seen(&self) -> &[usize] {
        self.seen
    }

    /// Tokens held of one sequence; 0 if there is no such sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.held(sequence).len
    }

    /// Whether a sequence holds no token.
    pub fn is_empty(&self, sequence: usize) -> bool {
        self.len(sequence) == 0
    }

    fn held(&self, sequence: usize) -> Held {
        self.slots.held(self.seen.get(sequence).copied().unwrap_or(0))
    }

    /// Elements of scratch that [`advance`](Self::advance) needs: one output row.
    pub fn scratch_len(&self) -> usize {
        let [.., value_dim] = self.v.sizes();
        value_dim
    }

    /// Takes `n` tokens of every sequence and attends with each: `q` `[batch, q_heads, n, head_dim]`, `k_new`
    /// `[batch, kv_heads, n, head_dim]`, `v_new` `[batch, kv_heads, n, value_dim]`. Token by token the new key
    /// displaces the oldest and the query sees what is held, less what the mask hides; the mask is that of one query
    /// against `kv_len` = the tokens held, in ascending order.
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written.
    pub fn advance<O: Int8Output>(
        &mut self,
        attn: &Int8Attention<'_>,
        q: View<'_, i8>,
        k_new: View<'_, i8>,
        v_new: View<'_, i8>,
        mut out: ViewMut<'_, O>,
        scratch: &mut [i32],
    ) -> Result<()> {
        let n = check_new(self.k.sizes(), self.v.sizes(), k_new.sizes(), v_new.sizes())?;
        let shape = AttnShape::new(q.sizes(), k_new.sizes(), v_new.sizes())?;
        AttnError::check_size("queries against new tokens", n, shape.q_len)?;
        shape.check_output(out.sizes())?;
        AttnError::check_len("int8 ring scratch", self.scratch_len(), scratch.len())?;
        check_count(self.seen, n)?;
        // Every length that will occur, so that no mask fails half-way.
        for &seen in self.seen.iter() {
            for kv_len in self.slots.lengths(seen, n) {
                attn.check(&own_shape(&shape, 1, kv_len))?;
            }
        }
        let Some(acc) = scratch.get_mut(..shape.value_dim) else {
            return Ok(());
        };
        for sequence in 0..shape.batch {
            for token in 0..n {
                let Some(seen) = self.seen.get_mut(sequence) else { continue };
                let slot = self.slots.of_position(*seen);
                *seen += 1;
                let held = self.slots.held(*seen);
                copy_token(k_new, (sequence, token), &mut self.k, (sequence, slot));
                copy_token(v_new, (sequence, token), &mut self.v, (sequence, slot));
                for head in 0..shape.q_heads {
                    let state = self.row(attn, &shape, (sequence, head, held), q.row(sequence, head, token), acc);
                    write_row(attn, head, &state, acc, |d, x| out.set(sequence, head, token, d, x));
                }
            }
        }
        Ok(())
    }

    /// Attention of one query to all keys held.
    fn row(
        &self,
        attn: &Int8Attention<'_>,
        shape: &AttnShape,
        (sequence, head, held): (usize, usize, Held),
        q: Row<'_, i8>,
        acc: &mut [i32],
    ) -> IntState {
        let (own, kv_head) = (own_shape(shape, 1, held.len), shape.kv_head(head));
        let query = Query::new(attn, head, q);
        let (k, v) = (self.k.as_view(), self.v.as_view());
        acc.fill(0);
        let mut state = IntState::new();
        let mask = attn.get_mask();
        mask.for_each_in(&own, [sequence, head, 0], mask.row_range(&own, sequence, head, 0), |i| {
            let slot = held.slot(i);
            query.take(k.row(sequence, kv_head, slot), v.row(sequence, kv_head, slot), &mut state, acc);
        });
        state
    }
}
