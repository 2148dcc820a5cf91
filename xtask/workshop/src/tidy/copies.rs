//! Files that stand in several places because each published crate must hold them itself, or is too small to share.
//!
//! `cargo package` takes nothing from outside of a crate's folder, and links do not survive every checkout: these are
//! plain copies, which `cargo xtask tidy` compares and `cargo xtask tidy --fix` renews.

use std::fs;
use std::io;
use std::path::Path;

/// An original and its copies.
pub(super) const COPIES: &[(&str, &[&str])] = &[
    (
        "LICENSE-MIT",
        &[
            "attn-core/LICENSE-MIT",
            "attn-layers/LICENSE-MIT",
            "attn-simd/LICENSE-MIT",
            "attn-parallel/LICENSE-MIT",
            "attn-capi/LICENSE-MIT",
            "attn-candle/LICENSE-MIT",
            "attn-mpi/LICENSE-MIT",
            "attn-python/LICENSE-MIT",
            "attn-bench/LICENSE-MIT",
        ],
    ),
    (
        "LICENSE-APACHE",
        &[
            "attn-core/LICENSE-APACHE",
            "attn-layers/LICENSE-APACHE",
            "attn-simd/LICENSE-APACHE",
            "attn-parallel/LICENSE-APACHE",
            "attn-capi/LICENSE-APACHE",
            "attn-candle/LICENSE-APACHE",
            "attn-mpi/LICENSE-APACHE",
            "attn-python/LICENSE-APACHE",
            "attn-bench/LICENSE-APACHE",
        ],
    ),
];

/// The copies that differ from their original, with the original.
pub(super) fn stale(root: &Path) -> Vec<(&'static str, &'static str)> {
    let same = |a: &str, b: &str| match (fs::read(root.join(a)), fs::read(root.join(b))) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    };
    let pairs = COPIES.iter().flat_map(|(original, copies)| copies.iter().map(move |copy| (*original, *copy)));
    pairs.filter(|(original, copy)| !same(original, copy)).collect()
}

/// Renews the copies that differ.
pub(super) fn renew(root: &Path) -> io::Result<()> {
    for (original, copy) in stale(root) {
        let to = root.join(copy);
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::copy(root.join(original), to)?;
        println!("{copy}: renewed from {original}");
    }
    Ok(())
}
