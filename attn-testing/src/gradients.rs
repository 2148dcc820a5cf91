//! Plain calls of some lengths whose gradients are measured beside torch's, their gradients in f64, and the sizes of
//! what each adds up. `attn-testing/python/torch_gradients.py` draws the same numbers.
//!
//! The loops are those of the formula, with sums along channels inside: some seconds for 4096 keys, where
//! [`attn_core::backward`] would take a minute.

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
        let [q, k, v, dy] = &self.tensors;
        let (len, scale) = (self.shape.q_len, 1.0 / (DIM as f64).sqrt());
        let zeros = || [vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]];
        let (mut exact, mut sizes) = (zeros(), zeros());
        let (mut weights, mut gradients) = (vec![0.0; len], vec![[0.0; 2]; len]);
        for (row, (q, dy)) in q.as_chunks::<DIM>().0.iter().zip(dy.as_chunks::<DIM>().0).enumerate() {
            let (head, query) = (row / len, row % len);
            let first = self.shape.kv_head(head) * len;
            let seen = if self.causal { query + 1 } else { len };
            let [k, v] = [k, v].map(|x| &x.as_chunks::<DIM>().0[first..first + seen]);
            let (weights, gradients) = (&mut weights[..seen], &mut gradients[..seen]);
            for (weight, k) in weights.iter_mut().zip(k) {
                *weight = dot(q, k) * scale;
            }
            let most = weights.iter().fold(f64::NEG_INFINITY, |most, &x| most.max(x));
            weights.iter_mut().for_each(|x| *x = (*x - most).exp());
            let sum: f64 = weights.iter().sum();
            let mut out = [0.0; DIM];
            for (weight, v) in weights.iter_mut().zip(v) {
                *weight /= sum;
                add(&mut out, *weight, v);
            }
            let (delta, delta_size) = (dot(dy, &out), dot_of_sizes(dy, &out));
            for ((gradient, &p), v) in gradients.iter_mut().zip(&*weights).zip(v) {
                *gradient = [p * (dot(dy, v) - delta) * scale, p * (dot_of_sizes(dy, v) + delta_size) * scale];
            }
            for (n, (&[gradient, size], k)) in gradients.iter().zip(k).enumerate() {
                for (to, factor, abs) in [(&mut exact, gradient, false), (&mut sizes, size, true)] {
                    let taken = |x: &[f64; DIM]| if abs { x.map(f64::abs) } else { *x };
                    let [dq, dk, dv] = to.each_mut().map(|x| x.as_chunks_mut::<DIM>().0);
                    add(&mut dq[row], factor, &taken(k));
                    add(&mut dk[first + n], factor, &taken(q));
                    add(&mut dv[first + n], weights[n], &taken(dy));
                }
            }
        }
        Answer { exact, sizes }
    }
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
    let mut sums = [0.0; 8];
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    sums.iter().sum()
}

fn dot_of_sizes(a: &[f64; DIM], b: &[f64; DIM]) -> f64 {
    dot(&a.map(f64::abs), &b.map(f64::abs))
}

fn add(to: &mut [f64; DIM], factor: f64, x: &[f64; DIM]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
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
