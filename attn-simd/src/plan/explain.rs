//! [`Explain`]: which kernel a plan runs, how it cuts the call, and why nothing faster runs.

use core::fmt;

use attn_core::score_mod::Mods;
use attn_core::{Dtype, Precision};

use super::{Kernel, Plan};
use crate::amx::layout::Layout;
use crate::amx::method::{Method, Obstacle};
use crate::amx::product::SIDE;
use crate::decode;
use crate::level::{Level, known_obstacle};
use crate::prefetch::Prefetch;
use crate::prefill::layout::Tiles;
use crate::scoring::Scoring;

impl<M: Mods + Sync> Plan<'_, '_, M> {
    /// What would run for inputs of this type and an output of the same, how it is cut, and why nothing faster.
    pub fn explain(&self, dtype: Dtype) -> Explain {
        self.explain_into(dtype, dtype)
    }

    /// As [`explain`](Self::explain), for an output of another type: on AMX a wider one takes more products.
    ///
    /// ```
    /// use attn_core::{Attention, AttnShape, Dtype};
    /// use attn_simd::{Level, Plan};
    /// let shape = AttnShape::new([1, 1, 100, 64], [1, 1, 100, 64], [1, 1, 100, 64])?;
    /// let (attn, level) = (Attention::new(), Level::by_name("amx-model").expect("every machine has it"));
    /// let plan = Plan::new(&attn, shape, level)?;
    /// assert!(plan.explain(Dtype::Bf16).to_string().contains("1 product for scores and 2 for values"));
    /// let wide = plan.explain_into(Dtype::Bf16, Dtype::F32).to_string();
    /// assert!(wide.contains("bf16-to-f32") && wide.contains("3 for values"));
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    pub fn explain_into(&self, dtype: Dtype, output: Dtype) -> Explain {
        let layout = self.amx_layout(dtype, output);
        let attn = self.problem.attn();
        let (precision, reproducible) = (attn.get_precision(), attn.is_reproducible());
        let (level, tiles, kernel, lines) =
            (self.level, self.tiles, self.kernel, self.workspace_lines_for(dtype, output));
        let scoring = Scoring::new(attn, self.problem.scale(), level.without_tiles());
        let pairs = dtype == Dtype::Bf16 && scoring.multiplies_pairs(self.shape().head_dim);
        Explain { level, tiles, kernel, layout, dtype, output, precision, lines, reproducible, pairs }
    }
}

/// Which kernel runs and how the work is cut, for people and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explain {
    level: Level,
    tiles: Tiles,
    kernel: Kernel,
    layout: Result<Layout, Obstacle>,
    dtype: Dtype,
    output: Dtype,
    precision: Precision,
    lines: usize,
    reproducible: bool,
    /// Whether decoding makes scores of pairs of bf16.
    pairs: bool,
}

impl Explain {
    /// The kernel that runs.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// The requested level.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Whether scores and outputs are made of products of bf16: on AMX, or by AVX512_BF16.
    pub fn multiplies_bf16(&self) -> bool {
        self.kernel == Kernel::Prefill && self.layout.is_ok()
    }
}

/// Types of inputs and output, as a kernel's name has them.
struct Types(Dtype, Dtype);

impl fmt::Display for Types {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(input, output) = self;
        f.write_str(input.name())?;
        if input == output { Ok(()) } else { write!(f, "-to-{}", output.name()) }
    }
}

impl fmt::Display for Explain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scratch = self.lines * 64 / 1024;
        let dtype = Types(self.dtype, self.output);
        if self.dtype == Dtype::F64 {
            return f.write_str("no kernel: f64 is computed by attn_core alone");
        }
        if self.kernel == Kernel::Decode {
            let level = if self.pairs { self.level.without_tiles() } else { self.level.vectors() };
            let (level, rows, keys) = (level.name(), decode::MAX_ROWS, decode::CHUNK);
            write!(f, "{level}-{dtype}-decode-r{rows}k{keys}: {scratch} KiB of scratch a thread")?;
            if self.pairs {
                f.write_str("; scores from products of bf16 by AVX512_BF16, values in f32")?;
            } else if self.dtype != Dtype::F32 {
                f.write_str("; computed in f32, widened in registers")?;
            }
            match self.reproducible {
                true => write!(f, "; one order of accumulation for every number of queries, which is slower for many"),
                false => write!(f, "; few queries: all heads of a group share one pass over keys and values"),
            }?;
            return write!(f, "; prefetch: {}", Prefetch::detect());
        }
        match self.layout {
            Ok(layout) => {
                let (level, keys, queries) = (self.level.name(), layout.tiles * SIDE, layout.rows());
                let Method { scores, values, .. } = layout.method;
                let (scores, values) = (scores.steps().len(), values.steps().len());
                let products = if scores == 1 { "product" } else { "products" };
                let unit = if self.level.uses_dot_products() { "by AVX512_BF16" } else { "on AMX" };
                let exact = if self.precision == Precision::Fast { "fast" } else { "exact" };
                write!(
                    f,
                    "{level}-{dtype}-q{SIDE}k{SIDE}: {scratch} KiB of scratch a thread; {exact}: bf16 {unit}, {scores} \
                     {products} for scores and {values} for values"
                )?;
                let fast = Method::of(self.dtype, self.output, Precision::Fast);
                if fast.scores != layout.method.scores || fast.values != layout.method.values {
                    let (scores, values) = (fast.scores.steps().len(), fast.values.steps().len());
                    write!(f, "; Precision::Fast takes {scores} + {values}")?;
                }
                write!(f, "; up to {queries} queries meet {keys} packed keys at a time")
            }
            Err(obstacle) => {
                let (level, q_tile, kv_tile) = (self.level.vectors().name(), self.tiles.q_tile(), self.tiles.kv_tile);
                write!(f, "{level}-{dtype}-q{q_tile}k{kv_tile}: {scratch} KiB of scratch a thread")?;
                if self.dtype != Dtype::F32 {
                    write!(f, "; computed in f32, widened tile by tile")?;
                }
                let unit = if self.level.uses_dot_products() { "by AVX512_BF16" } else { "on AMX" };
                match (obstacle, known_obstacle()) {
                    (Obstacle::Level, Some(absent)) => write!(f, "; not {unit}: {absent} (amx)")?,
                    _ => write!(f, "; not {unit}: {obstacle}")?,
                }
                match self.precision {
                    Precision::Fast => write!(f, "; Precision::Fast changes nothing without products of bf16"),
                    _ => Ok(()),
                }
            }
        }
    }
}
