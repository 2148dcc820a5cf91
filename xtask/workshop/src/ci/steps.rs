//! The table of the steps of `cargo xtask ci`: the name of each, what it proves, its limit, needs and commands.
//!
//! Benches are not built by a step of their own: clippy checks them like every other target.
//!
//! Order is by how soon a step tells something: seconds first, emulators and interpreters last. Steps that use the same
//! compiler, profile and flags share `target/`; every other combination has a directory of its own below `target/ci/`,
//! so that no step rebuilds what another one built. The limits are several times what a step takes on two cores: they
//! catch hangs, not slowness.
//!
//! Emulation covers `attn-core` and `attn-simd` only. User-mode emulators hang in thread pools now and then, and
//! `attn-parallel` is the same kernels over a pool. A model of AMX under an emulator would take minutes, and
//! is the same code on every processor: emulated steps skip it.

use super::needs::{C_PROGRAMS, CANDLE, MIRI, MPI, PYTHON};
use super::step::{Step, built, cargo, cargo_of, xtask};
use crate::emulated;
use crate::need::{MSRV, NIGHTLY, Need};

/// What turns on, in a debug build of the kernels, the checks that the workspace turns off there: of every sum, and of
/// every pointer. Steps with the portable level alone build quickly even so.
const OVERFLOW: &str = "profile.dev.package.attn-simd.overflow-checks=true";
const ASSERTIONS: &str = "profile.dev.package.attn-simd.debug-assertions=true";

/// The tests of core and simd for a target, with the checks of [`OVERFLOW`] and [`ASSERTIONS`], and then arguments of
/// the test programs.
macro_rules! tests_for {
    ($target:literal, $($argument:literal),*) => {
        cargo(&[
            "test",
            "-p",
            "attn-core",
            "-p",
            "attn-simd",
            "--lib",
            "--tests",
            "--target",
            $target,
            "--config",
            OVERFLOW,
            "--config",
            ASSERTIONS,
            "--",
            $($argument),*
        ])
    };
}

/// All steps.
pub(super) const STEPS: &[Step] = &[
    Step {
        name: "fmt",
        proves: "every file is formatted by rustfmt.toml",
        minutes: 2,
        one_core: false,
        needs: &[Need::Component("rustfmt", "bin/rustfmt")],
        runs: &[cargo(&["fmt", "--all", "--check"])],
    },
    Step {
        name: "tidy",
        proves: "the house rules hold: file headers, where unsafe may stand, sizes, no circles, no machine paths",
        minutes: 2,
        one_core: false,
        needs: &[],
        runs: &[xtask(&["tidy"])],
    },
    Step {
        name: "clippy",
        proves: "no warning in any target of any crate",
        minutes: 15,
        one_core: false,
        needs: &[Need::Component("clippy", "bin/cargo-clippy")],
        runs: &[cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])],
    },
    Step {
        name: "test",
        proves: "every test and doc test passes in a debug build: what the README tells users to run",
        minutes: 30,
        one_core: false,
        needs: &[],
        runs: &[cargo(&["test", "--workspace"])],
    },
    Step {
        name: "doc",
        proves: "the documentation builds without a warning or a dead link",
        minutes: 10,
        one_core: false,
        needs: &[],
        runs: &[cargo(&["doc", "--workspace", "--no-deps"]).with(&[("RUSTDOCFLAGS", "-D warnings")])],
    },
    Step {
        name: "thumbv7em",
        proves: "attn-core and attn-layers build for a Cortex-M4F: no std, no allocator; with defmt too",
        minutes: 5,
        one_core: false,
        needs: &[Need::Target("thumbv7em-none-eabihf")],
        runs: &[
            cargo(&["build", "-p", "attn-layers", "--release", "--target", "thumbv7em-none-eabihf"]),
            cargo(&[
                "build",
                "-p",
                "attn-core",
                "--release",
                "--target",
                "thumbv7em-none-eabihf",
                "--features",
                "defmt",
            ]),
        ],
    },
    Step {
        name: "thumbv6m",
        proves: "attn-core and attn-layers build for a Cortex-M0: no atomics, no floating-point unit",
        minutes: 5,
        one_core: false,
        needs: &[Need::Target("thumbv6m-none-eabi")],
        runs: &[cargo(&["build", "-p", "attn-layers", "--release", "--target", "thumbv6m-none-eabi"])],
    },
    Step {
        name: "simd-no-std",
        proves: "attn-simd without its default feature builds where there is no std",
        minutes: 5,
        one_core: false,
        needs: &[Need::Target("thumbv7em-none-eabihf")],
        runs: &[cargo(&[
            "build",
            "-p",
            "attn-simd",
            "--no-default-features",
            "--release",
            "--target",
            "thumbv7em-none-eabihf",
        ])],
    },
    Step {
        name: "msrv",
        proves: "the libraries build with the oldest compiler that they promise",
        minutes: 10,
        one_core: false,
        needs: &[Need::Toolchain(MSRV)],
        runs: &[cargo_of(
            MSRV,
            &[
                "check",
                "-p",
                "attn-core",
                "-p",
                "attn-layers",
                "-p",
                "attn-simd",
                "-p",
                "attn-parallel",
                "-p",
                "attn-capi",
            ],
        )
        .with(&[("CARGO_TARGET_DIR", "{ci}/msrv")])],
    },
    Step {
        name: "package",
        proves: "the published crates are complete: each packs, and attn-core builds from its package alone",
        minutes: 5,
        one_core: false,
        needs: &[],
        runs: &[
            cargo(&["package", "-p", "attn-core", "--allow-dirty", "--target-dir", "{ci}/package"]),
            cargo(&[
                "package",
                "-p",
                "attn-core",
                "-p",
                "attn-layers",
                "-p",
                "attn-simd",
                "-p",
                "attn-parallel",
                "-p",
                "attn-capi",
                "-p",
                "attn-bench",
                "--no-verify",
                "--allow-dirty",
                "--target-dir",
                "{ci}/package",
            ]),
        ],
    },
    Step {
        name: "test-release",
        proves: "tests of core and layers pass as users build them: optimised, without overflow checks",
        minutes: 20,
        one_core: false,
        needs: &[],
        // `test` builds the kernels like this already.
        runs: &[cargo(&["test", "--release", "-p", "attn-core", "-p", "attn-layers", "--lib", "--tests"])],
    },
    Step {
        name: "exp2",
        proves: "the exponential of the kernels is within 1.5 ulp for every f32 there is, on every level here",
        minutes: 15,
        one_core: true,
        needs: &[],
        // The whole workspace, which `test` has built: for one package cargo would build the kernels anew.
        runs: &[cargo(&["test", "--workspace", "--lib", "--", "--ignored", "--nocapture"])],
    },
    Step {
        name: "conformance",
        proves: "every suite of vectors in ../shared passes on every engine and level here, and no mutant does",
        minutes: 15,
        one_core: false,
        needs: &[],
        runs: &[xtask(&["conformance"]), xtask(&["conformance", "--engine", "simd", "--level", "amx-model"])],
    },
    Step {
        name: "random",
        proves: "random calls stay within the documented bound on every level: constants, wide magnitudes, long sums",
        minutes: 10,
        one_core: false,
        needs: &[],
        runs: &[xtask(&["random", "--calls", "5000"])],
    },
    Step {
        name: "no-panic",
        proves: "no way leads from any entry point of attn-core or attn-layers to a panic, in machine code for host and Cortex-M",
        minutes: 10,
        one_core: false,
        needs: &[Need::Target("thumbv7em-none-eabihf")],
        runs: &[xtask(&["no-panic"])],
    },
    Step {
        name: "features",
        proves: "the optional features work: views of ndarray's arrays and of bytes, scratch as bytes",
        minutes: 10,
        one_core: false,
        needs: &[],
        runs: &[
            cargo(&["test", "-p", "attn-core", "--all-features", "--tests", "--", "array"]),
            cargo(&["test", "-p", "attn-core", "--all-features", "--doc", "--", "array", "bytes"]),
            cargo(&["check", "-p", "attn-simd", "--all-features"]),
        ],
    },
    Step {
        name: "api",
        proves: "the libraries' public interface is the committed text",
        minutes: 10,
        one_core: false,
        needs: &[Need::Toolchain(NIGHTLY), Need::CargoCommand("cargo-public-api", "0.52.0")],
        runs: &[xtask(&["api"])],
    },
    Step {
        name: "examples",
        proves: "an application runs the kernels on a rayon pool of its own; processes share one attention and merge",
        minutes: 10,
        one_core: false,
        needs: &[],
        runs: &[
            cargo(&["run", "-p", "attn-parallel", "--example", "own_pool"]),
            cargo(&["run", "-p", "attn-parallel", "--example", "processes"]),
        ],
    },
    Step {
        name: "capi",
        proves: "the C library exports its header alone, and C and C++ programs that use it by pkg-config are right",
        minutes: 20,
        one_core: false,
        needs: &C_PROGRAMS,
        runs: &[xtask(&["capi", "examples", "overhead"])],
    },
    Step {
        name: "capi-cmake",
        proves: "so are they by CMake's find_package",
        minutes: 10,
        one_core: false,
        needs: &[C_PROGRAMS[0], C_PROGRAMS[1], Need::Program("cmake", "cmake")],
        runs: &[xtask(&["capi", "cmake"])],
    },
    Step {
        name: "capi-python",
        proves: "NumPy arrays of any strides go through ctypes without a copy, and the results are right",
        minutes: 10,
        one_core: false,
        needs: &[Need::Linux, Need::PythonModule("numpy")],
        runs: &[xtask(&["capi", "python"])],
    },
    Step {
        name: "capi-valgrind",
        proves: "wrong arguments from C, and right ones over buffers of exactly their length, are clean under Valgrind",
        minutes: 10,
        one_core: false,
        needs: &[C_PROGRAMS[0], C_PROGRAMS[1], C_PROGRAMS[2], Need::Program("valgrind", "valgrind")],
        runs: &[xtask(&["capi", "valgrind"])],
    },
    Step {
        name: "capi-asan",
        proves: "and under AddressSanitizer, which sees into the library too",
        minutes: 20,
        one_core: false,
        needs: &[C_PROGRAMS[0], C_PROGRAMS[1], C_PROGRAMS[2], Need::Arch("x86_64"), Need::Toolchain(NIGHTLY)],
        runs: &[xtask(&["capi", "asan"])],
    },
    Step {
        name: "capi-i686",
        proves: "the C library's tests pass where a size has 32 bits: what wraps there is an error too",
        minutes: 15,
        one_core: false,
        needs: &[Need::Linux, Need::Arch("x86_64"), Need::Target("i686-unknown-linux-musl")],
        // The processor runs these programs itself; rust-lld and musl come with the target.
        runs: &[cargo(&["test", "-p", "attn-capi", "--lib", "--tests", "--target", "i686-unknown-linux-musl"])
            .with(&[("CARGO_TARGET_I686_UNKNOWN_LINUX_MUSL_LINKER", "rust-lld")])],
    },
    Step {
        name: "candle",
        proves: "attn-candle computes what candle's own matmuls and softmax do, in a real layer too; heads of real models \
                 give their stored f64 results in every engine; a training that goes on gives the bits of one that did \
                 not end",
        minutes: 20,
        one_core: false,
        needs: &[Need::Packages("attn-candle/Cargo.toml")],
        runs: &[
            cargo(&["fmt", "--all", "--check", "--manifest-path", "attn-candle/Cargo.toml"]),
            cargo(&["test", "--locked", "--workspace", "--manifest-path", "attn-candle/Cargo.toml"]).with(&CANDLE),
        ],
    },
    Step {
        name: "mpi",
        proves: "attention over 1 to 8 ranks has the bits of one process, and its gradients; the suite ring passes; \
                 disagreement is an error on all; a rank that computes is waited for, a silent or dead one is named; C and \
                 Python merge states over ranks",
        minutes: 25,
        one_core: false,
        needs: &[
            Need::Linux,
            Need::Program("mpirun", "openmpi-bin"),
            // Debian's mpicc comes without its headers.
            Need::Header("mpicc", "mpi.h", "libopenmpi-dev"),
            Need::Library("libclang.so", "libclang-dev"),
            Need::Program("pkg-config", "pkg-config"),
            Need::Packages("attn-mpi/Cargo.toml"),
            Need::Packages("attn-python/Cargo.toml"),
            Need::Venv("numpy"),
            Need::Venv("maturin"),
            Need::Venv("mpi4py"),
        ],
        runs: &[
            cargo(&["fmt", "--check", "--manifest-path", "attn-mpi/Cargo.toml"]),
            cargo(&["test", "--locked", "--manifest-path", "attn-mpi/Cargo.toml"]).with(&MPI),
            xtask(&["capi", "mpi"]),
            xtask(&["python", "mpi"]),
        ],
    },
    Step {
        name: "python",
        proves: "the wheel installs in a clean environment, and its calls on NumPy arrays are the formula's in float64",
        minutes: 20,
        one_core: false,
        needs: &PYTHON,
        runs: &[cargo(&["fmt", "--check", "--manifest-path", "attn-python/Cargo.toml"]), xtask(&["python", "numpy"])],
    },
    Step {
        name: "python-torch",
        proves: "gradients, opcheck and torch.compile; rows of migrating.md; transformers as eager; jit of JAX; the tour",
        minutes: 20,
        one_core: false,
        needs: &[
            PYTHON[0],
            PYTHON[1],
            PYTHON[2],
            PYTHON[3],
            PYTHON[4],
            Need::Venv("torch"),
            Need::Venv("transformers"),
            Need::Venv("jax"),
            Need::Venv("matplotlib"),
        ],
        runs: &[xtask(&["python", "torch"])],
    },
    Step {
        name: "heatmap",
        proves: "the heat map's page works in Chromium: clicks, keys, masks, dropout, light and dark, wide and narrow",
        minutes: 15,
        one_core: true,
        needs: &[Need::Linux, Need::Program("chromium", "chromium"), Need::Packages("xtask/browser/Cargo.toml")],
        runs: &[
            cargo(&["fmt", "--check", "--manifest-path", "xtask/browser/Cargo.toml"]),
            xtask(&["heatmap", "--check", "--out", "{ci}/heatmap/heatmap.html"]),
        ],
    },
    Step {
        name: "models",
        proves: "a real encoder's layers on candle and these kernels give the activations that were computed in f64",
        minutes: 20,
        one_core: false,
        needs: &[Need::Packages("attn-candle/Cargo.toml"), Need::Folder("../shared/models/all-minilm-l6-v2")],
        runs: &[
            // All of it, as `candle` built it: for one package cargo would build candle anew.
            cargo(&["test", "--locked", "--workspace", "--manifest-path", "attn-candle/Cargo.toml", "--no-run"])
                .with(&CANDLE),
            built("candle/debug/attn-demo", &["minilm", "--check"]),
        ],
    },
    Step {
        name: "embedded",
        proves: "attn-core on six emulated boards: the host's bits, no panic, flash and stack within what is promised",
        minutes: 10,
        one_core: false,
        needs: crate::embedded::NEEDS,
        runs: &[xtask(&["embedded"])],
    },
    Step {
        name: "amx-emulated",
        proves: "the level amx on an emulated processor: the real instructions, flags, guard pages, permission; the kernels \
                 on its AVX-512",
        minutes: 20,
        one_core: false, // it starts two machines at a time
        needs: emulated::NEEDS,
        runs: &[xtask(&["emulated"])],
    },
    Step {
        name: "qemu-nehalem",
        proves: "attn-simd finds the portable level on a processor without AVX, and is right there",
        minutes: 15,
        one_core: true,
        needs: emulated::QEMU,
        runs: &[xtask(&["emulated", "--cpu", "nehalem"])],
    },
    Step {
        name: "qemu-haswell",
        proves: "attn-simd finds the AVX2 level on a processor without AVX-512, and is right there",
        minutes: 25,
        one_core: true,
        needs: emulated::QEMU,
        runs: &[xtask(&["emulated", "--cpu", "haswell"])],
    },
    Step {
        name: "aarch64",
        proves: "core and simd are right on 64-bit Arm, whose NEON the portable level uses, and with SDOT",
        minutes: 35,
        one_core: true,
        needs: &[
            Need::Linux,
            Need::Target("aarch64-unknown-linux-musl"),
            Need::Program("qemu-aarch64-static", "qemu-user-static"),
        ],
        runs: &[
            tests_for!("aarch64-unknown-linux-musl", "--test-threads=1", "--skip=amx_kernel").with(&[
                ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER", "rust-lld"),
                ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER", "qemu-aarch64-static -cpu cortex-a53"),
                ("ATTN_EXPECT_LEVEL", "portable"),
                ("ATTN_TEST_LEVELS", "portable"),
                ("ATTN_EMULATED", "1"),
            ]),
            // The same programs: decoding over bytes, which SDOT computes in another way, and a few other calls.
            tests_for!(
                "aarch64-unknown-linux-musl",
                "--test-threads=1",
                "--skip=amx_kernel",
                "dotprod",
                "quantized::",
                "stored::",
                "beside::",
                "guard::packed",
                "level::",
                "small::",
                "explan"
            )
            .with(&[
                ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER", "rust-lld"),
                ("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER", "qemu-aarch64-static -cpu cortex-a76"),
                ("ATTN_EXPECT_LEVEL", "dotprod"),
                ("ATTN_TEST_LEVELS", "dotprod"),
                ("ATTN_EMULATED", "1"),
            ]),
        ],
    },
    Step {
        name: "wasm",
        proves: "core and simd are right as WebAssembly with simd128",
        minutes: 15,
        one_core: true,
        needs: &[Need::Target("wasm32-wasip1"), Need::Program("node", "nodejs")],
        // Not captured: a panic ends the program there, and with it what was captured.
        runs: &[tests_for!("wasm32-wasip1", "--skip=amx_kernel", "--no-capture").with(&[
            (
                "CARGO_TARGET_WASM32_WASIP1_RUNNER",
                "node --no-warnings --single-threaded {root}/xtask/workshop/src/ci/wasi.mjs",
            ),
            ("CARGO_TARGET_WASM32_WASIP1_RUSTFLAGS", "-Ctarget-feature=+simd128"),
            ("ATTN_EXPECT_LEVEL", "portable"),
            ("ATTN_EMULATED", "1"),
        ])],
    },
    Step {
        name: "miri-core",
        proves: "the tests of attn-core and attn-layers have no undefined behaviour",
        minutes: 15,
        one_core: true,
        needs: &MIRI,
        runs: &[cargo_of(NIGHTLY, &["miri", "test", "-p", "attn-core", "-p", "attn-layers", "--lib"])
            .with(&[("CARGO_TARGET_DIR", "{ci}/miri"), ("MIRIFLAGS", "-Zmiri-disable-isolation")])],
    },
    Step {
        name: "miri-simd",
        proves: "attn-simd's portable level and its memory handling have no undefined behaviour",
        minutes: 25,
        one_core: true,
        needs: &MIRI,
        runs: &[
            cargo_of(
                NIGHTLY,
                &["miri", "test", "-p", "attn-simd", "--lib", "--config", OVERFLOW, "--config", ASSERTIONS],
            )
            .with(&[("CARGO_TARGET_DIR", "{ci}/miri"), ("MIRIFLAGS", "-Zmiri-disable-isolation")]),
            // Whole calls, through packing, the micro-kernel on addresses, and the output's claims.
            cargo_of(
                NIGHTLY,
                &[
                    "miri",
                    "test",
                    "-p",
                    "attn-simd",
                    "--test",
                    "it",
                    "--config",
                    OVERFLOW,
                    "--config",
                    ASSERTIONS,
                    "--",
                    "small::",
                    "boxed::",
                ],
            )
            .with(&[("CARGO_TARGET_DIR", "{ci}/miri"), ("MIRIFLAGS", "-Zmiri-disable-isolation")]),
        ],
    },
    Step {
        name: "asan",
        proves: "attn-simd reads and writes only what it was given, on every level of this machine",
        minutes: 25,
        one_core: true,
        needs: &[Need::Linux, Need::Arch("x86_64"), Need::Toolchain(NIGHTLY)],
        // `--target` keeps the flag away from proc macros and build scripts.
        runs: &[cargo_of(
            NIGHTLY,
            &[
                "test",
                "-p",
                "attn-simd",
                "--lib",
                "--tests",
                "--target",
                "x86_64-unknown-linux-gnu",
                "--",
                "--skip",
                "backward_eta", // 76 s for measuring errors; the tests around it run the same kernels
            ],
        )
        .with(&[
            ("CARGO_TARGET_DIR", "{ci}/asan"),
            ("RUSTFLAGS", "-Zsanitizer=address"),
            // Its own signal stacks are too small for a process with permission for AMX, where the system refuses them.
            ("ASAN_OPTIONS", "use_sigaltstack=0"),
        ])],
    },
];

#[cfg(test)]
mod tests;
