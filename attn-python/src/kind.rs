//! The number types of tensors: their names, and those of types that are refused.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

/// The number types that tensors may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    F64,
    F32,
    F16,
    Bf16,
    Bool,
}

impl Kind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::F64 => "float64",
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
            Self::Bool => "bool",
        }
    }

    pub(crate) const fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Bool => 1,
        }
    }

    /// The type of DLPack's code, bits and lanes, of an argument. `as_bf16` says that 16-bit integers are the bits of
    /// bfloat16.
    pub(crate) fn of_dlpack(name: &str, dtype: (u8, u8, u16), as_bf16: bool) -> PyResult<Self> {
        match dtype {
            (2, 64, 1) => Ok(Self::F64),
            (2, 32, 1) => Ok(Self::F32),
            (2, 16, 1) => Ok(Self::F16),
            (4, 16, 1) => Ok(Self::Bf16),
            (0, 16, 1) if as_bf16 => Ok(Self::Bf16),
            (6, 8, 1) => Ok(Self::Bool),
            (code, bits, lanes) => {
                let what = NAMES.get(usize::from(code)).copied().unwrap_or("an unknown type");
                let bits = if code < 7 { bits.to_string() } else { String::new() };
                let lanes = if lanes == 1 { String::new() } else { format!("x{lanes}") };
                let wanted = match name {
                    "attn_mask" => "bool, float64, float32, float16 and bfloat16 are supported",
                    "block_mask" => "bool is wanted",
                    "lse" => "float32 is wanted",
                    _ => "float32, float16 and bfloat16 are supported",
                };
                Err(PyTypeError::new_err(format!("{name} is {what}{bits}{lanes}; {wanted}")))
            }
        }
    }
}

/// DLPack's types by their codes; the size follows the first seven.
const NAMES: [&str; 18] = [
    "int",
    "uint",
    "float",
    "handle",
    "bfloat",
    "complex",
    "bool",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float4_e2m1fn",
];
