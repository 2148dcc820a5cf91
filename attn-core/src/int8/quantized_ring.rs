//! A KV cache in int8 for tokens in f32: each key and value keeps a scale of its own.
//!
//! Streams need scales per token, because nobody knows their range in advance; each scale costs four bytes beside
//! `head_dim`. A key's scale multiplies its score and a value's its weight, so that nothing is widened in memory (the
//! per-token values of KIVI, Liu et al. 2024, arXiv 2402.02750; it quantises keys along channels, which needs groups of
//! tokens).

use super::cache::{KeyScales, QuantizedView, nearest, scale_of};
use crate::error::{AttnError, Result};
use crate::kv_cache::checks::{check_count, check_new};
use crate::kv_cache::slots::{Held, Slots};
use crate::kv_cache::{CacheView, attend};
use crate::options::Attention;
use crate::outputs::Outputs;
use crate::row::Row;
use crate::score::Problem;
use crate::score_mod::Mods;
use crate::shape::AttnShape;
use crate::softmax::RowState;
use crate::view::{View, ViewMut};

/// One of a cache's two tensors: numbers `[batch, kv_heads, slots, dim]` and their scales
/// `[batch, kv_heads, slots, 1]`.
///
/// A row means `scale · number`, the scale being its largest magnitude divided by 127, so that each element is off
/// by at most half a scale. A row with a NaN or ±∞ becomes NaN.
#[derive(Debug)]
pub struct ScaledRows<'c> {
    numbers: ViewMut<'c, i8>,
    /// One scale for each row of them.
    scales: ViewMut<'c, f32>,
}

impl<'c> ScaledRows<'c> {
    /// Pairs numbers and scales.
    ///
    /// # Errors
    /// [`AttnError::Size`] if there is not one scale for each row.
    pub fn new(numbers: ViewMut<'c, i8>, scales: ViewMut<'c, f32>) -> Result<Self> {
        let [batch, heads, slots, _] = numbers.sizes();
        for (expected, found) in [batch, heads, slots, 1].into_iter().zip(scales.sizes()) {
            AttnError::check_size("scales [batch, kv_heads, slots, 1] of an int8 cache", expected, found)?;
        }
        Ok(Self { numbers, scales })
    }

    /// Stores a row of reals.
    fn store(&mut self, (sequence, head, slot): (usize, usize, usize), x: Row<'_, f32>) {
        let scale = scale_of(x.iter());
        for (d, x) in x.iter().enumerate() {
            self.numbers.set(sequence, head, slot, d, nearest(x, scale));
        }
        self.scales.set(sequence, head, slot, 0, scale);
    }

    fn row(&self, sequence: usize, head: usize, slot: usize) -> (f32, Row<'_, i8>) {
        let scale = self.scales.as_view().at(sequence, head, slot, 0);
        (scale, self.numbers.as_view().row(sequence, head, slot))
    }
}

/// Sinks and a ring of the last tokens, kept in int8; queries, new tokens and outputs are f32, and every option of
/// [`Attention`] but dropout applies. With a window of the whole stream nothing is evicted.
///
/// ```
/// use attn_core::int8::{QuantizedRingCache, ScaledRows};
/// use attn_core::{Attention, View, ViewMut};
/// let (mut k, mut v, mut scales, mut seen) = ([0i8; 8], [0i8; 8], [0.0f32; 8], [0]);
/// let (k_scales, v_scales) = scales.split_at_mut(4);
/// let mut cache = QuantizedRingCache::new(
///     ScaledRows::new(ViewMut::matrix(&mut k, 4, 2)?, ViewMut::matrix(k_scales, 4, 1)?)?,
///     ScaledRows::new(ViewMut::matrix(&mut v, 4, 2)?, ViewMut::matrix(v_scales, 4, 1)?)?,
///     &mut seen,
///     1, // sink
///     3, // window
/// )?;
/// let x = [1.0f32, 0.5, -0.25, 1.0, 0.1, -0.9]; // three tokens: q = k = v
/// let (x, mut out) = (View::matrix(&x, 3, 2)?, [0.0f32; 6]);
/// cache.advance(&Attention::new(), x, x, x, ViewMut::matrix(&mut out, 3, 2)?, &mut [0.0; 2])?;
/// assert!((out[0] - 1.0).abs() < 1e-6 && (out[1] - 0.5).abs() < 0.5 / 127.0); // the first token sees itself
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Debug)]
pub struct QuantizedRingCache<'c> {
    k: ScaledRows<'c>,
    v: ScaledRows<'c>,
    seen: &'c mut [usize],
    slots: Slots,
}

impl<'c> QuantizedRingCache<'c> {
    /// Takes the memory as it is: `seen` of zeros for an empty cache.
    ///
    /// # Errors
    /// [`AttnError::Size`] if k, v and seen disagree; [`AttnError::Option`] for a window of 0;
    /// [`AttnError::TooShort`] for too few slots.
    pub fn new(
        k: ScaledRows<'c>,
        v: ScaledRows<'c>,
        seen: &'c mut [usize],
        sinks: usize,
        window: usize,
    ) -> Result<Self> {
        let [batch, kv_heads, slots, head_dim] = k.numbers.sizes();
        AttnShape::new([batch, kv_heads, 0, head_dim], k.numbers.sizes(), v.numbers.sizes())?;
        AttnError::check_size("seen against batch", batch, seen.len())?;
        Ok(Self { k, v, seen, slots: Slots::new(sinks, window, slots)? })
    }

    /// Tokens seen of each sequence, held or not.
    pub fn seen(&self) -> &[usize] {
        self.seen
    }

    /// Tokens held of one sequence; 0 if there is no such sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.slots.held(self.seen.get(sequence).copied().unwrap_or(0)).len
    }

    /// Whether a sequence holds no token.
    pub fn is_empty(&self, sequence: usize) -> bool {
        self.len(sequence) == 0
    }

    /// The tokens held, in ascending order, to be read by any engine.
    pub fn view(&self) -> QuantizedView<'_> {
        let numbers =
            CacheView::of_checked_ring(self.k.numbers.as_view(), self.v.numbers.as_view(), self.seen, self.slots);
        QuantizedView::of_checked(numbers, KeyScales::PerToken(self.k.scales.as_view()), self.v.scales.as_view())
    }

    /// Takes tokens without attending: `k_new` `[batch, kv_heads, n, head_dim]`, `v_new`
    /// `[batch, kv_heads, n, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Size`], before anything is written.
    pub fn insert(&mut self, k_new: View<'_, f32>, v_new: View<'_, f32>) -> Result<()> {
        let n = check_new(self.k.numbers.sizes(), self.v.numbers.sizes(), k_new.sizes(), v_new.sizes())?;
        check_count(self.seen, n)?;
        for sequence in 0..self.seen.len() {
            for token in 0..n {
                self.insert_token((sequence, token), k_new, v_new);
            }
        }
        Ok(())
    }

    /// Overwrites the oldest non-sink token. Returns the tokens held then.
    fn insert_token(&mut self, (sequence, token): (usize, usize), k_new: View<'_, f32>, v_new: View<'_, f32>) -> Held {
        let [_, heads, ..] = self.k.numbers.sizes();
        let seen = self.seen.get(sequence).copied().unwrap_or(0);
        let slot = self.slots.of_position(seen);
        for head in 0..heads {
            self.k.store((sequence, head, slot), k_new.row(sequence, head, token));
            self.v.store((sequence, head, slot), v_new.row(sequence, head, token));
        }
        let seen = seen.saturating_add(1); // fits: checked before the first
        if let Some(slot) = self.seen.get_mut(sequence) {
            *slot = seen;
        }
        self.slots.held(seen)
    }

    /// Elements of scratch that [`advance`](Self::advance) needs: one output row.
    pub fn scratch_len(&self) -> usize {
        let [.., value_dim] = self.v.numbers.sizes();
        value_dim
    }

    /// Takes `n` tokens of every sequence and attends with each: `q` `[batch, q_heads, n, head_dim]`, `k_new`
    /// `[batch, kv_heads, n, head_dim]`, `v_new` `[batch, kv_heads, n, value_dim]`. Token by token the new key
    /// displaces the oldest and the query sees what is held; options are those of one query against `kv_len` = the
    /// tokens held.
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written; [`AttnError::Unsupported`] for dropout and for the full
    /// weights.
    pub fn advance<'o, M: Mods>(
        &mut self,
        attn: &Attention<'_, M>,
        q: View<'_, f32>,
        k_new: View<'_, f32>,
        v_new: View<'_, f32>,
        outputs: impl Into<Outputs<'o, f32>>,
        scratch: &mut [f32],
    ) -> Result<()> {
        let mut outputs = outputs.into();
        let n = check_new(self.k.numbers.sizes(), self.v.numbers.sizes(), k_new.sizes(), v_new.sizes())?;
        let shape = AttnShape::new(q.sizes(), k_new.sizes(), v_new.sizes())?;
        AttnError::check_size("queries against new tokens", n, shape.q_len)?;
        attend::check(attn, &shape, &outputs, (self.scratch_len(), scratch.len()))?;
        check_count(self.seen, n)?;
        // Every length that will occur, so that no option fails half-way.
        for &seen in self.seen.iter() {
            for kv_len in self.slots.lengths(seen, n) {
                Problem::of_shape(attn, attend::own_shape(&shape, 1, kv_len))?;
            }
        }
        let Some(acc) = scratch.get_mut(..shape.value_dim) else {
            return Ok(());
        };
        for sequence in 0..shape.batch {
            for token in 0..n {
                let held = self.insert_token((sequence, token), k_new, v_new);
                let problem = Problem::of_shape(attn, attend::own_shape(&shape, 1, held.len))?;
                for head in 0..shape.q_heads {
                    let state = self.row(&problem, (sequence, head, held), q.row(sequence, head, token), acc);
                    attend::write(&mut outputs, &shape, (sequence, head, token), acc, &state);
                }
            }
        }
        Ok(())
    }

    /// Attention of one query to all keys held.
    fn row<M: Mods>(
        &self,
        problem: &Problem<'_, '_, M>,
        (sequence, head, held): (usize, usize, Held),
        q: Row<'_, f32>,
        acc: &mut [f32],
    ) -> RowState<f32> {
        let kv_head = problem.shape().kv_head(head);
        let dot = |i| {
            let (scale, k) = self.k.row(sequence, kv_head, held.slot(i));
            scale * dot(q, k)
        };
        let add = |acc: &mut [f32], weight: f32, i| {
            let (scale, v) = self.v.row(sequence, kv_head, held.slot(i));
            let weight = weight * scale;
            for (a, x) in acc.iter_mut().zip(v.iter()) {
                *a += weight * f32::from(x);
            }
        };
        attend::row_with(problem, (sequence, head, 0), Some, dot, add, acc)
    }
}

/// `q·k`, the key in its own units.
#[inline]
fn dot(q: Row<'_, f32>, k: Row<'_, i8>) -> f32 {
    q.iter().zip(k.iter()).map(|(q, k)| q * f32::from(k)).sum()
}
