//! A plan: everything about a call that does not depend on the numbers, decided and checked once.

mod states;

use core::fmt;

use attn_core::score::Problem;
use attn_core::score_mod::Mods;
use attn_core::weights::RowAt;
use attn_core::{Attention, AttnError, AttnShape, Dtype, Outputs, Precision, Result, View};

use crate::amx;
use crate::amx::layout::Layout;
use crate::amx::method::{Method, Obstacle, obstacle};
use crate::amx::product::SIDE;
use crate::caches::Caches;
use crate::decode::{self, DecodeCall};
use crate::dtype::KernelElement;
use crate::level::{Level, known_obstacle};
use crate::pack;
use crate::prefill::job::Job;
use crate::prefill::layout::{Scratch, Tiles};
use crate::prefill::sweep;
use crate::queue::Queue;
use crate::recomputed::with_weights;
use crate::scoring::{Scoring, log2_scale};
use crate::workspace::{Line, lines_for};

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
    Tiled,
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
        // The scratch sizes are small multiples of these; beyond, they could overflow on 32 bits.
        for (what, size) in [("head_dim", shape.head_dim), ("value_dim", shape.value_dim)] {
            if size > (isize::MAX as usize) >> 12 {
                return Err(AttnError::Overflow { what });
            }
        }
        // A pinned order of accumulation is that of the decode kernel, whatever the number of queries. The model of the
        // tile unit is there for tests, and leaves nothing to it that tiles can do.
        let few = decode::is_few(&shape) && !matches!(level, Level::AmxModel(_));
        let decode = attn.is_reproducible() || few;
        let kernel = if decode { Kernel::Decode } else { Kernel::Tiled };
        Ok(Self { problem, level, tiles, caches: Caches::detect(), kernel })
    }

    /// Lays the blocks out for other caches than those of the core that made the plan. Changes no bit of a result, but
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

    fn scratch(&self, pack_k: bool) -> Scratch {
        if self.shape().rows() == 0 {
            // No block will ask for it, and the dims of a tensor without rows may be anything.
            return Scratch::default();
        }
        self.tiles.scratch(self.shape(), self.caches, self.problem.attn().get_bias().is_some(), pack_k)
    }

    /// Lines of scratch that one thread needs, whatever the layout and type of the inputs. Does not grow with `q_len`
    /// or `kv_len` beyond some tiles, but for the logarithm of `kv_len` where [few queries](Kernel::Decode) are
    /// decoded.
    pub fn workspace_lines(&self) -> usize {
        const TYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];
        if self.kernel == Kernel::Decode {
            return decode::lines(self.level.vectors(), self.shape());
        }
        let pairs = TYPES.into_iter().flat_map(|input| TYPES.map(|output| (input, output)));
        let lines = |(input, output)| self.amx_layout(input, output).map_or(0, |layout| layout.lines());
        self.vector_lines() + pairs.map(lines).max().unwrap_or(0)
    }

    /// Lines of scratch of the tiled kernel on vectors.
    fn vector_lines(&self) -> usize {
        let Scratch { strip, q, scores, out, row, groups, k, v, bias } = self.scratch(true);
        let kept = [strip * q, scores, strip * row, strip * row, row, k, v, bias];
        let group = [out, row, row].map(|len| strip * len);
        let total = [out, out, row, row, row].map(|len| if groups > 1 { strip * len } else { 0 });
        kept.into_iter().chain(group.into_iter().cycle().take(3 * groups)).chain(total).map(lines_for).sum()
    }

    /// How the call runs on matrix tiles, or why it does not.
    fn amx_layout(&self, input: Dtype, output: Dtype) -> core::result::Result<Layout, Obstacle> {
        let (shape, attn) = (self.shape(), self.problem.attn());
        let few_are_enough = matches!(self.level, Level::AmxModel(_));
        match obstacle(shape, few_are_enough, log2_scale(&self.problem), self.problem.scale()) {
            _ if !self.level.has_tiles() => Err(Obstacle::Level),
            Some(obstacle) => Err(obstacle),
            None => {
                let method = Method::of(input, output, attn.get_precision());
                Ok(Layout::of(shape, method, attn.get_bias().is_some(), output))
            }
        }
    }

    /// Computes attention on this thread. `workspace` holds at least [`workspace_lines`](Self::workspace_lines).
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
        AttnError::check_len("workspace lines", self.workspace_lines(), workspace.len())?;
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

    /// Cuts the call into what several threads can work on.
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
                (Scoring::new(self.problem.attn(), self.problem.scale(), self.level.vectors()), shape),
                q,
                k,
                v,
                outputs,
            )?));
        }
        let Outputs { out, lse, .. } = outputs;
        let job = Job::new(&self.problem, self.level.vectors(), [T::input(q), T::input(k), T::input(v)]);
        let layout = self.amx_layout(T::DTYPE, O::DTYPE).ok();
        let rows = layout.map_or(self.tiles.q_tile(), |layout| layout.rows_for(&shape, usize::MAX));
        let queue = Queue::new(O::target(out), lse, shape, rows);
        let scratch = Scratch { strip: 1, ..self.scratch(!pack::is_direct(&job.k)) };
        let lines = self.workspace_lines();
        let vector_lines = self.vector_lines();
        let most = self.tiles.strip(&shape, self.caches);
        let far = Tiles::is_far(&shape, self.caches);
        Ok(Work::Blocks(Blocks {
            level: self.level,
            job,
            queue,
            layout,
            scratch,
            strip: most,
            far,
            vector_lines,
            lines,
        }))
    }

    /// What would run for inputs of this type and an output of the same, how it is cut, and why nothing faster.
    pub fn explain(&self, dtype: Dtype) -> Explain {
        self.explain_into(dtype, dtype)
    }

    /// As [`explain`](Self::explain), for an output of another type: on matrix tiles a wider one takes more products.
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
        let (level, tiles, kernel, lines) = (self.level, self.tiles, self.kernel, self.workspace_lines());
        Explain { level, tiles, kernel, layout, dtype, output, precision, lines, reproducible }
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

/// Strips that there are for each thread at least, so that none waits long for the last one.
const STRIPS_PER_THREAD: usize = 4;

/// The same where a strip shares no work, only what is read from beyond the second cache: that gains less than waiting
/// could lose.
const FAR_STRIPS_PER_THREAD: usize = 24;

/// One call, cut into blocks. Any number of threads may [`run`](Self::run) it at once: each block is computed by one of
/// them, and the result is the same bits whoever does.
pub struct Blocks<'w> {
    level: Level,
    job: Job<'w>,
    queue: Queue<'w>,
    /// Where the call runs on matrix tiles.
    layout: Option<Layout>,
    scratch: Scratch,
    /// Most blocks of a strip.
    strip: usize,
    /// Whether a head's keys and values are read from beyond the caches.
    far: bool,
    vector_lines: usize,
    lines: usize,
}

impl fmt::Debug for Blocks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Blocks").field("level", &self.level).field("count", &self.count()).finish_non_exhaustive()
    }
}

impl Blocks<'_> {
    /// Blocks in all.
    pub fn count(&self) -> usize {
        self.queue.len()
    }

    /// Says how many threads will [`run`](Self::run) it, at most. Where keys or values have to be packed, widened or
    /// made contiguous, or are too many for the caches, each thread then takes as many blocks at once as leave enough
    /// for all, which share that work and what is read. Changes no bit.
    #[must_use]
    pub fn shared_by(mut self, threads: usize) -> Self {
        let packs = !pack::is_direct(&self.job.k) || !pack::is_direct(&self.job.v);
        let strips = |of_a_thread: usize| if threads <= 1 { 1 } else { threads.saturating_mul(of_a_thread) };
        if let Some(layout) = &self.layout {
            self.queue.cut(layout.rows_for(&self.job.shape, strips(STRIPS_PER_THREAD)));
        } else if packs || self.far {
            let fair = self.count() / strips(if packs { STRIPS_PER_THREAD } else { FAR_STRIPS_PER_THREAD });
            self.scratch.strip = self.strip.min(fair).max(1);
            self.queue.cut(self.job.tiles.q_tile() * self.scratch.strip);
        }
        self
    }

    /// Works on blocks until none is left. Each thread brings scratch of its own.
    ///
    /// # Errors
    /// [`AttnError::TooShort`] where the scratch is; nothing has been done then.
    pub fn run(&self, workspace: &mut [Line]) -> Result<()> {
        AttnError::check_len("workspace lines", self.lines, workspace.len())?;
        match &self.layout {
            None => sweep::work(&self.job, &self.queue, workspace, self.scratch),
            Some(layout) => {
                let (vector, rest) = workspace.split_at_mut(self.vector_lines);
                amx::sweep::work(self.level, &self.job, layout, &self.queue, rest, (vector, self.scratch));
            }
        }
        Ok(())
    }
}

/// Which kernel runs and how the work is cut, for people and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explain {
    level: Level,
    tiles: Tiles,
    kernel: Kernel,
    layout: core::result::Result<Layout, Obstacle>,
    dtype: Dtype,
    output: Dtype,
    precision: Precision,
    lines: usize,
    reproducible: bool,
}

impl Explain {
    /// The kernel that runs.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// The level that was asked for.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Whether the call runs on matrix tiles.
    pub fn uses_tiles(&self) -> bool {
        self.kernel == Kernel::Tiled && self.layout.is_ok()
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
            let (level, rows, keys) = (self.level.vectors().name(), decode::MAX_ROWS, decode::CHUNK);
            write!(f, "{level}-{dtype}-decode-r{rows}k{keys}: {scratch} KiB of scratch a thread")?;
            if self.dtype != Dtype::F32 {
                write!(f, "; computed in f32, widened in registers")?;
            }
            return match self.reproducible {
                true => write!(f, "; one order of accumulation for every number of queries, which is slower for many"),
                false => write!(f, "; few queries: all heads of a group share one pass over keys and values"),
            };
        }
        match self.layout {
            Ok(layout) => {
                let (level, keys, queries) = (self.level.name(), layout.chunks * SIDE, layout.rows());
                let Method { scores, values, .. } = layout.method;
                let (scores, values) = (scores.steps().len(), values.steps().len());
                let products = if scores == 1 { "product" } else { "products" };
                let exact = if self.precision == Precision::Fast { "fast" } else { "exact" };
                write!(
                    f,
                    "{level}-{dtype}-q{SIDE}k{SIDE}: {scratch} KiB of scratch a thread; {exact}: bf16 tiles, {scores} {products} for \
                     scores and {values} for values"
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
                match (obstacle, known_obstacle()) {
                    (Obstacle::Level, Some(absent)) => write!(f, "; no tiles: {absent} (amx)")?,
                    _ => write!(f, "; no tiles: {obstacle}")?,
                }
                match self.precision {
                    Precision::Fast => write!(f, "; Precision::Fast changes nothing without tiles"),
                    _ => Ok(()),
                }
            }
        }
    }
}
