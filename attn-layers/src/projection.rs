//! Projections: `y = x·W + b` over borrowed parameters, and its gradient.
//!
//! Attention's learned part is four matrices: `q = x·W_q`, `k = x·W_k`, `v = x·W_v`, and `W_o` after the heads (Vaswani
//! et al. 2017, arXiv 1706.03762, §3.2.2). [`Linear`] is one of them. It takes both usual conventions without copying:
//! textbooks store `W` as `[d_in, d_out]` and write `x·W` ([`Linear::new`]); torch stores `[d_out, d_in]` and writes
//! `x·Wᵀ` ([`Linear::transposed`]). A view can have any other strides.
//!
//! **Features are heads side by side.** A tensor `[batch, heads, seq, dim]` has `heads·dim` features per position, head
//! 0 first. So one projection fills all heads of a `q` in whatever layout the view says, and the output projection
//! reads the heads of a context in place: splitting and joining heads is a matter of strides, never a copy.
//!
//! **Accumulation.** [`Linear::forward`] sums in `f64` and rounds once: the reference form. [`Linear::forward_in`] sums
//! in a real type of the caller's choice, in four interleaved chains; a microcontroller without double precision
//! chooses `f32`. The gradient always sums in `f64`.
//!
//! Matrix multiplication at the machine's full speed is in the crates with kernels.
//!
//! ```
//! use attn_core::{View, ViewMut};
//! use attn_layers::Linear;
//! let w = [1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]; // W is [2, 3]
//! let x = [1.0f32, 10.0];
//! let mut y = [0.0f32; 3];
//! Linear::new(&w, 2, 3)?.forward(View::matrix(&x, 1, 2)?, &mut ViewMut::matrix(&mut y, 1, 3)?)?;
//! assert_eq!(y, [41.0, 52.0, 63.0]);
//!
//! let wt = [1.0f32, 4.0, 2.0, 5.0, 3.0, 6.0]; // the same matrix as torch stores it, [3, 2]
//! let layer = Linear::transposed(&wt, 2, 3)?.bias(&[1.0, 0.0, -1.0])?;
//! layer.forward(View::matrix(&x, 1, 2)?, &mut ViewMut::matrix(&mut y, 1, 3)?)?;
//! assert_eq!(y, [42.0, 52.0, 62.0]);
//! # Ok::<(), attn_core::AttnError>(())
//! ```

use core::ops::Range;

use attn_core::Element;
use attn_core::element::Real;
use attn_core::engine::check_same;
use attn_core::{AttnError, Result};
use attn_core::{View, ViewMut};

/// A linear layer over borrowed weights: `y = x·W + b`, without bias unless [`bias`](Self::bias) gives one.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a, T> {
    /// `[1, 1, d_out, d_in]`: row `o` holds the weights of output `o`, whatever their layout in memory.
    weight: View<'a, T>,
    bias: Option<&'a [T]>,
}

impl<'a, T: Element> Linear<'a, T> {
    /// `x·W` with `weight` `[d_in, d_out]`, row-major.
    ///
    /// # Errors
    /// [`AttnError::Size`] if the slice does not hold `d_in·d_out` elements; [`AttnError::Overflow`].
    pub const fn new(weight: &'a [T], d_in: usize, d_out: usize) -> Result<Self> {
        match check_matrix(weight.len(), d_in, d_out) {
            Ok(()) => Self::strided(weight, d_in, d_out, [d_out as isize, 1], 0),
            Err(e) => Err(e),
        }
    }

    /// `x·Wᵀ` with `weight` `[d_out, d_in]`, row-major: as torch stores a linear layer.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub const fn transposed(weight: &'a [T], d_in: usize, d_out: usize) -> Result<Self> {
        match check_matrix(weight.len(), d_in, d_out) {
            Ok(()) => Self::strided(weight, d_in, d_out, [1, d_in as isize], 0),
            Err(e) => Err(e),
        }
    }

    /// Any strides: `W[i, o]` is element `offset + i·strides[0] + o·strides[1]`.
    ///
    /// # Errors
    /// As [`View::strided`].
    pub const fn strided(
        weight: &'a [T],
        d_in: usize,
        d_out: usize,
        strides: [isize; 2],
        offset: usize,
    ) -> Result<Self> {
        match View::strided(weight, [1, 1, d_out, d_in], [0, 0, strides[1], strides[0]], offset) {
            Ok(weight) => Ok(Self { weight, bias: None }),
            Err(e) => Err(e),
        }
    }

    /// Adds a bias, `[d_out]`.
    ///
    /// # Errors
    /// [`AttnError::Size`].
    pub const fn bias(mut self, bias: &'a [T]) -> Result<Self> {
        match AttnError::check_size("bias against d_out", self.d_out(), bias.len()) {
            Ok(()) => {
                self.bias = Some(bias);
                Ok(self)
            }
            Err(e) => Err(e),
        }
    }

    /// The layer that computes only some outputs: columns of `W`, entries of the bias. One head of a fused projection
    /// is `outputs(h·head_dim..(h + 1)·head_dim)`.
    ///
    /// # Errors
    /// [`AttnError::Index`] if the range reaches beyond `d_out`; [`AttnError::Order`] if it ends before it
    /// starts.
    pub fn outputs(&self, range: Range<usize>) -> Result<Self> {
        if range.end > self.d_out() {
            let limit = self.d_out().saturating_add(1);
            return Err(AttnError::Index { what: "outputs end", at: 0, value: range.end, limit });
        }
        let Some(d_out) = range.end.checked_sub(range.start) else {
            return Err(AttnError::Order { what: "outputs", at: 1 });
        };
        let [_, _, by_output, by_input] = self.weight.strides();
        // An empty range may start one past the last output: it then has no element, wherever it points.
        let step = (range.start as isize).wrapping_mul(by_output);
        let offset = self.weight.offset().wrapping_add_signed(step);
        let weight =
            View::strided(self.weight.data(), [1, 1, d_out, self.d_in()], [0, 0, by_output, by_input], offset)?;
        Ok(Self { weight, bias: self.bias.and_then(|bias| bias.get(range)) })
    }

    /// Features of an input position.
    pub const fn d_in(&self) -> usize {
        self.weight.sizes()[3]
    }

    /// Features of an output position.
    pub const fn d_out(&self) -> usize {
        self.weight.sizes()[2]
    }

    /// The weights as `[1, 1, d_out, d_in]`, for engines with kernels of their own.
    pub const fn weight(&self) -> View<'a, T> {
        self.weight
    }

    /// The bias, if any.
    pub const fn get_bias(&self) -> Option<&'a [T]> {
        self.bias
    }

    /// Checks the sizes of an input and an output, both `[batch, heads, seq, dim]` with `heads·dim` features.
    ///
    /// # Errors
    /// [`AttnError::Size`] naming the tensor that disagrees.
    pub fn check(&self, x: [usize; 4], y: [usize; 4]) -> Result<()> {
        let ([x_batch, _, x_seq, _], [y_batch, _, y_seq, _]) = (x, y);
        AttnError::check_size("projection input features (heads · dim)", self.d_in(), features(x)?)?;
        AttnError::check_size("projection output features (heads · dim)", self.d_out(), features(y)?)?;
        AttnError::check_size("projection output batch", x_batch, y_batch)?;
        AttnError::check_size("projection output seq", x_seq, y_seq)
    }

    /// `y = x·W + b`, summed in `f64` and rounded once. `x`: `[batch, heads, seq, dim]` with `d_in` features, `y` the
    /// same with `d_out`.
    ///
    /// # Errors
    /// As [`check`](Self::check), before anything is written.
    pub fn forward<X: Element, O: Element>(&self, x: View<'_, X>, y: &mut ViewMut<'_, O>) -> Result<()> {
        self.forward_in::<f64, X, O>(x, y)
    }

    /// As [`forward`](Self::forward), summed in `R`.
    ///
    /// # Errors
    /// As [`check`](Self::check), before anything is written.
    pub fn forward_in<R: Real, X: Element, O: Element>(&self, x: View<'_, X>, y: &mut ViewMut<'_, O>) -> Result<()> {
        self.check(x.sizes(), y.sizes())?;
        let [batch, ..] = y.sizes();
        for b in 0..batch {
            for_each_feature(y.sizes(), |o, head, d, seq| {
                let weights = self.weight.row(0, 0, o).iter();
                let sum: R = dot(position(x, b, seq).zip(weights));
                let bias = self.bias.and_then(|bias| bias.get(o)).map_or(R::ZERO, |&b| R::of(b.to_f64()));
                y.set(b, head, seq, d, O::from_f64((sum + bias).to_f64()));
            });
        }
        Ok(())
    }

    /// The gradient of `Σ y·dy`: `dx = dy·Wᵀ`, `dW = xᵀ·dy`, `db = Σ dy` over all positions. Each is written, not added
    /// to, and each is summed in `f64` and rounded once. `dx` has the shape of `x`, `dy` that of `y`.
    ///
    /// # Errors
    /// [`AttnError::Size`], before anything is written.
    ///
    /// ```
    /// use attn_core::{View, ViewMut};
    /// use attn_layers::{Linear, LinearGradients};
    /// let (w, x, dy) = ([1.0f32, 2.0, 3.0, 4.0], [5.0f32, 6.0], [1.0f32, 10.0]);
    /// let (mut dx, mut dw, mut db) = ([0.0f32; 2], [0.0f32; 4], [0.0f32; 2]);
    /// Linear::new(&w, 2, 2)?.bias(&[0.0; 2])?.backward(
    ///     View::matrix(&x, 1, 2)?,
    ///     View::matrix(&dy, 1, 2)?,
    ///     Some(&mut ViewMut::matrix(&mut dx, 1, 2)?),
    ///     Some(&mut LinearGradients::new(&mut dw, 2, 2)?.bias(&mut db)),
    /// )?;
    /// assert_eq!((dx, dw, db), ([21.0, 43.0], [5.0, 50.0, 6.0, 60.0], [1.0, 10.0]));
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    pub fn backward<X: Element, G: Element, O: Element>(
        &self,
        x: View<'_, X>,
        dy: View<'_, G>,
        dx: Option<&mut ViewMut<'_, O>>,
        gradients: Option<&mut LinearGradients<'_, O>>,
    ) -> Result<()> {
        self.check(x.sizes(), dy.sizes())?;
        if let Some(dx) = &dx {
            check_same("dx against x", x.sizes(), dx.sizes())?;
        }
        if let Some(gradients) = &gradients {
            gradients.check(self)?;
        }
        if let Some(dx) = dx {
            let by_input = self.by_input()?;
            let [batch, ..] = x.sizes();
            for b in 0..batch {
                for_each_feature(x.sizes(), |i, head, d, seq| {
                    dx.set(b, head, seq, d, O::from_f64(input_gradient(by_input, dy, b, seq, i)));
                });
            }
        }
        if let Some(gradients) = gradients {
            gradients.write(x, dy);
        }
        Ok(())
    }

    /// The weights as `[1, 1, d_in, d_out]`: a row holds the weights of an input's gradient.
    pub(crate) fn by_input(&self) -> Result<View<'a, T>> {
        let [_, _, by_output, by_input] = self.weight.strides();
        let (sizes, strides) = ([1, 1, self.d_in(), self.d_out()], [0, 0, by_input, by_output]);
        View::strided(self.weight.data(), sizes, strides, self.weight.offset())
    }
}

/// `dx[i] = Σ_o dy[o]·W[i, o]` of one position.
pub(crate) fn input_gradient<T: Element, G: Element>(
    by_input: View<'_, T>,
    dy: View<'_, G>,
    batch: usize,
    seq: usize,
    i: usize,
) -> f64 {
    dot(position(dy, batch, seq).zip(by_input.row(0, 0, i).iter()))
}

/// Where the gradients of a [`Linear`] go; laid out as its weights may be.
#[derive(Debug)]
pub struct LinearGradients<'o, O> {
    /// `[1, 1, d_out, d_in]`.
    weight: ViewMut<'o, O>,
    bias: Option<&'o mut [O]>,
}

impl<'o, O: Element> LinearGradients<'o, O> {
    /// The gradient of a weight `[d_in, d_out]`, row-major.
    ///
    /// # Errors
    /// As [`Linear::new`].
    pub fn new(weight: &'o mut [O], d_in: usize, d_out: usize) -> Result<Self> {
        check_matrix(weight.len(), d_in, d_out)?;
        Self::strided(weight, d_in, d_out, [d_out as isize, 1], 0)
    }

    /// The gradient of a weight `[d_out, d_in]`, row-major.
    ///
    /// # Errors
    /// As [`Linear::new`].
    pub fn transposed(weight: &'o mut [O], d_in: usize, d_out: usize) -> Result<Self> {
        check_matrix(weight.len(), d_in, d_out)?;
        Self::strided(weight, d_in, d_out, [1, d_in as isize], 0)
    }

    /// Any strides, as [`Linear::strided`].
    ///
    /// # Errors
    /// As [`ViewMut::strided`].
    pub fn strided(weight: &'o mut [O], d_in: usize, d_out: usize, strides: [isize; 2], offset: usize) -> Result<Self> {
        let [by_input, by_output] = strides;
        let weight = ViewMut::strided(weight, [1, 1, d_out, d_in], [0, 0, by_output, by_input], offset)?;
        Ok(Self { weight, bias: None })
    }

    /// Also the gradient of the bias, `[d_out]`. It is `Σ dy` whether or not the layer has a bias.
    pub fn bias(mut self, bias: &'o mut [O]) -> Self {
        self.bias = Some(bias);
        self
    }

    /// Checks the sizes against those of the layer.
    ///
    /// # Errors
    /// [`AttnError::Size`].
    pub fn check<T: Element>(&self, layer: &Linear<'_, T>) -> Result<()> {
        let [_, _, d_out, d_in] = self.weight.sizes();
        AttnError::check_size("weight gradient d_in", layer.d_in(), d_in)?;
        AttnError::check_size("weight gradient d_out", layer.d_out(), d_out)?;
        match &self.bias {
            Some(bias) => AttnError::check_size("bias gradient", layer.d_out(), bias.len()),
            None => Ok(()),
        }
    }

    /// `dW = xᵀ·dy`, `db = Σ dy`; the sizes have been checked.
    pub(crate) fn write<X: Element, G: Element>(&mut self, x: View<'_, X>, dy: View<'_, G>) {
        let ([_, _, _, x_dim], [_, _, _, y_dim]) = (x.sizes(), dy.sizes());
        let [_, _, d_out, d_in] = self.weight.sizes();
        // Feature `n` of a tensor is dimension `n % dim` of head `n / dim`.
        let place = |n: usize, dim: usize| n.checked_div(dim).zip(n.checked_rem(dim)).unwrap_or((0, 0));
        for o in 0..d_out {
            let (y_head, y_d) = place(o, y_dim);
            if let Some(slot) = self.bias.as_deref_mut().and_then(|bias| bias.get_mut(o)) {
                let sum: f64 = dot(over_positions(dy, y_head, y_d).map(|g| (g, 1.0f64)));
                *slot = O::from_f64(sum);
            }
            for i in 0..d_in {
                let (x_head, x_d) = place(i, x_dim);
                let sum: f64 = dot(over_positions(x, x_head, x_d).zip(over_positions(dy, y_head, y_d)));
                self.weight.set(0, 0, o, i, O::from_f64(sum));
            }
        }
    }
}

const fn check_matrix(len: usize, d_in: usize, d_out: usize) -> Result<()> {
    match d_in.checked_mul(d_out) {
        Some(n) => AttnError::check_size("weight (d_in · d_out)", n, len),
        None => Err(AttnError::Overflow { what: "d_in · d_out" }),
    }
}

/// Features of a position: `heads·dim`.
pub(crate) const fn features([_, heads, _, dim]: [usize; 4]) -> Result<usize> {
    match heads.checked_mul(dim) {
        Some(n) => Ok(n),
        None => Err(AttnError::Overflow { what: "heads · dim" }),
    }
}

/// Calls `f(feature, head, dim, seq)` for every feature of every position of one batch entry.
pub(crate) fn for_each_feature(sizes: [usize; 4], mut f: impl FnMut(usize, usize, usize, usize)) {
    let [_, heads, seq, dim] = sizes;
    for s in 0..seq {
        let mut feature = 0;
        for head in 0..heads {
            for d in 0..dim {
                f(feature, head, d, s);
                feature += 1;
            }
        }
    }
}

/// The features of one position in order.
fn position<'v, X: Element>(x: View<'v, X>, batch: usize, seq: usize) -> impl Iterator<Item = X> + 'v {
    let [_, heads, ..] = x.sizes();
    (0..heads).flat_map(move |head| x.row(batch, head, seq).iter())
}

/// One feature over all positions, batch by batch.
fn over_positions<'v, X: Element>(x: View<'v, X>, head: usize, d: usize) -> impl Iterator<Item = X> + 'v {
    let [batch, _, seq, _] = x.sizes();
    (0..batch).flat_map(move |b| (0..seq).map(move |s| x.at(b, head, s, d)))
}

/// `Σ a·b` in `R`, in four interleaved chains.
fn dot<R: Real, A: Element, B: Element>(pairs: impl Iterator<Item = (A, B)>) -> R {
    let mut sums = [R::ZERO; 4];
    for (n, (a, b)) in pairs.enumerate() {
        if let Some(sum) = sums.get_mut(n % 4) {
            // Both are widened exactly; by way of `Compute`, halves reach `f32` without double precision.
            *sum += R::of(a.widen().to_f64()) * R::of(b.widen().to_f64());
        }
    }
    let [a, b, c, d] = sums;
    (a + b) + (c + d)
}
