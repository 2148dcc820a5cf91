//! Plain calls of some lengths whose gradients are measured beside torch's, their gradients in f64, and the sizes of
//! what each adds up. `attn-testing/python/torch_gradients.py` draws the same numbers.
//!
//! The loops are those of the formula, for some queries at a time, with sums along channels inside: a few seconds for
//! 4096 keys, where [`attn_core::backward`] would take a minute.

use attn_core::{Align, Attention, AttnShape, Mask};

use crate::numbers::Numbers;
use crate::tolerance::{Eta, TorchGradients};

/// Channels of a head.
pub const DIM: usize = 64;

/// A call of a row of the table: its tensors, which its type holds exactly.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Its sizes.
    pub shape: AttnShape,
    causal: bool,
    /// q, k, v and dy, `[head][position][channel]`.
    pub tensors: [Vec<f64>; 4],
}

/// Gradients by q, k and v, and for each number the sum of the sizes of its terms.
#[derive(Clone, Debug)]
pub struct Answer {
    exact: [Vec<f64>; 3],
    sizes: [Vec<f64>; 3],
}

impl Call {
    /// Of numbers of variance 1. For halves they are multiples of 1/64, which every type holds.
    pub fn new(row: &TorchGradients) -> Self {
        let (q_heads, kv_heads, len) = (row.q_heads, row.kv_heads, row.len);
        let coarse = row.dtype != attn_core::Dtype::F32;
        let round = |x: f64| if coarse { (x * 64.0 + 0.5).floor() / 64.0 } else { f64::from(x as f32) };
        let heads = [q_heads, kv_heads, kv_heads, q_heads];
        let tensors = core::array::from_fn(|n| {
            let numbers = Numbers::new((1000 * n + len) as u64).take(heads[n] * len * DIM);
            numbers.into_iter().map(|x| round(x * 1.7320508)).collect()
        });
        let shape = AttnShape { batch: 1, q_heads, kv_heads, q_len: len, kv_len: len, head_dim: DIM, value_dim: DIM };
        Self { shape, causal: row.causal, tensors }
    }

    /// Its options.
    pub fn attention(&self) -> Attention<'static> {
        if self.causal { Attention::new().mask(Mask::causal(Align::TopLeft)) } else { Attention::new() }
    }

    /// The gradients in f64.
    pub fn answer(&self) -> Answer {
        let [q, k, v, dy] = self.tensors.each_ref().map(|x| x.as_chunks::<DIM>().0);
        let len = self.shape.q_len;
        let zeros = || [q, k, v].map(|x| vec![[0.0; DIM]; x.len()]);
        let (mut exact, mut sizes) = (zeros(), zeros());
        let mut terms = vec![[Term::default(); QUERIES]; len];
        let heads = 0..self.shape.q_heads;
        for (head, query) in heads.flat_map(|head| (0..len).step_by(QUERIES).map(move |query| (head, query))) {
            let (first, count) = (head * len + query, QUERIES.min(len - query));
            let (q, dy) = (&q[first..first + count], &dy[first..first + count]);
            let keys = self.shape.kv_head(head) * len;
            let (k, v) = (&k[keys..keys + len], &v[keys..keys + len]);
            self.terms(query, [q, dy], [k, v], &mut terms);
            let of_queries = |to: &mut [Vec<[f64; DIM]>; 3]| to[0][first..first + count].to_vec();
            let [mut dq, mut dq_sizes] = [of_queries(&mut exact), of_queries(&mut sizes)];
            for (n, terms) in terms.iter().enumerate() {
                let ([_, dk, dv], [_, dk_sizes, dv_sizes]) = (&mut exact, &mut sizes);
                for (row, term) in terms[..count].iter().enumerate() {
                    add(&mut dq[row], term.gradient, &k[n]);
                    add_sizes(&mut dq_sizes[row], term.size, &k[n]);
                    add(&mut dk[keys + n], term.gradient, &q[row]);
                    add_sizes(&mut dk_sizes[keys + n], term.size, &q[row]);
                    add(&mut dv[keys + n], term.weight, &dy[row]);
                    add_sizes(&mut dv_sizes[keys + n], term.weight, &dy[row]);
                }
            }
            exact[0][first..first + count].copy_from_slice(&dq);
            sizes[0][first..first + count].copy_from_slice(&dq_sizes);
        }
        let flat = |x: [Vec<[f64; DIM]>; 3]| x.map(|x| x.as_flattened().to_vec());
        Answer { exact: flat(exact), sizes: flat(sizes) }
    }

    /// What each key is to some queries from number `query` on. What a query does not see weighs nothing.
    fn terms(
        &self,
        query: usize,
        [q, dy]: [&[[f64; DIM]]; 2],
        [k, v]: [&[[f64; DIM]]; 2],
        terms: &mut [[Term; QUERIES]],
    ) {
        let scale = 1.0 / (DIM as f64).sqrt();
        let (mut most, mut sum) = ([f64::NEG_INFINITY; QUERIES], [0.0; QUERIES]);
        let mut out = [[0.0; DIM]; QUERIES];
        for (n, (terms, k)) in terms.iter_mut().zip(k).enumerate() {
            for (row, q) in q.iter().enumerate() {
                let is_seen = !self.causal || n <= query + row;
                terms[row].weight = if is_seen { dot(q, k) * scale } else { f64::NEG_INFINITY };
                most[row] = most[row].max(terms[row].weight);
            }
        }
        for terms in &mut *terms {
            for row in 0..q.len() {
                terms[row].weight = (terms[row].weight - most[row]).exp();
                sum[row] += terms[row].weight;
            }
        }
        for (terms, v) in terms.iter_mut().zip(v) {
            for row in 0..q.len() {
                terms[row].weight /= sum[row];
                add(&mut out[row], terms[row].weight, v);
            }
        }
        for (row, dy) in dy.iter().enumerate() {
            let (delta, delta_size) = (dot(dy, &out[row]), dot_of_sizes(dy, &out[row]));
            for (terms, v) in terms.iter_mut().zip(v) {
                let factor = terms[row].weight * scale;
                terms[row].gradient = factor * (dot(dy, v) - delta);
                terms[row].size = factor * (dot_of_sizes(dy, v) + delta_size);
            }
        }
    }
}

/// So many queries share what is read of keys and values.
const QUERIES: usize = 16;

/// What one key is to one query.
#[derive(Clone, Copy, Default)]
struct Term {
    /// Its weight; its score before that.
    weight: f64,
    /// The derivative of the loss by its score.
    gradient: f64,
    /// The sum of the sizes of that derivative's terms.
    size: f64,
}

impl Answer {
    /// How far dq, dk and dv are from the exact ones.
    pub fn eta(&self, found: [&[f64]; 3]) -> [Eta; 3] {
        core::array::from_fn(|n| {
            let (mut largest, mut squares) = (0.0f64, 0.0);
            assert_eq!(found[n].len(), self.exact[n].len());
            for ((found, exact), size) in found[n].iter().zip(&self.exact[n]).zip(&self.sizes[n]) {
                let eta = (found - exact).abs() / (size + 1e-30);
                largest = if eta.is_nan() { f64::INFINITY } else { largest.max(eta) };
                squares += eta * eta;
            }
            Eta { largest, rms: (squares / found[n].len() as f64).sqrt() }
        })
    }
}

fn dot(a: &[f64; DIM], b: &[f64; DIM]) -> f64 {
    sum_of(a, b, |a, b| a * b)
}

fn dot_of_sizes(a: &[f64; DIM], b: &[f64; DIM]) -> f64 {
    sum_of(a, b, |a, b| (a * b).abs())
}

#[inline(always)]
fn sum_of(a: &[f64; DIM], b: &[f64; DIM], product: impl Fn(f64, f64) -> f64) -> f64 {
    let mut sums = [0.0; 8];
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for n in 0..8 {
            sums[n] += product(a[n], b[n]);
        }
    }
    sums.iter().sum()
}

fn add(to: &mut [f64; DIM], factor: f64, x: &[f64; DIM]) {
    for n in 0..DIM {
        to[n] += factor * x[n];
    }
}

fn add_sizes(to: &mut [f64; DIM], factor: f64, x: &[f64; DIM]) {
    for n in 0..DIM {
        to[n] += factor * x[n].abs();
    }
}

#[cfg(test)]
mod tests {
    use attn_core::backward::{self, Gradients};
    use attn_core::{Dtype, Layout, View, ViewMut};

    use super::*;

    #[test]
    fn the_answer_is_the_references() {
        for causal in [false, true] {
            let row =
                TorchGradients { dtype: Dtype::F32, len: 40, causal, q_heads: 2, kv_heads: 1, eta: Default::default() };
            let call = Call::new(&row);
            let (heads, sizes) = ([2, 1, 1, 2], |heads| [1, heads, 40, DIM]);
            let view = |n: usize| View::new(&call.tensors[n], Layout::Bhsd, sizes(heads[n])).unwrap();
            let [mut dq, mut dk, mut dv] = [2, 1, 1].map(|heads| vec![0.0; heads * 40 * DIM]);
            let to = Gradients::new(
                ViewMut::new(&mut dq, Layout::Bhsd, sizes(2)).unwrap(),
                ViewMut::new(&mut dk, Layout::Bhsd, sizes(1)).unwrap(),
                ViewMut::new(&mut dv, Layout::Bhsd, sizes(1)).unwrap(),
            );
            let mut scratch = vec![0.0; backward::scratch_len(&call.shape).unwrap()];
            let attn = call.attention();
            backward::gradients(&attn, view(0), view(1), view(2), view(3), to, &mut scratch).unwrap();
            let eta = call.answer().eta([&dq, &dk, &dv]);
            assert!(eta.iter().all(|eta| eta.largest < 1e-14 && eta.largest > 0.0), "{eta:?}");
            dq[7] += 1.0;
            assert!(call.answer().eta([&dq, &dk, &dv])[0].largest > 1e-3);
        }
    }
}
