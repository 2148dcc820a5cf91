//! One case as a suite's JSON file states it.

use std::collections::BTreeMap;

use attn_core::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::stop::Stop;

/// How far a value may be from the expected one: `atol + rtol·|want|`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tolerance {
    /// Absolute part.
    pub atol: f64,
    /// Relative part.
    pub rtol: f64,
}

/// One case of a suite.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Case {
    /// Unique in the suite.
    pub name: String,
    /// What to compute.
    pub op: String,
    /// Parameters of the op; absent and `null` mean the same.
    #[serde(default)]
    pub params: BTreeMap<String, Value>,
    /// Role to tensor name.
    #[serde(default)]
    pub inputs: BTreeMap<String, String>,
    /// Role to tensor name: what must be produced.
    pub outputs: BTreeMap<String, String>,
    /// For every output without a tolerance of its own.
    pub tol: Tolerance,
    /// By output.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tol_per_output: BTreeMap<String, Tolerance>,
    /// The expectation is wrong on purpose: the case is right when it does not pass.
    #[serde(default, skip_serializing_if = "core::ops::Not::not")]
    pub must_fail: bool,
    /// Notes for the reader: source, note, mutation, original.
    #[serde(flatten)]
    pub notes: BTreeMap<String, Value>,
}

impl Case {
    /// The tolerance of an output.
    pub fn tolerance(&self, role: &str) -> Tolerance {
        self.tol_per_output.get(role).copied().unwrap_or(self.tol)
    }

    /// Whether an output is compared.
    pub fn wants(&self, role: &str) -> bool {
        self.outputs.contains_key(role)
    }

    fn param(&self, name: &str) -> Option<&Value> {
        self.params.get(name).filter(|v| !v.is_null())
    }

    fn parsed<T>(&self, name: &str, parse: impl Fn(&Value) -> Option<T>) -> Result<Option<T>, Stop> {
        let Some(value) = self.param(name) else {
            return Ok(None);
        };
        parse(value).map(Some).ok_or_else(|| Stop::Fail(format!("parameter {name} = {value} is not understood")))
    }

    /// A number, `None` if it is absent or null.
    pub fn number(&self, name: &str) -> Result<Option<f64>, Stop> {
        self.parsed(name, Value::as_f64)
    }

    /// An integer.
    pub fn integer(&self, name: &str) -> Result<Option<i64>, Stop> {
        self.parsed(name, Value::as_i64)
    }

    /// A size.
    pub fn size(&self, name: &str) -> Result<Option<usize>, Stop> {
        self.parsed(name, |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    /// A size that must be there.
    pub fn required_size(&self, name: &str) -> Result<usize, Stop> {
        self.size(name)?.ok_or_else(|| Stop::Fail(format!("parameter {name} is missing")))
    }

    /// A flag, false if it is absent; 0 and 1 count as flags.
    pub fn flag(&self, name: &str) -> Result<bool, Stop> {
        Ok(self.parsed(name, |v| v.as_bool().or_else(|| v.as_i64().map(|n| n != 0)))?.unwrap_or(false))
    }

    /// A word.
    pub fn word(&self, name: &str) -> Result<Option<&str>, Stop> {
        match self.param(name) {
            None => Ok(None),
            Some(value) => match value.as_str() {
                Some(word) => Ok(Some(word)),
                None => Err(Stop::Fail(format!("parameter {name} = {value} is not a word"))),
            },
        }
    }

    /// An object.
    pub fn object(&self, name: &str) -> Result<Option<&serde_json::Map<String, Value>>, Stop> {
        match self.param(name) {
            None => Ok(None),
            Some(value) => match value.as_object() {
                Some(object) => Ok(Some(object)),
                None => Err(Stop::Fail(format!("parameter {name} = {value} is not an object"))),
            },
        }
    }

    /// A list of sizes.
    pub fn sizes(&self, name: &str) -> Result<Option<Vec<usize>>, Stop> {
        self.parsed(name, |v| v.as_array()?.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok())).collect())
    }

    /// The precision of the case.
    pub fn dtype(&self) -> Result<Dtype, Stop> {
        match self.word("dtype")? {
            None | Some("f32") => Ok(Dtype::F32),
            Some("f64") => Ok(Dtype::F64),
            Some("f16") => Ok(Dtype::F16),
            Some("bf16") => Ok(Dtype::Bf16),
            Some(other) => Err(Stop::Skip(format!("no element type {other}"))),
        }
    }
}
