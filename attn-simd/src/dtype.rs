//! Inputs, caches and outputs of decoding of any element type, behind one type each, so that kernels are compiled once
//! per instruction set. [`Target`] is the output of the other kernels.

use attn_core::formats::{StoredRows, StoredView};
use attn_core::half::{bf16, f16};
use attn_core::int8::QuantizedView;
use attn_core::kv_cache::{CacheRope, CacheView};
use attn_core::{AttnError, AttnShape, Bias, Dtype, Element, Result, View, ViewMut};

use crate::queue::Target;

/// A view of any element type that the kernels take.
#[derive(Clone, Copy, Debug)]
pub enum Input<'a> {
    /// Single precision.
    F32(View<'a, f32>),
    /// Half precision, widened while it is packed.
    F16(View<'a, f16>),
    /// bfloat16, widened while it is packed.
    Bf16(View<'a, bf16>),
}

impl<'a> Input<'a> {
    /// The tensor of a bias; `None` if it is in `f64`.
    pub(crate) fn of_bias(bias: &Bias<'a>) -> Option<Self> {
        match bias {
            Bias::F32(view) => Some(Self::F32(*view)),
            Bias::F16(view) => Some(Self::F16(*view)),
            Bias::Bf16(view) => Some(Self::Bf16(*view)),
            Bias::F64(_) => None,
        }
    }

    /// Elements of a row.
    pub(crate) fn columns(&self) -> usize {
        match self {
            Input::F32(view) => view.sizes()[3],
            Input::F16(view) => view.sizes()[3],
            Input::Bf16(view) => view.sizes()[3],
        }
    }

    /// Which type it holds.
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::F16(_) => Dtype::F16,
            Self::Bf16(_) => Dtype::Bf16,
        }
    }

    /// One element, widened.
    pub(crate) fn at(&self, [batch, head, seq, channel]: [usize; 4]) -> f32 {
        match self {
            Self::F32(view) => view.at(batch, head, seq, channel),
            Self::F16(view) => view.at(batch, head, seq, channel).to_f32(),
            Self::Bf16(view) => view.at(batch, head, seq, channel).to_f32(),
        }
    }
}

/// An element type that the kernels read and write: `f32`, `f16`, `bf16`.
///
/// `f64` is computed by [`attn_core::streaming`] and [`attn_core::reference`]:
///
/// ```compile_fail,E0277
/// use attn_core::{Attention, View, ViewMut};
/// let (x, mut out) = ([0.0f64; 4], [0.0f64; 4]);
/// let (x, to) = (View::matrix(&x, 2, 2)?, ViewMut::matrix(&mut out, 2, 2)?);
/// attn_simd::forward(&Attention::new(), x, x, x, to, &mut attn_simd::Workspace::new())?;
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "the kernels do not compute with `{Self}`",
    label = "not f32, f16 or bf16",
    note = "f64: `attn_core::streaming::forward` and `attn_core::reference::forward` take it",
    note = "q, k and v have one type; queries over a cache of another type: `attend_cache`"
)]
pub trait KernelElement: Element<Compute = f32> {
    /// Wraps an input.
    fn input(view: View<'_, Self>) -> Input<'_>;
    /// Wraps an output.
    #[doc(hidden)]
    fn target(view: ViewMut<'_, Self>) -> Target<'_>;
    /// Wraps an output of the decode kernel.
    #[doc(hidden)]
    fn row_target(view: ViewMut<'_, Self>) -> RowTarget<'_>;
    /// Wraps a cache.
    #[doc(hidden)]
    fn source(cache: CacheView<'_, Self>) -> Source<'_>;
}

macro_rules! kernel_element {
    ($($t:ty => $variant:ident),*) => {$(
        impl KernelElement for $t {
            fn input(view: View<'_, Self>) -> Input<'_> {
                Input::$variant(view)
            }
            fn target(view: ViewMut<'_, Self>) -> Target<'_> {
                Target::$variant(crate::queue::RawView::new(view))
            }
            fn row_target(view: ViewMut<'_, Self>) -> RowTarget<'_> {
                RowTarget::$variant(view)
            }
            fn source(cache: CacheView<'_, Self>) -> Source<'_> {
                Source::$variant(cache)
            }
        }
    )*};
}

kernel_element!(f32 => F32, f16 => F16, bf16 => Bf16);

/// A cache of any element type that the kernels read.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "one or two for a call, copied as views are")]
pub enum Source<'c> {
    /// Single precision.
    F32(CacheView<'c, f32>),
    /// Half precision.
    F16(CacheView<'c, f16>),
    /// bfloat16.
    Bf16(CacheView<'c, bf16>),
    /// int8 with scales.
    I8(QuantizedView<'c>),
    /// Bytes in packed formats: q8_0, q4_0, fp8 and others.
    Stored(StoredView<'c>),
}

impl<'c, T: KernelElement> From<CacheView<'c, T>> for Source<'c> {
    fn from(cache: CacheView<'c, T>) -> Self {
        T::source(cache)
    }
}

impl<'c> From<QuantizedView<'c>> for Source<'c> {
    fn from(cache: QuantizedView<'c>) -> Self {
        Self::I8(cache)
    }
}

impl<'c> From<StoredView<'c>> for Source<'c> {
    fn from(cache: StoredView<'c>) -> Self {
        Self::Stored(cache)
    }
}

/// Evaluates an expression with the cache of numbers, or of bytes, that a source is.
macro_rules! numbers {
    ($source:expr, $cache:ident => $body:expr) => {
        match $source {
            Source::F32($cache) => $body,
            Source::F16($cache) => $body,
            Source::Bf16($cache) => $body,
            Source::I8(quantized) => {
                let $cache = quantized.numbers();
                $body
            }
            Source::Stored(stored) => {
                let $cache = stored.bytes();
                $body
            }
        }
    };
}

impl<'c> Source<'c> {
    /// Its type; `None` for int8 and packed formats, which are no types of a tensor.
    pub fn dtype(&self) -> Option<Dtype> {
        match self {
            Self::F32(_) => Some(Dtype::F32),
            Self::F16(_) => Some(Dtype::F16),
            Self::Bf16(_) => Some(Dtype::Bf16),
            Self::I8(_) | Self::Stored(_) => None,
        }
    }

    /// Bytes of a token of one head: its key and its value, with scales of their own.
    pub fn token_bytes(&self) -> usize {
        let numbers = numbers!(self, cache => cache.k().sizes()[3].saturating_add(cache.v().sizes()[3]));
        let per_token = |rows: StoredRows<'_>| rows.scales().is_some_and(|scales| scales.strides()[2] != 0);
        let (element, scales) = match self {
            Self::I8(_) => (1, 2),
            Self::Stored(cache) => (1, usize::from(per_token(cache.keys())) + usize::from(per_token(cache.values()))),
            _ => (self.dtype().map_or(1, Dtype::bytes), 0),
        };
        let scales = scales * size_of::<f32>();
        numbers.saturating_mul(element).saturating_add(scales)
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        numbers!(self, cache => cache.batch())
    }

    /// The number of tokens of one sequence.
    pub(crate) fn len(&self, sequence: usize) -> usize {
        numbers!(self, cache => cache.len(sequence))
    }

    /// The index of the first token that is there.
    pub(crate) fn first(&self) -> usize {
        numbers!(self, cache => cache.first())
    }

    /// The same tokens, numbered as the continuation of others.
    pub(crate) fn after(self, before: usize) -> Result<Self> {
        Ok(match self {
            Self::F32(cache) => Self::F32(cache.after(before)?),
            Self::F16(cache) => Self::F16(cache.after(before)?),
            Self::Bf16(cache) => Self::Bf16(cache.after(before)?),
            Self::I8(cache) => Self::I8(cache.after(before)?),
            Self::Stored(cache) => Self::Stored(cache.after(before)?),
        })
    }

    /// Sizes of k or v without their third: rows, heads, dims.
    pub(crate) fn sizes(&self) -> [usize; 3] {
        let [heads, head_dim, value_dim] = numbers!(self, cache => {
            let ([_, heads, _, head_dim], [.., value_dim]) = (cache.k().sizes(), cache.v().sizes());
            [heads, head_dim, value_dim]
        });
        let [head_dim, value_dim] = match self {
            Self::Stored(cache) => cache.dims(),
            _ => [head_dim, value_dim],
        };
        [heads, head_dim, value_dim]
    }

    /// [`CacheView::shape`].
    pub(crate) fn shape(&self, q: [usize; 4]) -> Result<AttnShape> {
        match self {
            Self::Stored(cache) => cache.shape(q),
            _ => numbers!(self, cache => cache.shape(q)),
        }
    }

    /// Whether a ring has dropped tokens of a sequence.
    pub(crate) fn has_dropped(&self, sequence: usize) -> bool {
        numbers!(self, cache => cache.has_dropped(sequence))
    }

    /// Whether the heads of a token are nearer to each other in memory than the tokens of a head. Not where the kernel
    /// applies rope to keys, head by head.
    pub(crate) fn has_heads_beside(&self) -> bool {
        let beside = |[_, head, slot, _]: [isize; 4]| head.unsigned_abs() < slot.unsigned_abs();
        self.rope().is_none() && numbers!(self, cache => beside(cache.k().strides()) && beside(cache.v().strides()))
    }

    /// Rope tables.
    fn rope(&self) -> Option<CacheRope<'c>> {
        match self {
            Self::Stored(cache) => cache.rope().map(CacheRope::Single),
            _ => numbers!(self, cache => cache.rope()),
        }
    }

    /// Checks the tables of a shared prefix against those of the cache behind it: the same queries see both, and have
    /// positions behind both.
    pub(crate) fn check_rope_before(&self, behind: &Self) -> Result<()> {
        let rows = |source: &Self| match source.rope()? {
            CacheRope::Single(tables) => Some(tables.sizes()[2]),
            CacheRope::Double(tables) => Some(tables.sizes()[2]),
        };
        match (rows(self), rows(behind)) {
            (None, None) => Ok(()),
            (Some(rows), Some(_)) => {
                let longest = (0..behind.batch()).map(|sequence| behind.len(sequence)).max().unwrap_or(0);
                AttnError::check_len("rope tables of a shared prefix (tokens of the longest sequence)", longest, rows)
            }
            _ => Err(AttnError::Unsupported {
                what: "rope tables for only one of a shared prefix and the cache behind it",
            }),
        }
    }

    /// Refuses tables that the kernels do not read.
    pub(crate) fn check(&self) -> Result<()> {
        match self.rope() {
            Some(CacheRope::Double(_)) => {
                Err(AttnError::Unsupported { what: "rope tables of f64 for a cache of another type" })
            }
            _ => Ok(()),
        }
    }
}

/// An output of any element type that the kernels take.
#[derive(Debug)]
pub enum RowTarget<'o> {
    /// Single precision.
    F32(ViewMut<'o, f32>),
    /// Half precision, rounded once.
    F16(ViewMut<'o, f16>),
    /// bfloat16, rounded once.
    Bf16(ViewMut<'o, bf16>),
}

impl RowTarget<'_> {
    /// `[batch, heads, seq, dim]`.
    pub(crate) fn sizes(&self) -> [usize; 4] {
        match self {
            Self::F32(view) => view.sizes(),
            Self::F16(view) => view.sizes(),
            Self::Bf16(view) => view.sizes(),
        }
    }
}
