//! A classifier of gestures: one transformer layer over a window of an accelerometer, in f32 and in int8.
//!
//! ```text
//! window [16 steps × 3 axes, int8 of 1/32 g] → 16 features + position
//!   → two heads of self-attention, added → 32 hidden with ReLU, added → mean over the steps → 4 classes
//! ```
//!
//! `examples/train.rs` made the weights, from windows that [`data`] draws; both forms use the same ones.

#[cfg(not(target_os = "none"))]
pub mod data;
pub mod integer;
pub mod real;
pub mod scales;
pub mod weights;

use core::ops::Range;

/// Samples of a window.
pub const STEPS: usize = 16;
/// Axes of the sensor.
pub const AXES: usize = 3;
/// Features of a step.
pub const WIDTH: usize = 16;
/// Heads of the attention.
pub const HEADS: usize = 2;
/// Hidden features between the two last matrices.
pub const HIDDEN: usize = 32;
/// What is told apart.
pub const CLASSES: [&str; 4] = ["rest", "shake", "circle", "tap"];

/// One window as the sensor gives it: steps of `1/32` g.
pub type Window = [[i8; AXES]; STEPS];
/// A real acceleration per step of a sample.
pub const STEP: f32 = 1.0 / 32.0;

/// Where each weight lies in one array of all; matrices are `[in, out]`.
pub const EMBED: Range<usize> = 0..AXES * WIDTH;
/// Added to every step's features.
pub const EMBED_BIAS: Range<usize> = after(&EMBED, WIDTH);
/// Added to the features of each step.
pub const POSITION: Range<usize> = after(&EMBED_BIAS, STEPS * WIDTH);
/// Queries.
pub const QUERY: Range<usize> = after(&POSITION, WIDTH * WIDTH);
/// Keys.
pub const KEY: Range<usize> = after(&QUERY, WIDTH * WIDTH);
/// Values.
pub const VALUE: Range<usize> = after(&KEY, WIDTH * WIDTH);
/// Joins the heads.
pub const JOIN: Range<usize> = after(&VALUE, WIDTH * WIDTH);
/// To the hidden features.
pub const UP: Range<usize> = after(&JOIN, WIDTH * HIDDEN);
/// Their bias.
pub const UP_BIAS: Range<usize> = after(&UP, HIDDEN);
/// And back.
pub const DOWN: Range<usize> = after(&UP_BIAS, HIDDEN * WIDTH);
/// Its bias.
pub const DOWN_BIAS: Range<usize> = after(&DOWN, WIDTH);
/// From mean features to classes.
pub const CLASS: Range<usize> = after(&DOWN_BIAS, WIDTH * CLASSES.len());
/// Its bias.
pub const CLASS_BIAS: Range<usize> = after(&CLASS, CLASSES.len());
/// How many weights there are.
pub const WEIGHTS: usize = CLASS_BIAS.end;

const fn after(before: &Range<usize>, len: usize) -> Range<usize> {
    before.end..before.end + len
}

/// The class with the largest score.
pub fn best<T: PartialOrd>(scores: &[T]) -> usize {
    scores.iter().enumerate().fold(0, |best, (n, score)| if *score > scores[best] { n } else { best })
}
