//! AdamW (arXiv 1711.05101), the steps of `candle_nn::AdamW`. That one's state is private, so that a run could not go
//! on from a checkpoint.

use anyhow::Result;
use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

const RATE: f64 = 1e-3;
const BETAS: [f64; 2] = [0.9, 0.99];
const EPS: f64 = 1e-8;
const DECAY: f64 = 0.1;

/// The variables, and two moments of the gradients of each.
pub(super) struct AdamW {
    variables: Vec<Var>,
    pub(super) moments: Vec<[Tensor; 2]>,
    pub(super) steps: usize,
}

impl AdamW {
    pub(super) fn new(variables: Vec<Var>) -> Result<Self> {
        let moments = variables.iter().map(|var| Ok([var.zeros_like()?.detach(), var.zeros_like()?.detach()]));
        Ok(Self { moments: moments.collect::<Result<_>>()?, variables, steps: 0 })
    }

    /// Moves every variable that has a gradient.
    pub(super) fn step(&mut self, gradients: &GradStore) -> Result<()> {
        self.steps += 1;
        let [first, second] = BETAS.map(|beta| 1.0 / (1.0 - beta.powf(self.steps as f64)));
        for (var, [mean, square]) in self.variables.iter().zip(&mut self.moments) {
            let Some(gradient) = gradients.get(var) else { continue };
            let gradient = gradient.detach();
            *mean = ((&*mean * BETAS[0])? + (&gradient * (1.0 - BETAS[0]))?)?;
            *square = ((&*square * BETAS[1])? + (gradient.sqr()? * (1.0 - BETAS[1]))?)?;
            let by = ((&*mean * first)? / ((&*square * second)?.sqrt()? + EPS)?)?;
            var.set(&((var.as_tensor().detach() * (1.0 - RATE * DECAY))? - (by * RATE)?)?)?;
        }
        Ok(())
    }
}
