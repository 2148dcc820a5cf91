//! Text by the trained model, letter by letter.

use anyhow::Result;
use candle_core::{Device, Tensor};
use candle_nn::ops::softmax_last_dim;
use rand::SeedableRng;
use rand::distr::weighted::WeightedIndex;
use rand::rngs::StdRng;
use rand_distr::Distribution;

use super::model::Gpt;
use super::text::Text;

/// Below 1, likely letters are drawn more often than they are likely.
const TEMPERATURE: f64 = 0.8;

/// So many letters that follow the beginning of the text.
pub(super) fn text(gpt: &Gpt, text: &Text, count: usize) -> Result<String> {
    let mut random = StdRng::seed_from_u64(1);
    let mut ids: Vec<u32> = text.ids()[..text.len().min(16)].to_vec();
    for _ in 0..count {
        let seen = &ids[ids.len().saturating_sub(gpt.context())..];
        let logits = gpt.logits(&Tensor::new(seen, &Device::Cpu)?.unsqueeze(0)?)?;
        let last = logits.get(0)?.get(seen.len() - 1)?.detach();
        let chances = softmax_last_dim(&(last / TEMPERATURE)?)?.to_vec1::<f32>()?;
        ids.push(WeightedIndex::new(chances)?.sample(&mut random) as u32);
    }
    Ok(ids.iter().filter_map(|&id| text.letters().get(id as usize)).collect())
}
