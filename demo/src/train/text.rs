//! Letters as numbers, and the pieces of text of each step.

use std::path::Path;

use anyhow::{Context, Result};
use candle_core::{Device, Tensor};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// The project's own texts.
const OWN: [&str; 5] = [
    include_str!("../../../README.md"),
    include_str!("../../../ARCHITECTURE.md"),
    include_str!("../../../docs/decoding.md"),
    include_str!("../../../docs/migrating.md"),
    include_str!("../../../attn-layers/docs/attention.md"),
];

/// A text, and its letters in their order.
pub(super) struct Text {
    ids: Vec<u32>,
    letters: Vec<char>,
}

impl Text {
    /// The text of a file, or the project's own.
    pub(super) fn read(file: Option<&Path>) -> Result<Self> {
        let text = match file {
            Some(path) => std::fs::read_to_string(path).with_context(|| path.display().to_string())?,
            None => OWN.concat(),
        };
        let mut letters: Vec<char> = text.chars().collect();
        letters.sort_unstable();
        letters.dedup();
        let id = |letter: char| letters.binary_search(&letter).map_or(0, |id| id as u32);
        Ok(Self { ids: text.chars().map(id).collect(), letters })
    }

    /// Letters of the text.
    pub(super) fn len(&self) -> usize {
        self.ids.len()
    }

    /// All letters that occur.
    pub(super) fn letters(&self) -> &[char] {
        &self.letters
    }

    /// The number of each letter of the text.
    pub(super) fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Where the pieces of a step begin: drawn from the step alone, so that a run that goes on draws the same.
    pub(super) fn starts(&self, step: usize, batch: usize, context: usize) -> Vec<usize> {
        let mut random = StdRng::seed_from_u64(step as u64);
        (0..batch).map(|_| random.random_range(0..self.ids.len() - context)).collect()
    }

    /// The pieces of a step, `(batch, context)`, and the letters that follow.
    pub(super) fn pieces(&self, step: usize, batch: usize, context: usize) -> Result<(Tensor, Tensor)> {
        let starts = self.starts(step, batch, context);
        let from = |shift: usize| {
            let ids = starts.iter().flat_map(|start| &self.ids[start + shift..][..context]);
            Tensor::from_iter(ids.copied(), &Device::Cpu)?.reshape((batch, context))
        };
        Ok((from(0)?, from(1)?))
    }
}
