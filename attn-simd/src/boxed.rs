//! The caller's mods behind one type, so that a struct can hold options with closures, whose types have no names.

use alloc::boxed::Box;
use core::fmt;

use attn_core::score::At;
use attn_core::score_mod::Mods;

/// Mods of any type in a box: `Attention<'a, BoxedMods<'static>>` is a type that a field or a function can name, and
/// both arms of an `if` can have. [`Attention::with_mods`](attn_core::Attention::with_mods) puts them there.
///
/// Each score and each position that the mask shows is then a call through a pointer, which takes longer than an
/// inlined function. Results have the same bits.
///
/// ```
/// use attn_core::score::At;
/// use attn_core::{Attention, View, ViewMut};
/// use attn_simd::{BoxedMods, Workspace, forward};
///
/// struct Layer {
///     attn: Attention<'static, BoxedMods<'static>>,
/// }
///
/// fn layer(every: Option<usize>) -> Layer {
///     let attn = Attention::new().softcap(30.0);
///     let attn = if let Some(every) = every {
///         attn.mask_mod(move |at: At| at.key % every == 0).with_mods(BoxedMods::new)
///     } else {
///         attn.with_mods(BoxedMods::new)
///     };
///     Layer { attn }
/// }
///
/// let (x, mut out) = ([1.0f32, 5.0, 3.0, 7.0], [0.0f32; 4]);
/// let (x, to) = (View::matrix(&x, 4, 1)?, ViewMut::matrix(&mut out, 4, 1)?);
/// forward(&layer(Some(4)).attn, x, x, x, to, &mut Workspace::new())?;
/// assert_eq!(out, [1.0; 4]); // each query sees key 0 alone
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub struct BoxedMods<'m>(Box<dyn AnyMods + Send + Sync + 'm>);

impl<'m> BoxedMods<'m> {
    /// Boxes them. No mods, which are `()`, are not allocated and cost a call nothing.
    pub fn new(mods: impl Mods + Send + Sync + 'm) -> Self {
        Self(Box::new(mods))
    }
}

impl Default for BoxedMods<'_> {
    fn default() -> Self {
        Self::new(())
    }
}

impl fmt::Debug for BoxedMods<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (score_mod, mask_mod) = (self.0.has_score_mod(), self.0.has_mask_mod());
        f.debug_struct("BoxedMods").field("score_mod", &score_mod).field("mask_mod", &mask_mod).finish()
    }
}

impl Mods for BoxedMods<'_> {
    const SCORE_MOD: bool = true;
    const MASK_MOD: bool = true;
    fn has_score_mod(&self) -> bool {
        self.0.has_score_mod()
    }
    fn has_mask_mod(&self) -> bool {
        self.0.has_mask_mod()
    }
    fn score_mod(&self, score: f64, at: At) -> f64 {
        self.0.score_mod(score, at)
    }
    fn mask_mod(&self, at: At) -> bool {
        self.0.mask_mod(at)
    }
    fn derivative(&self, score: f64, at: At) -> Option<f64> {
        self.0.derivative(score, at)
    }
}

/// [`Mods`] without its constants, which no trait object can have.
trait AnyMods {
    fn has_score_mod(&self) -> bool;
    fn has_mask_mod(&self) -> bool;
    fn score_mod(&self, score: f64, at: At) -> f64;
    fn mask_mod(&self, at: At) -> bool;
    fn derivative(&self, score: f64, at: At) -> Option<f64>;
}

impl<M: Mods> AnyMods for M {
    fn has_score_mod(&self) -> bool {
        Mods::has_score_mod(self)
    }
    fn has_mask_mod(&self) -> bool {
        Mods::has_mask_mod(self)
    }
    fn score_mod(&self, score: f64, at: At) -> f64 {
        Mods::score_mod(self, score, at)
    }
    fn mask_mod(&self, at: At) -> bool {
        Mods::mask_mod(self, at)
    }
    fn derivative(&self, score: f64, at: At) -> Option<f64> {
        Mods::derivative(self, score, at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attn_core::backward::{self, Gradients};
    use attn_core::{Attention, View, ViewMut, reference};

    /// The oracle and the gradients take them too.
    #[test]
    fn derivatives_go_through_the_box() {
        let (x, dy) = ([0.1f64, 0.7, -0.3, 0.2], [1.0f64, 0.5, -1.0, 0.25]);
        let (x, dy) = (View::matrix(&x, 4, 1).unwrap(), View::matrix(&dy, 4, 1).unwrap());
        let run = |attn: &Attention<'_, BoxedMods<'_>>| {
            let (mut out, [mut dq, mut dk, mut dv]) = ([0.0f64; 4], [[0.0f64; 4]; 3]);
            reference::forward(attn, x, x, x, ViewMut::matrix(&mut out, 4, 1).unwrap(), &mut [0.0; 4]).unwrap();
            let [to_q, to_k, to_v] = [&mut dq, &mut dk, &mut dv].map(|x| ViewMut::matrix(x, 4, 1).unwrap());
            let gradients = Gradients::new(to_q, to_k, to_v);
            backward::gradients(attn, x, x, x, dy, gradients, &mut [0.0; 64]).map(|()| (out, dq))
        };
        let square = |s: f64, _: At| s * s;
        assert!(run(&Attention::new().score_mod(square).with_mods(BoxedMods::new)).is_err());
        let (_, dq) = run(&Attention::new().score_mod_with(square, |s, _| 2.0 * s).with_mods(BoxedMods::new)).unwrap();
        let (_, plain) = run(&Attention::new().with_mods(BoxedMods::new)).unwrap();
        assert_ne!(dq, plain);
    }
}
