//! [`Explain`]: which products a backward plan runs, how it cuts the call, and the memory that it takes.

use core::fmt;

use attn_core::score_mod::Mods;
use attn_core::{Dtype, Precision};

use super::layout::Layout;
use super::plan::{Plan, parts, vectors};
use crate::level::Level;

impl<M: Mods + Sync> Plan<'_, '_, M> {
    /// What would run for q, k, v, output and its gradient in the type `inputs`, and gradients in `outputs`.
    ///
    /// ```
    /// use attn_core::{Attention, AttnShape, Dtype};
    /// use attn_simd::{Level, backward};
    /// let shape = AttnShape::new([1, 1, 100, 64], [1, 1, 100, 64], [1, 1, 100, 64])?;
    /// let (attn, level) = (Attention::new(), Level::by_name("amx-model").expect("every machine has it"));
    /// let plan = backward::Plan::new(&attn, shape, level)?;
    /// let text = plan.explain(Dtype::Bf16, Dtype::Bf16).to_string();
    /// assert!(text.contains("amx-model-bf16") && text.contains("2 for each sum"), "{text}");
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    pub fn explain(&self, inputs: Dtype, outputs: Dtype) -> Explain {
        let fast = self.problem.attn().get_precision() == Precision::Fast;
        let layout = self.amx.filter(|_| inputs == Dtype::Bf16).unwrap_or(self.layout);
        let dot_products = self.level.uses_dot_products() && inputs == Dtype::Bf16;
        let products = match layout.scratch.amx {
            Some(_) => Products::Amx(parts(fast, outputs)),
            None if dot_products => Products::Pairs { all: fast },
            None => Products::Floats,
        };
        let level = if products == Products::Floats { vectors(self.level) } else { self.level };
        let by_heads = self.by_heads(&layout);
        Explain { level, layout, inputs, outputs, products, by_heads, lines: self.workspace_lines() }
    }
}

/// How the five products are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Products {
    Floats,
    /// Two of pairs of bf16, or all.
    Pairs {
        all: bool,
    },
    /// On AMX, with so many parts of a weight.
    Amx(usize),
}

/// Which products run and how the work is cut, for people and logs.
#[derive(Clone, Copy, Debug)]
pub struct Explain {
    level: Level,
    layout: Layout,
    inputs: Dtype,
    outputs: Dtype,
    products: Products,
    by_heads: bool,
    lines: usize,
}

impl Explain {
    /// The level that multiplies.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Whether any product is one of bf16: on AMX, or by AVX512_BF16.
    pub fn multiplies_bf16(&self) -> bool {
        self.products != Products::Floats
    }
}

impl fmt::Display for Explain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.inputs == Dtype::F64 {
            return f.write_str("no kernel: f64 is computed by attn_core alone");
        }
        let (level, inputs, queries, kib) =
            (self.level.name(), self.inputs.name(), self.layout.q_tile, self.lines.div_ceil(16));
        write!(f, "{level}-{inputs}-backward-q{queries}: {kib} KiB of scratch on one thread; ")?;
        match self.products {
            Products::Floats if self.inputs == Dtype::F32 => f.write_str("f32")?,
            Products::Floats => f.write_str("computed in f32, widened tile by tile")?,
            Products::Pairs { all: true } => f.write_str("fast: all products of bf16 by AVX512_BF16")?,
            Products::Pairs { all: false } => {
                f.write_str("exact: q·k and dy·v of bf16 by AVX512_BF16, the sums in f32; Precision::Fast: all")?;
            }
            Products::Amx(parts) => {
                let exact = if parts == 1 { "fast" } else { "exact" };
                write!(f, "{exact}: bf16 on AMX, 1 product for q·k and dy·v each and {parts} for each sum")?;
                if parts > 1 {
                    f.write_str("; Precision::Fast takes 1")?;
                }
            }
        }
        if self.outputs != self.inputs {
            write!(f, "; gradients in {}", self.outputs.name())?;
        }
        match (self.by_heads, self.layout.parts) {
            (true, _) => f.write_str("; one thread computes a key/value head and writes it"),
            (false, 1) => f.write_str("; one thread computes a key/value head, and all are written at the end"),
            (false, parts) => write!(f, "; {parts} parts of each key/value head, added up in order"),
        }
    }
}
