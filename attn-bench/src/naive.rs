//! The textbook form in plain f32: the whole score matrix of a head is built, then normalised, then multiplied by V.
//!
//! It is the baseline of the cost curve: a careful person's code without blocking or fusing. It has contiguous rows, a
//! dot product with independent accumulators and a row-wise second product, all of which the compiler vectorises for
//! the instruction set of the build; `exp` is the standard library's. Its scratch is caller-owned and reused between
//! calls, one head at a time, which is faster than to allocate every head's matrix in every call. It cannot avoid the
//! matrix itself: `q_len · kv_len` floats, written and read three times.

use attn_core::score::{At, Problem};
use attn_core::{Attention, AttnError, Dtype, Outputs, Result, View};
use attn_simd::KernelElement;

/// Elements of scratch that [`forward`] needs, or `None` if the count overflows: the scores of one head, one output
/// row, and, if the inputs are not contiguous f32, one head's q, k and v gathered.
pub fn scratch_len<T: KernelElement>(q: View<'_, T>, k: View<'_, T>, v: View<'_, T>) -> Option<usize> {
    let ([_, _, q_len, head_dim], [_, _, kv_len, value_dim]) = (q.sizes(), v.sizes());
    let mut len = q_len.checked_mul(kv_len)?.checked_add(value_dim)?;
    if ![q, k, v].iter().all(in_place) {
        for (seq, dim) in [(q_len, head_dim), (kv_len, head_dim), (kv_len, value_dim)] {
            len = len.checked_add(seq.checked_mul(dim)?)?;
        }
    }
    Some(len)
}

/// Whether the heads of a view can be read in place.
fn in_place<T: KernelElement>(view: &View<'_, T>) -> bool {
    let ([_, _, _, dim], [_, _, row, step]) = (view.sizes(), view.strides());
    T::DTYPE == Dtype::F32 && step == 1 && usize::try_from(row) == Ok(dim)
}

/// Computes attention by building the score matrix of each head. Scale and masks are honoured; `lse` is given on
/// request.
///
/// # Errors
/// Whatever does not fit, before anything is written; [`AttnError::Unsupported`] for options that change scores and for
/// the weights, which a baseline has no need of.
pub fn forward<'o, T: KernelElement, O: KernelElement>(
    attn: &Attention<'_>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
    outputs: impl Into<Outputs<'o, O>>,
    scratch: &mut [f32],
) -> Result<()> {
    let problem = Problem::new(attn, q.sizes(), k.sizes(), v.sizes())?;
    let mut outputs = outputs.into();
    let shape = *problem.shape();
    outputs.check(&shape)?;
    let plain = attn.get_softcap().is_none()
        && attn.get_temperature().is_none()
        && attn.get_bias().is_none()
        && attn.get_alibi().is_none()
        && attn.get_sinks().is_none()
        && attn.get_dropout().is_none();
    if !plain || outputs.weights.is_some() {
        return Err(AttnError::Unsupported { what: "more than scale and masks in the naive engine" });
    }
    let needed = scratch_len(q, k, v).ok_or(AttnError::Overflow { what: "naive scratch" })?;
    AttnError::check_len("naive scratch", needed, scratch.len())?;
    let (scores, rest) = scratch.split_at_mut(shape.q_len * shape.kv_len);
    let (out_row, gathered) = rest.split_at_mut(shape.value_dim);
    let direct = [q, k, v].iter().all(in_place);
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            let heads = [(q, head), (k, shape.kv_head(head)), (v, shape.kv_head(head))];
            let at = At { batch, head, query: 0, key: 0 };
            if direct {
                let [q, k, v] = heads.map(|(view, head)| head_of(view, batch, head));
                one_head(&problem, at, (q, k, v), scores, out_row, &mut outputs);
            } else {
                let (queries, rest) = gathered.split_at_mut(shape.q_len * shape.head_dim);
                let (keys, rest) = rest.split_at_mut(shape.kv_len * shape.head_dim);
                let values = &mut rest[..shape.kv_len * shape.value_dim];
                let into = [&mut *queries, &mut *keys, &mut *values];
                heads.into_iter().zip(into).for_each(|((view, head), to)| gather(view, batch, head, to));
                one_head(&problem, at, (&*queries, &*keys, &*values), scores, out_row, &mut outputs);
            }
        }
    }
    Ok(())
}

/// One head, from contiguous rows.
fn one_head<T: KernelElement, O: KernelElement>(
    problem: &Problem<'_, '_>,
    at: At,
    (queries, keys, values): (&[T], &[T], &[T]),
    scores: &mut [f32],
    out_row: &mut [f32],
    outputs: &mut Outputs<'_, O>,
) {
    let (shape, mask) = (problem.shape(), problem.attn().get_mask());
    let scale = problem.attn().get_scale().unwrap_or_else(|| attn_core::score::default_scale(shape.head_dim)) as f32;

    // S = scale · Q · Kᵀ
    scores.fill(0.0);
    if shape.head_dim > 0 && shape.kv_len > 0 {
        for (row, query) in scores.chunks_exact_mut(shape.kv_len).zip(queries.chunks_exact(shape.head_dim)) {
            for (score, key) in row.iter_mut().zip(keys.chunks_exact(shape.head_dim)) {
                *score = scale * dot(query, key);
            }
        }
    }
    for query in 0..shape.q_len {
        let row = &mut scores[query * shape.kv_len..][..shape.kv_len];
        if !mask.is_none() {
            for (key, score) in row.iter_mut().enumerate() {
                if !mask.visible(shape, At { query, key, ..at }) {
                    *score = f32::NEG_INFINITY;
                }
            }
        }
        // P = softmax(S), row by row; then O = P · V
        let lse = softmax(row);
        out_row.fill(0.0);
        if shape.value_dim > 0 {
            for (&weight, value) in row.iter().zip(values.chunks_exact(shape.value_dim)) {
                // A hidden key has weight 0 and must not be touched: its value may be NaN.
                if weight != 0.0 {
                    for (o, &x) in out_row.iter_mut().zip(value) {
                        *o += weight * x.widen();
                    }
                }
            }
        }
        for (d, &x) in out_row.iter().enumerate() {
            outputs.out.set(at.batch, at.head, query, d, O::narrow(x));
        }
        if let Some(slot) = outputs.lse.as_deref_mut() {
            slot[shape.row(at.batch, at.head, query)] = lse;
        }
    }
}

/// The rows of one head, which are contiguous.
fn head_of<T: KernelElement>(view: View<'_, T>, batch: usize, head: usize) -> &[T] {
    let ([_, _, seq, dim], [batch_stride, head_stride, ..]) = (view.sizes(), view.strides());
    if view.is_empty() {
        return &[];
    }
    let start = view.offset().wrapping_add_signed(batch as isize * batch_stride + head as isize * head_stride);
    &view.data()[start..][..seq * dim]
}

/// Copies one head into contiguous f32 rows.
fn gather<T: KernelElement>(from: View<'_, T>, batch: usize, head: usize, to: &mut [f32]) {
    let [_, _, seq, dim] = from.sizes();
    if dim == 0 {
        return;
    }
    for (s, row) in to.chunks_exact_mut(dim).take(seq).enumerate() {
        let source = from.row(batch, head, s);
        match source.as_slice() {
            Some(slice) => row.iter_mut().zip(slice).for_each(|(to, from)| *to = from.widen()),
            None => row.iter_mut().zip(source.iter()).for_each(|(to, from)| *to = from.widen()),
        }
    }
}

/// A dot product with sixteen independent sums, so that the compiler may use its widest registers.
pub(crate) fn dot<T: KernelElement>(a: &[T], b: &[T]) -> f32 {
    let mut sums = [0.0f32; 16];
    let (a16, a_rest) = a.as_chunks::<16>();
    let (b16, b_rest) = b.as_chunks::<16>();
    for (a, b) in a16.iter().zip(b16) {
        for (sum, (x, y)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += x.widen() * y.widen();
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(x, y)| x.widen() * y.widen()).sum();
    sums.iter().sum::<f32>() + rest
}

/// Normalises one row of scores in place and returns its log-sum-exp.
pub(crate) fn softmax(row: &mut [f32]) -> f32 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, |a, b| if b > a || b.is_nan() { b } else { a });
    if max == f32::NEG_INFINITY {
        row.fill(0.0);
        return f32::NEG_INFINITY;
    }
    let mut sum = 0.0f32;
    for x in row.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    for x in row {
        *x /= sum;
    }
    max + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::case::{Case, Tensors};
    use attn_core::{Align, Layout, Mask, ViewMut, reference};

    fn compare(case: Case, attn: &Attention<'_>) {
        let mut t = Tensors::<f32>::new(case, 3);
        let rows = case.shape().unwrap().rows();
        let (mut lse, mut want_lse) = (vec![0.0f32; rows], vec![0.0f32; rows]);
        let mut want = vec![0.0f32; t.out.len()];
        let (q, k, v, out) = t.views().unwrap();
        let mut scratch = vec![f32::NAN; scratch_len(q, k, v).unwrap()];
        forward(attn, q, k, v, Outputs::new(out).lse(&mut lse), &mut scratch).unwrap();
        let want_out = ViewMut::new(&mut want, Layout::Bhsd, case.q_sizes()).unwrap();
        let outputs = Outputs::new(want_out).lse(&mut want_lse);
        reference::forward(attn, q, k, v, outputs, &mut vec![0.0; case.kv_len]).unwrap();
        for (got, want) in t.out.iter().zip(&want).chain(lse.iter().zip(&want_lse)) {
            assert!(got == want || (got - want).abs() < 4e-6, "{case:?}: {got} against {want}");
        }
    }

    #[test]
    fn agrees_with_the_reference() {
        for causal in [false, true] {
            for (q_len, kv_len, head_dim) in [(1, 1, 1), (5, 17, 16), (33, 20, 40), (4, 0, 8), (0, 4, 8), (3, 5, 0)] {
                let case = Case { batch: 2, q_heads: 4, kv_heads: 2, q_len, kv_len, head_dim, causal };
                compare(case, &Attention::new().mask(case.mask()));
            }
        }
        let lens = [3, 0];
        let case = Case { batch: 2, ..Case::square(9, 8) };
        compare(case, &Attention::new().scale(0.3).mask(Mask::kv_lens(&lens).and(Mask::causal(Align::TopLeft))));
    }

    #[test]
    fn other_layouts_and_halves_are_gathered() {
        use attn_core::half::f16;
        // 2 heads of 3 positions of dim 4, stored position by position, in half precision.
        let data: Vec<f16> = crate::case::normal(1, 24).into_iter().map(f16::from_f32).collect();
        let x = View::new(&data, Layout::Bshd, [1, 2, 3, 4]).unwrap();
        assert_eq!(scratch_len(x, x, x), Some(9 + 4 + 3 * 12));
        let (mut out, mut want) = ([0.0f32; 24], [0.0f32; 24]);
        let attn = Attention::new();
        forward(&attn, x, x, x, ViewMut::new(&mut out, Layout::Bhsd, x.sizes()).unwrap(), &mut [0.0; 49]).unwrap();
        let want_view = ViewMut::new(&mut want, Layout::Bhsd, x.sizes()).unwrap();
        reference::forward(&attn, x, x, x, want_view, &mut [0.0; 3]).unwrap();
        assert!(out.iter().zip(want).all(|(a, b)| (a - b).abs() < 2e-6), "{out:?}\n{want:?}");
    }

    #[test]
    fn refuses_what_it_would_ignore() {
        let mut t = Tensors::<f32>::new(Case::square(4, 8), 0);
        let (q, k, v, out) = t.views().unwrap();
        let error = forward(&Attention::new().softcap(3.0), q, k, v, out, &mut [0.0; 1000]);
        assert!(matches!(error, Err(AttnError::Unsupported { .. })));
    }
}
