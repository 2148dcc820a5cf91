//! Calls that not all engines have: steps over caches, in int8 and packed formats too, parts of the keys, and
//! gradients; and the macros that write them.

use attn_core::backward::Gradients;
use attn_core::kv_cache::CacheView;
use attn_core::{Attention, AttnShape, Element, Outputs, View};

/// The arguments of one step over a cache: the queries are the last tokens of each sequence.
#[derive(Debug)]
pub struct StepCall<'c, T: Element, M, C = CacheView<'c, T>> {
    /// Options.
    pub attn: &'c Attention<'c, M>,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: View<'c, T>,
    /// Keys and values.
    pub cache: C,
    /// What to write.
    pub outputs: Outputs<'c, T>,
}

/// The arguments of one call over a part of the keys.
#[derive(Debug)]
pub struct PartCall<'c, T, M> {
    /// Options of the whole call.
    pub attn: &'c Attention<'c, M>,
    /// Sizes of the whole call.
    pub shape: AttnShape,
    /// The whole call's key that is this part's first.
    pub first: usize,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: View<'c, T>,
    /// `[batch, kv_heads, keys of the part, head_dim]`.
    pub k: View<'c, T>,
    /// `[batch, kv_heads, keys of the part, value_dim]`.
    pub v: View<'c, T>,
    /// Where the rows go, as [`attn_core::state`] has them.
    pub rows: &'c mut [f32],
}

/// The arguments of one call for gradients, after the forward call.
#[derive(Debug)]
pub struct GradientCall<'c, T: Element, M> {
    /// Options of the forward call.
    pub attn: &'c Attention<'c, M>,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: View<'c, T>,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub k: View<'c, T>,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub v: View<'c, T>,
    /// The output, `[batch, q_heads, q_len, value_dim]`.
    pub out: View<'c, T>,
    /// Its log-sum-exp, `[batch, q_heads, q_len]`.
    pub lse: &'c [T::Compute],
    /// The gradient of the loss by the output.
    pub dy: View<'c, T>,
    /// What to write.
    pub gradients: Gradients<'c, T::Compute>,
}

/// Writes the methods of [`Engine`](crate::Engine) for an engine that reads caches in `f32`, halves, int8 and
/// packed formats, from one body that is generic over them.
#[macro_export]
macro_rules! step_calls {
    (|$this:ident, $call:ident| $body:expr) => {
        fn reads_caches(&self) -> bool {
            true
        }
        $crate::step_calls!(@one f32_step, f32, attn_core::kv_cache::CacheView<'c, f32>, $this, $call, $body);
        $crate::step_calls!(
            @one f16_step, attn_core::half::f16, attn_core::kv_cache::CacheView<'c, attn_core::half::f16>, $this, $call, $body
        );
        $crate::step_calls!(
            @one bf16_step, attn_core::half::bf16, attn_core::kv_cache::CacheView<'c, attn_core::half::bf16>, $this, $call,
            $body
        );
        fn reads_int8(&self) -> bool {
            true
        }
        $crate::step_calls!(@one f32_int8, f32, attn_core::int8::QuantizedView<'c>, $this, $call, $body);
        $crate::step_calls!(@one f16_int8, attn_core::half::f16, attn_core::int8::QuantizedView<'c>, $this, $call, $body);
        $crate::step_calls!(@one bf16_int8, attn_core::half::bf16, attn_core::int8::QuantizedView<'c>, $this, $call, $body);
        $crate::stored_calls!(|$this, $call| $body);
    };
    (@one $name:ident, $t:ty, $cache:ty, $this:ident, $call:ident, $body:expr) => {
        fn $name<'c, M: attn_core::score_mod::Mods + Sync>(
            &self,
            $call: $crate::StepCall<'c, $t, M, $cache>,
        ) -> attn_core::Result<()> {
            let $this = self;
            $body
        }
    };
}

/// Writes the methods of [`Engine`](crate::Engine) for an engine that reads caches in packed formats, from one body
/// that is generic over the queries.
#[macro_export]
macro_rules! stored_calls {
    (|$this:ident, $call:ident| $body:expr) => {
        fn reads_stored(&self) -> bool {
            true
        }
        $crate::step_calls!(@one f32_stored, f32, attn_core::formats::StoredView<'c>, $this, $call, $body);
        $crate::step_calls!(
            @one f16_stored, attn_core::half::f16, attn_core::formats::StoredView<'c>, $this, $call, $body
        );
        $crate::step_calls!(
            @one bf16_stored, attn_core::half::bf16, attn_core::formats::StoredView<'c>, $this, $call, $body
        );
    };
}

/// Writes the methods of [`Engine`](crate::Engine) for an engine that attends to parts of the keys in `f32` and halves,
/// from one body that is generic over them.
#[macro_export]
macro_rules! part_calls {
    (|$this:ident, $call:ident| $body:expr) => {
        fn gives_parts(&self) -> bool {
            true
        }
        $crate::part_calls!(@one f32_part, f32, $this, $call, $body);
        $crate::part_calls!(@one f16_part, attn_core::half::f16, $this, $call, $body);
        $crate::part_calls!(@one bf16_part, attn_core::half::bf16, $this, $call, $body);
    };
    (@one $name:ident, $t:ty, $this:ident, $call:ident, $body:expr) => {
        fn $name<M: attn_core::score_mod::Mods + Sync>(&self, $call: $crate::PartCall<'_, $t, M>) -> attn_core::Result<()> {
            let $this = self;
            $body
        }
    };
}

/// Writes the methods of [`Engine`](crate::Engine) for an engine that computes gradients in `f32` and halves, from one
/// body that is generic over them.
#[macro_export]
macro_rules! gradient_calls {
    (|$this:ident, $call:ident| $body:expr) => {
        fn gives_gradients(&self) -> bool {
            true
        }
        $crate::gradient_calls!(@one f32_gradients, f32, $this, $call, $body);
        $crate::gradient_calls!(@one f16_gradients, attn_core::half::f16, $this, $call, $body);
        $crate::gradient_calls!(@one bf16_gradients, attn_core::half::bf16, $this, $call, $body);
    };
    (@one $name:ident, $t:ty, $this:ident, $call:ident, $body:expr) => {
        fn $name<M: attn_core::score_mod::Mods + Sync>(
            &self,
            $call: $crate::GradientCall<'_, $t, M>,
        ) -> attn_core::Result<()> {
            let $this = self;
            $body
        }
    };
}
