//! `onnx_attention`: the ONNX `Attention` operator, opsets 23 to 25.
//!
//! The operator adds to a plain call: heads folded into the last axis (rank 3), a past that K and V are appended to,
//! masks that are shorter than the keys, and per-sequence positions. The last makes each sequence a call of its own.

use attn_core::mask::{Lengths, Term, Window};
use attn_core::{Align, Attention, Bias, Element, Layout, Mask, Outputs, View, ViewMut};
use attn_layers::steps;

use super::attention::weights;
use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::conformance::{Data, Tensor};
use crate::engine::{Engine, Number};

pub(super) fn attention<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

/// `[batch, heads, seq, dim]` of a tensor of rank 4, or of rank 3 with the heads in its last axis.
fn heads<'t, T: Stored>(loaded: Loaded<'t>, role: &str, count: &str) -> Result<(View<'t, T>, bool), Stop> {
    let tensor = loaded.input(role)?;
    match *tensor.shape.as_slice() {
        [batch, seq, width] => {
            let heads = loaded.case.required_size(count)?;
            let dim = width.checked_div(heads).unwrap_or(0);
            if dim * heads != width {
                return Err(Stop::Fail(format!("{role}: {width} columns for {heads} heads")));
            }
            Ok((View::new(tensor.values()?, Layout::Bshd, [batch, heads, seq, dim])?, true))
        }
        _ => Ok((tensor.view()?, false)),
    }
}

/// The past followed by the new tokens, as a dense tensor.
fn append<T: Number + Stored>(past: Option<&Tensor>, new: View<'_, T>) -> Result<([usize; 4], Vec<T>), Stop> {
    let [batch, heads, seq, dim] = new.sizes();
    let past = past.map(Tensor::view::<T>).transpose()?;
    let past_len = past.map_or(0, |p| p.sizes()[2]);
    let mut all = Vec::with_capacity(batch * heads * (past_len + seq) * dim);
    for b in 0..batch {
        for h in 0..heads {
            for s in 0..past_len {
                all.extend(past.iter().flat_map(|p| p.row(b, h, s).iter()));
            }
            for s in 0..seq {
                all.extend(new.row(b, h, s).iter());
            }
        }
    }
    Ok(([batch, heads, past_len + seq, dim], all))
}

/// A mask widened to the total length: keys that it lacks are masked.
enum Padded {
    None,
    Keep(Vec<usize>, Vec<bool>),
    Bias(Vec<usize>, Vec<f64>),
}

impl Padded {
    fn of(mask: Option<&Tensor>, total: usize) -> Self {
        fn pad<X: Copy>(shape: &[usize], values: &[X], total: usize, fill: X) -> (Vec<usize>, Vec<X>) {
            let Some((&last, outer)) = shape.split_last() else {
                return (Vec::new(), values.to_vec());
            };
            let rows: usize = outer.iter().product();
            let mut padded = Vec::with_capacity(rows * total);
            for row in 0..rows {
                padded.extend_from_slice(&values[row * last..(row + 1) * last]);
                padded.resize(padded.len() + total.saturating_sub(last), fill);
            }
            (outer.iter().copied().chain([last.max(total)]).collect(), padded)
        }
        match mask {
            None => Self::None,
            Some(Tensor { shape, data: Data::Bool(keep) }) => {
                let (shape, keep) = pad(shape, keep, total, false);
                Self::Keep(shape, keep)
            }
            Some(tensor) => {
                let (shape, bias) = pad(&tensor.shape, &tensor.to_f64(), total, f64::NEG_INFINITY);
                Self::Bias(shape, bias)
            }
        }
    }
}

/// The part of a broadcasting tensor that belongs to one sequence.
fn one_batch<X: Copy>(view: View<'_, X>, batch: usize) -> Result<View<'_, X>, Stop> {
    let ([batches, heads, q_len, kv_len], strides) = (view.sizes(), view.strides());
    let step = if batches == 1 { 0 } else { strides[0].unsigned_abs() * batch };
    Ok(View::strided(view.data(), [1, heads, q_len, kv_len], strides, view.offset() + step)?)
}

fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    let case = loaded.case;
    let (q, folded) = heads::<T>(loaded, "Q", "q_num_heads")?;
    let (k_new, _) = heads::<T>(loaded, "K", "kv_num_heads")?;
    let (v_new, _) = heads::<T>(loaded, "V", "kv_num_heads")?;
    let past_len = loaded.optional("past_key")?.map_or(0, |t| t.shape.get(2).copied().unwrap_or(0));
    let (k_sizes, k) = append(loaded.optional("past_key")?, k_new)?;
    let (v_sizes, v) = append(loaded.optional("past_value")?, v_new)?;
    let (k, v) = (View::new(&k, Layout::Bhsd, k_sizes)?, View::new(&v, Layout::Bhsd, v_sizes)?);

    let ([batch, q_heads, q_len, _], total, value_dim) = (q.sizes(), k_sizes[2], v_sizes[3]);
    let nonpad = loaded.optional("nonpad_kv_seqlen")?.map(Tensor::integers).transpose()?;
    let padded = Padded::of(loaded.optional("attn_mask")?, total);

    let mut base = Attention::new();
    if let Some(scale) = case.number("scale")? {
        base = base.scale(scale);
    }
    if let Some(cap) = case.number("softcap")?.filter(|&cap| cap > 0.0) {
        base = base.softcap(cap);
    }
    let side =
        |name: &str| -> Result<Option<usize>, Stop> { Ok(case.integer(name)?.and_then(|n| usize::try_from(n).ok())) };
    let (left, right) = (side("left_window_size")?, side("right_window_size")?);
    let causal = case.flag("is_causal")?;

    let sizes = [batch, q_heads, q_len, value_dim];
    let layout = if folded { Layout::Bshd } else { Layout::Bhsd };
    let strides = layout.strides(sizes)?;
    let mut out = vec![T::from_f64(-12345.0); sizes.iter().product()];
    let mut lse = vec![T::Compute::from_f64(-12345.0); batch * q_heads * q_len];
    let mode = case.integer("qk_matmul_output_mode")?.unwrap_or(0);
    let wants_qk = case.wants("qk_matmul_output");
    let mut qk = vec![T::Compute::from_f64(-12345.0); if wants_qk { batch * q_heads * q_len * total } else { 0 }];
    for b in 0..batch {
        let (offset, kv_len) = match nonpad.as_ref().and_then(|lens| lens.get(b)) {
            Some(&n) => (n as isize - q_len as isize, usize::try_from(n).unwrap_or(0).min(total)),
            None => (past_len as isize, total),
        };
        let align = Align::Offset(offset);
        let mut mask = Mask::none();
        if causal {
            mask = mask.and(Mask::causal(align));
        }
        if left.is_some() || right.is_some() {
            mask = mask.and(Mask::term(Term::Window(Window { left, right, align })));
        }
        if kv_len < total {
            mask = mask.and(Mask::term(Term::KvLens(Lengths::All(kv_len))));
        }
        let mut attn = base;
        match &padded {
            Padded::None => {}
            Padded::Keep(shape, keep) => mask = mask.and(Mask::keep(one_batch(View::broadcast(keep, shape)?, b)?)),
            Padded::Bias(shape, bias) => attn = attn.bias(Bias::F64(one_batch(View::broadcast(bias, shape)?, b)?)),
        }
        let attn = attn.mask(mask);
        let (q, k, v) = (one_batch(q, b)?, one_batch(k, b)?, one_batch(v, b)?);
        let out_offset = strides[0].unsigned_abs() * b;
        let view = ViewMut::strided(&mut out, [1, q_heads, q_len, value_dim], strides, out_offset)?;
        let lse_part = b * q_heads * q_len..(b + 1) * q_heads * q_len;
        engine.forward(&attn, q, k, v, Outputs::new(view).lse(&mut lse[lse_part.clone()]))?;
        if wants_qk {
            let part = q_heads * q_len * total;
            let qk = &mut qk[b * part..(b + 1) * part];
            match mode {
                0..=2 => {
                    let mut view = ViewMut::new(qk, Layout::Bhsd, [1, q_heads, q_len, total])?;
                    match mode {
                        0 => steps::scaled_scores(&attn, q, k, &mut view)?,
                        1 => steps::capped_scores(&attn, q, k, &mut view)?,
                        _ => steps::masked_scores(&attn, q, k, &mut view)?,
                    }
                }
                3 => weights(engine, &attn, q, k, v, &lse[lse_part], qk)?,
                other => return Err(Stop::Fail(format!("qk_matmul_output_mode {other} is not understood"))),
            }
        }
    }

    let mut produced = Produced::default();
    if folded {
        produced.put("Y", &[batch, q_len, q_heads * value_dim], &out);
    } else {
        produced.put("Y", &sizes, &out);
    }
    produced.put("present_key", &k_sizes, k.data());
    produced.put("present_value", &v_sizes, v.data());
    if wants_qk {
        produced.put("qk_matmul_output", &[batch, q_heads, q_len, total], &qk);
    }
    Ok(produced)
}
