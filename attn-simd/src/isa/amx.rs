//! AMX: the tile unit of x86-64 servers, through inline assembly (the intrinsics are not stable).
//!
//! **Detection.** CPUID must list AMX-TILE, AMX-BF16 and the one palette of eight tiles of 16 × 64 bytes, XCR0 must
//! show that the system saves tile state, and Linux must give this process permission to use it (`arch_prctl`, which
//! may be refused). Where one of them is missing the level is absent, and its error says which.
//!
//! **Configuration** belongs to a thread. [`Unit`] loads it and, when dropped, puts back what it found: it cannot be
//! sent to another thread, and calls inside calls (from a caller's closure) leave the outer one's configuration as it
//! was. By the calling convention any function may use the unit for itself, which is why code that calls closures asks
//! for [`refresh`](TileProduct::refresh).
//!
//! **State.** No tile lives longer than one assembly block: each loads its sums, does all its steps and stores them.
//! The compiler knows nothing of tiles and need not.

#![allow(unsafe_code, reason = "the leaf: assembly behind a token that proves the CPU and the system allow it")]

use core::arch::asm;
use core::marker::PhantomData;

use super::avx512::Avx512;
use crate::amx::product::{Products, Square, Tile, TileProduct, with_products};
use crate::isa::LevelError;

/// Proof that the CPU has AMX-TILE and AMX-BF16, and that this process may use them; and AVX-512 for everything else.
/// Made only by `level`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Amx {
    pub(crate) vectors: Avx512,
    pub(crate) _proof: (),
}

impl Amx {
    /// What keeps this process from the tile unit, if anything does. Asks the CPU and the system, and for permission:
    /// to be kept, not repeated.
    #[cfg(all(target_os = "linux", not(miri)))]
    pub(crate) fn obstacle() -> Option<LevelError> {
        let (cpu, system) = cpu_and_system();
        verdict(cpu, system, permission)
    }

    /// What CPU and system lack; permission, which binds the process, is not asked for.
    #[cfg(all(feature = "std", target_os = "linux", not(miri)))]
    pub(crate) fn lacking() -> Option<LevelError> {
        let (cpu, system) = cpu_and_system();
        verdict(cpu, system, || 0)
    }

    /// No other system is known to hand out permission in the same way; Miri runs no assembly.
    #[cfg(not(all(target_os = "linux", not(miri))))]
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

/// From what the CPU has, whether the system saves the state of tiles, and what it answers when asked for permission:
/// 0, or an error below. It is asked last, for the answer binds the process.
#[cfg(all(target_os = "linux", not(miri)))]
fn verdict(cpu: bool, system: bool, permission: impl FnOnce() -> i64) -> Option<LevelError> {
    match (cpu, system) {
        (false, _) => Some(LevelError::Missing),
        (_, false) => Some(LevelError::Disabled),
        _ => (permission() != 0).then_some(LevelError::Refused),
    }
}

/// What CPUID and XCR0 say.
#[cfg(all(target_os = "linux", not(miri)))]
#[allow(unused_unsafe, reason = "CPUID is a safe function in newer compilers than the oldest that is promised")]
fn cpu_and_system() -> (bool, bool) {
    use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    const OSXSAVE: u32 = 1 << 27;
    const AMX_BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    const TILE_CONFIG_AND_DATA: u64 = 0b11 << 17;
    #[target_feature(enable = "xsave")]
    fn xcr0() -> u64 {
        // SAFETY: register 0 always exists where XGETBV does.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: every x86-64 CPU has CPUID; leaves are asked for only up to the highest there is. XGETBV runs only where
    // OSXSAVE says that the system has turned it on.
    unsafe {
        if __cpuid(0).eax < 0x1d || __cpuid_count(7, 0).edx & AMX_BF16_AND_TILE != AMX_BF16_AND_TILE {
            return (false, false);
        }
        let palette = __cpuid_count(0x1d, 1);
        let (row_bytes, tiles, rows) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
        let cpu = __cpuid_count(0x1d, 0).eax >= 1 && (row_bytes, tiles, rows) == (64, 8, 16);
        (cpu, __cpuid(1).ecx & OSXSAVE != 0 && xcr0() & TILE_CONFIG_AND_DATA == TILE_CONFIG_AND_DATA)
    }
}

/// Asks Linux to let this process use tile data: it is then saved for every thread that touches it. Refused where a
/// thread's alternate signal stack could not hold it, by a filter of system calls, or by a kernel older than 5.16.
/// Returns 0, or an error's number below 0.
#[cfg(all(target_os = "linux", not(miri)))]
fn permission() -> i64 {
    const SYS_ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let answer: i64;
    // SAFETY: a system call that takes two numbers and touches no memory of this program; the kernel clobbers RCX and
    // R11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => answer,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

/// A tile configuration, as LDTILECFG reads it.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Config([u8; 64]);

impl Config {
    /// Palette 1; eight tiles of sixteen rows of 64 bytes.
    const SQUARE: Self = {
        let mut bytes = [0; 64];
        bytes[0] = 1;
        let mut tile = 0;
        while tile < 8 {
            bytes[16 + 2 * tile] = 64; // bytes of a row, 16 bits each
            bytes[48 + tile] = 16; // rows
            tile += 1;
        }
        Self(bytes)
    };
}

/// The tile unit of this thread, configured; what it was before is put back at the end.
pub(crate) struct Unit {
    before: Config,
    /// The configuration is a thread's own: neither `Send` nor `Sync`.
    _this_thread: PhantomData<*const ()>,
}

impl Drop for Unit {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: a unit exists only where its token did. A configuration with palette 0 is none at all: TILERELEASE
        // puts that back; any other was in force on this thread and so is valid.
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
/// A part is a pair of tiles, 2 KiB.
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
                // SAFETY: the unit is configured: eight tiles of 16 × 64 bytes. `check` has shown that A and B hold
                // `steps` ≥ 1 steps of $in_a and $in_b pairs of tiles, 1 KiB each, of which the loop reads each once or
                // more and none beyond; C is 32 rows of 128 bytes, of which the four tiles are the quarters. Flags and
                // the tiles are declared as clobbered.
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

impl TileProduct for Unit {
    #[inline]
    fn refresh(&mut self) {
        static SQUARE: Config = Config::SQUARE;
        // SAFETY: a unit exists only where its token did; 64 bytes of a valid configuration are read.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &raw const SQUARE, options(nostack, preserves_flags, readonly));
        }
    }

    #[inline(always)]
    fn block(&mut self, products: Products, a: &[Tile], b: &[Tile], steps: usize, fresh: bool, c: &mut Square) {
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

    /// The token, where this machine has one. Where it has none the tests say so and pass, unless `ATTN_TEST_LEVELS`
    /// names it.
    fn amx() -> Option<Amx> {
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

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn what_is_missing_is_said_and_permission_is_asked_last() {
        let never = || -> i64 { panic!("asked for what cannot be used") };
        assert_eq!(verdict(false, false, never), Some(LevelError::Missing));
        assert_eq!(verdict(false, true, never), Some(LevelError::Missing));
        assert_eq!(verdict(true, false, never), Some(LevelError::Disabled));
        assert_eq!(verdict(true, true, || -1), Some(LevelError::Refused));
        assert_eq!(verdict(true, true, || 0), None);
    }

    /// A filter of system calls on a thread of its own refuses `arch_prctl`: no crash, but an answer, and the level
    /// falls back.
    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn a_refused_permission_is_an_answer() {
        /// One instruction of a filter: BPF's code, the jumps, a constant.
        #[repr(C)]
        struct Instruction(u16, u8, u8, u32);
        #[repr(C)]
        struct Filter(u16, *const Instruction);
        fn system_call(number: i64, [a, b, c, d]: [usize; 4], program: &Filter) -> i64 {
            let _alive = program;
            let answer;
            // SAFETY: `prctl`, which reads at most the filter that is borrowed here; the kernel clobbers RCX and R11.
            unsafe {
                asm!("syscall", inlateout("rax") number => answer, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
                    in("r8") 0, lateout("rcx") _, lateout("r11") _, options(nostack));
            }
            answer
        }
        let thread = std::thread::spawn(|| {
            const PRCTL: i64 = 157;
            let program = [
                Instruction(0x20, 0, 0, 0),               // load the number of the call
                Instruction(0x15, 0, 1, 158),             // arch_prctl?
                Instruction(0x06, 0, 0, 0x0005_0000 | 1), // refuse: EPERM
                Instruction(0x06, 0, 0, 0x7fff_0000),     // allow
            ];
            let filter = Filter(4, program.as_ptr());
            let no_new_privileges = system_call(PRCTL, [38, 1, 0, 0], &filter);
            let installed = system_call(PRCTL, [22, 2, (&raw const filter).addr(), 0], &filter);
            if (no_new_privileges, installed) != (0, 0) {
                assert!(!attn_testing::is_demanded("amx"), "no filter of system calls: {installed}");
                std::eprintln!("no filter of system calls here ({installed}): nothing was refused");
                return;
            }
            assert_eq!(permission(), -1);
            assert_eq!(verdict(true, true, permission), Some(LevelError::Refused));
        });
        thread.join().expect("no assertion failed");
    }

    /// Gives this thread a stack for its signals, of so many bytes, or takes it away. Returns 0, or an error's number
    /// below 0.
    #[cfg(all(target_os = "linux", not(miri)))]
    fn signal_stack(bytes: Option<usize>) -> i64 {
        const SIGALTSTACK: i64 = 131;
        const DISABLE: usize = 2;
        static STACK: [u64; 2048] = [0; 2048];
        assert!(bytes.is_none_or(|bytes| bytes <= size_of_val(&STACK)));
        let stack = [(&raw const STACK).addr(), if bytes.is_some() { 0 } else { DISABLE }, bytes.unwrap_or(0)];
        let answer;
        // SAFETY: `sigaltstack` reads three words, which live here: an address, flags, a size. No handler writes to the
        // stack while it is set: the test raises no signal. The kernel clobbers RCX and R11.
        unsafe {
            asm!("syscall", inlateout("rax") SIGALTSTACK => answer, in("rdi") &raw const stack, in("rsi") 0_usize,
                lateout("rcx") _, lateout("r11") _, options(nostack));
        }
        answer
    }

    /// As `Level` says: after the permission a small stack for signals is refused; while there is one, the permission
    /// is, for good.
    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn small_signal_stacks_and_the_permission_exclude_each_other() {
        const CHILD: &str = "ATTN_TEST_SMALL_STACK";
        const NO_MEMORY: i64 = -12;
        if std::env::var_os(CHILD).is_some() {
            // Nothing in this process has asked yet.
            assert_eq!(signal_stack(Some(2048)), 0);
            let refused = [Level::by_name("amx"), Level::by_name("amx")];
            assert_eq!(signal_stack(None), 0);
            assert_eq!([refused[0], refused[1], Level::by_name("amx")], [Err(LevelError::Refused); 3]);
            assert_eq!(Level::available().last().map(Level::name), Some("avx512"));
            return;
        }
        if amx().is_none() {
            return;
        }
        let thread = std::thread::spawn(|| [2048, 8192, 11_264, 16_384].map(|bytes| signal_stack(Some(bytes))));
        let answers = thread.join().expect("no assertion failed");
        assert_eq!(answers, [NO_MEMORY, NO_MEMORY, NO_MEMORY, 0]);
        let name = "isa::amx::tests::small_signal_stacks_and_the_permission_exclude_each_other";
        let mut child = std::process::Command::new(std::env::current_exe().expect("a program"));
        let child = child.env_remove("ATTN_LEVEL").env_remove("ATTN_TEST_LEVELS").env(CHILD, "1");
        let done = child.args(["--exact", name, "--nocapture"]).output().expect("a process");
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(done.status.success() && text.contains("1 passed"), "{text}");
    }

    /// Any bits: subnormal numbers, infinities and NaN among them where `wild`.
    fn tiles(count: usize, seed: &mut u64, wild: bool) -> Vec<Tile> {
        let mut word = || {
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let bits = (*seed >> 32) as u32;
            f32::from_bits(if wild { bits } else { (bits & 0x9fff_9fff) | 0x2000_2000 })
        };
        (0..count).map(|_| Tile(core::array::from_fn(|_| word()))).collect()
    }

    #[test]
    fn the_processor_computes_what_the_model_says() {
        use Products::*;
        let Some(amx) = amx() else { return };
        let (mut unit, mut model, mut seed) = (amx.open(), Model::new(), 7);
        for products in [One, OneByTwo, OneByThree, Three, Four, Five, Six] {
            for (steps, fresh, wild) in
                [(0, true, false), (1, true, false), (3, false, false), (2, false, true), (2, true, true)]
            {
                let (in_a, in_b) = products.parts();
                let (a, b) = (tiles(steps * 2 * in_a, &mut seed, wild), tiles(steps * 2 * in_b, &mut seed, wild));
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
