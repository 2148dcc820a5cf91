//! A random call made and checked: tensors, some exact rows, and what an engine's answer takes of the bound.

use std::panic::{AssertUnwindSafe, catch_unwind};

use attn_core::element::Real;
use attn_core::half::{bf16, f16};
use attn_core::kv_cache::{CacheView, PageTable};
use attn_core::{Attention, AttnError, Dtype, Element, Layout, Outputs, Result, ViewMut};

use super::data;
use super::{Call, Place};
use crate::cases::{Inputs, Memory, Tensor4};
use crate::engine::{Engine, Number};
use crate::exact::{Exact, Row};
use crate::paint::Paint;
use crate::tolerance;

/// Multiplications that the exact rows of a call may cost.
const EXACT_WORK: usize = 2_000_000;

/// The worst of one answer.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Rows that were compared.
    pub rows: usize,
    /// Share of the bound on an output.
    pub out: f64,
    /// Share of the bound on an lse.
    pub lse: f64,
    /// Where a bound is broken: the worst place.
    pub beyond: Option<String>,
}

/// What became of a call on an engine.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// It ran.
    Compared(Found),
    /// It should have run, and did not: a panic or a refusal, with its text.
    Broken(String),
    /// The engine has no such call.
    Skipped(String),
}

/// The inputs of a type, and exact rows of them.
#[derive(Debug)]
pub struct Made<T> {
    inputs: Inputs<T>,
    rows: Vec<(usize, Row)>,
}

/// A call with its numbers.
#[derive(Debug)]
#[expect(missing_docs, reason = "a type each")]
pub enum Ready {
    F32(Made<f32>),
    F16(Made<f16>),
    Bf16(Made<bf16>),
}

/// An engine behind a pointer.
pub trait Target {
    /// Runs a call and compares.
    fn check(&self, call: &Call, ready: &Ready) -> Verdict;
    /// The level.
    fn level(&self) -> &'static str;
    /// For messages.
    fn label(&self) -> String;
}

impl<E: Engine> Target for E {
    fn check(&self, call: &Call, ready: &Ready) -> Verdict {
        ready.check(self, call)
    }
    fn level(&self) -> &'static str {
        Engine::level(self).unwrap_or(Engine::name(self))
    }
    fn label(&self) -> String {
        Engine::label(self)
    }
}

impl Ready {
    /// Draws the numbers and computes some rows.
    ///
    /// # Errors
    /// Where a call was drawn that no engine has to take: a mistake of the generator.
    pub fn new(call: &Call) -> Result<Self> {
        Ok(match call.dtype {
            Dtype::F16 => Self::F16(made(call)?),
            Dtype::Bf16 => Self::Bf16(made(call)?),
            _ => Self::F32(made(call)?),
        })
    }

    /// How many rows each engine is held to.
    pub fn rows(&self) -> usize {
        match self {
            Self::F32(made) => made.rows.len(),
            Self::F16(made) => made.rows.len(),
            Self::Bf16(made) => made.rows.len(),
        }
    }

    /// Runs an engine and compares the rows.
    pub fn check<E: Engine>(&self, engine: &E, call: &Call) -> Verdict {
        let run = || match self {
            Self::F32(made) => one::<E, f32>(engine, call, made),
            Self::F16(made) if call.wide => wide::<E, f16>(engine, call, made),
            Self::Bf16(made) if call.wide => wide::<E, bf16>(engine, call, made),
            Self::F16(made) => one::<E, f16>(engine, call, made),
            Self::Bf16(made) => one::<E, bf16>(engine, call, made),
        };
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(found)) => Verdict::Compared(found),
            Ok(Err(AttnError::Unsupported { what })) => Verdict::Skipped(what.to_owned()),
            Ok(Err(error)) => Verdict::Broken(format!("refused: {error}")),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
                Verdict::Broken(format!("panicked: {}", text.unwrap_or_default()))
            }
        }
    }
}

fn attention(call: &Call) -> Attention<'_> {
    let attn = call.options.attention();
    if call.reproducible { attn.reproducible() } else { attn }
}

fn made<T: Number>(call: &Call) -> Result<Made<T>> {
    let (shape, attn, inputs) = (call.shape, attention(call), data::inputs::<T>(call));
    let mut exact = Exact::new(&attn, &inputs)?;
    // An exponential costs as much as some twenty multiplications.
    let cost = shape.kv_len * (shape.head_dim + 2 * shape.value_dim + 20);
    let (all, most) = (shape.rows(), (EXACT_WORK / cost).max(2));
    let mut paint = Paint::new(call.seed ^ 1);
    let mut chosen: Vec<usize> = if all <= most {
        (0..all).collect()
    } else {
        (2..most).map(|_| paint.below(all)).chain([0, all - 1]).collect()
    };
    chosen.sort_unstable();
    chosen.dedup();
    let place = |n: usize| [n / shape.q_len / shape.q_heads, n / shape.q_len % shape.q_heads, n % shape.q_len];
    let rows = chosen.into_iter().map(|n| (n, exact.row(place(n)))).collect();
    Ok(Made { inputs, rows })
}

/// Output and lse of a call, in buffers painted with a number that no call gives.
fn answer<O: Number>(call: &Call, run: impl FnOnce(Outputs<'_, O>) -> Result<()>) -> Result<(Vec<O>, Vec<O::Compute>)> {
    let mut out = vec![O::from_f64(f64::NAN); call.shape.rows() * call.shape.value_dim];
    let mut lse = vec![O::Compute::of(f64::NAN); call.shape.rows()];
    run(Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, call.shape.output())?).lse(&mut lse))?;
    Ok((out, lse))
}

/// The output of the inputs' type.
fn one<E: Engine, T: Number>(engine: &E, call: &Call, made: &Made<T>) -> Result<Found> {
    let (attn, inputs) = (attention(call), &made.inputs);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let lens = vec![call.shape.kv_len; call.shape.batch];
    let mut forms_differ = false;
    let (out, lse) = match call.place {
        Place::Tensors => answer(call, |outputs| engine.forward(&attn, q, k, v, outputs))?,
        Place::Slots => answer(call, |outputs| engine.step(&attn, q, CacheView::of_slots(k, v, &lens)?, outputs))?,
        Place::Pages(size) => {
            let width = call.shape.kv_len.div_ceil(size);
            let order = shuffled(call.shape.batch * width, call.seed);
            let [k, v] = [&inputs.k, &inputs.v].map(|x| paged(x, size, &order, call.memory[1]));
            let step =
                |table| answer(call, |to| engine.step(&attn, q, CacheView::of_pages(k.view(), v.view(), table)?, to));
            let padded = step(PageTable::padded(&order, &lens)?)?;
            let indptr: Vec<i32> = (0..=call.shape.batch).map(|b| (b * width) as i32).collect();
            let last = vec![(call.shape.kv_len - (width - 1) * size) as i32; call.shape.batch];
            let csr = step(PageTable::csr(&indptr, &order, &last)?)?;
            let bits = |(out, lse): &(Vec<T>, Vec<T::Compute>)| -> Vec<u64> {
                let lse = lse.iter().map(|x| x.to_f64().to_bits());
                out.iter().map(|x| x.to_f64().to_bits()).chain(lse).collect()
            };
            forms_differ = bits(&padded) != bits(&csr);
            padded
        }
    };
    let slack = if T::DTYPE == Dtype::F32 { 0.0 } else { engine.half_slack() };
    let mut found = compare(made, &out, &lse, slack);
    if forms_differ {
        found.beyond = Some("a padded page table and its CSR form give different bits".to_owned());
    }
    Ok(found)
}

/// The output in f32.
fn wide<E: Engine, T: Number>(engine: &E, call: &Call, made: &Made<T>) -> Result<Found>
where
    T::Compute: Number,
{
    let (attn, inputs) = (attention(call), &made.inputs);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let (out, lse) = answer(call, |outputs| engine.forward_wide(&attn, q, k, v, outputs))?;
    Ok(compare(made, &out, &lse, 0.0))
}

/// Pages in any order.
fn shuffled(pages: usize, seed: u64) -> Vec<i32> {
    let (mut order, mut paint): (Vec<i32>, _) = ((0..pages as i32).collect(), Paint::new(seed ^ 2));
    for n in (1..pages).rev() {
        order.swap(n, paint.below(n + 1));
    }
    order
}

/// A tensor in pages; slots after a sequence's last token are nonfinite.
fn paged<T: Number>(x: &Tensor4<T>, size: usize, order: &[i32], memory: Memory) -> Tensor4<T> {
    let [_, heads, len, dim] = x.sizes;
    let width = len.div_ceil(size);
    let mut pages = Tensor4::new([order.len(), heads, size, dim], memory, |_| f64::NAN);
    for (n, &page) in order.iter().enumerate() {
        for (slot, token) in (n % width * size..len).take(size).enumerate() {
            for (head, channel) in (0..heads).flat_map(|head| (0..dim).map(move |channel| (head, channel))) {
                let at = pages.index([page as usize, head, slot, channel]);
                pages.data[at] = x.at([n / width, head, token, channel]);
            }
        }
    }
    pages
}

/// The worst of the chosen rows, and that no other is NaN.
fn compare<T, O: Number, C: Real>(made: &Made<T>, out: &[O], lse: &[C], slack: f64) -> Found {
    let width = made.inputs.shape.value_dim;
    let mut found = Found { rows: made.rows.len(), ..Found::default() };
    let mut worst = 1.0;
    let mut meet = |share: f64, seen: &mut f64, told: &dyn Fn() -> String| {
        *seen = seen.max(share);
        if share > worst {
            worst = share;
            found.beyond = Some(told());
        }
    };
    for (n, row) in &made.rows {
        for (c, got) in out[n * width..][..width].iter().enumerate() {
            let (got, want) = (got.to_f64(), row.out[c]);
            let mut allowed = row.allowed(c);
            if O::DTYPE != Dtype::F32 {
                allowed += slack * row.magnitude[c];
                allowed += tolerance::rounding::<O>(want.abs() + allowed);
            }
            let share = if row.keys == 0 && got != 0.0 { f64::INFINITY } else { share(got, want, allowed) };
            meet(share, &mut found.out, &|| {
                let (s, keys) = (row.score_bound, row.keys);
                format!(
                    "row {n} ({keys} keys, S = {s:.3}), channel {c}: {got:e} for {want:e}, {share:.3} of ± {allowed:e}"
                )
            });
        }
        let (got, want, allowed) = (lse[*n].to_f64(), row.lse, row.allowed_lse());
        let share = share(got, want, allowed);
        meet(share, &mut found.lse, &|| {
            let (s, keys) = (row.score_bound, row.keys);
            format!("lse of row {n} ({keys} keys, S = {s:.3}): {got} for {want}, {share:.3} of ± {allowed:e}")
        });
    }
    if let Some(n) = out.iter().position(|x| x.to_f64().is_nan()) {
        meet(f64::INFINITY, &mut found.out, &|| format!("row {}, channel {}: NaN", n / width, n % width));
    }
    found
}

/// The difference as a share of the allowed one. An output that overflowed on both sides agrees.
fn share(got: f64, want: f64, allowed: f64) -> f64 {
    if got == want {
        0.0
    } else if got.is_finite() && want.is_finite() {
        (got - want).abs() / allowed
    } else {
        f64::INFINITY
    }
}
