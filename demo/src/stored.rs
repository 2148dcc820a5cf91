//! Activations from safetensors files.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use safetensors::SafeTensors;

/// The tensors of a file.
pub(crate) struct Stored {
    path: PathBuf,
    named: HashMap<String, Tensor>,
    /// The file's own remarks.
    pub(crate) metadata: HashMap<String, String>,
}

impl Stored {
    /// Reads all of a file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let named = || path.display().to_string();
        let bytes = std::fs::read(path).with_context(named)?;
        let (_, header) = SafeTensors::read_metadata(&bytes).with_context(named)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).with_context(named)?;
        Ok(Self { path: path.to_path_buf(), named: tensors, metadata })
    }

    /// Whether there is one of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.named.contains_key(name)
    }

    /// A tensor.
    pub(crate) fn get(&self, name: &str) -> Result<&Tensor> {
        self.named.get(name).with_context(|| format!("{}: has no tensor {name}", self.path.display()))
    }

    /// Whole numbers, such as token ids.
    pub(crate) fn ids(&self, name: &str) -> Result<Vec<u32>> {
        Ok(self.get(name)?.to_dtype(DType::U32)?.flatten_all()?.to_vec1()?)
    }

    /// All tensors.
    pub(crate) fn into_tensors(self) -> HashMap<String, Tensor> {
        self.named
    }
}
