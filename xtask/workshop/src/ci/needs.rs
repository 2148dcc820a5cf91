//! Needs that several steps of CI share, and the folders where they build.

use crate::need::{NIGHTLY, Need};

/// What Miri needs.
pub(super) const MIRI: [Need; 3] = [
    Need::Toolchain(NIGHTLY),
    Need::ComponentOf(NIGHTLY, "miri", "bin/cargo-miri"),
    Need::ComponentOf(NIGHTLY, "rust-src", "lib/rustlib/src/rust/library/core"),
];
/// What compiles and links programs in C and C++ and finds libraries for them.
pub(super) const C_PROGRAMS: [Need; 3] =
    [Need::Linux, Need::Program("c++", "g++"), Need::Program("pkg-config", "pkg-config")];

/// What builds and tests the Python package.
pub(super) const PYTHON: [Need; 5] = [
    Need::Linux,
    Need::Packages("attn-python/Cargo.toml"),
    Need::Venv("numpy"),
    Need::Venv("pytest"),
    Need::Venv("maturin"),
];

/// Where attn-candle is built.
pub(super) const CANDLE: [(&str, &str); 1] = [("CARGO_TARGET_DIR", "{ci}/candle")];

/// Where attn-mpi is built.
pub(super) const MPI: [(&str, &str); 1] = [("CARGO_TARGET_DIR", "{ci}/mpi")];
