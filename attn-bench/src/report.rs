//! Reports: one [`Document`](document::Document) per run, and three ways to show it.
//!
//! [`curve`], [`kernels`], [`decode`] and [`ranks`] write a run's document; [`html`], [`markdown`] and [`terminal`]
//! show any document, as a page, as text for docs/figures.md, or on the terminal. JSON holds the run itself.

pub mod curve;
pub mod decode;
pub mod document;
pub mod escape;
pub mod html;
pub mod kernels;
pub mod markdown;
mod pictures;
pub mod plot;
pub mod ranks;
pub mod table;
pub mod terminal;
