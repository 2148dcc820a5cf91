//! [`attention`]: `forward` with an output that the call allocates.

use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Layout, Result, View, ViewMut};
use attn_simd::KernelElement;

use crate::forward;

/// Computes attention into a new `Vec`: [`forward`] in one line, for prototypes and tests.
///
/// Returns the output `[batch, q_heads, q_len, value_dim]`, row-major. Every call allocates and clears it. A loop that
/// has its output already calls [`forward`].
///
/// ```
/// use attn_parallel::{Attention, Layout, View, attention};
/// let x: Vec<f32> = (0..2 * 10 * 8).map(|n| (n as f32).sin()).collect();
/// let x = View::new(&x, Layout::Bhsd, [1, 2, 10, 8])?;
/// let out = attention(&Attention::new(), x, x, x)?;
/// assert_eq!(out.len(), 2 * 10 * 8);
/// # Ok::<(), attn_parallel::AttnError>(())
/// ```
///
/// # Errors
/// As [`forward`]; [`AttnError::Memory`] if the output cannot be allocated.
pub fn attention<T: KernelElement, M: Mods + Sync>(
    attn: &Attention<'_, M>,
    q: View<'_, T>,
    k: View<'_, T>,
    v: View<'_, T>,
) -> Result<Vec<T>> {
    let sizes = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?.output();
    let len = sizes.iter().try_fold(1usize, |len, &size| len.checked_mul(size));
    let len = len.ok_or(AttnError::Overflow { what: "output" })?;
    let mut out = Vec::new();
    if out.try_reserve_exact(len).is_err() {
        return Err(AttnError::Memory { what: "output", bytes: len.saturating_mul(size_of::<T>()) });
    }
    out.resize(len, T::default());
    forward(attn, q, k, v, ViewMut::new(&mut out, Layout::Bhsd, sizes)?)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bits_of_forward_and_its_errors() {
        let x: Vec<f32> = (0..2 * 3 * 9 * 4).map(|n| (n as f32).sin()).collect();
        let q = View::new(&x, Layout::Bshd, [2, 3, 9, 4]).unwrap();
        let kv = View::new(&x, Layout::Bhsd, [2, 1, 7, 4]).unwrap();
        let mut want = vec![9.0f32; x.len()];
        let to = ViewMut::new(&mut want, Layout::Bhsd, [2, 3, 9, 4]).unwrap();
        forward(&Attention::new(), q, kv, kv, to).unwrap();
        assert_eq!(attention(&Attention::new(), q, kv, kv), Ok(want));

        let none = View::<f32>::new(&[], Layout::Bhsd, [2, 3, 0, 4]).unwrap();
        assert_eq!(attention(&Attention::new(), none, kv, kv), Ok(vec![]));
        let short = View::new(&x, Layout::Bhsd, [2, 1, 6, 4]).unwrap();
        assert!(matches!(attention(&Attention::new(), q, kv, short), Err(AttnError::Size { .. })));
    }
}
