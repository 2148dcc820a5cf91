//! The C interface of the attention kernels: `attn.h`, a shared and a static library.
//!
//! ```c
//! float q[8 * 128 * 64], k[8 * 128 * 64], v[8 * 128 * 64], out[8 * 128 * 64];
//! AttnTensor tq, tk, tv, to;
//! attn_tensor_contiguous(&tq, q, ATTN_DTYPE_F32, ATTN_LAYOUT_BHSD, 1, 8, 128, 64); // and so on
//! AttnOptions options = { .struct_size = sizeof options, .causal = ATTN_ALIGN_BOTTOM_RIGHT };
//! if (attn_forward(&options, &tq, &tk, &tv, &to, NULL, 0) != ATTN_STATUS_OK)
//!     fprintf(stderr, "%s\n", attn_last_error());
//! ```
//!
//! # What a caller vouches for, and what not
//!
//! A caller vouches for one thing: a pointer that is not null points to as many elements, or to as large a struct, as
//! the number beside it says. Any other mistake comes back as a status and a text, before anything is written.
//!
//! # Inside
//!
//! [`types`] holds what the header declares, `abi` the functions, `raw` the one place where pointers become slices,
//! `tensor` the arithmetic that proves they may, `args` the checked arguments; `options`, `cache`, `call`, `backward`,
//! `state` and `plan` are safe code over `attn-parallel`. cbindgen generates the header from these files; a test holds
//! the committed one equal to them.

pub mod abi;
mod args;
mod backward;
mod cache;
mod call;
mod error;
mod merge;
mod options;
mod plan;
mod raw;
mod state;
mod tensor;
pub mod types;

pub use plan::{AttnPlan, AttnWorkspace};
