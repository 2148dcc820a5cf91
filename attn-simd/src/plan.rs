//! A plan: everything about a call that does not depend on the numbers, decided and checked once.

use core::fmt;

use attn_core::{Attention, AttnError, AttnShape, Dtype, Modifier, Outputs, Problem, Result, View};

use crate::input::KernelElement;
use crate::job::Job;
use crate::kernel::{pack, sweep};
use crate::level::Level;
use crate::output::Queue;
use crate::tiles::{Scratch, Tiles};
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
}

impl<'p, 'a, M: Modifier + Sync> Plan<'p, 'a, M> {
    /// Checks shape and options.
    ///
    /// # Errors
    /// Whatever does not fit; see [`AttnError`].
    pub fn new(attn: &'p Attention<'a, M>, shape: AttnShape, level: Level) -> Result<Self> {
        let problem = Problem::of_shape(attn, shape)?;
        let tiles = Tiles::of(level);
        // The scratch sizes are small multiples of these; beyond, they could overflow on 32 bits.
        for (what, size) in [("head_dim", shape.head_dim), ("value_dim", shape.value_dim)] {
            if size > (isize::MAX as usize) >> 12 {
                return Err(AttnError::Overflow { what });
            }
        }
        Ok(Self { problem, level, tiles })
    }

    /// The sizes.
    pub fn shape(&self) -> &AttnShape {
        self.problem.shape()
    }

    /// The instruction-set level that runs.
    pub fn level(&self) -> Level {
        self.level
    }

    fn scratch(&self, pack_k: bool) -> Scratch {
        if self.shape().rows() == 0 {
            return Scratch::default(); // no block will ask for it, and the dims of a tensor without rows may be anything
        }
        self.tiles.scratch(self.problem.shape(), self.problem.attn().get_bias().is_some(), pack_k)
    }

    /// Lines of scratch that one thread needs, whatever the layout and type of the inputs. Does not grow with `q_len` or
    /// `kv_len`.
    pub fn workspace_lines(&self) -> usize {
        let Scratch { q, scores, out, row, k, v, bias } = self.scratch(true);
        [q, scores, out, row, row, row, k, v, bias].into_iter().map(lines_for).sum()
    }

    /// Computes attention on this thread. `workspace` holds at least [`workspace_lines`](Self::workspace_lines).
    ///
    /// # Errors
    /// Inputs or outputs that do not have the plan's sizes, before anything is written; [`AttnError::Unsupported`] where the
    /// full weights are asked for (`attn_core::weights` recomputes any row of them from the lse).
    pub fn run<'o, T: KernelElement, O: KernelElement>(
        &self,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        outputs: impl Into<Outputs<'o, O>>,
        workspace: &mut [Line],
    ) -> Result<()> {
        AttnError::check_len("workspace lines", self.workspace_lines(), workspace.len())?;
        self.work(q, k, v, outputs)?.run(workspace)
    }

    /// Cuts the call into blocks that several threads can work on.
    ///
    /// # Errors
    /// As [`run`](Self::run).
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
            return Err(AttnError::Unsupported { what: "the full weights from the kernels" });
        }
        let Outputs { out, lse, .. } = outputs;
        let job = Job::new(&self.problem, self.level, [T::input(q), T::input(k), T::input(v)]);
        let queue = Queue::new(O::target(out), lse, shape, self.tiles.q_tile());
        let scratch = self.scratch(!pack::is_direct(&job.k));
        Ok(Work { level: self.level, job, queue, scratch, lines: self.workspace_lines() })
    }

    /// What would run for inputs of this type, and how it is cut.
    pub fn explain(&self, dtype: Dtype) -> Explain {
        Explain { level: self.level, tiles: self.tiles, dtype, lines: self.workspace_lines() }
    }
}

/// One call, cut into blocks. Any number of threads may [`run`](Self::run) it at once: each block is computed by one of them, and
/// the result is the same bits whoever does.
pub struct Work<'w> {
    level: Level,
    job: Job<'w>,
    queue: Queue<'w>,
    scratch: Scratch,
    lines: usize,
}

impl Work<'_> {
    /// Blocks in all.
    pub fn blocks(&self) -> usize {
        self.queue.len()
    }

    /// Works on blocks until none is left. Each thread brings scratch of its own.
    ///
    /// # Errors
    /// [`AttnError::TooShort`] where the scratch is; nothing has been done then.
    pub fn run(&self, workspace: &mut [Line]) -> Result<()> {
        AttnError::check_len("workspace lines", self.lines, workspace.len())?;
        sweep::work(self.level, &self.job, &self.queue, workspace, self.scratch);
        Ok(())
    }
}

/// Which kernel runs and how the work is cut, for people and logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Explain {
    level: Level,
    tiles: Tiles,
    dtype: Dtype,
    lines: usize,
}

impl Explain {
    /// The kernel's name without its number type: level, queries and keys of a tile.
    pub fn level(&self) -> Level {
        self.level
    }
}

impl fmt::Display for Explain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (level, dtype, q_tile) = (self.level.name(), self.dtype.name(), self.tiles.q_tile());
        write!(
            f,
            "{level}-{dtype}-q{q_tile}k{}: {} KiB of scratch a thread",
            self.tiles.kv_tile,
            self.lines * 64 / 1024
        )?;
        if self.dtype != Dtype::F32 {
            write!(f, "; computed in f32, widened tile by tile")?;
        }
        Ok(())
    }
}
