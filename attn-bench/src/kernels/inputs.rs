//! The inputs of a row of the table: its numbers in the row's type, its options, and our engine on both.
//!
//! Peers get the same numbers as f32, whatever the type: rounded numbers, if ours are rounded.

use attn_core::dropout::Dropout;
use attn_core::half::{bf16, f16};
use attn_core::position::alibi::Alibi;
use attn_core::{Align, Attention, AttnError, Layout, Mask, Precision, View};

use super::gradients::Backward;
use super::ours::Ours;
use super::shapes::{Kernel, What, window};
use crate::case::{Case, Number, Tensors, Views, normal};

impl Kernel {
    /// Inputs, the same in every run.
    pub fn inputs(&self) -> Inputs {
        let Case { q_heads, q_len, kv_len, .. } = self.case;
        let mut tensors: Tensors = Tensors::new(self.case, 11);
        if let What::Spread(factor) = self.what {
            tensors.q.iter_mut().for_each(|q| *q *= factor as f32);
        }
        let halves = match self.number {
            Number::F32 => Halves::None,
            Number::F16 => Halves::F16(tensors.rounded()),
            Number::Bf16 => Halves::Bf16(tensors.rounded()),
        };
        let gradients = Gradients::None;
        let mut inputs = Inputs { tensors, halves, gradients, extra: Vec::new(), keep: Vec::new() };
        match self.what {
            What::Bias => inputs.extra = normal(5, q_len * kv_len),
            What::Keep => {
                // Standard normals exceed −1.2816 nine times in ten.
                inputs.keep = normal(6, q_len * kv_len).into_iter().map(|x| x > -1.2816).collect();
                inputs.extra = inputs.keep.iter().map(|&keep| f32::from(u8::from(keep))).collect();
            }
            // 2^(−8·(h+1)/heads): exact for the powers of two that the table uses.
            What::Alibi => inputs.extra = (1..=q_heads).map(|h| (-8.0 * h as f32 / q_heads as f32).exp2()).collect(),
            What::Backward => {
                inputs.extra = normal(7, inputs.tensors.out.len());
                let dy = &mut inputs.extra;
                inputs.gradients = match self.number {
                    Number::F32 => Gradients::F32(Backward::new(self.case, dy)),
                    Number::F16 => Gradients::F16(Backward::new(self.case, dy)),
                    Number::Bf16 => Gradients::Bf16(Backward::new(self.case, dy)),
                };
            }
            _ => {}
        }
        inputs
    }
}

/// What a kernel is run on.
#[derive(Clone, Debug)]
pub struct Inputs {
    /// q, k, v and the output, in f32.
    pub tensors: Tensors,
    halves: Halves,
    gradients: Gradients,
    extra: Vec<f32>,
    keep: Vec<bool>,
}

/// The same numbers as halves, if the kernel is one of halves.
#[derive(Clone, Debug)]
enum Halves {
    None,
    F16(Tensors<f16>),
    Bf16(Tensors<bf16>),
}

/// What a backward call needs besides, in the kernel's type.
#[derive(Clone, Debug)]
enum Gradients {
    None,
    F32(Backward<f32>),
    F16(Backward<f16>),
    Bf16(Backward<bf16>),
}

impl Inputs {
    /// The bias, the mask as numbers, the slopes, or the gradient by the output.
    pub fn extra(&self) -> &Vec<f32> {
        &self.extra
    }

    /// Runs `call` with the options of the kernel and views of its tensors.
    ///
    /// # Errors
    /// What `call` gives; nothing else for the inputs that [`Kernel::inputs`] made for this kernel.
    pub fn with<R>(
        &mut self,
        kernel: &Kernel,
        call: impl FnOnce(&Attention<'_>, Views<'_>) -> Result<R, AttnError>,
    ) -> Result<R, AttnError> {
        call(&options(kernel, &self.extra, &self.keep)?, self.tensors.views()?)
    }

    /// Seconds per call of our engine on the numbers of the kernel's type: the wall's and the thread's.
    pub(super) fn time(&mut self, kernel: &Kernel, ours: Ours<'_, '_>, calls: u32) -> Result<(f64, f64), AttnError> {
        let attn = options(kernel, &self.extra, &self.keep)?;
        match (&mut self.halves, &mut self.gradients) {
            (Halves::None, Gradients::F32(gradients)) => gradients.time(&attn, &mut self.tensors, ours, calls),
            (Halves::F16(tensors), Gradients::F16(gradients)) => gradients.time(&attn, tensors, ours, calls),
            (Halves::Bf16(tensors), Gradients::Bf16(gradients)) => gradients.time(&attn, tensors, ours, calls),
            (Halves::None, _) => ours.time(&attn, self.tensors.views()?, calls),
            (Halves::F16(tensors), _) => ours.time(&attn, tensors.views()?, calls),
            (Halves::Bf16(tensors), _) => ours.time(&attn, tensors.views()?, calls),
        }
    }

    /// What our engine has written last, widened: the output, or all gradients.
    pub(super) fn out(&self) -> Vec<f32> {
        match (&self.halves, &self.gradients) {
            (_, Gradients::F32(gradients)) => gradients.all(),
            (_, Gradients::F16(gradients)) => gradients.all(),
            (_, Gradients::Bf16(gradients)) => gradients.all(),
            (Halves::None, _) => self.tensors.out.clone(),
            (Halves::F16(tensors), _) => tensors.out.iter().map(|x| x.to_f32()).collect(),
            (Halves::Bf16(tensors), _) => tensors.out.iter().map(|x| x.to_f32()).collect(),
        }
    }
}

/// The options of a kernel.
fn options<'a>(kernel: &Kernel, extra: &'a [f32], keep: &'a [bool]) -> Result<Attention<'a>, AttnError> {
    let case = kernel.case;
    let dense = [1, 1, case.q_len, case.kv_len];
    let attn = case.attention().precision(if kernel.fast { Precision::Fast } else { Precision::Exact });
    Ok(match kernel.what {
        What::Plain | What::Spread(_) | What::Backward => attn,
        What::Window(left) => attn.mask(window(case, left)),
        What::Alibi => attn.alibi(Alibi { slopes: extra, align: Align::BottomRight }),
        What::Bias => attn.bias(View::new(extra, Layout::Bhsd, dense)?),
        What::Keep => attn.mask(case.mask().and(Mask::keep(View::new(keep, Layout::Bhsd, dense)?))),
        What::Softcap(cap) => attn.softcap(cap),
        What::Dropout(p) => attn.dropout(Dropout::Seeded { p: p as f32, seed: 1 }),
    })
}

#[cfg(test)]
mod tests {
    use super::super::shapes::parse;

    #[test]
    fn a_dense_mask_hides_one_key_in_ten_for_us_and_for_the_peer() {
        let inputs = parse("k 1 1 1 100 100 8 0 keep -").unwrap()[0].inputs();
        let kept = inputs.keep.iter().filter(|&&keep| keep).count();
        assert!((8800..=9200).contains(&kept), "{kept} of 10000"); // six standard deviations of a binomial share
        assert_eq!(inputs.extra().iter().sum::<f32>(), kept as f32);
    }
}
