//! What the benchmarks of the attn crates measure, and how: the cost curve of attention against sequence length, single
//! kernels against the machine's peak, and real tensors from a file.
//!
//! The commands that drive it (`cargo xtask bench`) hold the arguments, the progress bar and the choice of where things
//! are written; this crate holds everything that has a right answer, so that it can be tested: the cases and their FLOP
//! counts ([`case`]), the engines under one roof ([`engine`], with the textbook form in [`naive`]), the clock
//! ([`clock`]), the memory meter ([`memory`]), the peak probe ([`probe`]), the curve ([`curve`]) with its power-law fit
//! ([`fit`]) and its crossovers ([`crossover`]), the reports ([`report`]) and their comparison ([`compare`]). A run can
//! be narrowed ([`filter`]), be followed ([`progress`]) and go on after an interruption ([`journal`]).
//!
//! The parts of a layer are timed by [`parts`], with whatever multiplies matrices ([`product`]); [`roofline`] has the
//! roofs of the machine and what the cost model says under them. Real tensors come from [`tensors`] and run in
//! [`layers`]; single kernels are measured by [`kernels`], beside the libraries of a Python process ([`peer`]), and
//! steps over caches by [`decode`], beside a plain read.
//!
//! Conventions: times are medians of several samples, taken in passes over the whole grid, all samples are kept for
//! `--json`; work on one thread is timed by the thread's own clock; FLOPs count `4·B·H·Sq·Skv·D`, halved for causal
//! square shapes; a share of peak relates a measurement to a probe that ran right beside it in time.
#![forbid(unsafe_code)]

pub mod case;
pub mod clock;
pub mod compare;
pub mod crossover;
pub mod curve;
pub mod decode;
pub mod engine;
pub mod filter;
pub mod fit;
pub mod journal;
pub mod kernels;
pub mod layers;
pub mod machine;
pub mod memory;
pub mod naive;
pub mod parts;
pub mod peer;
pub mod probe;
pub mod product;
pub mod progress;
pub mod report;
pub mod roofline;
pub mod tensors;
