//! What the benchmarks of the attn crates measure, and how: the cost curve of attention against sequence length, single
//! kernels against the machine's peak, and real tensors from a file.
//!
//! `cargo xtask bench` drives it: arguments, the progress bar and the places of files are there. Here is all that has a
//! right answer, so that it can be tested.
//!
//! - What is run: cases and their FLOP counts ([`case`]), the engines under one roof ([`engine`], with the textbook
//!   form in [`naive`]), real tensors from a file ([`tensors`], [`layers`]).
//! - How it is measured: the clock ([`clock`]), the memory meter ([`memory`]), peak probes ([`probe`]), other libraries
//!   in a process of their own ([`peer`]), progress ([`progress`]), and going on after an interruption ([`journal`]).
//! - The four tables: the cost curve ([`curve`], with its power-law [`fit`] and [`roofline`]), single kernels beside
//!   the peak ([`kernels`]), steps over caches beside a plain read ([`decode`]), and ranks of an MPI job beside threads
//!   ([`ranks`]). A [`filter`] narrows each.
//! - What is left: a run as JSON ([`curve_report`], [`kernels::KernelReport`], [`decode::DecodeReport`]), two runs
//!   compared ([`compare`]), and their reports ([`report`]).
//!
//! Conventions: times are medians of several samples, taken in passes over the whole grid, all samples are kept for
//! `--json`; work on one thread is timed by the thread's own clock; FLOPs count `4·B·H·Sq·Skv·D`, halved for causal
//! square shapes; a share of peak relates a measurement to a probe that ran right beside it in time.
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
