//! A plan: all decisions and checks of a call that do not depend on the numbers, made once.

mod explain;
mod states;

pub use explain::Explain;

use attn_core::score::Problem;
use attn_core::score_mod::Mods;
use attn_core::weights::RowAt;
use attn_core::{Attention, AttnError, AttnShape, Dtype, Outputs, Result, View};

use crate::amx::layout::Layout;
use crate::amx::method::{Method, Obstacle, obstacle};
use crate::caches::Caches;
use crate::decode::{self, DecodeCall};
use crate::dtype::KernelElement;
use crate::level::Level;
use crate::prefill::call::{Blocks, Lines};
use crate::prefill::job::Job;
use crate::prefill::layout::Tiles;
use crate::recomputed::with_weights;
use crate::scoring::{Scoring, log2_scale};
use crate::workspace::{Line, check_dims};

/// Shape, options and level, checked against each other; runs any number of times without allocating.
///
/// ```
/// use attn_core::{Attention, AttnShape, Layout, View, ViewMut};
/// use attn_simd::{Level, Line, Plan};
/// let shape = AttnShape::new([1, 2, 100, 64], [1, 2, 100, 64], [1, 2, 100, 64])?;
/// let attn = Attention::new();
/// let plan = Plan::new(&attn, shape, Level::detect())?;
/// let mut workspace = vec![Line::ZERO; plan.workspace_lines()];
/// let (q, mut out) = (vec![0.5f32; 12_800], vec![0.0f32; 12_800]);
/// let x = View::new(&q, Layout::Bhsd, [1, 2, 100, 64])?;
/// plan.run(x, x, x, ViewMut::new(&mut out, Layout::Bhsd, shape.output())?, &mut workspace)?;
/// assert!(out.iter().all(|x| (x - 0.5).abs() < 1e-6));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Plan<'p, 'a, M = ()> {
    problem: Problem<'p, 'a, M>,
    level: Level,
    tiles: Tiles,
    caches: Caches,
    kernel: Kernel,
}

/// Which kernel a plan runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kernel {
    /// Blocks of queries over tiles of keys: lanes are queries.
    Prefill,
    /// Few queries over many keys, all heads of a group at once: lanes are channels.
    Decode,
}

impl<'p, 'a, M: Mods + Sync> Plan<'p, 'a, M> {
    /// Checks shape and options.
    ///
    /// # Errors
    /// Whatever does not fit; see [`AttnError`].
    pub fn new(attn: &'p Attention<'a, M>, shape: AttnShape, level: Level) -> Result<Self> {
        let problem = Problem::of_shape(attn, shape)?;
        let tiles = Tiles::of(level.vectors());
        check_dims([shape.head_dim, shape.value_dim])?;
        // A pinned order of accumulation is that of the decode kernel, whatever the number of queries. On models of
        // AMX, which are for tests, few queries run on the model too.
        let few = decode::is_few(&shape) && !level.is_model();
        let decode = attn.is_reproducible() || few;
        let kernel = if decode { Kernel::Decode } else { Kernel::Prefill };
        Ok(Self { problem, level, tiles, caches: Caches::detect(), kernel })
    }

    /// Lays the blocks out for other caches than those of the core that made the plan. Changes no bit of a result, only
    /// [`workspace_lines`](Self::workspace_lines).
    #[must_use]
    pub fn for_caches(mut self, caches: Caches) -> Self {
        self.caches = caches;
        self
    }

    /// The sizes.
    pub fn shape(&self) -> &AttnShape {
        self.problem.shape()
    }

    /// The options.
    pub fn attn(&self) -> &'p Attention<'a, M> {
        self.problem.attn()
    }

    /// The instruction-set level that runs.
    pub fn level(&self) -> Level {
        self.level
    }

    /// The kernel that runs.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    fn problem(&self) -> &Problem<'p, 'a, M> {
        &self.problem
    }

    /// Lines of scratch that one thread needs, whatever the layout and types of inputs and output;
    /// [`workspace_lines_for`](Self::workspace_lines_for) may be fewer. Does not grow with `q_len` or `kv_len` beyond
    /// some tiles, except by the logarithm of `kv_len` if the plan runs [`Kernel::Decode`].
    pub fn workspace_lines(&self) -> usize {
        const TYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
        if self.kernel == Kernel::Decode {
            return decode::lines(self.level.without_tiles(), self.shape());
        }
        let pairs = TYPES.into_iter().flat_map(|input| TYPES.map(|output| (input, output)));
        pairs.map(|(input, output)| self.workspace_lines_for(input, output)).max().unwrap_or(0)
    }

    /// Lines of scratch that one thread needs for inputs and an output of these types: fewer than
    /// [`workspace_lines`](Self::workspace_lines) if the level multiplies bf16, but these types run on vectors.
    pub fn workspace_lines_for(&self, input: Dtype, output: Dtype) -> usize {
        match self.kernel {
            Kernel::Decode => self.workspace_lines(),
            Kernel::Prefill => self.prefill_lines() + self.amx_layout(input, output).map_or(0, |layout| layout.lines()),
        }
    }

    /// Lines of scratch of the prefill kernel.
    fn prefill_lines(&self) -> usize {
        self.tiles.scratch(self.shape(), self.caches, self.problem.attn().get_bias().is_some(), true).lines()
    }

    /// How the call runs on AMX, or why it does not.
    fn amx_layout(&self, input: Dtype, output: Dtype) -> core::result::Result<Layout, Obstacle> {
        let (shape, attn) = (self.shape(), self.problem.attn());
        let few_are_enough = self.level.is_model();
        match obstacle(shape, few_are_enough, log2_scale(&self.problem), self.problem.scale()) {
            _ if !self.level.multiplies_bf16() => Err(Obstacle::Level),
            Some(obstacle) => Err(obstacle),
            None => {
                let method = Method::of(input, output, attn.get_precision());
                if method.products() > self.level.most_products() {
                    return Err(Obstacle::Products(method.products()));
                }
                if self.level.uses_dot_products() && !method.pays(shape) {
                    return Err(Obstacle::Padding(shape.head_dim, shape.value_dim));
                }
                Ok(Layout::of(shape, method, attn.get_bias().is_some(), output))
            }
        }
    }

    /// Computes attention on this thread. `workspace` holds at least [`workspace_lines`](Self::workspace_lines), or as
    /// many as these types need.
    ///
    /// # Errors
    /// Inputs or outputs that do not have the plan's sizes, before anything is written.
    ///
    /// # Weights
    /// [`Outputs::weights`] are recomputed from the lse after the call, by [`attn_core::weights`]: a plain dot product
    /// of each visible key, and an allocation of the lse if the outputs have none. They are for pictures and tests.
    pub fn run<'o, T: KernelElement, O: KernelElement>(
        &self,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        outputs: impl Into<Outputs<'o, O>>,
        workspace: &mut [Line],
    ) -> Result<()> {
        AttnError::check_len("workspace lines", self.workspace_lines_for(T::DTYPE, O::DTYPE), workspace.len())?;
        let run = |outputs: Outputs<'_, O>| match self.work(q, k, v, outputs)? {
            Work::Blocks(blocks) => blocks.shared_by(1).run(workspace),
            Work::Split(split) => split.run(workspace),
        };
        with_weights(self.shape(), outputs.into(), run, |lse, weights| {
            let AttnShape { q_heads, q_len, kv_len, .. } = *self.shape();
            for (n, part) in weights.chunks_exact_mut((q_len * kv_len).max(1)).enumerate() {
                let at = RowAt { batch: n / q_heads, head: n % q_heads, query: 0 };
                attn_core::weights::head(self.attn(), q, k, at, lse, part)?;
            }
            Ok(())
        })
    }

    /// Cuts the call into work for several threads.
    ///
    /// # Errors
    /// As [`run`](Self::run); [`AttnError::Unsupported`] if the outputs ask for weights, which [`run`](Self::run) and
    /// `attn_parallel::Runner` give.
    pub fn work<'w, 'o: 'w, T: KernelElement, O: KernelElement>(
        &'w self,
        q: View<'w, T>,
        k: View<'w, T>,
        v: View<'w, T>,
        outputs: impl Into<Outputs<'o, O>>,
    ) -> Result<Work<'w>> {
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
        for (what, planned, given) in [
            ("batch against the plan", self.shape().batch, shape.batch),
            ("q_heads against the plan", self.shape().q_heads, shape.q_heads),
            ("kv_heads against the plan", self.shape().kv_heads, shape.kv_heads),
            ("q_len against the plan", self.shape().q_len, shape.q_len),
            ("kv_len against the plan", self.shape().kv_len, shape.kv_len),
            ("head_dim against the plan", self.shape().head_dim, shape.head_dim),
            ("value_dim against the plan", self.shape().value_dim, shape.value_dim),
        ] {
            AttnError::check_size(what, planned, given)?;
        }
        let outputs = outputs.into();
        outputs.check(&shape)?;
        if outputs.weights.is_some() {
            return Err(AttnError::Unsupported {
                what: "weights of Plan::work (attn_core::weights::head with the lse)",
            });
        }
        if self.kernel == Kernel::Decode {
            return Ok(Work::Split(decode::split(
                (Scoring::new(self.problem.attn(), self.problem.scale(), self.level.without_tiles()), shape),
                q,
                k,
                v,
                outputs,
            )?));
        }
        let Outputs { out, lse, .. } = outputs;
        let job = Job::new(&self.problem, self.level.vectors(), [T::input(q), T::input(k), T::input(v)]);
        let layout = self.amx_layout(T::DTYPE, O::DTYPE).ok();
        let lines = Lines { prefill: self.prefill_lines(), all: self.workspace_lines_for(T::DTYPE, O::DTYPE) };
        Ok(Work::Blocks(Blocks::new(self.level, job, (O::target(out), lse), layout, self.caches, lines)))
    }
}

/// One call, to be shared by threads.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "made once a call and never moved again; a box would allocate")]
pub enum Work<'w> {
    /// Many queries: blocks of them, each computed by one thread.
    Blocks(Blocks<'w>),
    /// Few queries: parts of the keys, merged at the end.
    Split(DecodeCall<'w>),
}
