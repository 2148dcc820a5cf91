//! Items for the kernels and layers of sibling crates. Versions promise nothing about them.

pub use crate::appended::Appended;
pub use crate::backward::accumulate::Saved;
pub use crate::backward::appended::add_appended;
pub use crate::backward::gradients_saved;
pub use crate::backward::inputs::Inputs;
pub use crate::backward::outputs::{AppendedGradients, check_options};
pub use crate::backward::outputs::{DY, OUT};
pub use crate::dot::{dot, dot_slices};
pub use crate::kv_cache::attend::row as attend_row;
pub use crate::mask::bits::{lowest_bits, pack_bools, transpose_bits};
pub use crate::shape::{check_axes, check_same, product};
