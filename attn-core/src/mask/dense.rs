//! A mask given as a tensor of bools.

use super::bits::pack8;
use crate::view::View;

/// A boolean tensor that broadcasts to `[batch, q_heads, q_len, kv_len]`, and the meaning of `true`.
///
/// Torch's SDPA, ONNX and JAX mean "attend" by `true`; `nn.MultiheadAttention` and burn mean "hidden". So there is no
/// default: use [`Mask::keep`](crate::Mask::keep) or [`Mask::drop`](crate::Mask::drop).
#[derive(Clone, Copy, Debug)]
pub struct DenseMask<'a> {
    /// The tensor.
    pub mask: View<'a, bool>,
    /// Whether `true` keeps a key visible (or hides it).
    pub keep: bool,
}

impl DenseMask<'_> {
    #[inline]
    pub(crate) fn visible(&self, batch: usize, head: usize, query: usize, key: usize) -> bool {
        self.mask.at_broadcast(batch, head, query, key) == self.keep
    }

    /// The 64 keys from `start` on as bits; keys beyond the tensor are hidden.
    pub(crate) fn row_bits(&self, batch: usize, head: usize, query: usize, start: usize, kv_len: usize) -> u64 {
        let [nb, nh, nq, nk] = self.mask.sizes();
        let pick = |i: usize, n: usize| if n == 1 { 0 } else { i };
        let row = self.mask.row(pick(batch, nb), pick(head, nh), pick(query, nq));
        if nk == 1 && kv_len != 1 {
            return if row.get(0) == self.keep { u64::MAX } else { 0 };
        }
        let flip = if self.keep { 0 } else { u64::MAX };
        if let Some(slice) = row.as_slice() {
            let Some(keys) = slice.get(start..) else {
                return 0;
            };
            let keys = keys.get(..64).unwrap_or(keys);
            let (eights, rest) = keys.as_chunks::<8>();
            let mut bits = 0;
            for (n, eight) in eights.iter().enumerate() {
                bits |= pack8(*eight) << (8 * n);
            }
            for (n, &keep) in rest.iter().enumerate() {
                bits |= u64::from(keep) << (8 * eights.len() + n);
            }
            return (bits ^ flip) & super::bits::lowest_bits(keys.len());
        }
        let mut bits = 0;
        for n in 0..row.len().saturating_sub(start).min(64) {
            bits |= u64::from(row.get(start + n) == self.keep) << n;
        }
        bits
    }
}
