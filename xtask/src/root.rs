//! Where the workspace is.

use std::env;
use std::path::PathBuf;

/// The workspace's folder.
pub(crate) fn root() -> PathBuf {
    // Cargo says so where it starts the program, which may have been built for another checkout.
    let here = env::var_os("CARGO_MANIFEST_DIR").map_or(env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    here.parent().unwrap_or(&here).to_path_buf()
}
