//! AMX: products of bf16 matrices on x86-64 servers, by inline assembly, because the intrinsics are not stable.
//!
//! **Detection** (`amx/permission.rs`). CPUID must list AMX-TILE, AMX-BF16 and the one palette of eight registers of 16
//! × 64 bytes. XCR0 must show that the system saves them. Linux must give this process permission to use them
//! (`arch_prctl`, which may refuse). If one of these is missing the level is absent, and its error says which.
//!
//! **Configuration** belongs to a thread. [`Unit`] loads it and, when dropped, restores the previous one. It cannot be
//! sent to another thread. A call inside a call (from a caller's closure) leaves the outer configuration as it was. By
//! the calling convention any function may change the configuration, so code that has called closures then calls
//! [`refresh`](AmxUnit::refresh).
//!
//! **State.** No register keeps a value longer than one assembly block: each block loads its sums, does all its steps
//! and stores them. So the compiler need not know AMX's registers.

#![allow(unsafe_code, reason = "the leaf: assembly behind a token that proves the CPU and the system allow it")]

use core::arch::asm;
use core::marker::PhantomData;

#[cfg(all(feature = "std", target_os = "linux", not(miri)))]
mod permission;

#[cfg(all(feature = "std", target_os = "linux", not(miri)))]
use permission::{cpu_and_system, permission, verdict};

use super::avx512::Avx512;
use crate::amx::product::{AmxUnit, Operand, Products, Square, with_products};
#[cfg(feature = "std")]
use crate::isa::LevelError;

/// Proof that the CPU has AMX-TILE and AMX-BF16, and that this process may use them; and AVX-512 for everything else.
/// Made only by `level`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Amx {
    pub(crate) vectors: Avx512,
    pub(crate) _proof: (),
}

impl Amx {
    /// Why this process cannot use AMX, if it cannot. Asks the CPU and the system, and requests permission: callers
    /// keep the answer and do not ask again.
    #[cfg(all(feature = "std", target_os = "linux", not(miri)))]
    pub(crate) fn obstacle() -> Option<LevelError> {
        let (cpu, system) = cpu_and_system();
        verdict(cpu, system, permission)
    }

    /// What the CPU or the system lacks. Does not request permission, because that binds the process.
    #[cfg(all(feature = "std", target_os = "linux", not(miri)))]
    pub(crate) fn lacking() -> Option<LevelError> {
        let (cpu, system) = cpu_and_system();
        verdict(cpu, system, || 0)
    }

    /// No other system is known to give permission in the same way; Miri runs no assembly.
    #[cfg(all(feature = "std", not(all(target_os = "linux", not(miri)))))]
    pub(crate) fn obstacle() -> Option<LevelError> {
        Some(LevelError::Disabled)
    }

    /// As [`obstacle`](Self::obstacle).
    #[cfg(all(feature = "std", not(all(target_os = "linux", not(miri)))))]
    pub(crate) fn lacking() -> Option<LevelError> {
        Self::obstacle()
    }

    /// Configures this thread.
    #[inline]
    pub(crate) fn open(self) -> Unit {
        let mut before = Config([0; 64]);
        // SAFETY: the token proves the instructions and the permission. The first writes 64 bytes, which `before` has;
        // the second reads 64 bytes of a configuration that palette 1 allows.
        unsafe {
            asm!("sttilecfg [{}]", in(reg) &raw mut before, options(nostack, preserves_flags));
        }
        let mut unit = Unit { before, _this_thread: PhantomData };
        unit.refresh();
        unit
    }
}

/// A configuration of AMX, as LDTILECFG reads it.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Config([u8; 64]);

impl Config {
    /// Palette 1: eight registers of sixteen rows of 64 bytes.
    const SQUARE: Self = {
        let mut bytes = [0; 64];
        bytes[0] = 1;
        let mut register = 0;
        while register < 8 {
            bytes[16 + 2 * register] = 64; // bytes of a row, 16 bits each
            bytes[48 + register] = 16; // rows
            register += 1;
        }
        Self(bytes)
    };
}

/// AMX on this thread, configured. Dropping it restores the previous configuration.
pub(crate) struct Unit {
    before: Config,
    /// A configuration belongs to its thread: neither `Send` nor `Sync`.
    _this_thread: PhantomData<*const ()>,
}

impl Drop for Unit {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: a unit exists only where its token did. A configuration with palette 0 is none, and TILERELEASE
        // restores that; any other was in force on this thread and so is valid.
        unsafe {
            if self.before.0[0] == 0 {
                asm!("tilerelease", options(nostack, preserves_flags, nomem));
            } else {
                asm!("ldtilecfg [{}]", in(reg) &raw const self.before, options(nostack, preserves_flags));
            }
        }
    }
}

/// The instructions of one load or one product, as text: sums in tmm0 to tmm3, A in tmm4 and tmm5, B in tmm6 and tmm7.
/// A part is a pair of operands, 2 KiB.
macro_rules! text {
    (A0) => { text!(@a "0", "1024") };
    (A1) => { text!(@a "2048", "3072") };
    (A2) => { text!(@a "4096", "5120") };
    (B0) => { text!(@b "0", "1024") };
    (B1) => { text!(@b "2048", "3072") };
    (B2) => { text!(@b "4096", "5120") };
    (@a $first:literal, $second:literal) => {
        concat!(
            "tileloadd tmm4, [{a} + {line} + ", $first, "]\n",
            "tileloadd tmm5, [{a} + {line} + ", $second, "]\n",
        )
    };
    (@b $first:literal, $second:literal) => {
        concat!(
            "tileloadd tmm6, [{b} + {line} + ", $first, "]\n",
            "tileloadd tmm7, [{b} + {line} + ", $second, "]\n",
        )
    };
    ([$($load:ident)+]) => {
        concat!(
            $(text!($load),)+
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            "tdpbf16ps tmm1, tmm4, tmm7\n",
            "tdpbf16ps tmm2, tmm5, tmm6\n",
            "tdpbf16ps tmm3, tmm5, tmm7\n",
        )
    };
}

/// One assembly block per list of products.
macro_rules! blocks {
    ([$products:ident $a:ident $b:ident $c:ident $steps:ident $fresh:ident]
        $($(#[$doc:meta])* $name:ident $in_a:literal $in_b:literal $([$($load:ident)+])+;)*) => {
        match $products {
            $(Products::$name => {
                // SAFETY: the unit is configured: eight registers of 16 × 64 bytes. `check` has shown that A and B hold
                // `steps` ≥ 1 steps of $in_a and $in_b pairs of operands, 1 KiB each; the loop reads each at least once
                // and none beyond. C is 32 rows of 128 bytes, and the four sums are its quarters. Flags and registers
                // are declared as clobbered.
                unsafe {
                    asm!(
                        "test {fresh}, {fresh}",
                        "jnz 2f",
                        "tileloadd tmm0, [{c} + {row}]",
                        "tileloadd tmm1, [{c} + {row} + 64]",
                        "tileloadd tmm2, [{c} + {row} + 2048]",
                        "tileloadd tmm3, [{c} + {row} + 2112]",
                        "jmp 3f",
                        "2:",
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "tilezero tmm2",
                        "tilezero tmm3",
                        "3:",
                        $(text!([$($load)+]),)+
                        "add {a}, {a_step}",
                        "add {b}, {b_step}",
                        "dec {steps}",
                        "jnz 3b",
                        "tilestored [{c} + {row}], tmm0",
                        "tilestored [{c} + {row} + 64], tmm1",
                        "tilestored [{c} + {row} + 2048], tmm2",
                        "tilestored [{c} + {row} + 2112], tmm3",
                        a = inout(reg) $a.as_ptr() => _,
                        b = inout(reg) $b.as_ptr() => _,
                        c = in(reg) $c.as_mut_ptr(),
                        steps = inout(reg) $steps => _,
                        fresh = in(reg) usize::from($fresh),
                        line = in(reg) 64_usize,
                        row = in(reg) 128_usize,
                        a_step = const 2048 * $in_a,
                        b_step = const 2048 * $in_b,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack),
                    );
                }
            })*
        }
    };
}

impl AmxUnit for Unit {
    #[inline]
    fn refresh(&mut self) {
        static SQUARE: Config = Config::SQUARE;
        // SAFETY: a unit exists only where its token did; 64 bytes of a valid configuration are read.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const SQUARE, options(nostack, preserves_flags, readonly));
        }
    }

    #[inline(always)]
    fn block(&mut self, products: Products, a: &[Operand], b: &[Operand], steps: usize, fresh: bool, c: &mut Square) {
        products.check(a, b, steps);
        if steps == 0 {
            if fresh {
                c.fill(0.0);
            }
            return;
        }
        with_products!(blocks, products, a, b, c, steps, fresh);
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::amx::model::Model;
    use crate::level::Level;

    /// The token, if this machine has one. If not, the tests say so and pass, unless `ATTN_TEST_LEVELS` names the
    /// level.
    pub(super) fn amx() -> Option<Amx> {
        match Level::by_name("amx") {
            Ok(Level::Amx(amx)) => Some(amx),
            other => {
                assert!(!attn_testing::is_demanded("amx"), "{other:?}");
                std::eprintln!("no AMX here: nothing was compared");
                None
            }
        }
    }

    fn configuration() -> [u8; 64] {
        let mut config = Config([0xff; 64]);
        // SAFETY: called only where a token exists; 64 bytes are written.
        unsafe { asm!("sttilecfg [{}]", in(reg) &raw mut config, options(nostack, preserves_flags)) };
        config.0
    }

    /// Any bits; with `wild` subnormal numbers, infinities and NaN among them.
    fn operands(count: usize, seed: &mut u64, wild: bool) -> Vec<Operand> {
        let mut word = || {
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = (*seed >> 32) as u32;
            f32::from_bits(if wild { bits } else { (bits & 0x9fff_9fff) | 0x2000_2000 })
        };
        (0..count).map(|_| Operand(core::array::from_fn(|_| word()))).collect()
    }

    #[test]
    fn the_processor_computes_what_the_model_says() {
        use Products::*;
        let Some(amx) = amx() else { return };
        let (mut unit, mut model, mut seed) = (amx.open(), Model::new(), 7);
        for products in [One, OneByTwo, OneByThree, TwoByOne, ThreeByOne, Three, Four, Five, Six] {
            for (steps, fresh, wild) in
                [(0, true, false), (1, true, false), (3, false, false), (2, false, true), (2, true, true)]
            {
                let (in_a, in_b) = products.parts();
                let (a, b) = (operands(steps * 2 * in_a, &mut seed, wild), operands(steps * 2 * in_b, &mut seed, wild));
                let mut ours: Square = core::array::from_fn(|n| if n % 5 == 0 { 1e-40 } else { n as f32 * 1e-3 - 0.5 });
                let mut want = ours;
                unit.block(products, &a, &b, steps, fresh, &mut ours);
                model.block(products, &a, &b, steps, fresh, &mut want);
                for (n, (ours, want)) in ours.iter().zip(&want).enumerate() {
                    let same = ours.to_bits() == want.to_bits() || ours.is_nan() && want.is_nan();
                    assert!(same, "{products:?} {steps} {fresh} {wild}: {n} is {ours:e}, the model says {want:e}");
                }
            }
        }
    }

    #[test]
    fn a_unit_leaves_the_thread_as_it_was() {
        let Some(amx) = amx() else { return };
        let thread = std::thread::spawn(move || {
            assert_eq!(configuration(), [0; 64], "a fresh thread has none");
            let outer = amx.open();
            assert_eq!(configuration(), Config::SQUARE.0);
            {
                let mut inner = amx.open();
                // SAFETY: the token proves the instruction, which gives the configuration up, as any function may.
                unsafe { asm!("tilerelease", options(nostack, preserves_flags)) };
                inner.refresh();
                assert_eq!(configuration(), Config::SQUARE.0);
            }
            assert_eq!(configuration(), Config::SQUARE.0, "the outer one is back");
            drop(outer);
            assert_eq!(configuration(), [0; 64]);
        });
        thread.join().expect("no assertion failed");
    }
}
