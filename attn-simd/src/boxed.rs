//! The caller's mods behind one type, so that a struct can hold options whose closures have none.

use alloc::boxed::Box;
use core::fmt;

use attn_core::score::At;
use attn_core::score_mod::Mods;

/// Mods of any type in a box: `Attention<'a, BoxedMods<'static>>` is a type that a field or a function can name, and
/// both arms of an `if` can have. [`Attention::with_mods`](attn_core::Attention::with_mods) puts them there.
///
/// Each score and each position that the mask shows is then a call through a pointer, which costs more than the
/// function that a kernel inlines; results have the same bits.
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
    use crate::{Level, Workspace, forward_at};
    use alloc::vec;
    use alloc::vec::Vec;
    use attn_core::backward::{self, Gradients};
    use attn_core::{Align, Attention, Layout, Mask, View, ViewMut, reference};

    /// Tokens of a head: more than one tile, but not for an interpreter.
    const LEN: usize = if cfg!(miri) { 18 } else { 70 };
    const DIM: usize = if cfg!(miri) { 2 } else { 8 };

    fn bits<M: Mods + Sync>(level: Level, attn: &Attention<'_, M>, q_len: usize) -> Vec<u32> {
        // No `sin`: Miri gives it other last bits at each call.
        let x: Vec<f32> = (0..2 * LEN * DIM).map(|n| (n * 37 % 101) as f32 / 50.0 - 1.0).collect();
        let q = View::new(&x[..2 * q_len * DIM], Layout::Bhsd, [1, 2, q_len, DIM]).unwrap();
        let kv = View::new(&x, Layout::Bhsd, [1, 2, LEN, DIM]).unwrap();
        let mut out = vec![0.0f32; 2 * q_len * DIM];
        let to = ViewMut::new(&mut out, Layout::Bhsd, [1, 2, q_len, DIM]).unwrap();
        forward_at(level, attn, q, kv, kv, to, &mut Workspace::new()).unwrap();
        out.iter().map(|x| x.to_bits()).collect()
    }

    /// None, either and both, for both kernels: a box changes no bit.
    #[test]
    fn the_same_bits_as_without_a_box() {
        let plain = Attention::new().mask(Mask::causal(Align::BottomRight));
        let shift = |s: f64, at: At| s - 0.1 * at.key as f64;
        let even = |at: At| at.key.is_multiple_of(2);
        for level in Level::available() {
            for q_len in [LEN, 2] {
                let boxed = [
                    plain.with_mods(BoxedMods::new),
                    plain.score_mod(shift).with_mods(BoxedMods::new),
                    plain.mask_mod(even).with_mods(BoxedMods::new),
                    plain.score_mod(shift).mask_mod(even).with_mods(BoxedMods::new),
                ];
                let want = [
                    bits(level, &plain, q_len),
                    bits(level, &plain.score_mod(shift), q_len),
                    bits(level, &plain.mask_mod(even), q_len),
                    bits(level, &plain.score_mod(shift).mask_mod(even), q_len),
                ];
                for (boxed, want) in boxed.iter().zip(&want) {
                    assert_eq!(bits(level, boxed, q_len), *want, "{} {boxed:?}", level.name());
                    assert_eq!(bits(level, &boxed.by_ref(), q_len), *want);
                }
            }
        }
    }

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
