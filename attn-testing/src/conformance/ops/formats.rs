//! `kv_format_attention`: attention over caches in packed formats. The library has one, int8 with a scale per token.
//!
//! A scale per head or per tensor is one that the tokens share. Engines that read such caches attend to the bytes where
//! they lie; to the others the rows are handed out as the library decodes them.

use attn_core::int8::{KeyScales, QuantizedView};
use attn_core::kv_cache::CacheView;
use attn_core::{Align, Attention, Element, Layout, Outputs, View, ViewMut};

use super::attention::{Tables, causal, options};
use super::wide::repeated;
use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::conformance::{Data, Tensor};
use crate::engine::{Engine, Number, StepCall};

/// Which the library has.
fn check_format(loaded: Loaded<'_>) -> Result<(), Stop> {
    for (format, rotation) in [("k_format", "k_hadamard"), ("v_format", "v_hadamard")] {
        match loaded.case.word(format)? {
            Some("int8") => {}
            Some(other) => return Err(Stop::Skip(format!("caches in {other} are not built"))),
            None => return Err(Stop::Fail(format!("parameter {format} is missing"))),
        }
        if loaded.case.size(rotation)?.is_some() {
            return Err(Stop::Skip("caches in Hadamard-rotated rows are not built".to_owned()));
        }
    }
    if causal(loaded.case)? != Some(Align::BottomRight) {
        return Err(Stop::Skip("steps over a cache are causal at the bottom right".to_owned()));
    }
    Ok(())
}

/// Bytes as two's complement.
fn signed(tensor: &Tensor) -> Result<Vec<i8>, Stop> {
    match &tensor.data {
        Data::U8(bytes) => Ok(bytes.iter().map(|&byte| byte.cast_signed()).collect()),
        _ => Err(Stop::Fail("the data of a cache are not bytes".to_owned())),
    }
}

pub(super) fn attention<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
        check_format(loaded)?;
        let q = loaded.input("q")?.view::<T>()?;
        let (k, v) = (loaded.input("k_data")?, loaded.input("v_data")?);
        let (k_sizes, v_sizes): ([usize; 4], [usize; 4]) = (k.sizes()?, v.sizes()?);
        let (k, v) = (signed(k)?, signed(v)?);
        let numbers =
            CacheView::of_tensors(View::new(&k, Layout::Bhsd, k_sizes)?, View::new(&v, Layout::Bhsd, v_sizes)?)?;
        let scales = |role: &str, [batch, heads, slots, _]: [usize; 4]| {
            repeated(loaded.input(role)?.view::<f32>()?, [batch, heads, slots, 1])
        };
        let (k_scales, v_scales) = (scales("k_scale", k_sizes)?, scales("v_scale", v_sizes)?);
        let cache = QuantizedView::new(numbers, KeyScales::PerToken(k_scales), v_scales)?;

        let tables = Tables::of(loaded, k_sizes[2])?;
        let attn = options(loaded, &tables)?;
        let mut produced = Produced::default();
        let [k_deq, v_deq] = decoded(&cache, k_sizes, v_sizes);
        let ([batch, heads, q_len, _], [_, _, kv_len, value_dim]) = (q.sizes(), v_sizes);
        let (sizes, rows) = ([batch, heads, q_len, value_dim], [batch, heads, q_len]);
        if !engine.reads_int8() {
            let rows = (View::new(&k_deq, Layout::Bhsd, k_sizes)?, View::new(&v_deq, Layout::Bhsd, v_sizes)?);
            plain(engine, &attn, q, rows, &mut produced)?;
        } else if q_len > kv_len {
            return Err(Stop::Skip("a step has no more queries than its cache has tokens".to_owned()));
        } else {
            let mut y = vec![T::from_f64(-12345.0); sizes.iter().product()];
            let mut lse = vec![T::Compute::from_f64(-12345.0); rows.iter().product()];
            let outputs = Outputs::new(ViewMut::new(&mut y, Layout::Bhsd, sizes)?).lse(&mut lse);
            T::call_int8(engine, StepCall { attn: &attn, q, cache, outputs })?;
            produced.put("y", &sizes, &y);
            produced.put("lse", &rows, &lse);
        }
        produced.put("k_deq", &k_sizes, &k_deq);
        produced.put("v_deq", &v_sizes, &v_deq);
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

/// All keys and all values as the library decodes them.
fn decoded(cache: &QuantizedView<'_>, k_sizes: [usize; 4], v_sizes: [usize; 4]) -> [Vec<f32>; 2] {
    let [batch, heads, tokens, _] = k_sizes;
    let [mut k, mut v] = [k_sizes, v_sizes].map(|sizes| vec![-12345.0; sizes.iter().product()]);
    let (mut k_rows, mut v_rows) = (k.chunks_mut(k_sizes[3].max(1)), v.chunks_mut(v_sizes[3].max(1)));
    for n in 0..batch * heads * tokens {
        let (b, h, t) = (n / tokens / heads, n / tokens % heads, n % tokens);
        cache.key(b, h, t, k_rows.next().unwrap_or_default());
        cache.value(b, h, t, v_rows.next().unwrap_or_default());
    }
    [k, v]
}

/// The decoded rows as plain tensors, in singles.
fn plain<E: Engine, T: Number>(
    engine: &E,
    attn: &Attention<'_>,
    q: View<'_, T>,
    (k, v): (View<'_, f32>, View<'_, f32>),
    produced: &mut Produced,
) -> Result<(), Stop> {
    let ([batch, heads, q_len, _], [.., value_dim]) = (q.sizes(), v.sizes());
    let rows = (0..batch * heads * q_len).map(|n| q.row(n / q_len / heads, n / q_len % heads, n % q_len));
    let wide: Vec<f32> = rows.flat_map(|row| row.iter().map(|x| x.to_f64() as f32)).collect();
    let q = View::new(&wide, Layout::Bhsd, q.sizes())?;
    let (y, lse) = super::attention::attend(engine, attn, q, k, v, Layout::Bhsd)?;
    produced.put("y", &[batch, heads, q_len, value_dim], &y);
    produced.put("lse", &[batch, heads, q_len], &lse);
    Ok(())
}
