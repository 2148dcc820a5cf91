//! Linear attention: without the softmax, keys and values fold into a state of fixed size.
//!
//! With `φ(q)·φ(k)` in the place of `exp(q·k)`, where `φ(x) = elu(x) + 1`, the sum over keys can be taken first
//! (Katharopoulos et al. 2020, "Transformers are RNNs", arXiv 2006.16236, eq. 4-12):
//!
//! ```text
//! yᵢ = φ(qᵢ)·S / (φ(qᵢ)·z + eps),   S = Σⱼ φ(kⱼ)·vⱼᵀ  [head_dim, value_dim],   z = Σⱼ φ(kⱼ)  [head_dim]
//! ```
//!
//! The time is O(n·head_dim·value_dim), and a causal decoder needs only `S` and `z` to go on. There is no
//! `1/√head_dim`. It is not softmax attention, nor an approximation of it. Its gradient is
//! [`LinearAttention::backward`].

mod backward;

use attn_core::element::Real;
use attn_core::engine::product;
use attn_core::{Align, AttnError, AttnShape, Element, Result, View, ViewMut};

/// `elu(x) + 1`: above 0 for every x, so that weights are too.
///
/// ```
/// use attn_layers::variants::linear::elu_plus_one;
/// assert_eq!((elu_plus_one(2.0f64), elu_plus_one(-1.0f64)), (3.0, (-1f64).exp()));
/// ```
#[inline]
pub fn elu_plus_one<R: Real>(x: R) -> R {
    if x > R::ZERO { x + R::ONE } else { x.exp() }
}

/// The options of linear attention. Starts non-causal, with eps 0.
///
/// ```
/// use attn_layers::variants::linear::{LinearAttention, LinearState};
/// use attn_core::{Align, View, ViewMut};
/// let x = [0.5f32, -1.0, 2.0]; // three tokens of dim 1: q = k = v
/// let (mut s, mut z) = ([0.0f32; 1], [0.0f32; 1]);
/// let (mut whole, mut stream) = ([0.0f32; 3], [0.0f32; 3]);
/// let linear = LinearAttention::new().causal(Align::TopLeft);
/// let all = View::matrix(&x, 3, 1)?;
/// let mut out = ViewMut::matrix(&mut whole, 3, 1)?;
/// linear.forward(all, all, all, &mut out, LinearState { s: &mut s, z: &mut z }, &mut [0.0])?;
///
/// // Token by token: the state is all that is carried over.
/// (s, z) = ([0.0], [0.0]);
/// for (x, y) in x.iter().zip(&mut stream) {
///     let token = View::matrix(std::slice::from_ref(x), 1, 1)?;
///     let mut out = ViewMut::matrix(std::slice::from_mut(y), 1, 1)?;
///     linear.forward(token, token, token, &mut out, LinearState { s: &mut s, z: &mut z }, &mut [0.0])?;
/// }
/// assert_eq!(whole, stream);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinearAttention {
    causal: Option<Align>,
    eps: f64,
}

/// The sums over all keys so far, to be zeroed by the caller before the first call of a stream.
#[derive(Debug)]
pub struct LinearState<'s, R> {
    /// `Σ φ(k)·vᵀ`: `[batch, kv_heads, head_dim, value_dim]`, row-major.
    pub s: &'s mut [R],
    /// `Σ φ(k)`: `[batch, kv_heads, head_dim]`, row-major.
    pub z: &'s mut [R],
}

impl<R> LinearState<'_, R> {
    fn check(&self, shape: &AttnShape) -> Result<()> {
        let (s_len, z_len) = LinearAttention::state_len(shape)?;
        AttnError::check_size("state s (batch · kv_heads · head_dim · value_dim)", s_len, self.s.len())?;
        AttnError::check_size("state z (batch · kv_heads · head_dim)", z_len, self.z.len())
    }
}

impl LinearAttention {
    /// Every query sees every key; eps 0.
    pub const fn new() -> Self {
        Self { causal: None, eps: 0.0 }
    }

    /// Query `i` sees keys `j ≤ i + offset` of the call, and all that the state held before.
    pub const fn causal(mut self, align: Align) -> Self {
        self.causal = Some(align);
        self
    }

    /// Added to the denominator; finite and not negative.
    pub const fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// Lengths of the two sums of a state.
    ///
    /// # Errors
    /// [`AttnError::Overflow`].
    pub fn state_len(shape: &AttnShape) -> Result<(usize, usize)> {
        let len = |sizes: &[usize]| product(sizes).ok_or(AttnError::Overflow { what: "linear attention state" });
        let AttnShape { batch, kv_heads, head_dim, value_dim, .. } = *shape;
        Ok((len(&[batch, kv_heads, head_dim, value_dim])?, len(&[batch, kv_heads, head_dim])?))
    }

    /// Elements of scratch that [`forward`](Self::forward) needs: one query after the feature map.
    pub const fn scratch_len(shape: &AttnShape) -> usize {
        shape.head_dim
    }

    /// Takes all keys into the state and writes the outputs.
    ///
    /// `q`: `[batch, q_heads, q_len, head_dim]`, `k`: `[batch, kv_heads, kv_len, head_dim]`, `v`:
    /// `[batch, kv_heads, kv_len, value_dim]`, `out`: `[batch, q_heads, q_len, value_dim]`. `R`, the type of state and
    /// scratch, is what is computed in. A query whose denominator is 0 (no keys, and eps 0) gets 0.
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written.
    pub fn forward<T: Element, O: Element, R: Real>(
        &self,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        out: &mut ViewMut<'_, O>,
        state: LinearState<'_, R>,
        scratch: &mut [R],
    ) -> Result<()> {
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
        shape.check_output(out.sizes())?;
        self.check_eps()?;
        state.check(&shape)?;
        AttnError::check_len("linear attention scratch", Self::scratch_len(&shape), scratch.len())?;
        let features = scratch.get_mut(..shape.head_dim).unwrap_or_default();

        let (s_one, z_one) = (shape.head_dim.saturating_mul(shape.value_dim), shape.head_dim);
        for batch in 0..shape.batch {
            for kv_head in 0..shape.kv_heads {
                let n = batch * shape.kv_heads + kv_head;
                let s = state.s.get_mut(n * s_one..).and_then(|s| s.get_mut(..s_one)).unwrap_or_default();
                let z = state.z.get_mut(n * z_one..).and_then(|z| z.get_mut(..z_one)).unwrap_or_default();
                let mut taken = 0;
                let mut take_until = |end: usize, s: &mut [R], z: &mut [R]| {
                    while taken < end {
                        take(k.row(batch, kv_head, taken).iter(), v.row(batch, kv_head, taken), s, z);
                        taken += 1;
                    }
                };
                for query in 0..shape.q_len {
                    take_until(self.sees(query, &shape), s, z);
                    for member in 0..shape.group() {
                        let head = kv_head * shape.group() + member;
                        for (f, x) in features.iter_mut().zip(q.row(batch, head, query).iter()) {
                            *f = elu_plus_one(R::of(x.to_f64()));
                        }
                        let denominator = dot(features, z.iter().copied()) + R::of(self.eps);
                        for d in 0..shape.value_dim {
                            let column = s.iter().skip(d).step_by(shape.value_dim.max(1)).copied();
                            let numerator = dot(features, column);
                            let y = if denominator == R::ZERO { R::ZERO } else { numerator / denominator };
                            out.set(batch, head, query, d, O::from_f64(y.to_f64()));
                        }
                    }
                }
                take_until(shape.kv_len, s, z);
            }
        }
        Ok(())
    }

    fn check_eps(&self) -> Result<()> {
        if self.eps.is_finite() && self.eps >= 0.0 {
            return Ok(());
        }
        Err(AttnError::Option { name: "linear attention eps", must: "finite and not negative" })
    }

    /// How many keys a query sees.
    fn sees(&self, query: usize, shape: &AttnShape) -> usize {
        match self.causal {
            None => shape.kv_len,
            Some(align) => {
                let end = align.position(query, shape.q_len, shape.kv_len).saturating_add(1);
                usize::try_from(end).map_or(0, |end| end.min(shape.kv_len))
            }
        }
    }
}

/// Takes one key and value into the sums.
fn take<T: Element, R: Real>(k: impl Iterator<Item = T>, v: attn_core::row::Row<'_, T>, s: &mut [R], z: &mut [R]) {
    // Without value dims there are no rows of s, but z still counts the keys.
    let mut rows = s.chunks_exact_mut(v.len().max(1));
    for (k, z) in k.zip(z) {
        let feature = elu_plus_one(R::of(k.to_f64()));
        *z += feature;
        for (s, v) in rows.next().unwrap_or_default().iter_mut().zip(v.iter()) {
            *s += feature * R::of(v.to_f64());
        }
    }
}

fn dot<R: Real>(x: &[R], y: impl Iterator<Item = R>) -> R {
    let mut sum = R::ZERO;
    for (x, y) in x.iter().zip(y) {
        sum += *x * y;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::Layout;
    use std::vec;
    use std::vec::Vec;

    fn numbers(n: usize, seed: f64) -> Vec<f64> {
        (0..n).map(|i| libm::sin(seed + i as f64 * 1.7)).collect()
    }

    /// The definition: all weights `φ(q)·φ(k)`, one by one.
    fn direct(q: View<'_, f64>, k: View<'_, f64>, v: View<'_, f64>, offset: Option<isize>, eps: f64) -> Vec<f64> {
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes()).unwrap();
        let mut out = Vec::new();
        for (b, h, i) in (0..shape.rows())
            .map(|n| (n / shape.q_len / shape.q_heads, n / shape.q_len % shape.q_heads, n % shape.q_len))
        {
            let sees = |j: usize| offset.is_none_or(|offset| j as isize <= i as isize + offset);
            let weight = |j: usize| {
                let pairs = q.row(b, h, i).iter().zip(k.row(b, shape.kv_head(h), j).iter());
                pairs.map(|(q, k)| elu_plus_one(q) * elu_plus_one(k)).sum::<f64>()
            };
            let keys: Vec<usize> = (0..shape.kv_len).filter(|&j| sees(j)).collect();
            let sum = keys.iter().map(|&j| weight(j)).sum::<f64>() + eps;
            for d in 0..shape.value_dim {
                let y: f64 = keys.iter().map(|&j| weight(j) * v.at(b, shape.kv_head(h), j, d)).sum();
                out.push(if keys.is_empty() { 0.0 } else { y / sum });
            }
        }
        out
    }

    #[test]
    fn the_sums_give_what_the_weights_give() {
        let (q, k, v) = (numbers(2 * 4 * 3 * 5, 0.1), numbers(2 * 2 * 6 * 5, 0.2), numbers(2 * 2 * 6 * 2, 0.3));
        let q = View::new(&q, Layout::Bshd, [2, 4, 3, 5]).unwrap();
        let k = View::new(&k, Layout::Bhsd, [2, 2, 6, 5]).unwrap();
        let v = View::new(&v, Layout::Sbhd, [2, 2, 6, 2]).unwrap();
        let cases = [
            (LinearAttention::new().eps(0.25), None, 0.25),
            (LinearAttention::new().causal(Align::TopLeft), Some(0), 0.0),
            (LinearAttention::new().causal(Align::BottomRight), Some(3), 0.0),
            (LinearAttention::new().causal(Align::Offset(-2)), Some(-2), 0.0), // two rows see nothing
        ];
        for (linear, offset, eps) in cases {
            let (mut out, mut s, mut z) = (vec![9.0f64; 48], vec![0.0f64; 40], vec![0.0f64; 20]);
            let mut view = ViewMut::new(&mut out, Layout::Bhsd, [2, 4, 3, 2]).unwrap();
            let state = LinearState { s: &mut s, z: &mut z };
            linear.forward(q, k, v, &mut view, state, &mut [0.0; 5]).unwrap();
            for (got, want) in out.iter().zip(direct(q, k, v, offset, eps)) {
                assert!((got - want).abs() < 1e-13, "{linear:?}: {got} {want}");
            }
            // The state is over all keys, seen or not.
            let want: f64 = (0..6).map(|j| elu_plus_one(k.at(1, 1, j, 4))).sum();
            assert!((z[19] - want).abs() < 1e-13);
            let want: f64 = (0..6).map(|j| elu_plus_one(k.at(1, 1, j, 4)) * v.at(1, 1, j, 1)).sum();
            assert!((s[39] - want).abs() < 1e-13);
        }
    }

    #[test]
    fn the_feature_map_is_elu_plus_one() {
        assert_eq!((elu_plus_one(0.5f32), elu_plus_one(0.0f32)), (1.5, 1.0));
        assert_eq!(elu_plus_one(-2.0f64), libm::exp(-2.0));
        assert!(elu_plus_one(f64::NAN).is_nan());
    }

    #[test]
    fn what_does_not_fit_is_refused_before_writing() {
        let x = [1.0f32; 4];
        let x = View::matrix(&x, 2, 2).unwrap();
        let (mut out, mut s, mut z) = ([7.0f32; 4], [0.0f32; 4], [0.0f32; 2]);
        let mut refused = |linear: LinearAttention, s_len: usize, z_len: usize, scratch: &mut [f32]| {
            let state = LinearState { s: &mut s[..s_len], z: &mut z[..z_len] };
            linear.forward(x, x, x, &mut ViewMut::matrix(&mut out, 2, 2).unwrap(), state, scratch).is_err()
        };
        let linear = LinearAttention::new();
        assert!(refused(linear, 3, 2, &mut [0.0; 2]) && refused(linear, 4, 1, &mut [0.0; 2]));
        assert!(refused(linear, 4, 2, &mut [0.0; 1]));
        assert!(refused(linear.eps(-1.0), 4, 2, &mut [0.0; 2]) && refused(linear.eps(f64::NAN), 4, 2, &mut [0.0; 2]));
        assert_eq!((out, s), ([7.0; 4], [0.0; 4]));
    }
}
