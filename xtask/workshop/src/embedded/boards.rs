//! The boards: processors that QEMU emulates, and what building for them needs.

use crate::need::{self, Need};

/// One board.
pub(super) struct Board {
    /// How `--only` calls it.
    pub(super) name: &'static str,
    /// The processor.
    pub(super) core: &'static str,
    /// What is compiled for.
    pub(super) target: &'static str,
    /// The emulator and its arguments.
    pub(super) qemu: &'static [&'static str],
}

/// All boards, the smallest first.
pub(super) const BOARDS: &[Board] = &[
    Board {
        name: "microbit",
        core: "Cortex-M0",
        target: "thumbv6m-none-eabi",
        qemu: &["qemu-system-arm", "-machine", "microbit"],
    },
    Board {
        name: "mps2-an385",
        core: "Cortex-M3",
        target: "thumbv7m-none-eabi",
        qemu: &["qemu-system-arm", "-machine", "mps2-an385"],
    },
    Board {
        name: "mps2-an386",
        core: "Cortex-M4F",
        target: "thumbv7em-none-eabihf",
        qemu: &["qemu-system-arm", "-machine", "mps2-an386"],
    },
    Board {
        name: "mps2-an500",
        core: "Cortex-M7",
        target: "thumbv7em-none-eabihf",
        qemu: &["qemu-system-arm", "-machine", "mps2-an500"],
    },
    Board {
        name: "mps2-an505",
        core: "Cortex-M33",
        target: "thumbv8m.main-none-eabihf",
        qemu: &["qemu-system-arm", "-machine", "mps2-an505"],
    },
    Board {
        name: "riscv-virt",
        core: "RV32IMAC",
        target: "riscv32imac-unknown-none-elf",
        qemu: &["qemu-system-riscv32", "-machine", "virt", "-bios", "none"],
    },
];

/// Where the toolchain keeps its disassembler and, beside it, its linker.
const OBJDUMP: &str = if cfg!(target_arch = "aarch64") {
    "lib/rustlib/aarch64-unknown-linux-gnu/bin/llvm-objdump"
} else {
    "lib/rustlib/x86_64-unknown-linux-gnu/bin/llvm-objdump"
};

/// What all boards together need.
pub(crate) const NEEDS: &[Need] = &[
    Need::Linux,
    Need::Bare("thumbv6m-none-eabi"),
    Need::Bare("thumbv7m-none-eabi"),
    Need::Bare("thumbv7em-none-eabihf"),
    Need::Bare("thumbv8m.main-none-eabihf"),
    Need::Bare("riscv32imac-unknown-none-elf"),
    Need::Program("qemu-system-arm", "qemu-system-arm"),
    Need::Program("qemu-system-riscv32", "qemu-system-misc"),
    Need::Component("llvm-tools", OBJDUMP),
];

/// The disassembler.
pub(super) fn objdump() -> Option<std::path::PathBuf> {
    need::sysroot(None).map(|root| root.join(OBJDUMP))
}

/// Where everything is built.
pub(super) fn folder() -> std::path::PathBuf {
    xtask::root::root().join("target/ci/embedded")
}
