//! Reports: one [`Document`](document::Document) per run, and three ways to show it.
//!
//! [`curve`], [`kernels`], [`decode`] and [`ranks`] say what a run's document holds; [`html`], [`markdown`] and
//! [`terminal`] show any document, as a page, as text for docs/figures.md, or on the terminal. What is stored as JSON
//! is the run itself.

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
