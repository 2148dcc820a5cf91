//! Attention over a part of the keys: the share of one of several processes or machines, whose states are merged.
//!
//! A state is a row's maximum, sum and undivided output over the part ([`attn_core::state`]). The plan is that of the
//! whole call, so that masks, biases and positions have the same meaning; k and v hold only the part.

use attn_core::kv_cache::CacheView;
use attn_core::score_mod::Mods;
use attn_core::{AttnError, Outputs, Result, View, state};

use super::Plan;
use crate::decode::{self, Write};
use crate::dtype::KernelElement;
use crate::scoring::{Scoring, finish_row};
use crate::workspace::Line;

impl<M: Mods + Sync> Plan<'_, '_, M> {
    /// Lines of scratch that [`states`](Self::states) needs.
    pub fn states_lines(&self) -> usize {
        decode::lines(self.level().without_tiles(), self.shape())
    }

    /// Attends to the keys from `first` on that `k` and `v` hold, `[batch, kv_heads, n, …]` with `first + n ≤ kv_len`.
    /// Writes a state of `2 + value_dim` numbers for each query, `[batch, q_heads, q_len]`.
    /// [`attn_core::state::merge_states`] merges the states of all parts, [`finish`](Self::finish) makes outputs of
    /// them.
    ///
    /// Parts that begin at multiples of 512 keys, merged as the tree of [`decode`] merges them (two halves of a power
    /// of two of chunks each), give the bits of the whole call by the decode kernel.
    ///
    /// ```
    /// use attn_core::{Attention, AttnShape, Layout, View, ViewMut, state};
    /// use attn_simd::{Level, Line, Plan};
    /// let shape = AttnShape::new([1, 4, 1, 16], [1, 2, 1000, 16], [1, 2, 1000, 16])?;
    /// let attn = Attention::new();
    /// let plan = Plan::new(&attn, shape, Level::detect())?;
    /// let (q, kv) = (vec![0.5f32; 4 * 16], vec![0.25f32; 2 * 500 * 16]);
    /// let (q, kv) = (View::new(&q, Layout::Bhsd, [1, 4, 1, 16])?, View::new(&kv, Layout::Bhsd, [1, 2, 500, 16])?);
    /// // Two processes, each with half of the keys.
    /// let mut lines = vec![Line::ZERO; plan.states_lines()];
    /// let (mut left, mut right) = (vec![0.0; state::len(&shape)?], vec![0.0; state::len(&shape)?]);
    /// plan.states(0, q, kv, kv, &mut left, &mut lines)?;
    /// plan.states(500, q, kv, kv, &mut right, &mut lines)?;
    /// // One of them receives the other's states.
    /// state::merge_states(&mut left, &right, 16)?;
    /// let mut out = vec![0.0f32; 4 * 16];
    /// plan.finish(&left, ViewMut::new(&mut out, Layout::Bhsd, shape.output())?)?;
    /// assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-6));
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    ///
    /// # Errors
    /// Sizes that are not the plan's, keys beyond `kv_len`, rows or scratch of the wrong length; nothing has been
    /// written then.
    pub fn states<Q: KernelElement, T: KernelElement>(
        &self,
        first: usize,
        q: View<'_, Q>,
        k: View<'_, T>,
        v: View<'_, T>,
        rows: &mut [f32],
        workspace: &mut [Line],
    ) -> Result<()> {
        let shape = *self.shape();
        let ([batch, kv_heads, keys, head_dim], [.., value_dim]) = (k.sizes(), v.sizes());
        for (what, planned, given) in [
            ("q batch against the plan", shape.batch, q.sizes()[0]),
            ("q_heads against the plan", shape.q_heads, q.sizes()[1]),
            ("q_len against the plan", shape.q_len, q.sizes()[2]),
            ("q head_dim against the plan", shape.head_dim, q.sizes()[3]),
            ("k batch against the plan", shape.batch, batch),
            ("kv_heads against the plan", shape.kv_heads, kv_heads),
            ("k head_dim against the plan", shape.head_dim, head_dim),
            ("value_dim against the plan", shape.value_dim, value_dim),
            ("states (rows · (2 + value_dim))", state::len(&shape)?, rows.len()),
        ] {
            AttnError::check_size(what, planned, given)?;
        }
        let source = CacheView::of_part(k, v, first)?;
        if first + keys > shape.kv_len {
            let what = "the end of the part (first + its keys)";
            return Err(AttnError::Beyond { what, value: first + keys, most: shape.kv_len });
        }
        AttnError::check_len("workspace lines", self.states_lines(), workspace.len())?;
        if shape.rows() == 0 {
            return Ok(());
        }
        let (attn, scale) = (self.problem().attn(), self.problem().scale());
        let scoring = Scoring::new(attn, scale, self.level().without_tiles());
        decode::states((scoring, shape), Q::input(q), T::source(source), rows, workspace);
        Ok(())
    }

    /// Ends a call whose [states](Self::states) have been merged: takes the sinks in, divides, and writes outputs and
    /// lse.
    ///
    /// # Errors
    /// [`AttnError::Size`] if rows or outputs do not have the plan's sizes; nothing has been written then.
    pub fn finish<'o, O: KernelElement>(&self, rows: &[f32], outputs: impl Into<Outputs<'o, O>>) -> Result<()> {
        let (shape, outputs) = (*self.shape(), outputs.into());
        outputs.check(&shape)?;
        if outputs.weights.is_some() {
            return Err(AttnError::Unsupported {
                what: "weights of Plan::finish (attn_core::weights::head with the lse)",
            });
        }
        AttnError::check_size("states (rows · (2 + value_dim))", state::len(&shape)?, rows.len())?;
        let Outputs { out, mut lse, .. } = outputs;
        let (mut target, attn) = (O::row_target(out), self.problem().attn());
        let kept = attn.get_dropout().factor();
        for (n, row) in rows.chunks_exact(shape.value_dim + 2).enumerate() {
            let (pair, query) = (n / shape.q_len, n % shape.q_len);
            let at = [pair / shape.q_heads, pair % shape.q_heads, query];
            let sink = attn.get_sinks().map(|sinks| f64::from(sinks[at[1]]));
            let (factor, row_lse) = finish_row(f64::from(row[0]), f64::from(row[1]), sink, kept);
            let values = (row[1] != 0.0).then_some((&row[2..], factor));
            self.level().vectors().run(Write { target: &mut target, at, values });
            if let Some(lse) = lse.as_deref_mut() {
                lse[n] = row_lse;
            }
        }
        Ok(())
    }
}
