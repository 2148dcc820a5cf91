//! `cargo xtask emulated --cpu NAME`: the tests of all kernels on a processor that lacks levels, by QEMU.
//!
//! QEMU runs one program, not a machine, and an instruction that the processor lacks ends it. So this shows that the
//! kernels of a level have no instruction of another one, and that such a processor is given the right level.

use std::process::Command;

use clap::ValueEnum;

use crate::dist::succeed;
use crate::programs;

/// A processor, as QEMU calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Cpu {
    /// SSE 4.2, no AVX: the portable level.
    Nehalem,
    /// AVX2, no AVX-512.
    Haswell,
}

impl Cpu {
    /// Its name in QEMU, and the level that has to be chosen there.
    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Nehalem => ("Nehalem", "portable"),
            Self::Haswell => ("Haswell", "avx2"),
        }
    }
}

/// What is left out of the tests, which take some sixty times as long as on this machine. Those that are left go
/// through every phase of every kernel. These are laws over all masks, random calls, sums over many keys, guard pages
/// (which make the emulator translate anew), the model of AMX; the machine itself runs them at the same levels.
#[rustfmt::skip]
const SKIPPED: [&str; 14] = [
    "amx_kernel", "laws", "random", "gate", "long_s", "backward_eta", "biases_of", "options_over", "odd_sizes",
    "as_exact_as", "as_if_each", "queries_of_wide", "every_layout", "guard",
];

/// Runs the tests of `attn-simd` on such a processor.
pub(super) fn run(cpu: Cpu) -> Result<(), String> {
    let (name, level) = cpu.names();
    programs::of_simd()?.iter().try_for_each(|program| {
        let mut command = Command::new("qemu-x86_64-static");
        command.args(["-cpu", name]).arg(program).arg("--test-threads=1");
        command.args(SKIPPED.iter().flat_map(|skipped| ["--skip", skipped]));
        // Its own level alone: each lower one is another processor's.
        succeed(command.envs([("ATTN_EXPECT_LEVEL", level), ("ATTN_TEST_LEVELS", level), ("ATTN_EMULATED", "1")]))
    })
}
