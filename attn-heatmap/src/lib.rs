//! Attention weights as one HTML page, which needs no other file: heat maps of all heads and layers, and for each token
//! its scores, weights and vectors. `cargo xtask heatmap` writes such pages, and `attn.heatmap` of the Python package.
//!
//! [`Layer::new`] computes the numbers with the library's own kernels, [`Scene::html`] writes the page. The caller has
//! the words, files and arrays.
//!
//! ```
//! use attn_core::{Align, Attention, Layout, Mask, View};
//! use attn_heatmap::{Layer, Scene};
//! let x = [1.0f32, 0.0, 0.0, 1.0];
//! let x = View::new(&x, Layout::Bhsd, [1, 1, 2, 2])?; // two tokens of dim 2
//! let causal = Attention::new().mask(Mask::causal(Align::TopLeft));
//! let scene = Scene {
//!     title: "two words".into(),
//!     note: String::new(),
//!     tokens: vec!["two".into(), "words".into()],
//!     keys: None,
//!     masks: vec!["causal".into()],
//!     dropout: None,
//!     layers: vec![Layer::new("Layer 1".into(), [x, x, x], &[causal], None)?],
//! };
//! assert_eq!(scene.layers[0].heads[0].views[0].before[0], [Some(1.0), None]);
//! assert!(scene.html().starts_with("<!doctype html>"));
//! # Ok::<(), attn_core::AttnError>(())
//! ```

mod page;
mod scene;

pub use scene::{Drop, Head, HeadView, Layer, Rows, Scene};
