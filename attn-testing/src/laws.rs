//! Laws: test bodies that hold for every engine.
//!
//! Each law is a function that takes an engine and panics if the engine breaks it. [`law_tests!`](crate::law_tests)
//! makes one `#[test]` of each, so that a crate with an engine tests all of them with one line per engine. The
//! integration tests of this crate show for each law an engine with a planted bug that it refuses.

pub mod accuracy;
pub mod determinism;
pub mod errors;
pub mod layouts;
pub mod masks;
pub mod nan;
pub mod peers;
pub mod properties;
pub mod random;
pub mod vectors;

use attn_core::dropout::Dropout;
use attn_core::score::Problem;
use attn_core::score_mod::Mods;
use attn_core::{Attention, Element, Layout, Outputs, Result, View, ViewMut, reference};

use crate::cases::Inputs;
use crate::engine::{Engine, Number};
use crate::tolerance::{self, Entry};

/// What an engine wrote: dense `[batch, q_heads, q_len, value_dim]`, and one lse per row.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer<O: Element> {
    /// The output.
    pub out: Vec<O>,
    /// The lse.
    pub lse: Vec<O::Compute>,
}

/// Runs an engine on views, output and lse in fresh buffers that are painted with a value nobody expects.
///
/// # Errors
/// The engine's.
pub fn attend_views<E: Engine, T: Number, M: Mods + Sync>(
    engine: &E,
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
) -> Result<Answer<T>> {
    let ([batch, heads, q_len, _], [.., value_dim]) = (q.sizes(), v.sizes());
    let rows = batch * heads * q_len;
    let mut answer =
        Answer { out: vec![T::from_f64(-12345.0); rows * value_dim], lse: vec![T::Compute::from_f64(-12345.0); rows] };
    let view = ViewMut::new(&mut answer.out, Layout::Bhsd, [batch, heads, q_len, value_dim])?;
    engine.forward(attn, q, k, v, Outputs::new(view).lse(&mut answer.lse))?;
    Ok(answer)
}

/// Runs an engine on inputs; a refusal is a panic.
pub fn attend<E: Engine, T: Number, M: Mods + Sync>(
    engine: &E,
    attn: &Attention<'_, M>,
    inputs: &Inputs<T>,
) -> Answer<T> {
    match attend_views(engine, attn, inputs.q.view(), inputs.k.view(), inputs.v.view()) {
        Ok(answer) => answer,
        Err(error) => panic!("{} refused {:?}: {error}", engine.label(), inputs.shape),
    }
}

/// The exact result, and the unit of its error.
#[derive(Clone, Debug)]
pub struct Oracle {
    /// The output in doubles, as [`Answer::out`].
    pub out: Vec<f64>,
    /// The lse in doubles.
    pub lse: Vec<f64>,
    /// `Σⱼ pⱼ|vⱼ|` per element of the output, over all visible keys (times `1/(1 − p)` under dropout).
    pub magnitude: Vec<f64>,
    /// `S` per row: the largest `scale·Σ|q·k| + |bias|` over visible keys.
    pub score_bound: Vec<f64>,
    value_dim: usize,
}

/// The reference in doubles.
pub fn oracle<T: Number, M: Mods + Clone>(attn: &Attention<'_, M>, inputs: &Inputs<T>) -> Oracle {
    let shape = inputs.shape;
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let len = shape.rows() * shape.value_dim;
    let (mut out, mut lse, mut magnitude) = (vec![0.0f64; len], vec![0.0; shape.rows()], vec![0.0f64; len]);
    let mut scratch = vec![0.0; shape.kv_len];
    let view = ViewMut::new(&mut out, Layout::Bhsd, shape.output()).expect("output");
    reference::forward(attn, q, k, v, Outputs::new(view).lse(&mut lse), &mut scratch).expect("the oracle accepts");
    // The weights before dropout: where all but a few light keys of a row were dropped, the error of single weights
    // would be measured, not that of a mean.
    let mut positive = inputs.v.clone();
    positive.each(|_, x| *x = T::from_f64(x.to_f64().abs()));
    let view = ViewMut::new(&mut magnitude, Layout::Bhsd, shape.output()).expect("output");
    let (whole, factor) = (attn.clone().dropout(Dropout::None), attn.get_dropout().factor());
    reference::forward(&whole, q, k, positive.view(), Outputs::new(view), &mut scratch).expect("the oracle accepts");
    magnitude.iter_mut().for_each(|m| *m *= factor);

    let problem = Problem::of_shape(attn, shape).expect("the oracle accepts");
    let mut score_bound = Vec::with_capacity(shape.rows());
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            for query in 0..shape.q_len {
                let mut bound = problem.sink(head).map_or(0.0, |s| f64::from(s).abs());
                problem.for_each_visible(batch, head, query, |at| {
                    let (q, k) = (q.row(batch, head, query), k.row(batch, shape.kv_head(head), at.key));
                    let dot: f64 = q.iter().zip(k.iter()).map(|(q, k)| (q.to_f64() * k.to_f64()).abs()).sum();
                    let bias = attn.get_bias().map_or(0.0, |bias| bias.at(at).abs())
                        + attn.get_alibi().map_or(0.0, |alibi| alibi.at(&shape, at).abs());
                    let t = attn.get_temperature().unwrap_or(1.0);
                    bound = bound.max((dot * problem.scale().abs() + bias) / t);
                });
                score_bound.push(bound);
            }
        }
    }
    Oracle { out, lse, magnitude, score_bound, value_dim: shape.value_dim }
}

impl Oracle {
    /// Checks an answer: eta of the output within `entry`, the lse within its own bound, dead rows exactly 0. Returns
    /// the worst difference as a share of the allowed one.
    #[track_caller]
    pub fn check<O: Number>(&self, entry: Entry, answer: &Answer<O>, what: &dyn core::fmt::Debug) -> f64 {
        self.check_with(entry, 0.0, answer, what)
    }

    /// As [`check`](Self::check), but `eta` may be larger by `slack`.
    #[track_caller]
    pub fn check_with<O: Number>(
        &self,
        entry: Entry,
        slack: f64,
        answer: &Answer<O>,
        what: &dyn core::fmt::Debug,
    ) -> f64 {
        let mut worst = 0.0f64;
        for (n, got) in answer.out.iter().enumerate() {
            let row = n / self.value_dim;
            let (want, magnitude) = (self.out[n], self.magnitude[n]);
            if self.lse[row] == f64::NEG_INFINITY {
                assert!(got.bits() == 0, "{what:?}: row {row} sees nothing, but element {n} is {got:?}, not +0");
                continue;
            }
            let allowed = (entry.bound(O::DTYPE, self.score_bound[row]) + slack) * magnitude
                + tolerance::rounding::<O>(want) * entry.factor;
            let share = share(got.to_f64(), want, allowed);
            assert!(
                share <= 1.0,
                "{what:?}: element {n} (row {row}, S = {:.1}) is {got:?}, expected {want:e} ± {allowed:e}",
                self.score_bound[row]
            );
            worst = worst.max(share);
        }
        for (row, got) in answer.lse.iter().enumerate() {
            let (got, want) = (got.to_f64(), self.lse[row]);
            // The lse can exceed S by ln(kv_len).
            let shares = entry.factor / tolerance::ETA.factor;
            let allowed = tolerance::LSE.bound(O::DTYPE, self.score_bound[row] + want.abs()) * shares;
            let share = share(got, want, allowed);
            assert!(share <= 1.0, "{what:?}: lse of row {row} is {got:e}, expected {want:e} ± {allowed:e}");
            worst = worst.max(share);
        }
        worst
    }

    /// Checks the output of an answer in f32 alone, from inputs of any type: eta within the gate of f32, or larger by
    /// `slack`.
    #[track_caller]
    pub fn near_f32(&self, slack: f64, answer: &Answer<f32>, what: &dyn core::fmt::Debug) {
        assert_eq!(answer.out.len(), self.out.len(), "{what:?}");
        for (n, (got, &want)) in answer.out.iter().zip(&self.out).enumerate() {
            let bound = tolerance::ETA.bound(attn_core::Dtype::F32, self.score_bound[n / self.value_dim]) + slack;
            let allowed = bound * self.magnitude[n] + tolerance::rounding::<f32>(want) * tolerance::ETA.factor;
            let share = share(f64::from(*got), want, allowed);
            assert!(share <= 1.0, "{what:?}: element {n} is {got:e}, expected {want:e} ± {allowed:e}");
        }
    }

    /// Panics if an element differs from `want` by more than `entry` allows.
    #[track_caller]
    pub fn near<O: Number>(&self, entry: Entry, got: &[O], want: &[f64], what: &dyn core::fmt::Debug) {
        assert_eq!(got.len(), want.len(), "{what:?}");
        for (n, (got, &want)) in got.iter().zip(want).enumerate() {
            let bound = entry.bound(O::DTYPE, self.score_bound[n / self.value_dim]) * self.magnitude[n];
            let allowed = bound + tolerance::rounding::<O>(want) * entry.factor;
            let share = share(got.to_f64(), want, allowed);
            assert!(share <= 1.0, "{what:?}: element {n} is {got:?}, expected {want:e} ± {allowed:e}");
        }
    }
}

/// The difference as a share of the allowed one; infinite if a NaN or an unequal infinity is on either side.
pub fn share(got: f64, want: f64, allowed: f64) -> f64 {
    if got == want {
        0.0
    } else if !got.is_finite() || !want.is_finite() {
        f64::INFINITY
    } else {
        (got - want).abs() / allowed
    }
}

/// Panics unless two slices hold the same bits.
#[track_caller]
pub fn same_bits<O: Number>(left: &[O], right: &[O], what: &dyn core::fmt::Debug) {
    assert_eq!(left.len(), right.len(), "{what:?}");
    if let Some(n) = left.iter().zip(right).position(|(l, r)| l.bits() != r.bits()) {
        panic!("{what:?}: element {n} is {:?} and {:?}, not the same bits", left[n], right[n]);
    }
}

/// Makes one `#[test]` of each law, for an engine or several of one type: `law_tests!([MyEngine])`.
#[macro_export]
macro_rules! law_tests {
    ($engines:expr) => {
        $crate::law_tests! { @with modules [$engines] }
    };
    (@with $form:ident [$($argument:tt)*]) => {
        $crate::law_tests! { @$form [$($argument)*];
            accuracy: [f32_stays_within_the_gate f64_stays_within_its_gate halves_are_rounded_once
                large_scores_and_late_maxima halves_in_singles_out];
            determinism: [a_row_does_not_depend_on_its_batch a_row_does_not_depend_on_the_other_queries
                running_again_gives_the_same_bits future_tokens_never_change_past_rows];
            errors: [sizes_that_disagree options_without_meaning options_at_their_limits tables_that_do_not_fit
                products_that_overflow views_that_cannot_be empty_sizes_are_valid outputs_that_do_not_fit];
            layouts: [inputs_may_lie_anyhow outputs_may_lie_anyhow broadcast_inputs_are_repeated_ones
                packed_qkv_is_read_in_place];
            masks: [every_term_hides_what_it_says every_pair_of_terms_is_a_conjunction mods_hide_and_change_scores];
            nan: [hidden_nan_changes_no_bit a_visible_nan_marks_its_rows_only fully_masked_rows_are_zero
                an_infinite_score_is_nan nan_in_a_query_marks_its_row_only];
            peers: [a_block_of_keys_fully_masked_anywhere fully_masked_rows_at_any_place masked_rows_leading_a_tile
                all_logits_far_from_zero a_tail_of_keys_is_not_filled_with_zeros key_counts_around_blocks
                one_query_against_odd_key_counts every_head_dim keys_are_not_cut_to_the_query_count
                causal_alignment_when_lengths_differ softcap_comes_before_the_mask lowest_finite_bias_is_not_a_mask
                nothing_is_written_beyond_the_output infinite_and_huge_values];
            properties: [values_of_ones_give_ones identity_values_give_the_weights outputs_stay_in_the_hull_of_values
                permuted_keys_change_nothing permuted_queries_permute_rows a_constant_on_all_scores_changes_nothing
                a_causal_row_equals_a_shorter_run split_and_merge_equals_one_sweep grouped_heads_are_repeated_heads
                doubled_values_double_the_output a_sink_is_a_key_without_value weights_of_dropped_keys_vanish];
            random: [random_calls_match_the_reference];
            vectors: [committed_vectors_pass];
        }
    };
    (@modules [$engines:expr]; $($module:ident: [$($law:ident)*];)*) => {
        $(
            mod $module {
                $(
                    #[test]
                    fn $law() {
                        use super::*;
                        for engine in $engines {
                            $crate::laws::$module::$law(&engine);
                        }
                    }
                )*
            }
        )*
    };
    (@list [$engine:ty]; $($module:ident: [$($law:ident)*];)*) => {
        vec![$($((concat!(stringify!($module), "::", stringify!($law)), $crate::laws::$module::$law as fn(&$engine)),)*)*]
    };
}

/// A law with its name.
pub type Named<E> = (&'static str, fn(&E));

/// Every law with its name.
pub fn all<E: Engine>() -> Vec<Named<E>> {
    law_tests!(@with list [E])
}
