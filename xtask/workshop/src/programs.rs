//! The test programs of `attn-simd`, as `cargo test --workspace` builds them: for emulators, which then build nothing.
//!
//! Cargo chooses the features of packages for all that it builds at once, so `-p attn-simd` would build the kernels
//! anew. In a debug build too they are optimised, and without checks of sums, as in a release build.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use xtask::root::root;

/// The two test programs of `attn-simd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tests {
    /// Those inside the library.
    Unit,
    /// Those of its interface.
    Integration,
}

impl Tests {
    /// Where its source begins.
    fn file(self) -> &'static str {
        match self {
            Self::Unit => "src/lib.rs",
            Self::Integration => "tests/it/main.rs",
        }
    }
}

/// Builds the tests of the workspace if need be; the programs of `attn-simd`, unit tests first.
pub(crate) fn of_simd() -> Result<[PathBuf; 2], String> {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["test", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    // What cargo says of its progress is for people: where nothing is built yet, this takes minutes.
    let output = command.current_dir(root()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("cargo: {error}"))?;
    if !output.status.success() {
        return Err("the tests do not build".to_owned());
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let program = |tests: Tests| {
        let source = root().join("attn-simd").join(tests.file());
        let found = text.lines().find_map(|line| executable(line, &source));
        found.ok_or_else(|| format!("cargo names no test program of {}", source.display()))
    };
    Ok([program(Tests::Unit)?, program(Tests::Integration)?])
}

/// The program that a line of cargo's messages names, if it is one and was built from this file. (Of a library's file
/// the library itself is built, too, which is no program.)
fn executable(line: &str, source: &Path) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let chosen = Path::new(message["target"]["src_path"].as_str()?) == source;
    chosen.then(|| message["executable"].as_str().map(PathBuf::from))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_cargos_messages() {
        let line = r#"{"target":{"kind":["lib"],"src_path":"/w/src/lib.rs"},"executable":"/t/x-1"}"#;
        assert_eq!(executable(line, Path::new("/w/src/lib.rs")), Some(PathBuf::from("/t/x-1")));
        assert_eq!(executable(line, Path::new("/other/src/lib.rs")), None, "another package's");
        assert_eq!(executable(&line.replace("\"/t/x-1\"", "null"), Path::new("/w/src/lib.rs")), None, "a library");
        assert_eq!(executable("warning: unused", Path::new("/w/src/lib.rs")), None);
    }
}
