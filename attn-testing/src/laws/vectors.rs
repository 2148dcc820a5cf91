//! The committed conformance vectors.

use std::path::Path;

use crate::conformance::{Suite, Tally};
use crate::engine::Engine;

/// Every suite of the committed selection: nothing fails, mutants are refused, and the suites that every engine must run did.
pub fn committed_vectors_pass<E: Engine>(engine: &E) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors");
    let files = Suite::files_in(&dir).expect("the committed vectors");
    assert!(files.len() >= 10, "suites are missing from {}", dir.display());
    for file in files {
        let suite = Suite::load(&file).unwrap_or_else(|error| panic!("{error}"));
        let tally = Tally::of(engine, &suite);
        let what = format!("{}, {}", engine.label(), suite.name);
        assert!(tally.failed.is_empty(), "{what}: {:#?}", tally.failed);
        for (reason, cases) in &tally.skipped {
            println!("{what}: skipped, {reason}: {}", cases.join(" "));
        }
        // A green run must not be a hollow one.
        let floor = match suite.name.as_str() {
            "torch_sdpa" => suite.cases.len() - 4, // f64, where the engine has none
            "onnx_attention" | "worked_example" => suite.cases.len(),
            "mutants" => 9,
            "variants" => 5,
            _ => 0,
        };
        assert!(tally.passed >= floor, "{what}: only {} passed: {:?}", tally.passed, tally.skipped);
    }
}
