//! What the programs behind `cargo xtask` share: they start each other, know the workspace's folder, and bear a reader
//! who leaves early. The front itself is `main`.

pub mod hand_over;
pub mod reader;
pub mod root;
