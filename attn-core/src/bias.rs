//! A tensor that is added to scores.

use half::{bf16, f16};

use crate::element::{Element, Real};
use crate::error::Result;
use crate::shape::{At, AttnShape};
use crate::view::View;

/// An additive bias of any dtype that broadcasts to `[batch, q_heads, q_len, kv_len]`.
///
/// An entry of −∞ hides the key, exactly as a mask does: not even a NaN there reaches the output.
#[derive(Clone, Copy, Debug)]
pub enum Bias<'a> {
    /// Double precision.
    F64(View<'a, f64>),
    /// Single precision.
    F32(View<'a, f32>),
    /// Half precision.
    F16(View<'a, f16>),
    /// bfloat16.
    Bf16(View<'a, bf16>),
}

macro_rules! from_view {
    ($($t:ty => $variant:ident),*) => {$(
        impl<'a> From<View<'a, $t>> for Bias<'a> {
            fn from(view: View<'a, $t>) -> Self {
                Self::$variant(view)
            }
        }
    )*};
}

from_view!(f64 => F64, f32 => F32, f16 => F16, bf16 => Bf16);

impl Bias<'_> {
    /// Sizes of the tensor.
    pub fn sizes(&self) -> [usize; 4] {
        match self {
            Self::F64(view) => view.sizes(),
            Self::F32(view) => view.sizes(),
            Self::F16(view) => view.sizes(),
            Self::Bf16(view) => view.sizes(),
        }
    }

    pub(crate) fn check(&self, shape: &AttnShape) -> Result<()> {
        let to = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
        match self {
            Self::F64(view) => view.check_broadcast("bias", to),
            Self::F32(view) => view.check_broadcast("bias", to),
            Self::F16(view) => view.check_broadcast("bias", to),
            Self::Bf16(view) => view.check_broadcast("bias", to),
        }
    }

    /// The bias of one score.
    #[inline]
    pub fn at(&self, at: At) -> f64 {
        self.at_in(at)
    }

    /// As [`at`](Self::at) in the type that an engine computes in, a finite number beyond its range saturated: without
    /// double precision where neither needs it, which small processors emulate.
    #[inline]
    pub(crate) fn at_in<R: Real>(&self, At { batch, head, query, key }: At) -> R {
        // Exact in every real type.
        let single = |x: f32| R::of(f64::from(x));
        match self {
            Self::F64(view) => R::saturating(view.at_broadcast(batch, head, query, key)),
            Self::F32(view) => single(view.at_broadcast(batch, head, query, key)),
            Self::F16(view) => single(view.at_broadcast(batch, head, query, key).widen()),
            Self::Bf16(view) => single(view.at_broadcast(batch, head, query, key).widen()),
        }
    }
}
