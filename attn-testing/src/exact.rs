//! Single rows in doubles, with the unit of their error.
//!
//! [`laws::oracle`](crate::laws::oracle) computes every row by the reference, which is written to be read. Here a
//! caller names the rows, and each costs one pass over its keys. So a check can cover tens of thousands of keys, or a
//! hundred thousand calls.

use attn_core::score::Problem;
use attn_core::score_mod::Mods;
use attn_core::{Attention, Dtype, Element, Result, View};

use crate::cases::Inputs;
use crate::tolerance::{ETA, ETA_ANY, LEAST, LSE, TOO_SMALL};

/// One row of the output in doubles.
#[derive(Clone, Debug, Default)]
pub struct Row {
    /// The output, an element per channel.
    pub out: Vec<f64>,
    /// The lse: −∞ for a row that sees nothing and has no sink.
    pub lse: f64,
    /// `Σⱼ pⱼ|vⱼ|` per channel (times `1/(1 − p)` under dropout).
    pub magnitude: Vec<f64>,
    /// `Σⱼ |vⱼ|` per channel, over the keys that the row sees.
    pub values: Vec<f64>,
    /// `S`: the largest `scale·Σ|q·k| + |bias|` over the keys that the row sees.
    pub score_bound: f64,
    /// How many keys it sees.
    pub keys: usize,
}

impl Row {
    /// What `eta` of an f32 output may be, of inputs that are not chosen to err.
    pub fn eta_bound(&self) -> f64 {
        ETA.bound(Dtype::F32, self.score_bound)
    }

    /// How far a channel of an f32 output may be off, by the text of [`attn_core::Precision`].
    pub fn allowed(&self, channel: usize) -> f64 {
        let eta = ETA_ANY.bound(Dtype::F32, self.score_bound);
        eta * self.magnitude[channel] + TOO_SMALL * self.values[channel] + LEAST * self.keys.max(1) as f64
    }

    /// How far the lse may be off.
    pub fn allowed_lse(&self) -> f64 {
        LSE.bound(Dtype::F32, self.score_bound + self.lse.abs())
    }
}

/// One call, ready to compute rows.
#[derive(Debug)]
pub struct Exact<'x, M = ()> {
    problem: Problem<'x, 'x, M>,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    scores: Vec<f64>,
    seen: Vec<usize>,
}

impl<'x, M: Mods> Exact<'x, M> {
    /// Widens the inputs, in any layout.
    ///
    /// # Errors
    /// What [`Problem::of_shape`] refuses.
    pub fn new<T: Element>(attn: &'x Attention<'x, M>, inputs: &Inputs<T>) -> Result<Self> {
        Ok(Self {
            problem: Problem::of_shape(attn, inputs.shape)?,
            q: widened(inputs.q.view()),
            k: widened(inputs.k.view()),
            v: widened(inputs.v.view()),
            scores: Vec::new(),
            seen: Vec::new(),
        })
    }

    /// One row.
    pub fn row(&mut self, [batch, head, query]: [usize; 3]) -> Row {
        let problem = &self.problem;
        let (shape, attn) = (*problem.shape(), problem.attn());
        let (d, width) = (shape.head_dim, shape.value_dim);
        let kv_head = batch * shape.kv_heads + shape.kv_head(head);
        let q = &self.q[shape.row(batch, head, query) * d..][..d];
        let k = &self.k[kv_head * shape.kv_len * d..][..shape.kv_len * d];
        let v = &self.v[kv_head * shape.kv_len * width..][..shape.kv_len * width];

        let sink = problem.sink(head).map(f64::from);
        let (mut max, mut bound) = (sink.unwrap_or(f64::NEG_INFINITY), sink.map_or(0.0, f64::abs));
        let (scale, t) = (problem.scale().abs(), attn.get_temperature().unwrap_or(1.0));
        self.scores.clear();
        self.seen.clear();
        problem.for_each_visible(batch, head, query, |at| {
            let (dot, absolute) = dots(q, &k[at.key * d..][..d]);
            let score = problem.score(dot, at);
            let bias = attn.get_bias().map_or(0.0, |bias| bias.at(at).abs())
                + attn.get_alibi().map_or(0.0, |alibi| alibi.at(&shape, at).abs());
            bound = bound.max((absolute * scale + bias) / t);
            max = max.max(score);
            self.scores.push(score);
            self.seen.push(at.key);
        });

        let zero = vec![0.0; width];
        let mut row = Row { out: zero.clone(), magnitude: zero.clone(), values: zero, ..Row::default() };
        (row.score_bound, row.keys) = (bound, self.seen.len());
        if max == f64::NEG_INFINITY {
            row.lse = max;
            return row;
        }
        let mut sum = sink.map_or(0.0, |sink| (sink - max).exp());
        for score in &mut self.scores {
            *score = (*score - max).exp();
            sum += *score;
        }
        row.lse = max + sum.ln();
        let dropout = attn.get_dropout();
        for (&key, &weight) in self.seen.iter().zip(&self.scores) {
            let values = &v[key * width..][..width];
            let kept = if dropout.is_none() {
                weight
            } else {
                weight * problem.dropout_factor(attn_core::score::At { batch, head, query, key })
            };
            let sums = row.out.iter_mut().zip(&mut row.magnitude).zip(&mut row.values);
            for (((out, magnitude), all), &v) in sums.zip(values) {
                *out += kept * v;
                *magnitude += weight * v.abs();
                *all += v.abs();
            }
        }
        row.out.iter_mut().for_each(|x| *x /= sum);
        row.magnitude.iter_mut().for_each(|x| *x *= dropout.factor() / sum);
        row
    }
}

/// `Σ q·k` and `Σ |q·k|`, in eight chains.
fn dots(q: &[f64], k: &[f64]) -> (f64, f64) {
    let (mut dot, mut absolute) = ([0.0; 8], [0.0; 8]);
    let ((q8, q_rest), (k8, k_rest)) = (q.as_chunks::<8>(), k.as_chunks::<8>());
    for (q, k) in q8.iter().zip(k8) {
        for n in 0..8 {
            let product = q[n] * k[n];
            dot[n] += product;
            absolute[n] += product.abs();
        }
    }
    for (n, (q, k)) in q_rest.iter().zip(k_rest).enumerate() {
        dot[n] += q * k;
        absolute[n] += (q * k).abs();
    }
    (dot.iter().sum(), absolute.iter().sum())
}

/// A tensor in doubles, dense.
fn widened<T: Element>(view: View<'_, T>) -> Vec<f64> {
    let [batches, heads, seq, dim] = view.sizes();
    let mut all = Vec::with_capacity(batches * heads * seq * dim);
    for (batch, head) in (0..batches).flat_map(|batch| (0..heads).map(move |head| (batch, head))) {
        for place in 0..seq {
            all.extend(view.row(batch, head, place).iter().map(Element::to_f64));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::Case;
    use crate::laws::oracle;

    #[test]
    fn rows_are_the_reference_s() {
        for seed in 0..60 {
            let case = Case::random(seed);
            let (attn, inputs) = (case.options.attention(), case.inputs::<f32>());
            let (whole, shape) = (oracle(&attn, &inputs), case.shape);
            let mut exact = Exact::new(&attn, &inputs).unwrap();
            for n in 0..shape.rows() {
                let (head, query) = (n / shape.q_len, n % shape.q_len);
                let row = exact.row([head / shape.q_heads, head % shape.q_heads, query]);
                let near = |a: f64, b: f64| a == b || (a - b).abs() <= 1e-12 * b.abs().max(1.0);
                assert!(near(row.lse, whole.lse[n]) && near(row.score_bound, whole.score_bound[n]), "{case:?} row {n}");
                for c in 0..shape.value_dim {
                    let at = n * shape.value_dim + c;
                    assert!(near(row.out[c], whole.out[at]), "{case:?} row {n}");
                    assert!(near(row.magnitude[c], whole.magnitude[at]), "{case:?} row {n}");
                }
            }
        }
    }
}
