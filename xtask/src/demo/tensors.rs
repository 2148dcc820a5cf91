//! Tensors by name, widened to `f32`, and the layers that models make of them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use attn_core::half::{bf16, f16};
use attn_layers::Linear;
use safetensors::{Dtype, SafeTensors};

use super::{Failure, Result};

/// A tensor, row-major.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) shape: Vec<usize>,
    /// Integers are kept exactly up to 2²⁴, which no token id reaches.
    pub(crate) data: Vec<f32>,
}

/// The tensors of a file.
#[derive(Debug)]
pub(crate) struct Tensors {
    path: PathBuf,
    named: HashMap<String, Tensor>,
    /// The file's own remarks.
    pub(crate) metadata: HashMap<String, String>,
}

impl Tensors {
    /// Those of a safetensors file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let format = |what: String| Failure::Format(path.to_path_buf(), what);
        let bytes = std::fs::read(path).map_err(|error| Failure::File(path.to_path_buf(), error))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| format(error.to_string()))?;
        let (_, header) = SafeTensors::read_metadata(&bytes).map_err(|error| format(error.to_string()))?;
        let mut named = HashMap::new();
        for (name, tensor) in file.iter() {
            let data = match tensor.dtype() {
                Dtype::F32 => each(tensor.data(), f32::from_le_bytes),
                Dtype::F16 => each(tensor.data(), |bytes| f16::from_le_bytes(bytes).to_f32()),
                Dtype::BF16 => each(tensor.data(), |bytes| bf16::from_le_bytes(bytes).to_f32()),
                Dtype::I32 => each(tensor.data(), |bytes| i32::from_le_bytes(bytes) as f32),
                Dtype::I64 => each(tensor.data(), |bytes| i64::from_le_bytes(bytes) as f32),
                other => return Err(format(format!("{name} is {other:?}, which no demo reads"))),
            };
            named.insert(name.to_owned(), Tensor { shape: tensor.shape().to_vec(), data });
        }
        Ok(Self { path: path.to_path_buf(), named, metadata: header.metadata().clone().unwrap_or_default() })
    }

    /// Of a file that was read otherwise.
    pub(crate) fn of(path: &Path, named: HashMap<String, Tensor>) -> Self {
        Self { path: path.to_path_buf(), named, metadata: HashMap::new() }
    }

    /// Whether there is one of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.named.contains_key(name)
    }

    /// A tensor, which is looked at.
    pub(crate) fn get(&self, name: &str) -> Result<&Tensor> {
        self.named.get(name).ok_or_else(|| Failure::Format(self.path.clone(), format!("has no tensor {name}")))
    }

    /// A tensor of this shape, which is taken out.
    pub(crate) fn take(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let found = self.get(name)?.shape.clone();
        if found != shape {
            let what = format!("{name} has the shape {found:?}, it should be {shape:?}");
            return Err(Failure::Format(self.path.clone(), what));
        }
        Ok(self.named.remove(name).map(|tensor| tensor.data).unwrap_or_default())
    }

    /// Token ids.
    pub(crate) fn ids(&self, name: &str) -> Result<Vec<u32>> {
        Ok(self.get(name)?.data.iter().map(|&id| id as u32).collect())
    }
}

/// Each group of bytes as a number.
fn each<const N: usize>(bytes: &[u8], number: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    bytes.as_chunks::<N>().0.iter().map(|&bytes| number(bytes)).collect()
}

/// A linear layer that owns its weights, `[d_out, d_in]` as torch stores them.
#[derive(Debug)]
pub(crate) struct Dense {
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    d_in: usize,
}

impl Dense {
    /// `NAME.weight`, and `NAME.bias` where the layer has one.
    pub(crate) fn take(from: &mut Tensors, name: &str, d_in: usize, d_out: usize, biased: bool) -> Result<Self> {
        let weight = from.take(&format!("{name}.weight"), &[d_out, d_in])?;
        let bias = if biased { Some(from.take(&format!("{name}.bias"), &[d_out])?) } else { None };
        Ok(Self { weight, bias, d_in })
    }

    /// The layer.
    pub(crate) fn linear(&self) -> attn_core::Result<Linear<'_, f32>> {
        let layer = Linear::transposed(&self.weight, self.d_in, self.weight.len() / self.d_in.max(1))?;
        match &self.bias {
            Some(bias) => layer.bias(bias),
            None => Ok(layer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_lacks_or_has_otherwise_is_told() {
        let tensor = Tensor { shape: vec![2, 3], data: vec![0.0; 6] };
        let mut tensors = Tensors::of(Path::new("model"), HashMap::from([("a.weight".to_owned(), tensor)]));
        let told = |failure: Failure| failure.to_string();
        assert_eq!(told(tensors.take("b", &[6]).unwrap_err()), "model: has no tensor b");
        let text = told(Dense::take(&mut tensors, "a", 2, 3, false).unwrap_err());
        assert_eq!(text, "model: a.weight has the shape [2, 3], it should be [3, 2]");
        let layer = Dense::take(&mut tensors, "a", 3, 2, false).unwrap();
        assert_eq!(layer.linear().unwrap().d_out(), 2);
    }
}
