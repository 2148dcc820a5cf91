//! The measurements of the attn crates: the cost curve of attention against sequence length, single kernels against the
//! machine's peak, and real tensors from a file.
//!
//! `cargo xtask bench` drives them, and has the arguments, the progress bar and the paths of files. This crate has all
//! code with a right answer, so that tests can check it.
//!
//! - The calls: cases and their FLOP counts ([`case`]), all engines behind one call ([`engine`], with the textbook form
//!   in [`naive`]), real tensors from a file ([`tensors`], [`layers`]).
//! - The measurement: the clock ([`clock`]), the memory meter ([`memory`]), peak probes ([`probe`]), other libraries in
//!   a process of their own ([`peer`]), progress ([`progress`]), and resuming after an interruption ([`journal`]).
//! - The four tables: the cost curve ([`curve`], with its power-law [`fit`] and [`roofline`]), single kernels beside
//!   the peak ([`kernels`]), steps over caches beside a plain read ([`decode`]), and ranks of an MPI job beside threads
//!   ([`ranks`]). A [`filter`] narrows each.
//! - The results: a run as JSON ([`curve_report`], [`kernels::KernelReport`], [`decode::DecodeReport`]), two runs
//!   compared ([`compare`]), and their reports ([`report`]).
//!
//! Times are medians of several samples, taken in passes over the whole grid; `--json` keeps all samples. Work on one
//! thread is timed by the thread's own clock. FLOPs count `4·B·H·Sq·Skv·D`, halved for causal square shapes. A share of
//! peak compares a measurement with a probe that ran right before or after it.
#![forbid(unsafe_code)]

pub mod case;
pub mod clock;
pub mod compare;
pub mod curve;
pub mod curve_report;
pub mod decode;
pub mod engine;
pub mod filter;
pub mod fit;
pub mod format;
pub mod journal;
pub mod kernels;
pub mod layers;
pub mod machine;
pub mod memory;
pub mod naive;
pub mod peer;
pub mod probe;
pub mod progress;
pub mod ranks;
pub mod report;
pub mod roofline;
pub mod tensors;
