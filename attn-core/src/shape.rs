//! The sizes of one attention call, checked once, and an index into its scores.

use crate::error::{AttnError, Result};

/// The sizes of one attention call.
///
/// | tensor | shape |
/// |---|---|
/// | q | `[batch, q_heads, q_len, head_dim]` |
/// | k | `[batch, kv_heads, kv_len, head_dim]` |
/// | v | `[batch, kv_heads, kv_len, value_dim]` |
/// | out | `[batch, q_heads, q_len, value_dim]` |
///
/// Query head `h` reads key/value head `h / group()` (grouped-query attention, Ainslie et al. 2023, arXiv 2305.13245).
/// Every size may be 0.
///
/// ```
/// use attn_core::AttnShape;
/// let shape = AttnShape::new([1, 8, 128, 64], [1, 2, 256, 64], [1, 2, 256, 80])?;
/// assert_eq!((shape.group(), shape.kv_head(5), shape.value_dim), (4, 1, 80));
/// assert!(AttnShape::new([1, 8, 128, 64], [1, 3, 256, 64], [1, 3, 256, 64]).is_err()); // 8 heads over 3
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub struct AttnShape {
    /// Independent sequences.
    pub batch: usize,
    /// Heads of q and of the output.
    pub q_heads: usize,
    /// Heads of k and v.
    pub kv_heads: usize,
    /// Queries per head.
    pub q_len: usize,
    /// Keys per head.
    pub kv_len: usize,
    /// Size of a query and of a key.
    pub head_dim: usize,
    /// Size of a value.
    pub value_dim: usize,
}

/// A position in the score tensor `[batch, q_heads, q_len, kv_len]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub struct At {
    /// Index of the sequence in the batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query.
    pub query: usize,
    /// Key.
    pub key: usize,
}

impl AttnShape {
    /// From the shapes of q, k and v, each `[batch, heads, seq, dim]`.
    ///
    /// # Errors
    /// [`AttnError::Size`] if two tensors disagree, [`AttnError::Heads`] if the query heads do not divide into
    /// groups, [`AttnError::Overflow`] if a product of sizes does not fit in `usize`.
    pub const fn new(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<Self> {
        let [batch, q_heads, q_len, head_dim] = q;
        let [k_batch, kv_heads, kv_len, k_dim] = k;
        let [v_batch, v_heads, v_len, value_dim] = v;
        let checks = [
            ("k batch against q batch", batch, k_batch),
            ("v batch against q batch", batch, v_batch),
            ("k head_dim against q head_dim", head_dim, k_dim),
            ("v heads against k heads", kv_heads, v_heads),
            ("v kv_len against k kv_len", kv_len, v_len),
        ];
        let mut i = 0;
        while i < checks.len() {
            let (what, expected, found) = checks[i];
            if expected != found {
                return Err(AttnError::Size { what, expected, found });
            }
            i += 1;
        }
        let divides = if kv_heads == 0 { q_heads == 0 } else { q_heads % kv_heads == 0 };
        if !divides {
            return Err(AttnError::Heads { q_heads, kv_heads });
        }
        let shape = Self { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
        if product(&[batch, q_heads, q_len]).is_none() {
            return Err(AttnError::Overflow { what: "batch · q_heads · q_len" });
        }
        if product(&[batch, q_heads, q_len, value_dim]).is_none() {
            return Err(AttnError::Overflow { what: "batch · q_heads · q_len · value_dim" });
        }
        Ok(shape)
    }

    /// Checks the shape of an output, `[batch, q_heads, q_len, value_dim]`.
    ///
    /// # Errors
    /// [`AttnError::Size`] naming the axis.
    pub const fn check_output(&self, out: [usize; 4]) -> Result<()> {
        let checks = [
            ("output batch", self.batch, out[0]),
            ("output heads", self.q_heads, out[1]),
            ("output q_len", self.q_len, out[2]),
            ("output value_dim", self.value_dim, out[3]),
        ];
        let mut i = 0;
        while i < checks.len() {
            let (what, expected, found) = checks[i];
            if expected != found {
                return Err(AttnError::Size { what, expected, found });
            }
            i += 1;
        }
        Ok(())
    }

    /// Query heads per key/value head; 1 if there are no heads.
    pub const fn group(&self) -> usize {
        match self.q_heads.checked_div(self.kv_heads) {
            Some(group) => group,
            None => 1,
        }
    }

    /// The key/value head that query head `head` reads.
    pub const fn kv_head(&self, head: usize) -> usize {
        // `group()` is 0 only where there are no query heads, and then no head is mapped.
        match head.checked_div(self.group()) {
            Some(kv_head) => kv_head,
            None => 0,
        }
    }

    /// Shape of the output: `[batch, q_heads, q_len, value_dim]`.
    pub const fn output(&self) -> [usize; 4] {
        [self.batch, self.q_heads, self.q_len, self.value_dim]
    }

    /// Query rows in all: `batch · q_heads · q_len`, the length of an `lse` buffer.
    pub const fn rows(&self) -> usize {
        self.batch * self.q_heads * self.q_len // checked by `new`
    }

    /// Position of a row in buffers that hold one value per row (`lse`): row-major over `[batch, q_heads, q_len]`.
    pub const fn row(&self, batch: usize, head: usize, query: usize) -> usize {
        (batch * self.q_heads + head) * self.q_len + query
    }

    /// Elements of the whole weight matrix, `rows() · kv_len`.
    ///
    /// # Errors
    /// [`AttnError::Overflow`] if it does not fit in `usize` (on 32-bit targets it often does not).
    pub const fn weights_len(&self) -> Result<usize> {
        match self.rows().checked_mul(self.kv_len) {
            Some(n) => Ok(n),
            None => Err(AttnError::Overflow { what: "batch · q_heads · q_len · kv_len" }),
        }
    }
}

/// The product of some sizes, `None` if it overflows. A zero anywhere gives 0 whatever the others are.
pub const fn product(sizes: &[usize]) -> Option<usize> {
    let mut total: usize = 1;
    let mut overflow = false;
    let mut i = 0;
    while i < sizes.len() {
        if sizes[i] == 0 {
            return Some(0);
        }
        match total.checked_mul(sizes[i]) {
            Some(t) => total = t,
            None => overflow = true,
        }
        i += 1;
    }
    if overflow { None } else { Some(total) }
}

/// `Ok` if two shapes are the same.
pub fn check_same(what: &'static str, expected: [usize; 4], found: [usize; 4]) -> Result<()> {
    check_axes([what; 4], expected, found)
}

/// As [`check_same`], with a text for each axis.
pub fn check_axes(what: [&'static str; 4], expected: [usize; 4], found: [usize; 4]) -> Result<()> {
    let sizes = expected.into_iter().zip(found);
    what.into_iter().zip(sizes).try_for_each(|(what, (expected, found))| AttnError::check_size(what, expected, found))
}
