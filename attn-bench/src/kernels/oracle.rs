//! What a row should give, in f64: a part of the output or of the gradients, because the reference is slow.

use attn_core::backward::{self, Gradients};
use attn_core::{AttnError, AttnShape, Layout, View, ViewMut};

use super::inputs::Inputs;
use super::shapes::{Kernel, What};
use crate::case::{Case, Tensors};

/// Queries per head that are held against the reference: the last ones, which see all keys even if causal.
const ROWS: usize = 8;

/// Some numbers of a row's result, and where they are in it.
#[derive(Debug)]
pub(super) struct Oracle {
    /// How many numbers the result has.
    len: usize,
    /// Where each run of numbers starts.
    runs: Vec<(usize, Vec<f64>)>,
}

impl Oracle {
    /// For plain rows and those of gradients; none for others.
    ///
    /// # Errors
    /// What the reference refuses.
    pub(super) fn of(kernel: &Kernel, inputs: &Inputs) -> Result<Option<Self>, AttnError> {
        Ok(match kernel.what {
            What::Plain => Some(Self::of_output(&inputs.tensors)?),
            What::Backward => Some(Self::of_gradients(&inputs.tensors, inputs.extra())?),
            _ => None,
        })
    }

    /// The outputs of the last queries of each head.
    fn of_output(tensors: &Tensors) -> Result<Self, AttnError> {
        let case = tensors.case;
        let rows = case.q_len.min(ROWS);
        let few = Case { q_len: rows, ..case };
        let (head, skipped) = (case.q_len * case.head_dim, (case.q_len - rows) * case.head_dim);
        let heads = tensors.q.chunks_exact(head.max(1));
        let q: Vec<f32> = heads.flat_map(|head| &head[skipped..]).copied().collect();
        let mut out = vec![0.0f64; q.len()];
        let view = |x| View::new(x, Layout::Bhsd, case.kv_sizes());
        let (k, v) = (view(&tensors.k)?, view(&tensors.v)?);
        let q = View::new(&q, Layout::Bhsd, few.q_sizes())?;
        let to = ViewMut::new(&mut out, Layout::Bhsd, few.q_sizes())?;
        attn_core::reference::forward(&few.attention(), q, k, v, to, &mut vec![0.0; case.kv_len])?;
        let runs = out.chunks_exact((rows * case.head_dim).max(1)).enumerate();
        let runs = runs.map(|(n, run)| (n * head + skipped, run.to_vec())).collect();
        Ok(Self { len: tensors.out.len(), runs })
    }

    /// All gradients of the first key/value head and its query heads.
    fn of_gradients(tensors: &Tensors, dy: &[f32]) -> Result<Self, AttnError> {
        let case = tensors.case;
        let first = Case { batch: 1, q_heads: case.q_heads / case.kv_heads, kv_heads: 1, ..case };
        let (q_sizes, kv_sizes) = (first.q_sizes(), first.kv_sizes());
        let (q, dy) = (start(&tensors.q, q_sizes)?, start(dy, q_sizes)?);
        let (k, v) = (start(&tensors.k, kv_sizes)?, start(&tensors.v, kv_sizes)?);
        let [mut dq, mut dk, mut dv] = [q_sizes, kv_sizes, kv_sizes].map(|sizes| vec![0.0f64; sizes.iter().product()]);
        let to = Gradients::new(
            ViewMut::new(&mut dq, Layout::Bhsd, q_sizes)?,
            ViewMut::new(&mut dk, Layout::Bhsd, kv_sizes)?,
            ViewMut::new(&mut dv, Layout::Bhsd, kv_sizes)?,
        );
        let shape = AttnShape::new(q_sizes, kv_sizes, kv_sizes)?;
        backward::gradients(&first.attention(), q, k, v, dy, to, &mut vec![0.0; backward::scratch_len(&shape)?])?;
        let [of_q, of_k] = [tensors.q.len(), tensors.k.len()]; // one gradient after the other
        let runs = vec![(0, dq), (of_q, dk), (of_q + of_k, dv)];
        Ok(Self { len: of_q + 2 * of_k, runs })
    }

    /// The largest distance of a result; infinite if it has another length or is not a number.
    pub(super) fn distance(&self, result: &[f32]) -> f64 {
        if result.len() != self.len {
            return f64::INFINITY;
        }
        let off = self.runs.iter().flat_map(|(at, run)| {
            let found = result[*at..].iter();
            found.zip(run).map(|(&x, y)| (f64::from(x) - y).abs())
        });
        off.fold(0.0, |worst, d| if d.is_nan() { f64::INFINITY } else { worst.max(d) })
    }
}

/// A view of the first numbers.
fn start(data: &[f32], sizes: [usize; 4]) -> Result<View<'_, f32>, AttnError> {
    View::new(&data[..sizes.iter().product()], Layout::Bhsd, sizes)
}

#[cfg(test)]
mod tests {
    use super::super::shapes::parse;
    use super::*;

    /// A result of f64 passes; one that is off in a number that is looked at, or has another length, does not.
    #[test]
    fn a_wrong_number_is_seen() {
        for causal in [0, 1] {
            let row = |what| parse(&format!("k 2 4 2 20 20 8 {causal} {what} -")).unwrap().remove(0);
            let mut tensors = Tensors::<f32>::new(Case { causal: causal == 1, ..row("plain").case }, 1);
            let oracle = Oracle::of_output(&tensors).unwrap();
            let (q, k, v, out) = tensors.views().unwrap();
            attn_core::reference::forward(&row("plain").case.attention(), q, k, v, out, &mut [0.0; 20]).unwrap();
            assert!(oracle.distance(&tensors.out) < 1e-6, "causal {causal}");
            tensors.out[20 * 8 - 1] += 1.0; // the last query of the first head
            assert!(oracle.distance(&tensors.out) > 0.9);
            assert_eq!(oracle.distance(&tensors.out[..8]), f64::INFINITY);

            let inputs = row("backward").inputs();
            let oracle = Oracle::of(&row("backward"), &inputs).unwrap().expect("gradients have a reference");
            let (of_q, of_k) = (inputs.tensors.q.len(), inputs.tensors.k.len());
            let mut all = vec![0.0; of_q + 2 * of_k];
            for (at, run) in &oracle.runs {
                all[*at..][..run.len()].iter_mut().zip(run).for_each(|(to, &x)| *to = x as f32);
            }
            assert!(oracle.distance(&all) < 1e-6);
            for at in [0, of_q, of_q + of_k + 20 * 8 - 1] {
                all[at] += 1.0;
                assert!(oracle.distance(&all) > 0.9, "{at}");
                all[at] -= 1.0;
            }
            assert!(Oracle::of(&row("alibi"), &inputs).unwrap().is_none());
        }
    }
}
