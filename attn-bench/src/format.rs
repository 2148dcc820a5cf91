//! The version of the JSON that runs leave behind.

/// Version of the JSON that `--json` writes. It changes when a field changes its meaning or goes.
pub const FORMAT: &str = "attn-bench/3";
