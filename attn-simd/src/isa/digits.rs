//! Products of integers, in digits of eight bits, with the bytes of keys: what they are made of, and the products in
//! plain Rust.

#![allow(unsafe_code, reason = "keys and digits are anywhere: the caller vouches for them")]

/// Bytes of keys, and R rows of integers that they are multiplied with.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "plain Rust prefetches nothing, and takes bytes as signed")
)]
pub(crate) struct Bytes<'a, const R: usize> {
    /// The first byte of each key: a multiple of `LANES` keys.
    pub(crate) keys: &'a [*const i8],
    /// Bytes of a key; at most 256, so that no sum overflows.
    pub(crate) columns: usize,
    /// Digits `a`, `b` and `c` of integers `65536·a + 256·b + c`, `|a| ≤ 127`, as words of four channels:
    /// `[columns / 4][R][3]`. Zeros pad them to a multiple of 64 columns.
    pub(crate) digits: *const [i8; 4],
    /// −128 times the sum of each digit over all columns.
    pub(crate) start: &'a [[i32; 3]; R],
    /// The factor of each row's sums.
    pub(crate) unit: &'a [f32; R],
    /// Bytes from a line to those that are prefetched meanwhile: into the first cache, and into the second.
    pub(crate) ahead: [usize; 2],
    /// Where the sums go: `stride` floats for each row.
    pub(crate) s: &'a mut [f32],
    /// Floats from row to row; at least the number of keys.
    pub(crate) stride: usize,
}

/// As [`Isa::dot_bytes`](super::Isa::dot_bytes), in plain Rust.
///
/// # Safety
/// As there.
pub(super) unsafe fn dot_bytes<const R: usize>(of: Bytes<'_, R>) {
    let Bytes { keys, columns, digits, unit, s, stride, .. } = of;
    // SAFETY: the caller vouches for the digits.
    let digits = unsafe { core::slice::from_raw_parts(digits, columns.next_multiple_of(64) / 4 * R * 3) };
    for (n, &key) in keys.iter().enumerate() {
        // SAFETY: the caller vouches for the bytes.
        let key = unsafe { core::slice::from_raw_parts(key, columns) };
        for (r, unit) in unit.iter().enumerate() {
            let mut sums = [0i32; 3];
            for (bytes, words) in key.chunks(4).zip(digits.chunks_exact(3 * R)) {
                for (sum, digits) in sums.iter_mut().zip(&words[3 * r..]) {
                    *sum += bytes.iter().zip(digits).map(|(&k, &n)| i32::from(k) * i32::from(n)).sum::<i32>();
                }
            }
            let [a, b, c] = sums;
            s[r * stride + n] = unit * (256.0 * (256 * a + b) as f32 + c as f32);
        }
    }
}
