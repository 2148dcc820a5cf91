//! Tensors of a suite: a shape and its numbers in their own type.

use attn_core::half::{bf16, f16};
use attn_core::{Element, Layout, View};
use safetensors::tensor::{Dtype, TensorView};

use super::stop::Stop;

/// The elements of a [`Tensor`].
#[derive(Clone, Debug, PartialEq)]
#[expect(missing_docs, reason = "each variant is named after its type")]
pub enum Data {
    F64(Vec<f64>),
    F32(Vec<f32>),
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    I64(Vec<i64>),
    I32(Vec<i32>),
    U8(Vec<u8>),
    Bool(Vec<bool>),
}

/// A dense row-major tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its sizes; empty for a scalar.
    pub shape: Vec<usize>,
    /// Its elements.
    pub data: Data,
}

/// A type that [`Data`] holds.
pub trait Stored: Copy + Sized + 'static {
    /// The elements, if they are of this type.
    fn of(data: &Data) -> Option<&[Self]>;
}

macro_rules! stored {
    ($($t:ty => $variant:ident),*) => {$(
        impl Stored for $t {
            fn of(data: &Data) -> Option<&[Self]> {
                match data {
                    Data::$variant(values) => Some(values),
                    _ => None,
                }
            }
        }
    )*};
}

stored!(f64 => F64, f32 => F32, f16 => F16, bf16 => Bf16, i64 => I64, i32 => I32, u8 => U8, bool => Bool);

impl Tensor {
    /// Decodes a tensor of a safetensors file.
    ///
    /// # Errors
    /// A dtype that no suite uses, or a length that does not match.
    pub fn decode(view: &TensorView<'_>) -> Result<Self, String> {
        fn all<const N: usize, T>(bytes: &[u8], from: impl Fn([u8; N]) -> T) -> Result<Vec<T>, String> {
            let (chunks, rest) = bytes.as_chunks::<N>();
            if rest.is_empty() {
                Ok(chunks.iter().map(|c| from(*c)).collect())
            } else {
                Err("ragged length".to_owned())
            }
        }
        let bytes = view.data();
        let data = match view.dtype() {
            Dtype::F64 => Data::F64(all(bytes, f64::from_le_bytes)?),
            Dtype::F32 => Data::F32(all(bytes, f32::from_le_bytes)?),
            Dtype::F16 => Data::F16(all(bytes, f16::from_le_bytes)?),
            Dtype::BF16 => Data::Bf16(all(bytes, bf16::from_le_bytes)?),
            Dtype::I64 => Data::I64(all(bytes, i64::from_le_bytes)?),
            Dtype::I32 => Data::I32(all(bytes, i32::from_le_bytes)?),
            Dtype::U8 => Data::U8(bytes.to_vec()),
            Dtype::BOOL => Data::Bool(bytes.iter().map(|&b| b != 0).collect()),
            other => return Err(format!("dtype {other:?} is not one that suites use")),
        };
        let tensor = Self { shape: view.shape().to_vec(), data };
        let (wanted, found) = (tensor.shape.iter().product::<usize>(), tensor.len());
        if wanted == found { Ok(tensor) } else { Err(format!("{wanted} elements by shape, {found} in the file")) }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match &self.data {
            Data::F64(x) => x.len(),
            Data::F32(x) => x.len(),
            Data::F16(x) => x.len(),
            Data::Bf16(x) => x.len(),
            Data::I64(x) => x.len(),
            Data::I32(x) => x.len(),
            Data::U8(x) => x.len(),
            Data::Bool(x) => x.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements as doubles; exact for all that suites hold.
    pub fn to_f64(&self) -> Vec<f64> {
        match &self.data {
            Data::F64(x) => x.clone(),
            Data::F32(x) => x.iter().map(|&x| f64::from(x)).collect(),
            Data::F16(x) => x.iter().map(|&x| Element::to_f64(x)).collect(),
            Data::Bf16(x) => x.iter().map(|&x| Element::to_f64(x)).collect(),
            Data::I64(x) => x.iter().map(|&x| x as f64).collect(),
            Data::I32(x) => x.iter().map(|&x| f64::from(x)).collect(),
            Data::U8(x) => x.iter().map(|&x| f64::from(x)).collect(),
            Data::Bool(x) => x.iter().map(|&x| f64::from(u8::from(x))).collect(),
        }
    }

    /// The elements, which must be of type `T`.
    ///
    /// # Errors
    /// The case is malformed if they are not.
    pub fn values<T: Stored>(&self) -> Result<&[T], Stop> {
        T::of(&self.data).ok_or_else(|| Stop::Fail(format!("a tensor is not {}", core::any::type_name::<T>())))
    }

    /// Indices or lengths: `I64` or `I32`, negative values as they are.
    ///
    /// # Errors
    /// The case is malformed if the tensor holds no integers.
    pub fn integers(&self) -> Result<Vec<i64>, Stop> {
        match &self.data {
            Data::I64(x) => Ok(x.clone()),
            Data::I32(x) => Ok(x.iter().map(|&x| i64::from(x)).collect()),
            _ => Err(Stop::Fail("a tensor of indices holds no integers".to_owned())),
        }
    }

    /// The sizes, which must be `N`.
    ///
    /// # Errors
    /// The case is malformed if the rank is another.
    pub fn sizes<const N: usize>(&self) -> Result<[usize; N], Stop> {
        self.shape.as_slice().try_into().map_err(|_| Stop::Fail(format!("shape {:?} is not of rank {N}", self.shape)))
    }

    /// A view of a `[batch, heads, seq, dim]` tensor.
    ///
    /// # Errors
    /// As [`values`](Self::values) and [`sizes`](Self::sizes).
    pub fn view<T: Stored>(&self) -> Result<View<'_, T>, Stop> {
        Ok(View::new(self.values()?, Layout::Bhsd, self.sizes()?)?)
    }

    /// A view that broadcasts, of a tensor of rank up to 4.
    ///
    /// # Errors
    /// As [`values`](Self::values).
    pub fn broadcast<T: Stored>(&self) -> Result<View<'_, T>, Stop> {
        Ok(View::broadcast(self.values()?, &self.shape)?)
    }
}
