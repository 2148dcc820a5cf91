//! `ring_attention` and `merge_states`: parts of the keys that are attended to apart and joined.
//!
//! Rows of parts have the layout of [`attn_core::state`]. Every engine gives outputs and lse, which become such
//! rows; an engine with calls for parts gives them itself, as a second answer.

use attn_core::element::Real;
use attn_core::mask::{Term, Window};
use attn_core::{Align, Attention, AttnShape, Element, Layout, Mask, Outputs, View, ViewMut, state};
use serde_json::Value;

use super::cache::span;
use crate::conformance::Case;
use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::engine::{Engine, Number, PartCall};

/// Ranges `[start, end)`, a list per shard.
type Shards = Vec<Vec<[usize; 2]>>;

fn shards(case: &Case, name: &str, len: usize) -> Result<Shards, Stop> {
    let size = |n: &Value| n.as_u64().and_then(|n| usize::try_from(n).ok());
    let range = |range: &Value| match range.as_array()?.as_slice() {
        [start, end] => Some([size(start)?, size(end)?]).filter(|[start, end]| start <= end && *end <= len),
        _ => None,
    };
    let all = case.params.get(name).and_then(Value::as_array);
    let lists = all.and_then(|all| all.iter().map(|shard| shard.as_array()?.iter().map(range).collect()).collect());
    lists.ok_or_else(|| Stop::Fail(format!("parameter {name} is not ranges within {len}")))
}

/// A case of `ring_attention`.
struct Ring<'s, T> {
    q: View<'s, T>,
    k: View<'s, T>,
    v: View<'s, T>,
    /// Options without masks.
    plain: Attention<'static>,
    causal: bool,
    left: Option<usize>,
    /// Position of row 0 less that of key 0.
    offset: isize,
    shape: AttnShape,
}

impl<T: Number> Ring<'_, T> {
    /// The options of a call whose row 0 and key 0 are these of the whole.
    fn options(&self, row: usize, key: usize) -> Attention<'static> {
        let align = Align::Offset(self.offset + row as isize - key as isize);
        let mut mask = Mask::none();
        if self.causal {
            mask = mask.and(Mask::causal(align));
        }
        if let Some(left) = self.left {
            mask = mask.and(Mask::term(Term::Window(Window { left: Some(left), right: None, align })));
        }
        self.plain.mask(mask)
    }

    /// Rows `a..b` over keys `c..d` as a call of its own, which knows nothing of the others.
    fn finished<E: Engine>(&self, engine: &E, [a, b]: [usize; 2], [c, d]: [usize; 2]) -> Result<Vec<T::Compute>, Stop>
    where
        T::Compute: Number,
    {
        let (q, k, v) = (span(self.q, a, b - a)?, span(self.k, c, d - c)?, span(self.v, c, d - c)?);
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
        let mut out = vec![T::Compute::from_f64(-12345.0); shape.rows() * shape.value_dim];
        let mut lse = vec![T::Compute::default(); shape.rows()];
        let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output())?).lse(&mut lse);
        engine.forward_wide(&self.options(a, c), q, k, v, outputs)?;
        rows_of(&out, &lse, shape.value_dim)
    }

    /// The same as a part of the whole call.
    fn part<E: Engine>(&self, engine: &E, [a, b]: [usize; 2], [c, d]: [usize; 2]) -> Result<Vec<f32>, Stop> {
        let (q, k, v) = (span(self.q, a, b - a)?, span(self.k, c, d - c)?, span(self.v, c, d - c)?);
        let shape = AttnShape { q_len: b - a, ..self.shape };
        let (attn, mut rows) = (self.options(a, 0), vec![-12345.0; state::len(&shape)?]);
        T::call_part(engine, PartCall { attn: &attn, shape, first: c, q, k, v, rows: &mut rows })?;
        Ok(rows)
    }

    /// The rows of each shard of keys, every device of `q_shards` with its own queries.
    fn shards<R: Real>(
        &self,
        q_shards: &Shards,
        kv_shards: &Shards,
        compute: impl Fn([usize; 2], [usize; 2]) -> Result<Vec<R>, Stop>,
    ) -> Result<Vec<Vec<R>>, Stop> {
        let (q_len, value_dim, row) = (self.shape.q_len, self.shape.value_dim, state::row_len(self.shape.value_dim)?);
        let of_shard = |ranges: &Vec<[usize; 2]>| {
            let mut all = vec![R::ZERO; state::len(&self.shape)?];
            state::clear(&mut all, value_dim);
            for &[a, b] in q_shards.iter().flatten() {
                let mut own = vec![R::ZERO; state::len(&AttnShape { q_len: b - a, ..self.shape })?];
                state::clear(&mut own, value_dim);
                for &keys in ranges {
                    state::merge_states(&mut own, &compute([a, b], keys)?, value_dim)?;
                }
                for (head, rows) in own.chunks((row * (b - a)).max(1)).enumerate() {
                    all[(head * q_len + a) * row..][..rows.len()].copy_from_slice(rows);
                }
            }
            Ok(all)
        };
        kv_shards.iter().map(of_shard).collect()
    }
}

/// Outputs and lse as rows of a part.
fn rows_of<R: Real>(out: &[R], lse: &[R], value_dim: usize) -> Result<Vec<R>, Stop> {
    let row = state::row_len(value_dim)?;
    let mut rows = vec![R::ZERO; lse.len() * row];
    for (n, (row, &lse)) in rows.chunks_mut(row).zip(lse).enumerate() {
        state::from_output(&out[n * value_dim..][..value_dim], lse, row);
    }
    Ok(rows)
}

/// The rows of all parts joined.
fn joined<R: Real>(parts: &[Vec<R>], shape: &AttnShape) -> Result<Vec<R>, Stop> {
    let mut all = vec![R::ZERO; state::len(shape)?];
    state::clear(&mut all, shape.value_dim);
    for part in parts {
        state::merge_states(&mut all, part, shape.value_dim)?;
    }
    Ok(all)
}

/// Rows ended by `attn-core`.
fn finish<R: Real>(rows: &[R], shape: &AttnShape) -> Result<(Vec<R>, Vec<R>), Stop> {
    let row = state::row_len(shape.value_dim)?;
    let (mut out, mut lse) = (vec![R::of(-12345.0); shape.rows() * shape.value_dim], vec![R::ZERO; shape.rows()]);
    for (n, (lse, rows)) in lse.iter_mut().zip(rows.chunks(row)).enumerate() {
        *lse = state::finish(rows, None, &mut out[n * shape.value_dim..][..shape.value_dim]);
    }
    Ok((out, lse))
}

/// Rows ended by an engine that gives parts.
fn finish_by<E: Engine>(engine: &E, rows: &[f32], shape: &AttnShape) -> Result<(Vec<f32>, Vec<f32>), Stop> {
    let (mut out, mut lse) = (vec![-12345.0; shape.rows() * shape.value_dim], vec![-12345.0; shape.rows()]);
    let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output())?).lse(&mut lse);
    engine.finish_parts(&Attention::new(), *shape, rows, outputs)?;
    Ok((out, lse))
}

/// Puts what the parts and all of them together give.
fn put<R: Real>(
    produced: &mut Produced,
    parts: &[Vec<R>],
    shape: &AttnShape,
    finish: impl Fn(&[R]) -> Result<(Vec<R>, Vec<R>), Stop>,
) -> Result<(), Stop> {
    let [batch, heads, q_len, value_dim] = shape.output();
    let (mut part_y, mut part_lse) = (Vec::new(), Vec::new());
    for part in parts {
        let (y, lse) = finish(part)?;
        part_y.extend(y);
        part_lse.extend(lse);
    }
    produced.put("part_y", &[parts.len(), batch, heads, q_len, value_dim], &part_y);
    produced.put("part_lse", &[parts.len(), batch, heads, q_len], &part_lse);
    let (y, lse) = finish(&joined(parts, shape)?)?;
    produced.put("y", &shape.output(), &y);
    produced.put("lse", &[batch, heads, q_len], &lse);
    Ok(())
}

pub(super) fn ring<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop>
    where
        T::Compute: Number,
    {
        let (case, view) = (loaded.case, |role: &str| loaded.input(role)?.view::<T>());
        let (q, k, v) = (view("q")?, view("k")?, view("v")?);
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
        let mut plain = Attention::new();
        if let Some(scale) = case.number("scale")? {
            plain = plain.scale(scale);
        }
        if let Some(cap) = case.number("softcap")? {
            plain = plain.softcap(cap);
        }
        let start = |name: &str| -> Result<isize, Stop> { Ok(case.integer(name)?.unwrap_or(0) as isize) };
        let offset = start("q_start")? - start("kv_start")?;
        let (causal, left) = (case.flag("causal")?, case.size("window_left")?);
        let ring = Ring { q, k, v, plain, causal, left, offset, shape };
        let (rows, keys) = (shards(case, "q_shards", shape.q_len)?, shards(case, "kv_shards", shape.kv_len)?);
        let mut produced = Produced::default();
        let parts = ring.shards(&rows, &keys, |rows, keys| ring.finished(engine, rows, keys))?;
        put(&mut produced, &parts, &shape, |rows| finish(rows, &shape))?;
        if engine.gives_parts() {
            let parts = ring.shards(&rows, &keys, |rows, keys| ring.part(engine, rows, keys))?;
            put(&mut produced, &parts, &shape, |rows| finish_by(engine, rows, &shape))?;
        }
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

/// Given outputs and lse of parts, joined in the type that is computed in.
pub(super) fn merge_states<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn parts<R: Real>(loaded: Loaded<'_>, value_dim: usize, count: usize) -> Result<Vec<Vec<R>>, Stop> {
        let all = |role: &str| -> Result<Vec<R>, Stop> {
            Ok(loaded.input(role)?.to_f64().iter().map(|&x| R::of(x)).collect())
        };
        let (y, lse) = (all("part_y")?, all("part_lse")?);
        let rows = lse.len().checked_div(count).unwrap_or(0);
        (0..count).map(|n| rows_of(&y[n * rows * value_dim..], &lse[n * rows..][..rows], value_dim)).collect()
    }
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let [count, batch, heads, q_len, value_dim] = loaded.input("part_y")?.sizes()?;
        let lse = loaded.input("part_lse")?.sizes::<4>()?;
        if lse != [count, batch, heads, q_len] {
            return Err(Stop::Fail(format!("part_lse of shape {lse:?}")));
        }
        let shape = AttnShape::new([batch, heads, q_len, 1], [batch, heads, 0, 1], [batch, heads, 0, value_dim])?;
        let (y, lse) = if engine.gives_parts() {
            finish_by(engine, &joined(&parts(loaded, value_dim, count)?, &shape)?, &shape).map(widened)?
        } else {
            finish(&joined(&parts::<T::Compute>(loaded, value_dim, count)?, &shape)?, &shape).map(widened)?
        };
        let mut produced = Produced::default();
        produced.put("y", &shape.output(), &y);
        produced.put("lse", &[batch, heads, q_len], &lse);
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

/// Both as doubles.
fn widened<R: Real>((y, lse): (Vec<R>, Vec<R>)) -> (Vec<f64>, Vec<f64>) {
    let wide = |all: Vec<R>| all.iter().map(|x| x.to_f64()).collect();
    (wide(y), wide(lse))
}
