//! Shared by the programs of this package: the same calls on every board and on the host, with their results as bits.
//!
//! [`cases`] are the calls, [`board`] is how a program starts, prints, counts instructions and measures its stack,
//! [`entries`] are the functions whose images are weighed.
#![cfg_attr(target_os = "none", no_std)]

pub mod board;
pub mod cases;
pub mod entries;
pub mod gesture;
pub mod paint;
