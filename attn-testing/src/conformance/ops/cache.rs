//! `kv_decode`, `kv_append_attend`, `paged_decode`: attention over caches.
//!
//! The caches store the tokens. An engine that reads caches reads them in place, and so does the streaming engine. The
//! reference gets them in order, as plain tensors.

use attn_core::kv_cache::{AppendCache, CacheView, PageTable, Queries, RingCache};
use attn_core::mask::{Term, Window};
use attn_core::position::Positions;
use attn_core::position::rope::{Rope, RopeTables};
use attn_core::row::Row;
use attn_core::{Align, Attention, Layout, Mask, Outputs, View, ViewMut, streaming};
use serde_json::Value;

use super::positional::pairing;
use crate::conformance::Tensor;
use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::engine::{Engine, Number};

/// The positions `start..start + len` of a tensor.
pub(super) fn span<T: Copy>(x: View<'_, T>, start: usize, len: usize) -> Result<View<'_, T>, Stop> {
    let ([batch, heads, _, dim], strides) = (x.sizes(), x.strides());
    let offset = x.offset().wrapping_add_signed(start as isize * strides[2]);
    Ok(View::strided(x.data(), [batch, heads, len, dim], strides, offset)?)
}

fn scaled<'a>(loaded: Loaded<'_>) -> Result<Attention<'a>, Stop> {
    Ok(match loaded.case.number("scale")? {
        Some(scale) => Attention::new().scale(scale),
        None => Attention::new(),
    })
}

/// The tokens of a stream, and their rope.
struct Stream<'s, T> {
    q: View<'s, T>,
    k: View<'s, T>,
    v: View<'s, T>,
    /// Applied by the index in the cache.
    relative: Option<Rope<'static>>,
}

pub(super) fn decode<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop>
    where
        T::Compute: Number,
    {
        let (q, k, v) = (loaded.input("q")?.view::<T>()?, loaded.input("k")?.view()?, loaded.input("v")?.view()?);
        let Some(object) = loaded.case.object("rope")? else {
            return stream(engine, loaded, Stream { q, k, v, relative: None });
        };
        let mut rope = Rope::new(pairing(object.get("style").and_then(Value::as_str))?);
        if let Some(base) = object.get("base").and_then(Value::as_f64) {
            rope = rope.base(base);
        }
        match object.get("positions").and_then(Value::as_str) {
            Some("cache_relative") => stream(engine, loaded, Stream { q, k, v, relative: Some(rope) }),
            Some("absolute") => {
                // Rope is applied once, in the type that is computed in: rounding such keys to halves would cost
                // accuracy.
                let roped = |x: View<'_, T>| -> Result<Vec<T::Compute>, Stop> {
                    let mut y = vec![T::Compute::default(); x.sizes().iter().product()];
                    rope.apply(x, &mut ViewMut::new(&mut y, Layout::Bhsd, x.sizes())?, Positions::Offset(0))?;
                    Ok(y)
                };
                let (roped_q, roped_k) = (roped(q)?, roped(k)?);
                let wide_v: Vec<T::Compute> = loaded.input("v")?.values::<T>()?.iter().map(|x| x.widen()).collect();
                let q = View::new(&roped_q, Layout::Bhsd, q.sizes())?;
                let k = View::new(&roped_k, Layout::Bhsd, k.sizes())?;
                stream(engine, loaded, Stream { q, k, v: View::new(&wide_v, Layout::Bhsd, v.sizes())?, relative: None })
            }
            other => Err(Stop::Fail(format!("rope positions {other:?} are not understood"))),
        }
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

fn stream<E: Engine, T: Number>(
    engine: &E,
    loaded: Loaded<'_>,
    Stream { q, k, v, relative }: Stream<'_, T>,
) -> Result<Produced, Stop>
where
    T::Compute: Number,
{
    let ([batch, heads, tokens, head_dim], [_, kv_heads, _, value_dim]) = (q.sizes(), v.sizes());
    // Without a window everything is kept.
    let (sinks, window) = match loaded.case.size("window")? {
        Some(window) => (loaded.case.size("sinks")?.unwrap_or(0), window),
        None => (0, tokens.max(1)),
    };
    let chunks = loaded.case.sizes("chunks")?.unwrap_or_else(|| vec![tokens]);
    if chunks.iter().sum::<usize>() != tokens {
        return Err(Stop::Fail(format!("chunks of {} tokens in all, for {tokens}", chunks.iter().sum::<usize>())));
    }
    let slots = sinks + window;
    let mut k_memory = vec![T::default(); batch * kv_heads * slots * head_dim];
    let mut v_memory = vec![T::default(); batch * kv_heads * slots * value_dim];
    let mut seen = vec![0; batch];
    let mut cache = RingCache::new(
        ViewMut::new(&mut k_memory, Layout::Bhsd, [batch, kv_heads, slots, head_dim])?,
        ViewMut::new(&mut v_memory, Layout::Bhsd, [batch, kv_heads, slots, value_dim])?,
        &mut seen,
        sinks,
        window,
    )?;
    let table_sizes = [1, 1, slots, head_dim / 2];
    let (mut cos, mut sin) =
        (vec![T::Compute::default(); slots * (head_dim / 2)], vec![T::Compute::default(); slots * (head_dim / 2)]);
    if let Some(rope) = relative {
        let mut cos_view = ViewMut::new(&mut cos, Layout::Bhsd, table_sizes)?;
        let mut sin_view = ViewMut::new(&mut sin, Layout::Bhsd, table_sizes)?;
        rope.tables(head_dim, Positions::Offset(0), &mut cos_view, &mut sin_view)?;
        let (cos, sin) = (View::new(&cos, Layout::Bhsd, table_sizes)?, View::new(&sin, Layout::Bhsd, table_sizes)?);
        cache = cache.cache_relative(RopeTables::new(rope.pairing(), cos, sin)?)?;
    }

    let attn = scaled(loaded)?;
    let sizes = [batch, heads, tokens, value_dim];
    let strides = Layout::Bhsd.strides(sizes)?;
    let mut out = vec![T::from_f64(-12345.0); sizes.iter().product()];
    let mut lse = vec![T::Compute::default(); batch * heads * tokens];
    let mut scratch = vec![T::Compute::default(); cache.scratch_len()];
    // An engine that is not the cache's own sees a chunk at once while nothing has to go, and token by token then.
    let mut cuts = Vec::new();
    for n in chunks {
        let end = cuts.iter().sum::<usize>() + n;
        if engine.name() == "streaming" || end <= slots { cuts.push(n) } else { cuts.extend(vec![1; n]) }
    }
    let mut done = 0;
    for n in cuts {
        let mut chunk_lse = vec![T::Compute::default(); batch * heads * n];
        let view = ViewMut::strided(&mut out, [batch, heads, n, value_dim], strides, done * value_dim)?;
        let outputs = Outputs::new(view).lse(&mut chunk_lse);
        let (q, k, v) = (span(q, done, n)?, span(k, done, n)?, span(v, done, n)?);
        if engine.name() == "streaming" {
            cache.advance(&attn, q, k, v, outputs, &mut scratch)?;
        } else {
            cache.insert(k, v)?;
            if engine.reads_caches() {
                engine.step(&attn, q, cache.view(), outputs)?;
            } else {
                in_order(engine, &attn, q, &cache, relative, outputs)?;
            }
        }
        for (row, part) in chunk_lse.chunks(n.max(1)).enumerate() {
            lse[row * tokens + done..][..n].copy_from_slice(part);
        }
        done += n;
    }

    let kept: Vec<f64> = cache.positions(0).map(|position| position as f64).collect();
    let held = if batch == 0 { 0 } else { kept.len() };
    let (mut k_out, mut v_out) = (
        vec![T::default(); batch * kv_heads * held * head_dim],
        vec![T::default(); batch * kv_heads * held * value_dim],
    );
    for b in 0..batch {
        let (k_part, v_part) = (kv_heads * held * head_dim, kv_heads * held * value_dim);
        cache.unroll(
            b,
            &mut ViewMut::new(&mut k_out[b * k_part..][..k_part], Layout::Bhsd, [1, kv_heads, held, head_dim])?,
            &mut ViewMut::new(&mut v_out[b * v_part..][..v_part], Layout::Bhsd, [1, kv_heads, held, value_dim])?,
        )?;
    }
    let mut produced = Produced::default();
    produced.put("y", &sizes, &out);
    produced.put("lse", &[batch, heads, tokens], &lse);
    produced.put("kept_positions", &[kept.len()], &kept);
    produced.put("k_cache_out", &[batch, kv_heads, held, head_dim], &k_out);
    produced.put("v_cache_out", &[batch, kv_heads, held, value_dim], &v_out);
    Ok(produced)
}

/// Attends to the tokens of a ring as plain tensors, in the type that is computed in.
fn in_order<'k, E: Engine, T: Number>(
    engine: &E,
    attn: &Attention<'_>,
    q: View<'_, T>,
    cache: &'k RingCache<'_, T>,
    relative: Option<Rope<'_>>,
    mut outputs: Outputs<'_, T>,
) -> Result<(), Stop>
where
    T::Compute: Number,
{
    let ([batch, heads, n, head_dim], [_, kv_heads, ..]) = (q.sizes(), cache.view().k().sizes());
    let [.., value_dim] = cache.view().v().sizes();
    let attn = attn.mask(Mask::causal(Align::BottomRight));
    for b in 0..batch {
        let held = cache.len(b);
        let all = |dim: usize, row: &dyn Fn(usize, usize) -> Row<'k, T>| -> Vec<T::Compute> {
            let rows = (0..kv_heads).flat_map(|h| (0..held).map(move |i| (h, i)));
            rows.flat_map(|(h, i)| row(h, i).iter().take(dim).map(|x| x.widen()).collect::<Vec<_>>()).collect()
        };
        let (mut k, v) = (all(head_dim, &|h, i| cache.key(b, h, i)), all(value_dim, &|h, i| cache.value(b, h, i)));
        let queries = (0..heads).flat_map(|h| (0..n).map(move |i| (h, i)));
        let mut q: Vec<_> = queries.flat_map(|(h, i)| q.row(b, h, i).iter().map(|x| x.widen())).collect();
        let (q_sizes, k_sizes) = ([1, heads, n, head_dim], [1, kv_heads, held, head_dim]);
        if let Some(rope) = relative {
            rope.apply_in_place(&mut ViewMut::new(&mut k, Layout::Bhsd, k_sizes)?, Positions::Offset(0))?;
            let last = Positions::Offset((held - n) as isize);
            rope.apply_in_place(&mut ViewMut::new(&mut q, Layout::Bhsd, q_sizes)?, last)?;
        }
        let rows = heads * n;
        let (mut out, mut lse) = (vec![T::Compute::default(); rows * value_dim], vec![T::Compute::default(); rows]);
        let view = ViewMut::new(&mut out, Layout::Bhsd, [1, heads, n, value_dim])?;
        let (q, k) = (View::new(&q, Layout::Bhsd, q_sizes)?, View::new(&k, Layout::Bhsd, k_sizes)?);
        let v = View::new(&v, Layout::Bhsd, [1, kv_heads, held, value_dim])?;
        engine.forward_wide(&attn, q, k, v, Outputs::new(view).lse(&mut lse))?;
        for (row, values) in out.chunks(value_dim.max(1)).enumerate().take(rows) {
            for (d, &x) in values.iter().enumerate() {
                outputs.out.set(b, row / n, row % n, d, T::narrow(x));
            }
        }
        if let Some(all) = outputs.lse.as_deref_mut() {
            all[b * rows..][..rows].copy_from_slice(&lse);
        }
    }
    Ok(())
}

/// The streaming engine over a cache, with scratch of its own.
fn forward_cache<T: Number>(
    attn: &Attention<'_>,
    q: View<'_, T>,
    cache: CacheView<'_, T>,
    outputs: Outputs<'_, T>,
) -> attn_core::Result<()> {
    let mut scratch = vec![T::Compute::default(); streaming::cache_scratch_len(&cache)];
    streaming::forward_cache(attn, q, Queries::All, cache, outputs, &mut scratch)
}

/// Lengths that must not be negative.
fn lengths(tensor: &Tensor) -> Result<Vec<usize>, Stop> {
    let all = tensor.integers()?;
    all.iter().map(|&n| usize::try_from(n).map_err(|_| Stop::Fail(format!("a length of {n}")))).collect()
}

pub(super) fn append_attend<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let (q, k_new, v_new) =
            (loaded.input("q")?.view::<T>()?, loaded.input("k_new")?.view()?, loaded.input("v_new")?.view()?);
        let (k_tensor, v_tensor) = (loaded.input("k_cache")?, loaded.input("v_cache")?);
        let (mut k, mut v) = (k_tensor.values::<T>()?.to_vec(), v_tensor.values::<T>()?.to_vec());
        let mut lens = lengths(loaded.input("cache_lens")?)?;
        let mut cache = AppendCache::new(
            ViewMut::new(&mut k, Layout::Bhsd, k_tensor.sizes()?)?,
            ViewMut::new(&mut v, Layout::Bhsd, v_tensor.sizes()?)?,
            &mut lens,
        )?;
        cache.append(k_new, v_new)?;

        let mut mask = Mask::causal(Align::BottomRight);
        if let Some(window) = loaded.case.size("window")? {
            let Some(left) = window.checked_sub(1) else {
                return Err(Stop::Fail("a window of 0".to_owned()));
            };
            mask =
                mask.and(Mask::term(Term::Window(Window { left: Some(left), right: None, align: Align::BottomRight })));
        }
        let attn = scaled(loaded)?.mask(mask);
        let ([batch, heads, q_len, head_dim], [.., value_dim]) = (q.sizes(), v_new.sizes());
        let sizes = [batch, heads, q_len, value_dim];
        let mut out = vec![T::from_f64(-12345.0); sizes.iter().product()];
        let mut lse = vec![T::Compute::default(); batch * heads * q_len];
        if engine.name() == "streaming" {
            let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, sizes)?).lse(&mut lse);
            forward_cache(&attn, q, cache.view(), outputs)?;
        } else if engine.reads_caches() {
            let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, sizes)?).lse(&mut lse);
            engine.step(&attn, q, cache.view(), outputs)?;
        } else {
            for b in 0..batch {
                let (k, v) = cache.sequence(b)?;
                let (rows, part) = (heads * q_len, heads * q_len * value_dim);
                let offset = q.offset() + b * q.strides()[0].unsigned_abs();
                let q = View::strided(q.data(), [1, heads, q_len, head_dim], q.strides(), offset)?;
                let view = ViewMut::new(&mut out[b * part..][..part], Layout::Bhsd, [1, heads, q_len, value_dim])?;
                engine.forward(&attn, q, k, v, Outputs::new(view).lse(&mut lse[b * rows..][..rows]))?;
            }
        }
        let mut produced = Produced::default();
        produced.put("y", &sizes, &out);
        produced.put("lse", &[batch, heads, q_len], &lse);
        produced.put("k_cache_out", &k_tensor.shape, &k);
        produced.put("v_cache_out", &v_tensor.shape, &v);
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

pub(super) fn paged<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
        // [pages, page_size, kv_heads, dim] in memory.
        fn pages<T: Stored>(tensor: &Tensor) -> Result<View<'_, T>, Stop> {
            let [pages, page_size, heads, dim] = tensor.sizes()?;
            Ok(View::new(tensor.values()?, Layout::Bshd, [pages, heads, page_size, dim])?)
        }
        let q = loaded.input("q")?.view::<T>()?;
        let (k, v) = (pages::<T>(loaded.input("k_pages")?)?, pages::<T>(loaded.input("v_pages")?)?);
        if loaded.case.size("page_size")?.is_some_and(|n| n != k.sizes()[2]) {
            return Err(Stop::Fail("page_size is not that of the pages".to_owned()));
        }
        let lens = lengths(loaded.input("seq_lens")?)?;
        let table = loaded.input("block_table")?.integers()?;
        let table: Vec<i32> = table.iter().map(|&n| i32::try_from(n).unwrap_or(i32::MAX)).collect();
        let cache = CacheView::of_pages(k, v, PageTable::padded(&table, &lens)?)?;
        let ([batch, heads, q_len, _], [.., value_dim]) = (q.sizes(), v.sizes());
        let sizes = [batch, heads, q_len, value_dim];
        let mut out = vec![T::from_f64(-12345.0); sizes.iter().product()];
        let mut lse = vec![T::Compute::default(); batch * heads * q_len];
        let attn = scaled(loaded)?;
        if engine.name() == "streaming" || engine.reads_caches() {
            let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, sizes)?).lse(&mut lse);
            if engine.reads_caches() {
                engine.step(&attn, q, cache, outputs)?;
            } else {
                forward_cache(&attn, q, cache, outputs)?;
            }
        } else {
            let causal = attn.mask(Mask::causal(Align::BottomRight));
            let [_, kv_heads, _, head_dim] = k.sizes();
            let row = |x: View<'_, T>, b, h, t| {
                cache.run(b, t).map(|at| x.row(at.row, h, at.slot).iter().collect::<Vec<T>>())
            };
            for b in 0..batch {
                let tokens = || (0..kv_heads).flat_map(|h| (0..lens[b]).map(move |t| (h, t)));
                let [k, v] =
                    [k, v].map(|x| tokens().filter_map(|(h, t)| row(x, b, h, t)).flatten().collect::<Vec<T>>());
                let (rows, part) = (heads * q_len, heads * q_len * value_dim);
                let offset = q.offset() + b * q.strides()[0].unsigned_abs();
                let q = View::strided(q.data(), [1, heads, q_len, head_dim], q.strides(), offset)?;
                let k = View::new(&k, Layout::Bhsd, [1, kv_heads, lens[b], head_dim])?;
                let v = View::new(&v, Layout::Bhsd, [1, kv_heads, lens[b], value_dim])?;
                let view = ViewMut::new(&mut out[b * part..][..part], Layout::Bhsd, [1, heads, q_len, value_dim])?;
                engine.forward(&causal, q, k, v, Outputs::new(view).lse(&mut lse[b * rows..][..rows]))?;
            }
        }
        let mut produced = Produced::default();
        produced.put("y", &sizes, &out);
        produced.put("lse", &[batch, heads, q_len], &lse);
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}
