//! One door to every engine, so that a test body written once runs on all of them.
//!
//! An engine takes some element types and not others, and each takes them under its own trait bounds. [`Engine`]
//! therefore has one method per pair of input and output type, all written by [`engine_calls!`](crate::engine_calls);
//! generic code goes through [`Engine::forward`], which picks the method by the element type. The engines of
//! `attn-core` are here; those of other crates implement the trait in their tests.

mod calls;
mod plain;

use attn_core::formats::StoredView;
use attn_core::half::{bf16, f16};
use attn_core::int8::QuantizedView;
use attn_core::kv_cache::CacheView;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Dtype, Element, Outputs, Result, View};

pub use calls::{GradientCall, PartCall, StepCall};
pub use plain::{Reference, Streaming};

/// The arguments of one attention call.
#[derive(Debug)]
pub struct Call<'c, T, O: Element, M> {
    /// Options.
    pub attn: &'c Attention<'c, M>,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: View<'c, T>,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub k: View<'c, T>,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub v: View<'c, T>,
    /// What to write.
    pub outputs: Outputs<'c, O>,
}

/// An attention engine at one level.
///
/// The element types that it does not take answer [`AttnError::Unsupported`].
pub trait Engine: Sync {
    /// `reference`, `streaming`, `simd`, `parallel`.
    fn name(&self) -> &'static str;

    /// The instruction-set level, for engines that have levels.
    fn level(&self) -> Option<&'static str> {
        None
    }

    /// Whether the engine takes this type as input.
    fn supports_dtype(&self, dtype: Dtype) -> bool;

    /// Whether the engine gives the whole weight tensor on request.
    fn gives_weights(&self) -> bool {
        false
    }

    /// Whether the engine computes in `f64` whatever the input, so that only the output's rounding is left.
    fn is_exact(&self) -> bool {
        false
    }

    /// What `eta` of an output in f16 or bf16 may be besides what [`tolerance::ETA`](crate::tolerance::ETA) allows.
    fn half_slack(&self) -> f64 {
        0.0
    }

    /// Doubles in and out.
    #[doc(hidden)]
    fn f64<M: Mods + Sync>(&self, call: Call<'_, f64, f64, M>) -> Result<()> {
        refuse(call)
    }
    /// Singles in and out.
    #[doc(hidden)]
    fn f32<M: Mods + Sync>(&self, call: Call<'_, f32, f32, M>) -> Result<()>;
    /// Half precision in and out.
    #[doc(hidden)]
    fn f16<M: Mods + Sync>(&self, call: Call<'_, f16, f16, M>) -> Result<()>;
    /// bfloat16 in and out.
    #[doc(hidden)]
    fn bf16<M: Mods + Sync>(&self, call: Call<'_, bf16, bf16, M>) -> Result<()>;
    /// Half precision in, singles out.
    #[doc(hidden)]
    fn f16_wide<M: Mods + Sync>(&self, call: Call<'_, f16, f32, M>) -> Result<()>;
    /// bfloat16 in, singles out.
    #[doc(hidden)]
    fn bf16_wide<M: Mods + Sync>(&self, call: Call<'_, bf16, f32, M>) -> Result<()>;

    /// Whether the engine reads caches of any layout in place.
    fn reads_caches(&self) -> bool {
        false
    }
    /// Singles.
    #[doc(hidden)]
    fn f32_step<M: Mods + Sync>(&self, _: StepCall<'_, f32, M>) -> Result<()> {
        Err(NO_STEP)
    }
    /// Half precision.
    #[doc(hidden)]
    fn f16_step<M: Mods + Sync>(&self, _: StepCall<'_, f16, M>) -> Result<()> {
        Err(NO_STEP)
    }
    /// bfloat16.
    #[doc(hidden)]
    fn bf16_step<M: Mods + Sync>(&self, _: StepCall<'_, bf16, M>) -> Result<()> {
        Err(NO_STEP)
    }

    /// Whether the engine reads caches in int8 in place.
    fn reads_int8(&self) -> bool {
        false
    }
    /// Singles over int8.
    #[doc(hidden)]
    fn f32_int8<'c, M: Mods + Sync>(&self, _: StepCall<'c, f32, M, QuantizedView<'c>>) -> Result<()> {
        Err(NO_STEP)
    }
    /// Half precision over int8.
    #[doc(hidden)]
    fn f16_int8<'c, M: Mods + Sync>(&self, _: StepCall<'c, f16, M, QuantizedView<'c>>) -> Result<()> {
        Err(NO_STEP)
    }
    /// bfloat16 over int8.
    #[doc(hidden)]
    fn bf16_int8<'c, M: Mods + Sync>(&self, _: StepCall<'c, bf16, M, QuantizedView<'c>>) -> Result<()> {
        Err(NO_STEP)
    }

    /// Whether the engine reads caches in packed formats in place.
    fn reads_stored(&self) -> bool {
        false
    }
    /// Singles over packed formats.
    #[doc(hidden)]
    fn f32_stored<'c, M: Mods + Sync>(&self, _: StepCall<'c, f32, M, StoredView<'c>>) -> Result<()> {
        Err(NO_STEP)
    }
    /// Half precision over packed formats.
    #[doc(hidden)]
    fn f16_stored<'c, M: Mods + Sync>(&self, _: StepCall<'c, f16, M, StoredView<'c>>) -> Result<()> {
        Err(NO_STEP)
    }
    /// bfloat16 over packed formats.
    #[doc(hidden)]
    fn bf16_stored<'c, M: Mods + Sync>(&self, _: StepCall<'c, bf16, M, StoredView<'c>>) -> Result<()> {
        Err(NO_STEP)
    }

    /// Whether the engine has calls of its own for a part of the keys, and for their end.
    fn gives_parts(&self) -> bool {
        false
    }
    /// Singles.
    #[doc(hidden)]
    fn f32_part<M: Mods + Sync>(&self, _: PartCall<'_, f32, M>) -> Result<()> {
        Err(NO_PART)
    }
    /// Half precision.
    #[doc(hidden)]
    fn f16_part<M: Mods + Sync>(&self, _: PartCall<'_, f16, M>) -> Result<()> {
        Err(NO_PART)
    }
    /// bfloat16.
    #[doc(hidden)]
    fn bf16_part<M: Mods + Sync>(&self, _: PartCall<'_, bf16, M>) -> Result<()> {
        Err(NO_PART)
    }
    /// Ends a call whose parts have been merged.
    ///
    /// # Errors
    /// The engine's own; [`AttnError::Unsupported`] for one that has no such call.
    fn finish_parts<M: Mods + Sync>(
        &self,
        _: &Attention<'_, M>,
        _: AttnShape,
        _: &[f32],
        _: Outputs<'_, f32>,
    ) -> Result<()> {
        Err(NO_PART)
    }

    /// Whether the engine computes gradients itself.
    fn gives_gradients(&self) -> bool {
        false
    }
    /// Singles.
    #[doc(hidden)]
    fn f32_gradients<M: Mods + Sync>(&self, _: GradientCall<'_, f32, M>) -> Result<()> {
        Err(NO_GRADIENTS)
    }
    /// Half precision.
    #[doc(hidden)]
    fn f16_gradients<M: Mods + Sync>(&self, _: GradientCall<'_, f16, M>) -> Result<()> {
        Err(NO_GRADIENTS)
    }
    /// bfloat16.
    #[doc(hidden)]
    fn bf16_gradients<M: Mods + Sync>(&self, _: GradientCall<'_, bf16, M>) -> Result<()> {
        Err(NO_GRADIENTS)
    }

    /// Attends with the last tokens of each sequence to a cache.
    ///
    /// # Errors
    /// The engine's own; [`AttnError::Unsupported`] for one that reads no caches.
    fn step<'c, T: Number, M: Mods + Sync>(
        &self,
        attn: &'c Attention<'c, M>,
        q: View<'c, T>,
        cache: CacheView<'c, T>,
        outputs: impl Into<Outputs<'c, T>>,
    ) -> Result<()>
    where
        Self: Sized,
    {
        T::call_step(self, StepCall { attn, q, cache, outputs: outputs.into() })
    }

    /// Runs the engine; the output has the type of the inputs.
    ///
    /// # Errors
    /// The engine's own; [`AttnError::Unsupported`] for a type that it does not take.
    fn forward<'c, T: Number, M: Mods + Sync>(
        &self,
        attn: &'c Attention<'c, M>,
        q: View<'c, T>,
        k: View<'c, T>,
        v: View<'c, T>,
        outputs: impl Into<Outputs<'c, T>>,
    ) -> Result<()>
    where
        Self: Sized,
    {
        T::call(self, Call { attn, q, k, v, outputs: outputs.into() })
    }

    /// Runs the engine; the output has the type that is computed in.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    fn forward_wide<'c, T: Number, M: Mods + Sync>(
        &self,
        attn: &'c Attention<'c, M>,
        q: View<'c, T>,
        k: View<'c, T>,
        v: View<'c, T>,
        outputs: impl Into<Outputs<'c, T::Compute>>,
    ) -> Result<()>
    where
        Self: Sized,
    {
        T::call_wide(self, Call { attn, q, k, v, outputs: outputs.into() })
    }

    /// `simd at avx2`, for messages.
    fn label(&self) -> String {
        match self.level() {
            Some(level) => format!("{} at {level}", self.name()),
            None => self.name().to_owned(),
        }
    }
}

const NO_PART: AttnError = AttnError::Unsupported { what: "a part of the keys of this element type by this engine" };
const NO_GRADIENTS: AttnError = AttnError::Unsupported { what: "gradients of this element type by this engine" };
const NO_STEP: AttnError = AttnError::Unsupported { what: "a cache of this element type by this engine" };

fn refuse<T, O: Element, M>(_: Call<'_, T, O, M>) -> Result<()> {
    Err(AttnError::Unsupported { what: "this element type by this engine" })
}

/// An element type that finds its own method of an [`Engine`].
pub trait Number: Element {
    #[doc(hidden)]
    fn call<E: Engine, M: Mods + Sync>(engine: &E, call: Call<'_, Self, Self, M>) -> Result<()>;
    #[doc(hidden)]
    fn call_wide<E: Engine, M: Mods + Sync>(engine: &E, call: Call<'_, Self, Self::Compute, M>) -> Result<()>;
    #[doc(hidden)]
    fn call_step<E: Engine, M: Mods + Sync>(engine: &E, call: StepCall<'_, Self, M>) -> Result<()>;
    #[doc(hidden)]
    fn call_int8<'c, E: Engine, M: Mods + Sync>(
        engine: &E,
        call: StepCall<'c, Self, M, QuantizedView<'c>>,
    ) -> Result<()>;
    #[doc(hidden)]
    fn call_stored<'c, E: Engine, M: Mods + Sync>(
        engine: &E,
        call: StepCall<'c, Self, M, StoredView<'c>>,
    ) -> Result<()>;
    #[doc(hidden)]
    fn call_part<E: Engine, M: Mods + Sync>(engine: &E, call: PartCall<'_, Self, M>) -> Result<()>;
    #[doc(hidden)]
    fn call_gradients<E: Engine, M: Mods + Sync>(engine: &E, call: GradientCall<'_, Self, M>) -> Result<()>;
    /// The bits of a value, for comparisons in which −0 is not 0 and a NaN equals itself.
    fn bits(self) -> u64;
}

macro_rules! number {
    ($t:ident, $wide:ident, |$engine:ident, $call:ident| $step:expr, $int8:expr, $stored:expr, $part:expr, $gradients:expr) => {
        impl Number for $t {
            fn call_step<E: Engine, M: Mods + Sync>($engine: &E, $call: StepCall<'_, Self, M>) -> Result<()> {
                $step
            }
            fn call_int8<'c, E: Engine, M: Mods + Sync>(
                $engine: &E,
                $call: StepCall<'c, Self, M, QuantizedView<'c>>,
            ) -> Result<()> {
                $int8
            }
            fn call_stored<'c, E: Engine, M: Mods + Sync>(
                $engine: &E,
                $call: StepCall<'c, Self, M, StoredView<'c>>,
            ) -> Result<()> {
                $stored
            }
            fn call_part<E: Engine, M: Mods + Sync>($engine: &E, $call: PartCall<'_, Self, M>) -> Result<()> {
                $part
            }
            fn call_gradients<E: Engine, M: Mods + Sync>($engine: &E, $call: GradientCall<'_, Self, M>) -> Result<()> {
                $gradients
            }
            fn call<E: Engine, M: Mods + Sync>(engine: &E, call: Call<'_, Self, Self, M>) -> Result<()> {
                engine.$t(call)
            }
            fn call_wide<E: Engine, M: Mods + Sync>(engine: &E, call: Call<'_, Self, Self::Compute, M>) -> Result<()> {
                engine.$wide(call)
            }
            fn bits(self) -> u64 {
                u64::from(self.to_bits())
            }
        }
    };
}

number!(f64, f64, |_engine, _call| Err(NO_STEP), Err(NO_STEP), Err(NO_STEP), Err(NO_PART), Err(NO_GRADIENTS));
number!(
    f32,
    f32,
    |engine, call| engine.f32_step(call),
    engine.f32_int8(call),
    engine.f32_stored(call),
    engine.f32_part(call),
    engine.f32_gradients(call)
);
number!(
    f16,
    f16_wide,
    |engine, call| engine.f16_step(call),
    engine.f16_int8(call),
    engine.f16_stored(call),
    engine.f16_part(call),
    engine.f16_gradients(call)
);
number!(
    bf16,
    bf16_wide,
    |engine, call| engine.bf16_step(call),
    engine.bf16_int8(call),
    engine.bf16_stored(call),
    engine.bf16_part(call),
    engine.bf16_gradients(call)
);

/// Writes the methods of [`Engine`] that take the arguments, from one body that is generic over their types.
///
/// ```
/// use attn_testing::{Engine, engine_calls};
/// struct Mine;
/// impl Engine for Mine {
///     fn name(&self) -> &'static str {
///         "mine"
///     }
///     fn supports_dtype(&self, dtype: attn_core::Dtype) -> bool {
///         dtype != attn_core::Dtype::F64
///     }
///     engine_calls!(f32, f16, bf16; |this, call| {
///         let _ = this;
///         let mut scratch = vec![0.0; call.v.sizes()[3]];
///         attn_core::streaming::forward(call.attn, call.q, call.k, call.v, call.outputs, &mut scratch)
///     });
/// }
/// ```
#[macro_export]
macro_rules! engine_calls {
    (f64, f32, f16, bf16; |$this:ident, $call:ident| $body:expr) => {
        $crate::engine_calls!(@one f64, f64, f64, $this, $call, $body);
        $crate::engine_calls!(f32, f16, bf16; |$this, $call| $body);
    };
    (f32, f16, bf16; |$this:ident, $call:ident| $body:expr) => {
        $crate::engine_calls!(@one f32, f32, f32, $this, $call, $body);
        $crate::engine_calls!(@one f16, attn_core::half::f16, attn_core::half::f16, $this, $call, $body);
        $crate::engine_calls!(@one bf16, attn_core::half::bf16, attn_core::half::bf16, $this, $call, $body);
        $crate::engine_calls!(@one f16_wide, attn_core::half::f16, f32, $this, $call, $body);
        $crate::engine_calls!(@one bf16_wide, attn_core::half::bf16, f32, $this, $call, $body);
    };
    (@one $name:ident, $t:ty, $o:ty, $this:ident, $call:ident, $body:expr) => {
        fn $name<M: attn_core::score_mod::Mods + Sync>(&self, $call: $crate::Call<'_, $t, $o, M>) -> attn_core::Result<()> {
            let $this = self;
            $body
        }
    };
}
