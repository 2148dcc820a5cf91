//! The project's workshop: `cargo xtask <command>` (skeleton).
fn main() {}
