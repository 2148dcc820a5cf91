//! How far torch's gradients are from f64, measured on the calls of [`gradients`](crate::gradients): a table that
//! `attn-testing/python/torch_gradients.py` writes. Its first lines say by which torch.

use attn_core::Dtype;

/// The root of the mean square of the errors of a gradient under `Precision::Exact`, as a multiple of torch's: never
/// more. f32 reaches 0.93 of it.
pub const TORCH_RMS: f64 = 1.0;
/// The same of bf16 under `Precision::Fast`, which rounds what torch rounds: of short calls it reaches 1.016, because
/// the lse of a `Fast` forward call is that of rounded weights. Of long calls it is below 1.
pub const TORCH_RMS_FAST: f64 = 1.03;
/// The largest error as a multiple of torch's: one of some thousands to some hundred thousands, which scatters on both
/// sides. f32 reaches 1.65 (dk of a causal call: keys that few queries see), halves 1.5.
pub const TORCH_LARGEST: f64 = 2.0;

/// An error of a gradient in units of `eta`: over all of its numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Eta {
    /// The largest.
    pub largest: f64,
    /// The root of the mean of its square.
    pub rms: f64,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TorchGradients {
    /// Of all tensors.
    pub dtype: Dtype,
    /// Queries, and keys.
    pub len: usize,
    /// Whether a query sees no later keys.
    pub causal: bool,
    /// Of queries.
    pub q_heads: usize,
    /// Of keys and values.
    pub kv_heads: usize,
    /// Of dq, dk, dv.
    pub eta: [Eta; 3],
}

/// All rows.
pub fn torch_gradients() -> impl Iterator<Item = TorchGradients> {
    include_str!("torch_gradients.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| row(line).unwrap_or_else(|| panic!("torch_gradients.txt: {line}")))
}

fn row(line: &str) -> Option<TorchGradients> {
    let mut words = line.split(' ');
    let dtype = match words.next()? {
        "f32" => Dtype::F32,
        "f16" => Dtype::F16,
        "bf16" => Dtype::Bf16,
        _ => return None,
    };
    let mut count = || words.next()?.parse::<usize>().ok();
    let (len, causal, q_heads, kv_heads) = (count()?, count()? == 1, count()?, count()?);
    let mut number = || words.next()?.parse::<f64>().ok().filter(|x| x.is_finite());
    let mut eta = [Eta::default(); 3];
    for eta in &mut eta {
        *eta = Eta { largest: number()?, rms: number()? };
    }
    words.next().is_none().then_some(TorchGradients { dtype, len, causal, q_heads, kv_heads, eta })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_row_for_every_call() {
        let rows: Vec<_> = torch_gradients().collect();
        assert_eq!(rows.len(), 5 * 2 * 2 * 3);
        for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
            let of = |len: usize| rows.iter().filter(|row| row.dtype == dtype && row.len == len).count();
            assert_eq!([32, 128, 512, 1024, 4096].map(of), [4; 5]);
        }
        assert!(row("f32 32 0 1 1 1e-8 1e-9 1e-8 1e-9 1e-8").is_none() && row("f32 32 0 1 1 nan 1 1 1 1 1").is_none());
    }
}
