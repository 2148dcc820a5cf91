//! Where the workspace is.

use std::env;
use std::path::{Path, PathBuf};

/// The workspace's folder: the nearest above the package that holds its lock file.
#[must_use]
pub fn root() -> PathBuf {
    // Cargo names the folder of the package when it starts the program, which may have been built for another checkout.
    let here = env::var_os("CARGO_MANIFEST_DIR").map_or(env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    here.ancestors().find(|dir| dir.join("Cargo.lock").is_file()).map_or_else(|| here.clone(), Path::to_path_buf)
}
