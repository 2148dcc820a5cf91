//! The version of the JSON of a run.

/// Version of the JSON that `--json` writes. It changes when a field changes its meaning or goes.
pub const FORMAT: &str = "attn-bench/3";
