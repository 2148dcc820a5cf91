//! Suites on disk.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;

use super::case::Case;
use super::tensor::Tensor;

/// A suite with its tensors in memory.
#[derive(Clone, Debug)]
pub struct Suite {
    /// The file name without its ending.
    pub name: String,
    /// The cases, in the order of the file.
    pub cases: Vec<Case>,
    /// All tensors by name.
    pub tensors: BTreeMap<String, Tensor>,
}

impl Suite {
    /// Loads `NAME.json` and the `NAME.safetensors` beside it.
    ///
    /// # Errors
    /// What cannot be read or parsed, and where.
    pub fn load(json: &Path) -> Result<Self, String> {
        let at = |path: &Path, error: &dyn core::fmt::Display| format!("{}: {error}", path.display());
        let text = std::fs::read_to_string(json).map_err(|e| at(json, &e))?;
        let cases: Vec<Case> = serde_json::from_str(&text).map_err(|e| at(json, &e))?;
        let data = json.with_extension("safetensors");
        let bytes = std::fs::read(&data).map_err(|e| at(&data, &e))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|e| at(&data, &e))?;
        let mut tensors = BTreeMap::new();
        for (name, view) in file.tensors() {
            let tensor = Tensor::decode(&view).map_err(|e| at(&data, &format!("{name}: {e}")))?;
            tensors.insert(name, tensor);
        }
        let name = json.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
        Ok(Self { name, cases, tensors })
    }

    /// The JSON files of all suites in a directory, sorted.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn files_in(dir: &Path) -> Result<Vec<PathBuf>, String> {
        let entries = std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let mut files: Vec<PathBuf> = entries
            .filter_map(|entry| entry.ok().map(|entry| entry.path()))
            .filter(|path| path.extension().is_some_and(|ext| ext == "json"))
            .collect();
        files.sort();
        Ok(files)
    }
}
