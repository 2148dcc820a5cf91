//! A checkpoint of a run: weights, state of the optimiser, losses and times so far, as one safetensors file.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor, safetensors};

use super::model::Gpt;
use super::optimiser::AdamW;
use super::text::Text;

/// The steps so far.
#[derive(Default)]
pub(super) struct Checkpoint {
    /// Of each step, before it.
    pub(super) losses: Vec<f32>,
    /// Seconds of each step.
    pub(super) times: Vec<f32>,
}

impl Checkpoint {
    /// Writes a new file, then puts it in the place of the old one: an interrupted run leaves a whole one.
    pub(super) fn write(&self, path: &Path, gpt: &Gpt, optimiser: &AdamW, lessons: Lessons<'_>) -> Result<()> {
        let mut tensors = HashMap::new();
        for ((name, var), [mean, square]) in gpt.named().iter().zip(&optimiser.moments) {
            tensors.insert(format!("weight.{name}"), var.as_tensor().clone());
            tensors.insert(format!("mean.{name}"), mean.clone());
            tensors.insert(format!("square.{name}"), square.clone());
        }
        let numbers = |numbers: &[f32]| Tensor::new(numbers, &Device::Cpu);
        tensors.insert("losses".to_owned(), numbers(&self.losses)?);
        tensors.insert("times".to_owned(), numbers(&self.times)?);
        tensors.insert("letters".to_owned(), lessons.letters()?);
        tensors.insert("pieces".to_owned(), lessons.pieces()?);
        tensors.insert("text".to_owned(), lessons.ids()?);
        let new = path.with_extension("new");
        safetensors::save(&tensors, &new)?;
        std::fs::rename(&new, path).with_context(|| path.display().to_string())
    }

    /// Reads a file into the model and the optimiser.
    pub(super) fn read(path: &Path, gpt: &Gpt, optimiser: &mut AdamW, lessons: Lessons<'_>) -> Result<Self> {
        let tensors = safetensors::load(path, &Device::Cpu).with_context(|| path.display().to_string())?;
        let tensor = |name: &str| tensors.get(name).with_context(|| format!("{} lacks {name}", path.display()));
        let same =
            |name: &str, now: Tensor| -> Result<bool> { Ok(tensor(name)?.to_vec1::<u32>()? == now.to_vec1::<u32>()?) };
        ensure!(
            same("letters", lessons.letters()?)? && same("pieces", lessons.pieces()?)? && same("text", lessons.ids()?)?,
            "{} learned another text, or pieces of other sizes; --fresh begins anew",
            path.display()
        );
        for ((name, var), moments) in gpt.named().iter().zip(&mut optimiser.moments) {
            var.set(tensor(&format!("weight.{name}"))?)?;
            *moments = [tensor(&format!("mean.{name}"))?.clone(), tensor(&format!("square.{name}"))?.clone()];
        }
        let done = Self { losses: tensor("losses")?.to_vec1()?, times: tensor("times")?.to_vec1()? };
        optimiser.steps = done.losses.len();
        Ok(done)
    }
}

/// What a run learns from.
#[derive(Clone, Copy)]
pub(super) struct Lessons<'a> {
    pub(super) text: &'a Text,
    /// Pieces of a step, and letters of a piece.
    pub(super) pieces: [usize; 2],
}

impl Lessons<'_> {
    fn letters(&self) -> Result<Tensor> {
        let letters = self.text.letters().iter().map(|&letter| u32::from(letter));
        Ok(Tensor::from_iter(letters, &Device::Cpu)?)
    }

    /// The sizes of the pieces.
    fn pieces(&self) -> Result<Tensor> {
        Ok(Tensor::from_iter(self.pieces.map(|n| n as u32), &Device::Cpu)?)
    }

    /// The text that they are cut from, letter by letter.
    fn ids(&self) -> Result<Tensor> {
        Ok(Tensor::new(self.text.ids(), &Device::Cpu)?)
    }
}
