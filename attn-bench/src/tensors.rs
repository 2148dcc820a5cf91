//! Real tensors from a safetensors file: the q, k and v of a model's layers, and tensors that belong to them.
//!
//! A layer is three tensors `NAME.q`, `NAME.k`, `NAME.v`, which are found, or any three that the caller names. Their
//! shape is `[batch, heads, seq, dim]` (fewer axes count as leading 1s), in f32, f16 or bf16. If the file also holds
//! `NAME.attn_out` and `NAME.lse`, engines are compared with them. If it holds `attention_mask` (`[batch, kv_len]`, 0 =
//! padding), padded keys are hidden.

use std::fmt;

use attn_core::half::{bf16, f16};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};

/// Why a file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileError {
    /// The bytes are not a safetensors file.
    Format(String),
    /// A requested tensor is not there.
    Missing {
        /// Its name.
        name: String,
        /// Some names that are there.
        there: Vec<String>,
    },
    /// No three tensors are called `NAME.q`, `NAME.k`, `NAME.v`.
    NoLayers {
        /// Some names that are there.
        there: Vec<String>,
    },
    /// A tensor holds numbers of a type that is not read here.
    Dtype {
        /// Its name.
        name: String,
        /// Its type.
        found: String,
        /// The types that would do.
        wanted: &'static str,
    },
    /// A tensor has too many axes, or none.
    Rank {
        /// Its name.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The ranks that would do.
        wanted: &'static str,
    },
    /// A tensor does not have the shape that fits the others.
    Shape {
        /// Its name.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The shape that fits.
        wanted: Vec<usize>,
    },
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let some = |names: &[String]| if names.is_empty() { "nothing".to_string() } else { names.join(", ") };
        match self {
            Self::Format(why) => write!(f, "not a safetensors file: {why}"),
            Self::Missing { name, there } => write!(f, "no tensor `{name}`; the file holds {}", some(there)),
            Self::NoLayers { there } => {
                write!(
                    f,
                    "no tensors NAME.q, NAME.k, NAME.v (say which with --q, --k, --v); the file holds {}",
                    some(there)
                )
            }
            Self::Dtype { name, found, wanted } => write!(f, "`{name}` holds {found}; {wanted} can be read"),
            Self::Rank { name, shape, wanted } => write!(f, "`{name}` has shape {shape:?}; {wanted} is needed"),
            Self::Shape { name, shape, wanted } => {
                write!(f, "`{name}` has shape {shape:?}, but {wanted:?} fits the others")
            }
        }
    }
}

impl std::error::Error for FileError {}

/// Numbers in the precision that the file has.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Single precision.
    F32(Vec<f32>),
    /// Half precision.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

/// A tensor with four axes.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// `[batch, heads, seq, dim]`.
    pub sizes: [usize; 4],
    /// The elements, contiguous.
    pub data: Data,
}

/// What an engine's result is compared with.
#[derive(Clone, Debug, PartialEq)]
pub struct Expected {
    /// The values, row-major.
    pub values: Vec<f64>,
    /// How far a stored value may be from the exact one because of its own precision, relative to it.
    pub precision: f64,
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Its name in the file, such as `layer3`; the name of q if that says nothing.
    pub name: String,
    /// Queries.
    pub q: Tensor,
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
    /// The stored output, `[batch, heads, q_len, value_dim]`.
    pub out: Option<Expected>,
    /// The stored log-sum-exp, `[batch, heads, q_len]`.
    pub lse: Option<Expected>,
    /// Keys that are real, `[batch, kv_len]`; `None` if the file has no `attention_mask`.
    pub real: Option<Vec<bool>>,
}

/// Names of the tensors to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Names {
    /// Every `NAME.q`, `NAME.k`, `NAME.v`.
    Find,
    /// These three.
    Given {
        /// Queries.
        q: String,
        /// Keys.
        k: String,
        /// Values.
        v: String,
    },
}

/// Reads the layers of a file.
///
/// # Errors
/// [`FileError`] naming the tensor. Whether q, k and v fit together is for the engines to say.
pub fn layers(bytes: &[u8], names: &Names) -> Result<Vec<Layer>, FileError> {
    let file = SafeTensors::deserialize(bytes).map_err(|error| FileError::Format(error.to_string()))?;
    let mut there: Vec<String> = file.names().into_iter().map(str::to_string).collect();
    there.sort_by_cached_key(|name| natural(name));
    let file = File { file, there };
    let triples = match names {
        Names::Given { q, k, v } => vec![[q.clone(), k.clone(), v.clone()]],
        Names::Find => file.find()?,
    };
    triples.iter().map(|triple| file.layer(triple)).collect()
}

/// Orders `layer2` before `layer10`: digits count as numbers.
fn natural(name: &str) -> Vec<(String, u64)> {
    let mut parts = vec![(String::new(), 0u64)];
    let mut in_number = false;
    for c in name.chars() {
        if let (Some(digit), Some(part)) = (c.to_digit(10), parts.last_mut()) {
            part.1 = part.1.saturating_mul(10).saturating_add(u64::from(digit));
            in_number = true;
            continue;
        }
        if in_number {
            parts.push((String::new(), 0));
            in_number = false;
        }
        if let Some(part) = parts.last_mut() {
            part.0.push(c);
        }
    }
    parts
}

struct File<'b> {
    file: SafeTensors<'b>,
    there: Vec<String>,
}

impl File<'_> {
    /// The first names, for messages.
    fn some_names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.there.iter().take(12).cloned().collect();
        if self.there.len() > names.len() {
            names.push(format!("and {} more", self.there.len() - names.len()));
        }
        names
    }

    fn find(&self) -> Result<Vec<[String; 3]>, FileError> {
        let stems = self.there.iter().filter_map(|name| name.strip_suffix(".q"));
        let triples: Vec<[String; 3]> = stems
            .map(|stem| ["q", "k", "v"].map(|part| format!("{stem}.{part}")))
            .filter(|triple| triple.iter().all(|name| self.there.contains(name)))
            .collect();
        if triples.is_empty() { Err(FileError::NoLayers { there: self.some_names() }) } else { Ok(triples) }
    }

    fn get(&self, name: &str) -> Result<TensorView<'_>, FileError> {
        let missing = || FileError::Missing { name: name.to_string(), there: self.some_names() };
        self.file.tensor(name).map_err(|_| missing())
    }

    fn layer(&self, [q, k, v]: &[String; 3]) -> Result<Layer, FileError> {
        let name = q.strip_suffix(".q").unwrap_or(q).to_string();
        let (q, k, v) = (self.tensor(q)?, self.tensor(k)?, self.tensor(v)?);
        let ([batch, heads, q_len, _], [.., value_dim]) = (q.sizes, v.sizes);
        let out = self.expected(&format!("{name}.attn_out"), &[batch, heads, q_len, value_dim])?;
        let lse = self.expected(&format!("{name}.lse"), &[batch, heads, q_len])?;
        let real = self.real_keys(&[batch, k.sizes[2]])?;
        Ok(Layer { name, q, k, v, out, lse, real })
    }

    fn tensor(&self, name: &str) -> Result<Tensor, FileError> {
        let view = self.get(name)?;
        let shape = view.shape();
        if shape.len() < 2 || shape.len() > 4 {
            let wanted = "[batch, heads, seq, dim], [heads, seq, dim] or [seq, dim]";
            return Err(FileError::Rank { name: name.to_string(), shape: shape.to_vec(), wanted });
        }
        let mut sizes = [1; 4];
        sizes[4 - shape.len()..].copy_from_slice(shape);
        let data = match view.dtype() {
            Dtype::F32 => Data::F32(elements(view.data(), f32::from_le_bytes)),
            Dtype::F16 => Data::F16(elements(view.data(), f16::from_le_bytes)),
            Dtype::BF16 => Data::Bf16(elements(view.data(), bf16::from_le_bytes)),
            other => return Err(wrong_dtype(name, other, "f32, f16 and bf16")),
        };
        Ok(Tensor { sizes, data })
    }

    /// A stored result, if it is there; its leading axes of 1 may be left out.
    fn expected(&self, name: &str, wanted: &[usize]) -> Result<Option<Expected>, FileError> {
        let Ok(view) = self.file.tensor(name) else { return Ok(None) };
        let significant = |shape: &[usize]| shape.iter().copied().skip_while(|&n| n == 1).collect::<Vec<_>>();
        if significant(view.shape()) != significant(wanted) {
            let (name, shape, wanted) = (name.to_string(), view.shape().to_vec(), wanted.to_vec());
            return Err(FileError::Shape { name, shape, wanted });
        }
        let (values, precision) = match view.dtype() {
            Dtype::F64 => (elements(view.data(), f64::from_le_bytes), 0.0),
            Dtype::F32 => (elements(view.data(), |b| f64::from(f32::from_le_bytes(b))), 2f64.powi(-24)),
            Dtype::F16 => (elements(view.data(), |b| f16::from_le_bytes(b).to_f64()), 2f64.powi(-11)),
            Dtype::BF16 => (elements(view.data(), |b| bf16::from_le_bytes(b).to_f64()), 2f64.powi(-8)),
            other => return Err(wrong_dtype(name, other, "f64, f32, f16 and bf16")),
        };
        Ok(Some(Expected { values, precision }))
    }

    /// Which keys are real, by `attention_mask`.
    fn real_keys(&self, wanted: &[usize; 2]) -> Result<Option<Vec<bool>>, FileError> {
        let name = "attention_mask";
        let Ok(view) = self.file.tensor(name) else { return Ok(None) };
        if view.shape() != wanted {
            let (shape, wanted) = (view.shape().to_vec(), wanted.to_vec());
            return Err(FileError::Shape { name: name.to_string(), shape, wanted });
        }
        Ok(Some(match view.dtype() {
            Dtype::BOOL | Dtype::U8 | Dtype::I8 => elements(view.data(), |[b]: [u8; 1]| b != 0),
            Dtype::I32 | Dtype::U32 => elements(view.data(), |b: [u8; 4]| b != [0; 4]),
            Dtype::I64 | Dtype::U64 => elements(view.data(), |b: [u8; 8]| b != [0; 8]),
            Dtype::F32 => elements(view.data(), |b| f32::from_le_bytes(b) != 0.0),
            other => return Err(wrong_dtype(name, other, "bool, integers and f32")),
        }))
    }
}

fn wrong_dtype(name: &str, found: Dtype, wanted: &'static str) -> FileError {
    FileError::Dtype { name: name.to_string(), found: format!("{found:?}").to_lowercase(), wanted }
}

/// Little-endian elements of `N` bytes. (The bytes of a file need not be aligned for them.)
fn elements<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().map(|&chunk| read(chunk)).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Bytes of a file of tensors `(name, dtype, shape, bytes)`.
    pub(crate) fn file(tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) -> Vec<u8> {
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            (name.to_string(), TensorView::new(*dtype, shape.to_vec(), bytes).unwrap())
        });
        safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()
    }

    pub(crate) fn f32s(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
        values.into_iter().flat_map(f32::to_le_bytes).collect()
    }

    fn numbered(n: usize) -> Vec<u8> {
        f32s((0..n).map(|x| x as f32))
    }

    #[test]
    fn layers_are_found_in_natural_order_with_what_is_stored() {
        let shape: &[usize] = &[1, 2, 3, 4];
        let mut tensors = Vec::new();
        for name in
            ["layer10.q", "layer10.k", "layer10.v", "layer2.q", "layer2.k", "layer2.v", "layer3.q", "layer2.attn_out"]
        {
            tensors.push((name, Dtype::F32, shape, numbered(24)));
        }
        tensors.push(("layer2.lse", Dtype::F32, &[2, 3], numbered(6)));
        tensors.push((
            "attention_mask",
            Dtype::I32,
            &[1, 3],
            [1i32, 1, 0].into_iter().flat_map(i32::to_le_bytes).collect(),
        ));
        let layers = layers(&file(&tensors), &Names::Find).unwrap();
        assert_eq!(layers.iter().map(|l| l.name.as_str()).collect::<Vec<_>>(), ["layer2", "layer10"]);
        let layer = &layers[0];
        assert_eq!((layer.q.sizes, layer.real.as_deref()), ([1, 2, 3, 4], Some(&[true, true, false][..])));
        assert_eq!(layer.out.as_ref().unwrap().values[23], 23.0);
        assert_eq!(layer.lse.as_ref().unwrap().values.len(), 6);
        assert_eq!((&layers[1].out, &layers[1].lse), (&None, &None));
    }

    #[test]
    fn given_names_halves_and_fewer_axes() {
        let half: Vec<u8> = [1.5f32, -2.0].into_iter().flat_map(|x| f16::from_f32(x).to_le_bytes()).collect();
        let bf: Vec<u8> = [1.5f32, -2.0].into_iter().flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect();
        let bytes = file(&[("a", Dtype::F16, &[1, 2], half), ("b", Dtype::BF16, &[1, 1, 2], bf)]);
        let names = Names::Given { q: "a".into(), k: "b".into(), v: "a".into() };
        let layer = layers(&bytes, &names).unwrap().remove(0);
        assert_eq!((layer.name.as_str(), layer.q.sizes, layer.k.sizes), ("a", [1, 1, 1, 2], [1, 1, 1, 2]));
        assert_eq!(layer.q.data, Data::F16(vec![f16::from_f32(1.5), f16::from_f32(-2.0)]));
        assert_eq!(layer.k.data, Data::Bf16(vec![bf16::from_f32(1.5), bf16::from_f32(-2.0)]));
    }

    #[test]
    fn bad_files_are_named_errors() {
        assert!(matches!(layers(b"", &Names::Find), Err(FileError::Format(_))));
        assert!(matches!(layers(&[255; 64], &Names::Find), Err(FileError::Format(_))));
        let whole = file(&[("x", Dtype::F32, &[2, 2], numbered(4))]);
        assert!(matches!(layers(&whole[..whole.len() - 1], &Names::Find), Err(FileError::Format(_))));
        let none = layers(&whole, &Names::Find).unwrap_err();
        assert!(none.to_string().contains("the file holds x"), "{none}");
        let given = |q: &str| layers(&whole, &Names::Given { q: q.into(), k: "x".into(), v: "x".into() });
        assert!(matches!(given("y"), Err(FileError::Missing { .. })));
        let with = |dtype, shape: &'static [usize], bytes| {
            let bytes = file(&[
                ("l.q", dtype, shape, bytes),
                ("l.k", Dtype::F32, &[1, 1], numbered(1)),
                ("l.v", Dtype::F32, &[1, 1], numbered(1)),
            ]);
            layers(&bytes, &Names::Find).unwrap_err()
        };
        assert!(matches!(with(Dtype::I32, &[1, 1], vec![0; 4]), FileError::Dtype { .. }));
        assert!(matches!(with(Dtype::F32, &[1], vec![0; 4]), FileError::Rank { .. }));
        assert!(matches!(with(Dtype::F32, &[1, 1, 1, 1, 1], vec![0; 4]), FileError::Rank { .. }));
    }

    #[test]
    fn stored_results_of_another_shape_are_refused() {
        let triple = |extra: (&'static str, Dtype, &'static [usize], Vec<u8>)| {
            let shape: &[usize] = &[1, 1, 2, 2];
            let qkv = ["l.q", "l.k", "l.v"].map(|name| (name, Dtype::F32, shape, numbered(4)));
            layers(&file(&[&qkv[..], &[extra]].concat()), &Names::Find).unwrap_err()
        };
        assert!(matches!(triple(("l.attn_out", Dtype::F32, &[1, 1, 4, 1], numbered(4))), FileError::Shape { .. }));
        assert!(matches!(triple(("l.lse", Dtype::F32, &[1, 1, 4], numbered(4))), FileError::Shape { .. }));
        assert!(matches!(triple(("l.lse", Dtype::U8, &[1, 1, 2], vec![0; 2])), FileError::Dtype { .. }));
        assert!(matches!(triple(("attention_mask", Dtype::U8, &[1, 3], vec![1; 3])), FileError::Shape { .. }));
    }
}
