//! The arguments of a call, checked: safe values that `raw` reads from a caller's pointers, and that `call` and `state`
//! compute with. They are plain data.

use core::ffi::c_void;

use attn_core::half::{bf16, f16};
use attn_core::kv_cache::Queries;
use attn_core::score::At;
use attn_core::{AttnShape, ViewMut};
use attn_simd::Input;

use crate::cache::Tokens;
use crate::error::Result;
use crate::types::{AttnMaskMod, AttnOptions, AttnScoreMod};

/// Where a call writes its output.
#[derive(Debug)]
pub(crate) enum Output<'a> {
    F32(ViewMut<'a, f32>),
    F16(ViewMut<'a, f16>),
    Bf16(ViewMut<'a, bf16>),
}

/// The tensors of a call.
pub(crate) struct Call<'a> {
    pub(crate) q: Input<'a>,
    pub(crate) k: Input<'a>,
    pub(crate) v: Input<'a>,
    pub(crate) out: Output<'a>,
    pub(crate) lse: Option<&'a mut [f32]>,
}

impl Call<'_> {
    /// The sizes of q, k and v.
    pub(crate) fn shape(&self) -> Result<AttnShape> {
        Ok(AttnShape::new(sizes(&self.q), sizes(&self.k), sizes(&self.v))?)
    }
}

/// The sizes of an input of any element type.
pub(crate) fn sizes(input: &Input<'_>) -> [usize; 4] {
    match input {
        Input::F32(view) => view.sizes(),
        Input::F16(view) => view.sizes(),
        Input::Bf16(view) => view.sizes(),
    }
}

/// Queries against a cache.
pub(crate) struct Decode<'a> {
    pub(crate) q: Input<'a>,
    pub(crate) queries: Queries<'a>,
    pub(crate) tokens: Tokens<'a>,
    pub(crate) out: Output<'a>,
    pub(crate) lse: Option<&'a mut [f32]>,
}

/// The tensors of a backward call.
pub(crate) struct Backward<'a> {
    pub(crate) q: Input<'a>,
    pub(crate) k: Input<'a>,
    pub(crate) v: Input<'a>,
    pub(crate) out: Input<'a>,
    pub(crate) lse: &'a [f32],
    pub(crate) dout: Input<'a>,
    pub(crate) dq: Output<'a>,
    pub(crate) dk: Output<'a>,
    pub(crate) dv: Output<'a>,
    pub(crate) dsinks: Option<&'a mut [f64]>,
    pub(crate) dbias: Option<ViewMut<'a, f64>>,
    /// That of score_mod.
    pub(crate) derivative: AttnScoreMod,
}

/// A part of the keys of a call.
pub(crate) struct Part<'a> {
    /// The first of its keys.
    pub(crate) first: usize,
    pub(crate) q: Input<'a>,
    pub(crate) k: Input<'a>,
    pub(crate) v: Input<'a>,
    /// To be written: `[batch, q_heads, q_len, 2 + value_dim]`.
    pub(crate) states: &'a mut [f32],
}

/// The merged states of all parts, and the outputs of the call.
pub(crate) struct Finish<'a> {
    pub(crate) states: &'a [f32],
    pub(crate) out: Output<'a>,
    pub(crate) lse: Option<&'a mut [f32]>,
}

/// The caller's functions. (They are `Sync`: `raw` says why.)
#[derive(Clone, Copy, Debug)]
pub(crate) struct Callbacks {
    score_mod: AttnScoreMod,
    mask_mod: AttnMaskMod,
    /// Of score_mod; for gradients.
    derivative: AttnScoreMod,
    user_data: *mut c_void,
}

impl Callbacks {
    /// The caller's functions; `None` without any.
    pub(crate) fn of(options: &AttnOptions) -> Option<Self> {
        let AttnOptions { score_mod, mask_mod, user_data, .. } = *options;
        let derivative = None;
        (score_mod.is_some() || mask_mod.is_some()).then_some(Self { score_mod, mask_mod, derivative, user_data })
    }

    /// With the derivative of score_mod.
    pub(crate) fn derivative(self, derivative: AttnScoreMod) -> Self {
        Self { derivative, ..self }
    }

    /// Whether there is a function of scores.
    pub(crate) fn has_score_mod(&self) -> bool {
        self.score_mod.is_some()
    }

    /// The new score.
    pub(crate) fn score(&self, score: f64, At { batch, head, query, key }: At) -> f64 {
        self.score_mod.map_or(score, |f| f(score, batch, head, query, key, self.user_data))
    }

    /// The derivative at a score before score_mod.
    pub(crate) fn slope(&self, score: f64, At { batch, head, query, key }: At) -> f64 {
        self.derivative.map_or(1.0, |f| f(score, batch, head, query, key, self.user_data))
    }

    /// Whether the key stays visible.
    pub(crate) fn visible(&self, At { batch, head, query, key }: At) -> bool {
        self.mask_mod.is_none_or(|f| f(batch, head, query, key, self.user_data) != 0)
    }
}
