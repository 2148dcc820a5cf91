//! The committed conformance vectors.

use std::path::Path;

use attn_core::Dtype;

use crate::conformance::{Suite, Tally};
use crate::engine::Engine;

/// Every suite of the committed selection: nothing fails, wrong expectations are refused, nothing is left out.
pub fn committed_vectors_pass<E: Engine>(engine: &E) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("vectors");
    let files = Suite::files_in(&dir).expect("the committed vectors");
    assert!(files.len() >= 10, "suites are missing from {}", dir.display());
    for file in files {
        let suite = Suite::load(&file).unwrap_or_else(|error| panic!("{error}"));
        let tally = Tally::of(engine, &suite);
        let what = format!("{}, {}", engine.label(), suite.name);
        assert!(tally.failed.is_empty(), "{what}: {:#?}", tally.failed);
        // A green run must not be a hollow one: nothing is skipped but doubles, where the engine has none, and the
        // reference runs every op.
        for (reason, cases) in &tally.skipped {
            let doubles = reason.ends_with("takes no f64") && !engine.supports_dtype(Dtype::F64);
            assert!(doubles, "{what}: skipped, {reason}: {}", cases.join(" "));
        }
        assert!(!engine.is_exact() || tally.elsewhere == 0, "{what}: the reference left cases to others");
        let sum = tally.passed + tally.skipped_count() + tally.elsewhere;
        assert_eq!(sum, suite.cases.len(), "{what}: cases were lost");
        assert!(tally.passed > 0 || tally.elsewhere == sum, "{what}: nothing ran");
    }
}
