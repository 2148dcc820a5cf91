//! The test programs of `attn-simd`, as `cargo test --workspace` builds them: for emulators, which then build nothing.
//!
//! Cargo chooses the features of packages for all that it builds at once, so `-p attn-simd` would build the kernels
//! anew. In a debug build too they are optimised, and without checks of sums, as in a release build.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::root::root;

/// The two test programs of `attn-simd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tests {
    /// Those inside the library.
    Unit,
    /// Those of its interface.
    Integration,
}

impl Tests {
    /// What cargo calls the kind of its target.
    fn kind(self) -> &'static str {
        match self {
            Self::Unit => "lib",
            Self::Integration => "test",
        }
    }

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
    let output = command.current_dir(root()).output().map_err(|error| format!("cargo: {error}"))?;
    if !output.status.success() {
        return Err(format!("the tests do not build:\n{}", String::from_utf8_lossy(&output.stderr)));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let folder = root().join("attn-simd");
    let program = |tests: Tests| {
        let found = text.lines().find_map(|line| executable(line, &folder, tests));
        found.ok_or_else(|| format!("cargo names no test program of attn-simd of the kind {}", tests.kind()))
    };
    Ok([program(Tests::Unit)?, program(Tests::Integration)?])
}

/// The test program that a line of cargo's messages names, if its source is in this folder and it is one of these.
fn executable(line: &str, folder: &Path, tests: Tests) -> Option<PathBuf> {
    let message: serde_json::Value = serde_json::from_str(line).ok()?;
    let source = Path::new(message["target"]["src_path"].as_str()?);
    let kinds = message["target"]["kind"].as_array()?;
    let chosen =
        source.starts_with(folder) && source.ends_with(tests.file()) && kinds.iter().any(|of| of == tests.kind());
    chosen.then(|| message["executable"].as_str().map(PathBuf::from))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_cargos_messages() {
        let unit = r#"{"target":{"kind":["lib"],"src_path":"/w/attn-simd/src/lib.rs"},"executable":"/t/x-1"}"#;
        let all = r#"{"target":{"kind":["test"],"src_path":"/w/attn-simd/tests/it/main.rs"},"executable":"/t/it-1"}"#;
        let find = |line: &str, tests| executable(line, Path::new("/w/attn-simd"), tests);
        assert_eq!(find(unit, Tests::Unit), Some(PathBuf::from("/t/x-1")));
        assert_eq!(find(unit, Tests::Integration), None);
        assert_eq!(find(all, Tests::Integration), Some(PathBuf::from("/t/it-1")));
        assert_eq!(find(&all.replace("attn-simd", "attn-core"), Tests::Integration), None, "another package's");
        assert_eq!(find(&unit.replace("\"/t/x-1\"", "null"), Tests::Unit), None, "a library, not its tests");
        assert_eq!(find("warning: unused", Tests::Unit), None);
    }
}
