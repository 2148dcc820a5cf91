//! The gradient of linear attention: one sweep over the tokens forward, for the queries, and one back, for the keys.
//!
//! With `ψ = φ(q)`, `D = ψ·z + eps`, `y = ψ·S/D` and a loss whose gradient by `y` is `dy`:
//!
//! ```text
//! dψ = (S·dy − (dy·y)·z)/D          dS += ψ·dyᵀ/D      dz −= ψ·(dy·y)/D
//! dφ(kⱼ) = dS·vⱼ + dz               dvⱼ = dSᵀ·φ(kⱼ)     dS, dz over the queries that see key j
//! ```
//!
//! Both sweeps hold a state of fixed size, so that memory does not grow with `head_dim·value_dim·n`.

use attn_core::backward::Gradients;
use attn_core::element::Real;
use attn_core::engine::check_same;
use attn_core::{AttnError, AttnShape, Element, Result, View};

use super::{LinearAttention, LinearState, dot, elu_plus_one, take};

/// `d(elu(x) + 1)/dx`.
fn slope<R: Real>(x: R) -> R {
    if x > R::ZERO { R::ONE } else { x.exp() }
}

impl LinearAttention {
    /// Elements of scratch that [`backward`](Self::backward) needs: two numbers for each query of a group, and one
    /// query after the feature map.
    ///
    /// # Errors
    /// [`AttnError::Overflow`].
    pub fn backward_scratch_len(shape: &AttnShape) -> Result<usize> {
        let rows = shape.q_len.checked_mul(shape.group()).and_then(|rows| rows.checked_mul(2));
        let len = rows.and_then(|rows| rows.checked_add(shape.head_dim));
        len.ok_or(AttnError::Overflow { what: "linear attention backward scratch" })
    }

    /// The gradients of `Σ y·dy` by q, k and v; of the state before the call, too.
    ///
    /// `state` is what [`forward`](Self::forward) was given, and becomes what it left. `by_state` is the gradient by
    /// the state after the call (zeros, if nothing came after), and becomes the one by the state before it: so a stream
    /// of calls is gone back through from its last call to its first. Shapes as in the forward call, `dy` as its
    /// output; `scratch` holds [`backward_scratch_len`](Self::backward_scratch_len) elements.
    ///
    /// ```
    /// use attn_core::backward::Gradients;
    /// use attn_core::{View, ViewMut};
    /// use attn_layers::variants::linear::{LinearAttention, LinearState};
    /// let (q, k, v, dy) = ([1.0f64], [0.5f64, 0.5], [1.0f64, 3.0], [1.0f64]); // one query, two keys alike
    /// let [mut dq, mut dk, mut dv] = [[0.0f64; 2]; 3];
    /// let gradients = Gradients::new(
    ///     ViewMut::matrix(&mut dq[..1], 1, 1)?,
    ///     ViewMut::matrix(&mut dk, 2, 1)?,
    ///     ViewMut::matrix(&mut dv, 2, 1)?,
    /// );
    /// let (mut before, mut after) = ([0.0; 2], [0.0; 2]);
    /// let [s, z] = &mut before;
    /// let state = LinearState { s: std::slice::from_mut(s), z: std::slice::from_mut(z) };
    /// let [s, z] = &mut after;
    /// let by_state = LinearState { s: std::slice::from_mut(s), z: std::slice::from_mut(z) };
    /// let (q, dy) = (View::matrix(&q, 1, 1)?, View::matrix(&dy, 1, 1)?);
    /// let (k, v) = (View::matrix(&k, 2, 1)?, View::matrix(&v, 2, 1)?);
    /// LinearAttention::new().backward(q, k, v, dy, gradients, state, by_state, &mut [0.0; 3])?;
    /// assert_eq!(dv, [0.5, 0.5]); // both keys have weight ½
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    ///
    /// # Errors
    /// Whatever does not fit, before anything is written; [`AttnError::Unsupported`] for gradients of a bias or of
    /// sinks, which linear attention does not have.
    #[allow(clippy::too_many_arguments, reason = "those of forward, and what gradients add")]
    pub fn backward<T: Element, G: Element, O: Element, R: Real>(
        &self,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        dy: View<'_, G>,
        mut gradients: Gradients<'_, O>,
        state: LinearState<'_, R>,
        by_state: LinearState<'_, R>,
        scratch: &mut [R],
    ) -> Result<()> {
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
        check_same("dy against the output", shape.output(), dy.sizes())?;
        gradients.check(&shape)?;
        if gradients.bias.is_some() || gradients.sinks.is_some() {
            return Err(AttnError::Unsupported { what: "the gradient of a bias or of sinks in linear attention" });
        }
        self.check_eps()?;
        state.check(&shape)?;
        by_state.check(&shape)?;
        AttnError::check_len("linear attention backward scratch", Self::backward_scratch_len(&shape)?, scratch.len())?;

        let (s_one, z_one) = (shape.head_dim.saturating_mul(shape.value_dim), shape.head_dim);
        for batch in 0..shape.batch {
            for kv_head in 0..shape.kv_heads {
                let n = batch * shape.kv_heads + kv_head;
                let one = Head { linear: self, shape: &shape, batch, kv_head, q, k, v, dy };
                let mut sums = Sums { s: part(state.s, n, s_one), z: part(state.z, n, z_one) };
                one.queries(&mut sums, &mut gradients, scratch);
                let mut sums = Sums { s: part(by_state.s, n, s_one), z: part(by_state.z, n, z_one) };
                one.keys(&mut sums, &mut gradients, scratch);
            }
        }
        Ok(())
    }
}

/// The sums of one key/value head, or the gradients by them.
struct Sums<'s, R> {
    /// `[head_dim, value_dim]`.
    s: &'s mut [R],
    /// `[head_dim]`.
    z: &'s mut [R],
}

/// One key/value head of a call, and the query heads that share it.
struct Head<'c, T, G> {
    linear: &'c LinearAttention,
    shape: &'c AttnShape,
    batch: usize,
    kv_head: usize,
    q: View<'c, T>,
    k: View<'c, T>,
    v: View<'c, T>,
    dy: View<'c, G>,
}

impl<T: Element, G: Element> Head<'_, T, G> {
    /// Forward over the tokens: writes dq, and `1/D` and `(dy·y)/D` of each row into the scratch.
    fn queries<R: Real, O: Element>(&self, sums: &mut Sums<'_, R>, to: &mut Gradients<'_, O>, scratch: &mut [R]) {
        let (shape, dims) = (self.shape, self.shape.value_dim.max(1));
        let Some((features, rows)) = scratch.split_at_mut_checked(shape.head_dim) else { return };
        let mut rows = rows.chunks_exact_mut(2);
        let mut taken = 0;
        for query in 0..shape.q_len {
            self.take_until(self.linear.sees(query, shape), &mut taken, sums);
            for head in self.heads() {
                let q = self.q.row(self.batch, head, query);
                let dy = self.dy.row(self.batch, head, query);
                for (f, x) in features.iter_mut().zip(q.iter()) {
                    *f = elu_plus_one(R::of(x.to_f64()));
                }
                let denominator = dot(features, sums.z.iter().copied()) + R::of(self.linear.eps);
                // A row whose denominator is 0 is 0, whatever its inputs are.
                let inverse = if denominator == R::ZERO { R::ZERO } else { R::ONE / denominator };
                let mut by_y = R::ZERO; // dy·y
                for (d, dy) in dy.iter().enumerate() {
                    let y = dot(features, sums.s.iter().skip(d).step_by(dims).copied()) * inverse;
                    by_y += R::of(dy.to_f64()) * y;
                }
                if let Some([of_inverse, of_y]) = rows.next() {
                    (*of_inverse, *of_y) = (inverse, by_y * inverse);
                }
                // Without value dims s has no rows, and dy none: every dψ is 0.
                let mut s_rows = sums.s.chunks_exact(dims);
                for (i, (x, z)) in q.iter().zip(&*sums.z).enumerate() {
                    let s = s_rows.next().unwrap_or_default();
                    let mut by_feature = R::ZERO - by_y * *z;
                    for (s, dy) in s.iter().zip(dy.iter()) {
                        by_feature += *s * R::of(dy.to_f64());
                    }
                    let dq = by_feature * inverse * slope(R::of(x.to_f64()));
                    to.dq.set(self.batch, head, query, i, O::from_f64(dq.to_f64()));
                }
            }
        }
        self.take_until(shape.kv_len, &mut taken, sums);
    }

    /// Back over the tokens: writes dk and dv, and takes what the queries add to the gradients by the sums.
    fn keys<R: Real, O: Element>(&self, sums: &mut Sums<'_, R>, to: &mut Gradients<'_, O>, scratch: &mut [R]) {
        let (shape, dims) = (self.shape, self.shape.value_dim.max(1));
        let Some((_, rows)) = scratch.split_at_mut_checked(shape.head_dim) else { return };
        let mut left = shape.kv_len;
        for query in (0..shape.q_len).rev() {
            // Keys behind those that this query sees: no earlier query sees them either.
            self.keys_from(self.linear.sees(query, shape), &mut left, sums, to);
            for (member, head) in self.heads().enumerate() {
                let row = query.saturating_mul(shape.group()).saturating_add(member).saturating_mul(2);
                let Some(&[inverse, by_y]) = rows.get(row..).and_then(|rows| rows.first_chunk()) else { continue };
                let dy = self.dy.row(self.batch, head, query);
                let mut s_rows = sums.s.chunks_exact_mut(dims);
                for (x, z) in self.q.row(self.batch, head, query).iter().zip(&mut *sums.z) {
                    let feature = elu_plus_one(R::of(x.to_f64()));
                    *z += R::ZERO - feature * by_y;
                    for (s, dy) in s_rows.next().unwrap_or_default().iter_mut().zip(dy.iter()) {
                        *s += feature * inverse * R::of(dy.to_f64());
                    }
                }
            }
        }
        self.keys_from(0, &mut left, sums, to);
    }

    /// Writes the gradients of keys `from..left` and of their values.
    fn keys_from<R: Real, O: Element>(
        &self,
        from: usize,
        left: &mut usize,
        sums: &Sums<'_, R>,
        to: &mut Gradients<'_, O>,
    ) {
        let (batch, head, dims) = (self.batch, self.kv_head, self.shape.value_dim.max(1));
        while *left > from {
            *left -= 1;
            let (k, v) = (self.k.row(batch, head, *left), self.v.row(batch, head, *left));
            let mut s_rows = sums.s.chunks_exact(dims);
            for (i, (x, z)) in k.iter().zip(&*sums.z).enumerate() {
                let mut by_feature = *z;
                for (s, v) in s_rows.next().unwrap_or_default().iter().zip(v.iter()) {
                    by_feature += *s * R::of(v.to_f64());
                }
                let dk = by_feature * slope(R::of(x.to_f64()));
                to.dk.set(batch, head, *left, i, O::from_f64(dk.to_f64()));
            }
            for d in 0..self.shape.value_dim {
                let mut dv = R::ZERO;
                for (x, s) in k.iter().zip(sums.s.iter().skip(d).step_by(dims)) {
                    dv += elu_plus_one(R::of(x.to_f64())) * *s;
                }
                to.dv.set(batch, head, *left, d, O::from_f64(dv.to_f64()));
            }
        }
    }

    /// Takes keys into the sums.
    fn take_until<R: Real>(&self, end: usize, taken: &mut usize, sums: &mut Sums<'_, R>) {
        while *taken < end {
            let (k, v) = (self.k.row(self.batch, self.kv_head, *taken), self.v.row(self.batch, self.kv_head, *taken));
            take(k.iter(), v, sums.s, sums.z);
            *taken += 1;
        }
    }

    /// The query heads that share the key/value head.
    fn heads(&self) -> core::ops::Range<usize> {
        let group = self.shape.group();
        self.kv_head * group..(self.kv_head + 1) * group
    }
}

/// Part `n` of a tensor; empty if it is outside.
fn part<R>(tensor: &mut [R], n: usize, len: usize) -> &mut [R] {
    let start = n.saturating_mul(len);
    tensor.get_mut(start..start.saturating_add(len)).unwrap_or_default()
}
