//! Rows in packed formats: bytes that the products widen in registers, in place, or that are widened into scratch.
//!
//! Each format has its own type of bytes. Its numbers are exactly those of [`Format::decode`], at every level.
//! [`attn_core::formats`] defines the formats.

#![allow(unsafe_code, reason = "the hot loop: addresses that `Unchecked::check` has held against their slice")]

use attn_core::formats::Format;
use attn_core::half::{bf16, f16};
use attn_core::row::Row;

use super::{Integers, Stored};
use crate::isa::{Isa, MAX_LANES};

/// A byte of a row in a packed format.
///
/// # Safety
/// The type is a byte: `repr(transparent)` around a `u8`, or `i8`.
pub(crate) unsafe trait Packed: Stored {
    /// The format of a row.
    const FORMAT: Format;
}

// SAFETY: a byte.
unsafe impl Packed for i8 {
    const FORMAT: Format = Format::Int8;
}

/// Bytes as a row of a format.
pub(crate) const fn packed<T: Packed>(bytes: &[u8]) -> &[T] {
    // SAFETY: `Packed` vouches that an element is a byte, of which any bits are a value.
    unsafe { core::slice::from_raw_parts(bytes.as_ptr().cast::<T>(), bytes.len()) }
}

/// Writes the numbers of a row, as many as both hold, without the scale that the cache stores beside it.
#[inline(always)]
pub(crate) fn widen<I: Isa>(isa: I, format: Format, bytes: &[u8], to: &mut [f32]) {
    match format {
        Format::Q8_0 => widen_as::<I, Q8>(isa, bytes, to),
        Format::Q4_0 => widen_as::<I, Q4>(isa, bytes, to),
        Format::E4m3 => widen_as::<I, E4m3>(isa, bytes, to),
        Format::E5m2 => widen_as::<I, E5m2>(isa, bytes, to),
        Format::Int8 => widen_as::<I, i8>(isa, bytes, to),
        Format::F16 => widen_as::<I, F16>(isa, bytes, to),
        Format::Bf16 => widen_as::<I, Bf16>(isa, bytes, to),
    }
}

#[inline(always)]
fn widen_as<I: Isa, T: Packed>(isa: I, bytes: &[u8], to: &mut [f32]) {
    let format = T::FORMAT;
    let numbers = (bytes.len() / format.block_bytes() * format.block()).min(to.len());
    let (whole, tail) = to[..numbers].split_at_mut(numbers / I::LANES * I::LANES);
    let row = packed::<T>(bytes).as_ptr();
    let mut done = 0;
    for x in whole.chunks_mut(2 * I::LANES) {
        // SAFETY: the bytes hold `numbers` numbers, and these are below.
        unsafe {
            if let Some((first, second)) = x.split_at_mut_checked(I::LANES).filter(|(_, second)| !second.is_empty()) {
                let both = T::load_two(isa, row, done);
                isa.store(both[0], first);
                isa.store(both[1], second);
            } else {
                isa.store(T::load(isa, row, done), x);
            }
        }
        done += x.len();
    }
    // Blocks are whole vectors, so only formats without blocks have a tail.
    if !tail.is_empty() {
        format.widen(&bytes[T::elements(whole.len())..], tail);
    }
}

macro_rules! packed {
    ($($name:ident, $format:ident, $doc:literal, $load:ident $(, $load_two:ident)? $(=> $integers:expr)?;)*) => {$(
        #[doc = $doc]
        #[derive(Clone, Copy, Debug, Default)]
        #[repr(transparent)]
        pub(crate) struct $name(u8);

        // SAFETY: `repr(transparent)` around a `u8`.
        unsafe impl Packed for $name {
            const FORMAT: Format = Format::$format;
        }

        impl Stored for $name {
            const FINITE: bool = false;
            const EVERY: bool = false;
            $(const INTEGERS: Option<Integers> = Some($integers);)?
            #[inline(always)]
            fn elements(numbers: usize) -> usize {
                numbers / Format::$format.block() * Format::$format.block_bytes()
            }
            #[inline(always)]
            unsafe fn load<I: Isa>(isa: I, row: *const Self, c: usize) -> I::F {
                // SAFETY: the caller vouches for the numbers of the row.
                unsafe { $load(isa, row.cast(), c) }
            }
            $(
                const TOGETHER: bool = true;
                #[inline(always)]
                unsafe fn load_two<I: Isa>(isa: I, row: *const Self, c: usize) -> [I::F; 2] {
                    // SAFETY: the caller vouches for the numbers of the row.
                    unsafe { $load_two(isa, row.cast(), c) }
                }
            )?
            fn read(row: Row<'_, Self>, out: &mut [f32]) {
                let mut bytes = row.iter().map(|byte| byte.0);
                // 32 numbers at a time: whole blocks of any format.
                for some in out.chunks_mut(32) {
                    let (mut block, len) = ([0; 64], Self::elements(some.len()));
                    block.iter_mut().zip(bytes.by_ref().take(len)).for_each(|(to, byte)| *to = byte);
                    Format::$format.widen(&block[..len], some);
                }
            }
        }
    )*};
}
packed! {
    Q8, Q8_0, "ggml's blocks of 32 int8.", load_q8_0, load_two_q8_0 => Integers::Blocks;
    Q4, Q4_0, "ggml's blocks of 32 numbers of four bits.", load_q4_0, load_two_q4_0;
    E4m3, E4m3, "OCP's e4m3fn.", load_e4m3, load_two_e4m3;
    E5m2, E5m2, "OCP's e5m2.", load_e5m2, load_two_e5m2;
    F16, F16, "Half precision at any address.", load_f16;
    Bf16, Bf16, "bfloat16 at any address.", load_bf16;
}

/// The scale that a block begins with, in all lanes.
///
/// # Safety
/// Two bytes are readable.
#[inline(always)]
unsafe fn scale<I: Isa>(isa: I, block: *const u8) -> I::F {
    // SAFETY: the caller vouches for two bytes.
    let d = f16::from_le_bytes(unsafe { block.cast::<[u8; 2]>().read() });
    isa.load_f16(&[d; MAX_LANES])
}

/// # Safety
/// As [`Stored::load`].
#[inline(always)]
unsafe fn load_q8_0<I: Isa>(isa: I, row: *const u8, c: usize) -> I::F {
    // SAFETY: vectors do not cross blocks, whose size their own divides.
    unsafe {
        let block = row.add(c / 32 * 34);
        isa.mul(scale(isa, block), isa.load_i8_ptr(block.add(2 + c % 32).cast()))
    }
}

/// # Safety
/// As [`Stored::load_two`].
#[inline(always)]
unsafe fn load_two_q8_0<I: Isa>(isa: I, row: *const u8, c: usize) -> [I::F; 2] {
    // SAFETY: two vectors are in one block, whose size theirs divides.
    unsafe {
        let block = row.add(c / 32 * 34);
        let (scale, numbers) = (scale(isa, block), block.add(2 + c % 32).cast());
        [isa.mul(scale, isa.load_i8_ptr(numbers)), isa.mul(scale, isa.load_i8_ptr(numbers.add(I::LANES)))]
    }
}

/// # Safety
/// As [`Stored::load`].
#[inline(always)]
unsafe fn load_q4_0<I: Isa>(isa: I, row: *const u8, c: usize) -> I::F {
    // SAFETY: numbers 0 to 15 are the lower halves of 16 bytes, 16 to 31 the upper ones; vectors do not cross that.
    unsafe {
        let (block, shift) = (row.add(c / 32 * 18), (c % 32 / 16 * 4) as i32);
        isa.mul(scale(isa, block), isa.load_nibbles_ptr(block.add(2 + c % 16), shift))
    }
}

/// # Safety
/// As [`Stored::load_two`].
#[inline(always)]
unsafe fn load_two_q4_0<I: Isa>(isa: I, row: *const u8, c: usize) -> [I::F; 2] {
    // SAFETY: two vectors of sixteen lanes are a block, of a scale and sixteen bytes. Two shorter ones are the lower
    // halves of some of these bytes, or the upper ones.
    unsafe {
        let block = row.add(c / 32 * 18);
        let scale = scale(isa, block);
        if const { I::LANES == 16 } {
            isa.load_two_nibbles_ptr(block.add(2), scale)
        } else {
            let [a, b] = isa.load_nibbles_twice_ptr(block.add(2 + c % 16), (c % 32 / 16 * 4) as i32);
            [isa.mul(scale, a), isa.mul(scale, b)]
        }
    }
}

/// # Safety
/// As [`Stored::load`].
#[inline(always)]
unsafe fn load_e4m3<I: Isa>(isa: I, row: *const u8, c: usize) -> I::F {
    // SAFETY: the caller vouches for the numbers.
    unsafe { isa.load_e4m3_ptr(row.add(c)) }
}

/// # Safety
/// As [`Stored::load_two`].
#[inline(always)]
unsafe fn load_two_e4m3<I: Isa>(isa: I, row: *const u8, c: usize) -> [I::F; 2] {
    // SAFETY: the caller vouches for the numbers.
    unsafe { isa.load_two_e4m3_ptr(row.add(c)) }
}

/// # Safety
/// As [`Stored::load`].
#[inline(always)]
unsafe fn load_e5m2<I: Isa>(isa: I, row: *const u8, c: usize) -> I::F {
    // SAFETY: the caller vouches for the numbers.
    unsafe { isa.load_e5m2_ptr(row.add(c)) }
}

/// # Safety
/// As [`Stored::load_two`].
#[inline(always)]
unsafe fn load_two_e5m2<I: Isa>(isa: I, row: *const u8, c: usize) -> [I::F; 2] {
    // SAFETY: the caller vouches for the numbers.
    unsafe { isa.load_two_e5m2_ptr(row.add(c)) }
}

/// # Safety
/// As [`Stored::load`].
#[inline(always)]
unsafe fn load_f16<I: Isa>(isa: I, row: *const u8, c: usize) -> I::F {
    let mut numbers = [f16::ZERO; MAX_LANES];
    // A loop: the closure of `from_fn` may be compiled by itself, without the level's instructions.
    for (n, number) in numbers.iter_mut().enumerate().take(I::LANES) {
        // SAFETY: the caller vouches for the numbers.
        *number = f16::from_le_bytes(unsafe { row.add(2 * (c + n)).cast::<[u8; 2]>().read() });
    }
    isa.load_f16(&numbers)
}

/// # Safety
/// As [`Stored::load`].
#[inline(always)]
unsafe fn load_bf16<I: Isa>(isa: I, row: *const u8, c: usize) -> I::F {
    let mut numbers = [bf16::ZERO; MAX_LANES];
    for (n, number) in numbers.iter_mut().enumerate().take(I::LANES) {
        // SAFETY: the caller vouches for the numbers.
        *number = bf16::from_le_bytes(unsafe { row.add(2 * (c + n)).cast::<[u8; 2]>().read() });
    }
    isa.load_bf16(&numbers)
}

#[cfg(test)]
mod tests {
    use attn_core::View;

    use super::*;
    use crate::level::{Level, Run};

    struct Widen<'a>(Format, &'a [u8], &'a mut [f32]);
    impl Run<()> for Widen<'_> {
        #[inline(always)]
        fn run<I: Isa>(self, isa: I) {
            widen(isa, self.0, self.1, self.2);
        }
    }

    fn same(got: &[f32], want: &[f32]) -> bool {
        let same = |(x, y): (&f32, &f32)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
        got.len() == want.len() && got.iter().zip(want).all(same)
    }

    /// Every code in every place of a block, with scales of all kinds, and rows that end inside of a vector.
    fn check<T: Packed>() {
        let (format, scales) = (T::FORMAT, [0x3c00u16, 1, 0x83ff, 0xb801, 0x7bff, 0, 0x8000, 0x7c00, 0x7e00]);
        let lengths = [96, 1, 31, 33, 75, 0].map(|len| len / format.block() * format.block());
        for (start, len) in
            (0..=255u8).step_by(if cfg!(miri) { 85 } else { 1 }).flat_map(|n| lengths.map(|len| (n, len)))
        {
            let row = format.row_bytes(len).unwrap();
            let mut bytes: Vec<u8> = (0..row).map(|n| start.wrapping_add((n * 7) as u8)).collect();
            if format.block() > 1 {
                for (n, block) in bytes.chunks_exact_mut(format.block_bytes()).enumerate() {
                    block[..2].copy_from_slice(&scales[(usize::from(start) + n) % scales.len()].to_le_bytes());
                }
            }
            let (mut want, mut read) = (vec![7.0; len], vec![7.0; len]);
            format.decode(&bytes, &mut want).unwrap();
            T::read(View::matrix(packed::<T>(&bytes), 1, row).unwrap().row(0, 0, 0), &mut read);
            assert!(same(&read, &want), "{format:?} {start}: {read:?}, not {want:?}");
            for level in Level::available() {
                let mut got = vec![7.0; len];
                level.run(Widen(format, &bytes, &mut got));
                assert!(same(&got, &want), "{} {format:?} {start}: {got:?}, not {want:?}", level.name());
            }
        }
    }

    #[test]
    fn numbers_are_those_of_the_core_at_every_level() {
        check::<Q8>();
        check::<Q4>();
        check::<E4m3>();
        check::<E5m2>();
        check::<i8>();
        check::<F16>();
        check::<Bf16>();
    }

    #[test]
    fn of_two_lengths_the_smaller_counts() {
        let bytes: Vec<u8> = (1..=80).collect();
        for level in Level::available() {
            for len in [0, 5, 31, 32, 33, 64, 79, 80, 81, 130] {
                let (mut got, mut want) = (vec![7.0; len], vec![7.0; len]);
                level.run(Widen(Format::Int8, &bytes, &mut got));
                Format::Int8.widen(&bytes, &mut want);
                assert_eq!(got, want);
            }
        }
    }
}
