//! The same training by torch: `train_torch.py` gets the first weights and the pieces of each step by a file, so that
//! nothing random is left to it.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor, safetensors};

use super::checkpoint::Checkpoint;
use super::model::Gpt;
use super::text::Text;

const BEGINNING: &str = "beginning.safetensors";
const LOSSES: &str = "torch.safetensors";

/// Steps whose pieces are written at most: as far as the curves can be compared.
const MOST_STEPS: usize = 10_000;

/// Writes what torch begins from: for so many steps, of so many pieces of so many letters.
pub(super) fn write(out: &Path, gpt: &Gpt, text: &Text, [steps, batch, context]: [usize; 3]) -> Result<()> {
    let mut tensors: HashMap<String, Tensor> =
        gpt.named().iter().map(|(name, var)| (format!("weight.{name}"), var.as_tensor().clone())).collect();
    let starts = (0..steps.clamp(1000, MOST_STEPS)).flat_map(|step| text.starts(step, batch, context));
    let starts = Tensor::from_iter(starts.map(|start| start as u32), &Device::Cpu)?.reshape(((), batch))?;
    tensors.insert("starts".to_owned(), starts);
    tensors.insert("ids".to_owned(), Tensor::new(text.ids(), &Device::Cpu)?);
    tensors.insert("context".to_owned(), Tensor::new(&[context as u32], &Device::Cpu)?);
    Ok(safetensors::save(&tensors, out.join(BEGINNING))?)
}

/// Trains by torch; its losses and times.
pub(super) fn train(python: &Path, out: &Path, steps: usize) -> Result<Checkpoint> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("train_torch.py");
    let mut command = Command::new(python);
    command.arg(script).arg(out.join(BEGINNING)).arg(out.join(LOSSES)).arg(steps.to_string());
    let status = command.status().with_context(|| python.display().to_string())?;
    ensure!(status.success(), "{command:?}: {status}");
    let tensors = safetensors::load(out.join(LOSSES), &Device::Cpu)?;
    let numbers = |name: &str| anyhow::Ok(tensors.get(name).context("a tensor is missing")?.to_vec1::<f32>()?);
    Ok(Checkpoint { losses: numbers("losses")?, times: numbers("times")? })
}
