//! Inputs and outputs of an op: a case with its tensors, and its answers.

use std::collections::BTreeMap;

use attn_core::Element;

use super::stop::Stop;
use super::{Case, Suite, Tensor};
use crate::engine::Engine;

/// A shape and its elements, row-major.
pub(crate) type Dense = (Vec<usize>, Vec<f64>);

/// The outputs of a case: role to shape and elements. What the library computes in several ways has several answers.
#[derive(Clone, Debug, Default)]
pub struct Produced(BTreeMap<String, Vec<Dense>>);

impl Produced {
    /// Adds an output, or one more answer to it.
    pub fn put<T: Element>(&mut self, role: &str, shape: &[usize], values: &[T]) {
        let answer = (shape.to_vec(), values.iter().map(|x| x.to_f64()).collect());
        self.0.entry(role.to_owned()).or_default().push(answer);
    }

    /// All answers to an output; none if it was not produced.
    pub fn get(&self, role: &str) -> &[Dense] {
        self.0.get(role).map_or(&[], Vec::as_slice)
    }
}

/// A case with its tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loaded<'s> {
    pub(super) suite: &'s Suite,
    /// The case.
    pub(crate) case: &'s Case,
}

impl<'s> Loaded<'s> {
    /// An input that must be there.
    ///
    /// # Errors
    /// The case is malformed if it is not.
    pub(crate) fn input(&self, role: &str) -> Result<&'s Tensor, Stop> {
        self.optional(role)?.ok_or_else(|| Stop::Fail(format!("input {role} is missing")))
    }

    /// An input that may be absent.
    ///
    /// # Errors
    /// The case is malformed if it names a tensor that the file does not have.
    pub(crate) fn optional(&self, role: &str) -> Result<Option<&'s Tensor>, Stop> {
        match self.case.inputs.get(role) {
            None => Ok(None),
            Some(name) => match self.suite.tensors.get(name) {
                Some(tensor) => Ok(Some(tensor)),
                None => Err(Stop::Fail(format!("input {role}: no tensor {name}"))),
            },
        }
    }
}

/// Refuses, with a reason, a precision that the engine does not take.
pub(crate) fn check_dtype<E: Engine>(engine: &E, case: &Case) -> Result<attn_core::Dtype, Stop> {
    let dtype = case.dtype()?;
    if engine.supports_dtype(dtype) {
        Ok(dtype)
    } else {
        Err(Stop::Skip(format!("the {} engine takes no {}", engine.name(), dtype.name())))
    }
}

/// Evaluates an expression with `T` standing for the type that a dtype names.
macro_rules! by_dtype {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            attn_core::Dtype::F64 => {
                type $T = f64;
                $body
            }
            attn_core::Dtype::F32 => {
                type $T = f32;
                $body
            }
            attn_core::Dtype::F16 => {
                type $T = attn_core::half::f16;
                $body
            }
            attn_core::Dtype::Bf16 => {
                type $T = attn_core::half::bf16;
                $body
            }
        }
    };
}
pub(crate) use by_dtype;
