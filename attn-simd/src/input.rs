//! The tensors that kernels read: f32, f16 or bf16, behind one type, so that kernels are compiled once per instruction
//! set.

use attn_core::half::{bf16, f16};
use attn_core::kv_cache::CacheView;
use attn_core::{Dtype, Element, View, ViewMut};

use crate::decode::{RowTarget, Source};
use crate::output::Target;

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

impl Input<'_> {
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
                Target::$variant(crate::output::RawView::new(view))
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
