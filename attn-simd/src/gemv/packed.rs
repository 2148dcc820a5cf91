//! Rows in packed formats, read by the products where they lie: bytes that are widened in registers.
//!
//! Each format is a type of bytes. What the formats are is [`attn_core::formats`]'; rows whose numbers are no whole
//! vectors are widened into scratch instead, by [`formats`](crate::formats).

#![allow(unsafe_code, reason = "the hot loop: addresses that `Unchecked::check` has held against their slice")]

use attn_core::formats::Format;
use attn_core::half::f16;
use attn_core::row::Row;

use super::Stored;
use crate::isa::{Isa, MAX_LANES};

/// A byte of a row in a packed format.
///
/// # Safety
/// The type is a byte: `repr(transparent)` around a `u8`.
pub(crate) unsafe trait Packed: Stored {
    /// The format of a row.
    #[cfg_attr(not(test), expect(dead_code, reason = "for tests"))]
    const FORMAT: Format;
}

/// Bytes of a row as such.
pub(crate) const fn packed<T: Packed>(bytes: &[u8]) -> &[T] {
    // SAFETY: `Packed` vouches that an element is a byte.
    unsafe { core::slice::from_raw_parts(bytes.as_ptr().cast::<T>(), bytes.len()) }
}

macro_rules! packed {
    ($($name:ident, $format:ident, $doc:literal, $load:ident;)*) => {$(
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
            #[inline(always)]
            fn elements(numbers: usize) -> usize {
                numbers / Format::$format.block() * Format::$format.block_bytes()
            }
            #[inline(always)]
            unsafe fn load<I: Isa>(isa: I, row: *const Self, c: usize) -> I::F {
                // SAFETY: the caller vouches for the numbers of the row.
                unsafe { $load(isa, row.cast(), c) }
            }
            fn read(row: Row<'_, Self>, out: &mut [f32]) {
                let mut bytes = row.iter().map(|byte| byte.0);
                // Some blocks at a time, of whatever format.
                for some in out.chunks_mut(32) {
                    let (mut block, len) = ([0; 34], Self::elements(some.len()));
                    block.iter_mut().zip(bytes.by_ref().take(len)).for_each(|(to, byte)| *to = byte);
                    Format::$format.widen(&block[..len], some);
                }
            }
        }
    )*};
}
packed! {
    Q8, Q8_0, "ggml's blocks of 32 int8.", load_q8_0;
    Q4, Q4_0, "ggml's blocks of 32 numbers of four bits.", load_q4_0;
    E4m3, E4m3, "OCP's e4m3fn.", load_e4m3;
    E5m2, E5m2, "OCP's e5m2.", load_e5m2;
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
/// As [`Stored::load`].
#[inline(always)]
unsafe fn load_e4m3<I: Isa>(isa: I, row: *const u8, c: usize) -> I::F {
    // SAFETY: the caller vouches for the numbers.
    unsafe { isa.load_e4m3_ptr(row.add(c)) }
}

/// # Safety
/// As [`Stored::load`].
#[inline(always)]
unsafe fn load_e5m2<I: Isa>(isa: I, row: *const u8, c: usize) -> I::F {
    // SAFETY: the caller vouches for the numbers.
    unsafe { isa.load_e5m2_ptr(row.add(c)) }
}

#[cfg(test)]
mod tests {
    use attn_core::View;

    use super::*;
    use crate::level::{Level, Run};

    struct Widen<'a, T>(&'a [T], &'a mut [f32]);
    impl<T: Packed> Run<()> for Widen<'_, T> {
        #[inline(always)]
        fn run<I: Isa>(self, isa: I) {
            assert!(self.0.len() >= T::elements(self.1.len()));
            for (n, x) in self.1.chunks_exact_mut(I::LANES).enumerate() {
                // SAFETY: as asserted.
                isa.store(unsafe { T::load(isa, self.0.as_ptr(), n * I::LANES) }, x);
            }
        }
    }

    /// Every code in every place of a block, with scales of all kinds.
    fn check<T: Packed>() {
        let (format, scales) = (T::FORMAT, [0x3c00u16, 1, 0x83ff, 0xb801, 0x7bff, 0, 0x8000, 0x7c00, 0x7e00]);
        for (start, blocks) in (0..=255u8).step_by(if cfg!(miri) { 51 } else { 1 }).zip([1, 2, 4].into_iter().cycle()) {
            let row = format.row_bytes(32 * blocks).unwrap();
            let mut bytes: Vec<u8> = (0..row).map(|n| start.wrapping_add((n * 7) as u8)).collect();
            if format.block() > 1 {
                for (n, block) in bytes.chunks_exact_mut(format.block_bytes()).enumerate() {
                    block[..2].copy_from_slice(&scales[(usize::from(start) + n) % scales.len()].to_le_bytes());
                }
            }
            let mut want = vec![7.0; 32 * blocks];
            format.decode(&bytes, &mut want).unwrap();
            let rows = packed::<T>(&bytes);
            let mut read = vec![7.0; 32 * blocks];
            T::read(View::matrix(rows, 1, row).unwrap().row(0, 0, 0), &mut read);
            for level in Level::available() {
                let mut got = vec![7.0; 32 * blocks];
                level.run(Widen(rows, &mut got));
                for ((got, want), read) in got.iter().zip(&want).zip(&read) {
                    let same = |x: &f32| x.to_bits() == want.to_bits() || x.is_nan() && want.is_nan();
                    assert!(same(got), "{} {format:?} {start}: {got:e}, not {want:e}", level.name());
                    assert!(same(read), "{format:?} {start}: {read:e}, not {want:e}");
                }
            }
        }
    }

    #[test]
    fn numbers_are_those_of_the_core_at_every_level() {
        check::<Q8>();
        check::<Q4>();
        check::<E4m3>();
        check::<E5m2>();
    }
}
