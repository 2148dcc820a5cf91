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
    pub(super) fn write(&self, path: &Path, gpt: &Gpt, optimiser: &AdamW, text: &Text) -> Result<()> {
        let mut tensors = HashMap::new();
        for ((name, var), [mean, square]) in gpt.named().iter().zip(&optimiser.moments) {
            tensors.insert(format!("weight.{name}"), var.as_tensor().clone());
            tensors.insert(format!("mean.{name}"), mean.clone());
            tensors.insert(format!("square.{name}"), square.clone());
        }
        let numbers = |numbers: &[f32]| Tensor::new(numbers, &Device::Cpu);
        tensors.insert("losses".to_owned(), numbers(&self.losses)?);
        tensors.insert("times".to_owned(), numbers(&self.times)?);
        tensors.insert("letters".to_owned(), letters(text)?);
        let new = path.with_extension("new");
        safetensors::save(&tensors, &new)?;
        std::fs::rename(&new, path).with_context(|| path.display().to_string())
    }

    /// Reads a file into the model and the optimiser.
    pub(super) fn read(path: &Path, gpt: &Gpt, optimiser: &mut AdamW, text: &Text) -> Result<Self> {
        let tensors = safetensors::load(path, &Device::Cpu).with_context(|| path.display().to_string())?;
        let tensor = |name: &str| tensors.get(name).with_context(|| format!("{} lacks {name}", path.display()));
        let same = tensor("letters")?.to_vec1::<u32>()? == letters(text)?.to_vec1::<u32>()?;
        ensure!(same, "{} is of a text with other letters; --fresh begins anew", path.display());
        for ((name, var), moments) in gpt.named().iter().zip(&mut optimiser.moments) {
            var.set(tensor(&format!("weight.{name}"))?)?;
            *moments = [tensor(&format!("mean.{name}"))?.clone(), tensor(&format!("square.{name}"))?.clone()];
        }
        let done = Self { losses: tensor("losses")?.to_vec1()?, times: tensor("times")?.to_vec1()? };
        optimiser.steps = done.losses.len();
        Ok(done)
    }
}

fn letters(text: &Text) -> Result<Tensor> {
    Ok(Tensor::from_iter(text.letters().iter().map(|&letter| u32::from(letter)), &Device::Cpu)?)
}
