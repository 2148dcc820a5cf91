//! A small streaming engine with a bug of choice.
//!
//! The healthy form ([`Bug::None`]) is the streaming algorithm, one key at a time. Each [`Bug`] changes one thing that
//! real libraries got wrong.

use std::cell::Cell;

use attn_core::element::Real;
use attn_core::half::bf16;
use attn_core::score::{At, Problem};
use attn_core::score_mod::Mods;
use attn_core::softmax::RowState;
use attn_core::{AttnError, Dtype, Element, Outputs, Result};
use attn_testing::{Call, Engine, engine_calls};

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    None,
    ForgetsToRescale,
    SeesOneKeyAhead,
    IgnoresMask,
    IgnoresTerms,
    DeadRowsAreNan,
    DeadRowsAreMeans,
    HiddenValuesTimesZero,
    TailFilledWithZeros,
    KeysCutToQueries,
    HeadsInterleaved,
    CapIgnored,
    CapAfterBias,
    BiasIgnored,
    ModIgnored,
    SinksIgnored,
    DropoutIgnored,
    DropoutNotScaled,
    NanBecomesZero,
    RowsTakenAsContiguous,
    OutputTakenAsContiguous,
    WritesBeforeChecks,
    WritesBehindRows,
    OrderByBatch,
    MaximumOfRowBefore,
    OrderByCall,
    WeightsInHalf,
    LseInBitsOfTwo,
    AcceptsAnyOption,
    RefusesEmpty,
    ClampsScores,
    SentinelForInfinity,
    ClampsValues,
    DivisorPlusEpsilon,
    LastKeyLost,
    TopLeftAlways,
    OutputRoundedTwice,
    OverflowIgnored,
    LongHeadsCut,
}

impl Bug {
    pub(crate) const ALL: [Self; 38] = [
        Self::ForgetsToRescale,
        Self::SeesOneKeyAhead,
        Self::IgnoresMask,
        Self::IgnoresTerms,
        Self::DeadRowsAreNan,
        Self::DeadRowsAreMeans,
        Self::HiddenValuesTimesZero,
        Self::TailFilledWithZeros,
        Self::KeysCutToQueries,
        Self::HeadsInterleaved,
        Self::CapIgnored,
        Self::CapAfterBias,
        Self::BiasIgnored,
        Self::ModIgnored,
        Self::SinksIgnored,
        Self::DropoutIgnored,
        Self::DropoutNotScaled,
        Self::NanBecomesZero,
        Self::RowsTakenAsContiguous,
        Self::OutputTakenAsContiguous,
        Self::WritesBeforeChecks,
        Self::WritesBehindRows,
        Self::OrderByBatch,
        Self::MaximumOfRowBefore,
        Self::OrderByCall,
        Self::WeightsInHalf,
        Self::LseInBitsOfTwo,
        Self::AcceptsAnyOption,
        Self::RefusesEmpty,
        Self::ClampsScores,
        Self::SentinelForInfinity,
        Self::ClampsValues,
        Self::DivisorPlusEpsilon,
        Self::LastKeyLost,
        Self::TopLeftAlways,
        Self::OutputRoundedTwice,
        Self::OverflowIgnored,
        Self::LongHeadsCut,
    ];
}

/// The engine.
pub(crate) struct Sick(pub(crate) Bug);

impl Engine for Sick {
    fn name(&self) -> &'static str {
        "sick"
    }
    fn supports_dtype(&self, _: Dtype) -> bool {
        true
    }
    engine_calls!(f64, f32, f16, bf16; |this, call| run(this.0, call));
}

thread_local! {
    /// Calls so far. Each test has its own: another's would make the bug come and go.
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

fn run<T: Element, O: Element<Compute = T::Compute>, M: Mods + Sync>(bug: Bug, call: Call<'_, T, O, M>) -> Result<()> {
    let Call { attn, q, k, v, mut outputs } = call;
    if bug == Bug::WritesBeforeChecks {
        outputs.out.set(0, 0, 0, 0, O::from_f64(0.0));
    }
    let problem = match Problem::new(attn, q.sizes(), k.sizes(), v.sizes()) {
        Err(AttnError::Option { .. }) if bug == Bug::AcceptsAnyOption => return Ok(()),
        Err(AttnError::Overflow { .. }) if bug == Bug::OverflowIgnored => return Ok(()),
        problem => problem?,
    };
    let shape = *problem.shape();
    outputs.check(&shape)?;
    if outputs.weights.is_some() {
        return Err(AttnError::Unsupported { what: "weights" });
    }
    if bug == Bug::RefusesEmpty && (shape.kv_len == 0 || shape.head_dim == 0) {
        return Err(AttnError::TooShort { what: "keys", needed: 1, found: 0 });
    }
    let calls = CALLS.replace(CALLS.get() + 1);
    let mut before = T::Compute::NEG_INFINITY;
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            for query in 0..shape.q_len {
                let backwards = match bug {
                    Bug::OrderByBatch => batch % 2 == 1,
                    Bug::OrderByCall => calls % 2 == 1,
                    _ => false,
                };
                let keys = visible(bug, &problem, (batch, head, query), backwards);
                let mut row = Row { acc: vec![T::Compute::ZERO; shape.value_dim], state: RowState::new() };
                if bug == Bug::MaximumOfRowBefore {
                    row.state.max = before;
                }
                let kv_head = if bug == Bug::HeadsInterleaved { head % shape.kv_heads } else { shape.kv_head(head) };
                for key in keys {
                    let at = At { batch, head, query, key };
                    let dot = dot(bug, q, k, at, kv_head);
                    row.take(bug, &problem, at, dot, |d| value(bug, v, at, kv_head, d));
                }
                row.finish(bug, &problem, (batch, head, query), v, &mut outputs);
                before = row.state.max;
            }
        }
    }
    if bug == Bug::WritesBehindRows {
        let ([.., value_dim], strides, offset) = (outputs.out.sizes(), outputs.out.strides(), outputs.out.offset());
        if strides[3] == 1 && strides[2] > value_dim as isize {
            let data = outputs.out.into_data();
            if let Some(slot) = data.get_mut(offset + value_dim) {
                *slot = O::from_f64(0.0);
            }
        }
    }
    Ok(())
}

/// The keys that a row is taken to see.
fn visible<M: Mods>(
    bug: Bug,
    problem: &Problem<'_, '_, M>,
    (batch, head, query): (usize, usize, usize),
    backwards: bool,
) -> Vec<usize> {
    let shape = problem.shape();
    let mut keys = Vec::new();
    match bug {
        Bug::IgnoresMask => keys.extend(0..shape.kv_len),
        // Only the first term counts.
        Bug::IgnoresTerms => {
            let mask = problem.attn().get_mask();
            let first = mask.terms().next().map(|term| attn_core::Mask::term(*term)).unwrap_or_default();
            let later =
                |key| problem.attn().get_bias().is_none_or(|b| b.at(At { batch, head, query, key }).is_finite());
            let sees = |key: &usize| first.visible(shape, At { batch, head, query, key: *key }) && later(*key);
            keys.extend((0..shape.kv_len).filter(sees));
        }
        Bug::TopLeftAlways => {
            let range = problem.attn().get_mask().terms().any(|t| matches!(t, attn_core::mask::Term::Causal(_)));
            problem.for_each_visible(batch, head, query, |at| keys.push(at.key));
            if range {
                keys.retain(|&key| key <= query);
            }
        }
        _ => problem.for_each_visible(batch, head, query, |at| keys.push(at.key)),
    }
    match bug {
        Bug::SeesOneKeyAhead => {
            let next = keys.last().map(|last| last + 1).filter(|&next| next < shape.kv_len);
            keys.extend(next);
        }
        Bug::KeysCutToQueries => keys.retain(|&key| key < shape.q_len),
        Bug::LastKeyLost => keys.retain(|&key| key + 1 < shape.kv_len),
        _ => {}
    }
    if backwards {
        keys.reverse();
    }
    keys
}

fn dot<T: Element>(
    bug: Bug,
    q: attn_core::View<'_, T>,
    k: attn_core::View<'_, T>,
    at: At,
    kv_head: usize,
) -> T::Compute {
    let (q, k) = (q.row(at.batch, at.head, at.query), ReadRow::new(bug, k, at.batch, kv_head, at.key));
    let dims = if bug == Bug::LongHeadsCut { q.len().min(96) } else { q.len() };
    // Four chains, as the healthy engine has.
    let mut sums = [T::Compute::ZERO; 4];
    for d in 0..dims {
        sums[d % 4] += q.get(d).widen() * k.get(d);
    }
    (sums[0] + sums[1]) + (sums[2] + sums[3])
}

fn value<T: Element>(bug: Bug, v: attn_core::View<'_, T>, at: At, kv_head: usize, d: usize) -> T::Compute {
    let x = ReadRow::new(bug, v, at.batch, kv_head, at.key).get(d);
    let limit = T::Compute::of(2.5);
    if bug == Bug::ClampsValues && x > limit { limit } else { x }
}

/// A row read with its stride, or as if the stride were 1.
struct ReadRow<'v, T> {
    row: attn_core::row::Row<'v, T>,
    slice: Option<&'v [T]>,
}

impl<'v, T: Element> ReadRow<'v, T> {
    fn new(bug: Bug, view: attn_core::View<'v, T>, batch: usize, head: usize, seq: usize) -> Self {
        let [b, h, s, _] = view.strides();
        let start = view.offset() as isize + batch as isize * b + head as isize * h + seq as isize * s;
        let slice = (bug == Bug::RowsTakenAsContiguous).then(|| view.data().get(start as usize..)).flatten();
        Self { row: view.row(batch, head, seq), slice }
    }

    fn get(&self, d: usize) -> T::Compute {
        match self.slice {
            Some(slice) => slice.get(d).copied().unwrap_or_default().widen(),
            None => self.row.get(d).widen(),
        }
    }
}

struct Row<R> {
    acc: Vec<R>,
    state: RowState<R>,
}

impl<R: Real> Row<R> {
    fn take<M: Mods>(&mut self, bug: Bug, problem: &Problem<'_, '_, M>, at: At, dot: R, value: impl Fn(usize) -> R) {
        let mut score = score(bug, problem, dot, at);
        match bug {
            Bug::ClampsScores if score > R::of(1e30) => score = R::of(1e30),
            Bug::SentinelForInfinity if score <= R::of(-5e4) => return,
            _ => {}
        }
        let step = self.state.push(score);
        let mut weight = step.weight;
        if bug == Bug::WeightsInHalf {
            weight = R::of(<bf16 as Element>::from_f64(weight.to_f64()).to_f64());
        }
        if !problem.attn().get_dropout().keeps(at) && bug != Bug::DropoutIgnored {
            weight *= R::ZERO;
        }
        for (d, acc) in self.acc.iter_mut().enumerate() {
            if bug != Bug::ForgetsToRescale {
                *acc *= step.rescale;
            }
            *acc += weight * value(d);
        }
    }

    fn finish<T: Element<Compute = R>, O: Element<Compute = R>, M: Mods>(
        &mut self,
        bug: Bug,
        problem: &Problem<'_, '_, M>,
        (batch, head, query): (usize, usize, usize),
        v: attn_core::View<'_, T>,
        outputs: &mut Outputs<'_, O>,
    ) {
        let shape = problem.shape();
        if let Some(sink) = problem.sink(head).filter(|_| bug != Bug::SinksIgnored) {
            let step = self.state.push(R::of(f64::from(sink)));
            self.acc.iter_mut().for_each(|acc| *acc *= step.rescale);
        }
        if bug == Bug::TailFilledWithZeros {
            for _ in 0..shape.kv_len.next_multiple_of(16) - shape.kv_len {
                let step = self.state.push(R::ZERO);
                self.acc.iter_mut().for_each(|acc| *acc *= step.rescale);
            }
        }
        let mut factor = self.state.finish();
        if bug == Bug::DivisorPlusEpsilon && self.state.sum > R::ZERO {
            factor = R::ONE / (self.state.sum + R::of(1e-5));
        }
        if !matches!(bug, Bug::DropoutIgnored | Bug::DropoutNotScaled) {
            factor *= R::of(problem.attn().get_dropout().factor());
        }
        let dead = self.state.sum == R::ZERO;
        for d in 0..shape.value_dim {
            let mut x = self.acc[d] * factor;
            match bug {
                Bug::DeadRowsAreNan if dead => x = R::of(f64::NAN),
                Bug::DeadRowsAreMeans if dead => {
                    for key in 0..shape.kv_len {
                        x += v.at(batch, shape.kv_head(head), key, d).widen() / R::of(shape.kv_len as f64);
                    }
                }
                Bug::HiddenValuesTimesZero => {
                    for key in 0..shape.kv_len {
                        x += R::ZERO * v.at(batch, shape.kv_head(head), key, d).widen();
                    }
                }
                #[expect(clippy::eq_op, reason = "the test for a NaN in a type without one")]
                Bug::NanBecomesZero if !(x == x) => x = R::ZERO,
                Bug::OutputRoundedTwice => {
                    x = R::of(<bf16 as Element>::from_f64(x.to_f64()).to_f64());
                }
                _ => {}
            }
            let place = if bug == Bug::OutputTakenAsContiguous {
                // Sequence and head confused where there are several heads.
                (
                    batch,
                    query % shape.q_heads,
                    (query / shape.q_heads + head * shape.q_len / shape.q_heads) % shape.q_len,
                )
            } else {
                (batch, head, query)
            };
            outputs.out.set(place.0, place.1, place.2, d, O::narrow(x));
        }
        let mut lse = self.state.lse();
        if bug == Bug::LseInBitsOfTwo && !dead {
            lse *= R::of(core::f64::consts::LOG2_E);
        }
        if let Some(slot) = outputs.lse.as_deref_mut() {
            slot[shape.row(batch, head, query)] = lse;
        }
    }
}

/// The score, from the options by hand where the bug is in their order.
fn score<R: Real, M: Mods>(bug: Bug, problem: &Problem<'_, '_, M>, dot: R, at: At) -> R {
    let attn = problem.attn();
    let bias = attn.get_bias().map_or(0.0, |bias| bias.at(at));
    let alibi = attn.get_alibi().map_or(0.0, |alibi| alibi.at(problem.shape(), at));
    let cap = |s: f64| attn.get_softcap().map_or(s, |cap| cap * (s / cap).tanh());
    let scaled = dot.to_f64() * problem.scale();
    let t = attn.get_temperature().unwrap_or(1.0);
    match bug {
        Bug::CapIgnored => R::of((scaled + bias + alibi) / t),
        Bug::CapAfterBias => R::of(cap(scaled + bias + alibi) / t),
        Bug::BiasIgnored => R::of((cap(scaled) + alibi) / t),
        Bug::ModIgnored => R::of((cap(scaled) + bias + alibi) / t),
        _ => problem.score(dot, at),
    }
}
