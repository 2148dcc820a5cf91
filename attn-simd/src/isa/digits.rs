//! Products of integers, in digits of eight bits, with the bytes of keys: what they are made of, and the products in
//! plain Rust.

#![allow(unsafe_code, reason = "keys and digits are anywhere: the caller vouches for them")]

use attn_core::half::f16;

#[cfg(all(test, any(target_arch = "x86_64", all(target_arch = "aarch64", not(miri)))))]
pub(super) mod testing;

/// Numbers of a block of ggml's q8_0.
pub(crate) const BLOCK: usize = 32;

/// Bytes of such a block: its scale and its numbers.
pub(crate) const BLOCK_BYTES: usize = 34;

/// Bytes of keys, and R rows of integers of D digits that they are multiplied with.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "plain Rust prefetches nothing, and takes bytes as signed")
)]
pub(crate) struct Bytes<'a, const R: usize, const D: usize> {
    /// The first byte of each key: a multiple of `LANES` keys.
    pub(crate) keys: &'a [*const i8],
    /// Numbers of a key; at most 256, so that no sum overflows.
    pub(crate) columns: usize,
    /// Digits of integers, the highest first, as words of four channels: `[columns / 4][R][D]`. Each is −128 to 127,
    /// and the highest at least −127. Or in another [order](super::Isa::ORDER). Zeros pad them to a multiple of 64
    /// columns.
    pub(crate) digits: *const [i8; 4],
    /// −128 times the sum of each digit over all columns, or over each block; in other orders than words, anything.
    pub(crate) start: &'a [[[i32; D]; R]],
    /// The factor of each row's sums.
    pub(crate) unit: &'a [f32; R],
    /// Bytes from a line to those that are prefetched meanwhile: into the first cache, and into the second.
    pub(crate) ahead: [usize; 2],
    /// Where the sums go: `stride` floats for each row.
    pub(crate) s: &'a mut [f32],
    /// Floats from row to row; at least the number of keys.
    pub(crate) stride: usize,
}

/// How the digits of R rows of integers lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "each architecture has some of them")]
pub(crate) enum Order {
    /// Four channels of a digit, then of the next digit, then of the next row: `[columns / 4][R][D]` words.
    Words,
    /// Integers of two digits in 16 bits, row by row: `[R][columns]`.
    Whole,
    /// All channels of a digit, then of the next: `[R][D][columns]`.
    Apart,
}

/// The number that the sums over digits are: the lowest counts by itself, since more than 24 bits are rounded.
#[inline(always)]
pub(super) fn joined<const D: usize>(sums: [i32; D]) -> f32 {
    let (low, high) = (sums[D - 1], sums[..D - 1].iter().fold(0, |high, sum| 256 * high + sum));
    if D == 2 { (256 * high + low) as f32 } else { 256.0 * high as f32 + low as f32 }
}

/// As [`Isa::dot_bytes`](super::Isa::dot_bytes), in plain Rust.
///
/// # Safety
/// As there.
pub(super) unsafe fn dot_bytes<const R: usize, const D: usize>(of: Bytes<'_, R, D>) {
    let Bytes { keys, columns, digits, unit, s, stride, .. } = of;
    // SAFETY: the caller vouches for the digits.
    let digits = unsafe { core::slice::from_raw_parts(digits, columns.next_multiple_of(64) / 4 * R * D) };
    for (n, &key) in keys.iter().enumerate() {
        // SAFETY: the caller vouches for the bytes.
        let key = unsafe { core::slice::from_raw_parts(key, columns) };
        for (r, unit) in unit.iter().enumerate() {
            s[r * stride + n] = unit * joined::<D>(sums(key, &digits[r * D..], R * D));
        }
    }
}

/// As [`Isa::dot_blocks`](super::Isa::dot_blocks), in plain Rust.
///
/// # Safety
/// As there.
pub(super) unsafe fn dot_blocks<const R: usize, const D: usize>(of: Bytes<'_, R, D>) -> u64 {
    let Bytes { keys, columns, digits, unit, s, stride, .. } = of;
    let mut odd = 0;
    // SAFETY: the caller vouches for the digits.
    let digits = unsafe { core::slice::from_raw_parts(digits, columns.next_multiple_of(64) / 4 * R * D) };
    for (n, &key) in keys.iter().enumerate() {
        // SAFETY: the caller vouches for the blocks.
        let key = unsafe { core::slice::from_raw_parts(key, columns / BLOCK * BLOCK_BYTES) };
        for (r, unit) in unit.iter().enumerate() {
            let mut sum = 0.0f64;
            for (nth, block) in key.chunks_exact(BLOCK_BYTES).enumerate() {
                let scale = f16::from_le_bytes([block[0].cast_unsigned(), block[1].cast_unsigned()]);
                odd |= u64::from(!scale.is_finite()) << n;
                let sums = sums::<D>(&block[2..], &digits[nth * BLOCK / 4 * R * D + r * D..], R * D);
                // One rounding, as of a fused multiply-add: the product is exact in f64, and the sum nearly.
                sum = f64::from((sum + f64::from(scale.to_f32()) * f64::from(joined::<D>(sums))) as f32);
            }
            s[r * stride + n] = unit * sum as f32;
        }
    }
    odd
}

/// The sums of the products of bytes with each digit of one row, whose words are `step` apart.
fn sums<const D: usize>(bytes: &[i8], words: &[[i8; 4]], step: usize) -> [i32; D] {
    let mut sums = [0i32; D];
    for (bytes, words) in bytes.chunks(4).zip(words.chunks(step)) {
        for (sum, digits) in sums.iter_mut().zip(words) {
            *sum += bytes.iter().zip(digits).map(|(&k, &n)| i32::from(k) * i32::from(n)).sum::<i32>();
        }
    }
    sums
}

/// How floats become integers: times a power of two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Integer {
    /// What an integer of 1 is.
    pub(crate) unit: f32,
    /// 1/unit.
    pub(crate) scale: f32,
}

impl Integer {
    /// The largest numbers of rows that are held: units and sums are normal numbers.
    pub(crate) const HELD: core::ops::Range<f32> = 1e-24..1e30;

    /// Of D digits, for numbers up to one that is held.
    #[inline(always)]
    pub(crate) fn of<const D: usize>(most: f32) -> Self {
        let power = |exponent: i32| f32::from_bits(((127 + exponent) as u32) << 23);
        // The largest integer in as many digits from −128 to 127 whose negative is one, too.
        let largest = (0..D).fold(0, |all, _| 256 * all + 127) as f32;
        // The largest number is below 2^exponent, and 2^(bits − exponent) makes integers.
        let (exponent, bits) = ((most.to_bits() >> 23) as i32 - 126, 8 * D as i32 - 1);
        let exponent = if most * power(bits - exponent) > largest { exponent + 1 } else { exponent };
        Self { unit: power(exponent - bits), scale: power(bits - exponent) }
    }
}

/// The weights of 64 values as integers of two digits from 0 to 255; or, at levels with an [`Order`] of their own, as
/// those pack them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights {
    /// The digits of four values in turn, the higher one first: those of value `v` begin at [`place`](Self::place).
    pub(crate) bytes: [[u8; 64]; 2],
}

impl Weights {
    /// None.
    pub(crate) const ZERO: Self = Self { bytes: [[0; 64]; 2] };

    /// The largest integer.
    pub(crate) const MOST: f32 = 65535.0;

    /// Where four values begin whose first is a multiple of four: as vectors pack them.
    #[inline(always)]
    pub(crate) const fn place(value: usize) -> usize {
        value % 16 * 4 + value / 16 * 4
    }
}

/// Some bytes of the values of a tile.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "plain Rust prefetches nothing"))]
pub(crate) struct Values<'a> {
    /// The first byte of each value. Those after the last one are addresses of any value.
    pub(crate) values: &'a [*const i8; 64],
    /// The number of values.
    pub(crate) len: usize,
    /// The first byte of each value that is taken.
    pub(crate) at: usize,
    /// How many are taken, one after the other.
    pub(crate) bytes: usize,
    /// As of [`Bytes`].
    pub(crate) ahead: [usize; 2],
    /// What is requested meanwhile.
    pub(crate) next: Next,
}

/// Where the requests of a call begin that reads some bytes of all values: calls share the rows of a tile, in the order
/// of memory.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "plain Rust prefetches nothing"))]
pub(crate) struct Next {
    /// The row.
    pub(crate) row: usize,
    /// Its part.
    pub(crate) part: usize,
    /// The parts of a row: half a line each, or a little more.
    pub(crate) parts: usize,
    /// Bytes of a part.
    pub(crate) step: usize,
}

/// As [`Isa::most_weight`](super::Isa::most_weight), in plain Rust.
pub(super) fn most_weight(weights: &[f32; 64], scales: Option<&[f32; 64]>, some: u64) -> Option<f32> {
    let mut most = 0.0f32;
    for n in (0..64).filter(|n| some >> n & 1 == 1) {
        let x = weights[n] * scales.map_or(1.0, |scales| scales[n]);
        if !(0.0..f32::INFINITY).contains(&x) {
            return None;
        }
        most = most.max(x);
    }
    Some(most)
}

/// As [`Isa::write_weights`](super::Isa::write_weights), in plain Rust.
pub(super) fn write_weights(weights: &[f32; 64], scale: f32, scales: Option<&[f32; 64]>, some: u64, to: &mut Weights) {
    for n in 0..64 {
        let weight = weights[n] * scale * scales.map_or(1.0, |scales| scales[n]);
        let [low, high] = if some >> n & 1 == 1 { (libm::rintf(weight) as u16).to_le_bytes() } else { [0; 2] };
        let place = Weights::place(n / 4 * 4) + n % 4;
        (to.bytes[0][place], to.bytes[1][place]) = (high, low);
    }
}

/// As [`Isa::weigh_bytes`](super::Isa::weigh_bytes), in plain Rust, of one row.
///
/// # Safety
/// As there.
pub(super) unsafe fn weigh(of: &Values<'_>, weights: &Weights, unit: f32, out: &mut [f32]) {
    let Values { values, len, at, bytes, .. } = *of;
    for (c, out) in out.iter_mut().enumerate().take(bytes) {
        let mut sums = [0i32; 2];
        for (n, value) in values.iter().enumerate().take(len) {
            // SAFETY: the caller vouches for the bytes.
            let byte = i32::from(unsafe { value.add(at + c).read() });
            for (sum, digits) in sums.iter_mut().zip(&weights.bytes) {
                *sum += byte * i32::from(digits[Weights::place(n / 4 * 4) + n % 4]);
            }
        }
        *out = unit * joined(sums);
    }
}
