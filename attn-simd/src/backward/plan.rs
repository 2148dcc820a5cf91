//! A plan of a backward call: shape, options and level, checked once.

use core::sync::atomic::AtomicBool;

use attn_core::backward::Gradients;
use attn_core::engine::{DY, OUT, check_axes, check_same};
use attn_core::score::Problem;
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnError, AttnShape, Dtype, Element, Precision, Result, View, ViewMut};

use super::call::{BiasCall, Call, Sweep};
use super::heads::{self, Heads};
use super::layout::Layout;
use super::output::{Output, Writing};
use super::sinks::SinksCall;
use crate::amx::method::obstacle;
use crate::dtype::KernelElement;
use crate::level::Level;
use crate::prefill::job::Job;
use crate::prefill::layout::Tiles;
use crate::queue::heads::HeadQueue;
use crate::scoring::log2_scale;
use crate::workspace::{Line, check_dims, floats, lines_for};

/// What the gradients are computed from.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'v, T, G> {
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: View<'v, T>,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub k: View<'v, T>,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub v: View<'v, T>,
    /// The output of the forward call, `[batch, q_heads, q_len, value_dim]`.
    pub out: View<'v, G>,
    /// Its log-sum-exp, `batch · q_heads · q_len`.
    pub lse: &'v [f32],
    /// The gradient by the output, of its shape.
    pub dy: View<'v, G>,
}

/// Shape, options and level of a backward call, checked against each other; runs any number of times without
/// allocating.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'p, 'a, M = ()> {
    pub(super) problem: Problem<'p, 'a, M>,
    pub(super) level: Level,
    pub(super) layout: Layout,
    /// Of bf16 on AMX.
    pub(super) amx: Option<Layout>,
    stop: Option<&'p AtomicBool>,
}

impl<'p, 'a, M: Mods + Sync> Plan<'p, 'a, M> {
    /// Checks shape and options.
    ///
    /// # Errors
    /// Whatever does not fit.
    pub fn new(attn: &'p Attention<'a, M>, shape: AttnShape, level: Level) -> Result<Self> {
        let problem = Problem::of_shape(attn, shape)?;
        check_dims([shape.head_dim, shape.value_dim])?;
        let options = (attn.get_bias().is_some(), Mods::has_score_mod(attn.get_mods()));
        let fast = attn.get_precision() == Precision::Fast;
        let words = level.uses_dot_products().then_some(fast);
        let layout = Layout::of(shape, &Tiles::of(vectors(level)), options, words)?;
        let amx = on_amx(&problem, level)
            .then(|| Layout::of_amx(shape, vectors(level).lanes(), options, fast))
            .transpose()?;
        let level = if amx.is_some() || level.uses_dot_products() { level } else { level.vectors() };
        Ok(Self { problem, level, layout, amx, stop: None })
    }

    /// Ends a call soon after the flag is set, which must then stay set, with [`AttnError::Stopped`]. Each row of a
    /// gradient has its result then, or is as it was.
    #[must_use]
    pub fn stop_when(self, flag: &'p AtomicBool) -> Self {
        Self { stop: Some(flag), ..self }
    }

    /// The sizes.
    pub fn shape(&self) -> &AttnShape {
        self.problem.shape()
    }

    /// The level that runs. `amx` and `avx512bf16` multiply bf16 if q, k, v and `dy` are bf16, and otherwise compute
    /// gradients on vectors; so does `amx` for 16 queries a head and fewer, for dims above 512, and for a scale above
    /// 2¹⁶. The gradient of a bias is computed on vectors. [`explain`](Self::explain) says more.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Lines of scratch of a call on one thread: its own, the sums of one part or head, and those of all heads.
    pub fn workspace_lines(&self) -> usize {
        let of = |layout: &Layout| {
            let one = if self.by_heads(layout) || layout.parts > 1 { layout.sum_lines() } else { 0 };
            layout.scratch.lines() + one
        };
        self.most(of) + self.sums_lines()
    }

    /// The most of what the layouts need.
    fn most(&self, of: impl Fn(&Layout) -> usize) -> usize {
        of(&self.layout).max(self.amx.as_ref().map_or(0, of))
    }

    /// Lines of the sums of all heads, which grow with `q_len` and `kv_len`: the gradients in `f32`. None if a thread
    /// writes the gradients of each head as soon as it has them, as [`Sweep::Heads`] does.
    pub fn sums_lines(&self) -> usize {
        self.most(|layout| {
            if self.by_heads(layout) {
                return 0;
            }
            lines_for(layout.dq_len()) + layout.heads() * layout.sum_lines()
        })
    }

    /// Whether heads are computed and written one by one: if each has one part. A `score_mod` may turn out to have no
    /// derivative, and then nothing may have been written.
    pub(super) fn by_heads(&self, layout: &Layout) -> bool {
        layout.parts == 1 && !Mods::has_score_mod(self.problem.attn().get_mods())
    }

    /// Checks tensors against the plan.
    ///
    /// # Errors
    /// Sizes that are not those of the plan.
    pub fn check<T: KernelElement, G: KernelElement, O: Element>(
        &self,
        inputs: &Inputs<'_, T, G>,
        gradients: &Gradients<'_, O>,
    ) -> Result<()> {
        let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = *self.shape();
        let (q, k) = ([batch, q_heads, q_len, head_dim], [batch, kv_heads, kv_len, head_dim]);
        let (v, out) = ([batch, kv_heads, kv_len, value_dim], self.shape().output());
        check_same("q against the plan", q, inputs.q.sizes())?;
        check_same("k against the plan", k, inputs.k.sizes())?;
        check_same("v against the plan", v, inputs.v.sizes())?;
        check_axes(OUT, out, inputs.out.sizes())?;
        check_axes(DY, out, inputs.dy.sizes())?;
        AttnError::check_size("lse against the rows", self.shape().rows(), inputs.lse.len())?;
        gradients.check(self.shape())
    }

    /// Computes the gradients on this thread. `workspace` holds at least [`workspace_lines`](Self::workspace_lines).
    ///
    /// # Errors
    /// As [`check`](Self::check), and [`AttnError::TooShort`]; [`AttnError::Unsupported`] if a `score_mod` has no
    /// derivative (see [`Attention::score_mod_with`]). Nothing has been written then. [`AttnError::Stopped`] as
    /// [`stop_when`](Self::stop_when) says.
    pub fn run<T: KernelElement, G: KernelElement, O: Element>(
        &self,
        inputs: Inputs<'_, T, G>,
        gradients: Gradients<'_, O>,
        workspace: &mut [Line],
    ) -> Result<()> {
        AttnError::check_len("workspace lines", self.workspace_lines(), workspace.len())?;
        let (sums, scratch) = workspace.split_at_mut(self.sums_lines());
        self.run_with(inputs, gradients, sums, |sweep| match sweep {
            Sweep::Heads(heads) => heads.work(scratch),
            Sweep::Parts(call, mut dq, sums) => {
                let (scratch, own) = scratch.split_at_mut(call.scratch_lines());
                for (part, n) in (0..call.parts()).map(|part| (part, part % call.parts_of_head())) {
                    let head = part / call.parts_of_head();
                    let sums = &mut sums[head * call.sum_lines()..][..call.sum_lines()];
                    let (this, rest) = core::mem::take(&mut dq).split_at_mut(call.dq_len(part));
                    dq = rest;
                    if n == 0 {
                        call.compute(part, this, sums, scratch)?;
                    } else {
                        call.compute(part, this, own, scratch)?;
                        call.add(part, sums, own)?;
                    }
                }
                Ok(())
            }
            Sweep::Bias(bias, to) => (0..bias.pieces()).try_for_each(|piece| {
                bias.compute(piece, scratch)?.write(to);
                Ok(())
            }),
            Sweep::Sinks(sinks, to) => to.iter_mut().enumerate().try_for_each(|(head, to)| {
                *to = sinks.compute(head, scratch)?;
                Ok(())
            }),
            Sweep::Write(writing) => {
                writing.work();
                Ok(())
            }
        })
    }

    /// Computes the gradients on a caller's threads: calls `sweep` with [`Sweep::Heads`] or [`Sweep::Parts`], then with
    /// [`Sweep::Bias`] and [`Sweep::Sinks`] if those gradients are requested, and after [`Sweep::Parts`] last with
    /// [`Sweep::Write`].
    ///
    /// # Errors
    /// As [`run`](Self::run), and those of `sweep`. Nothing has been written then but what `sweep` itself wrote: heads,
    /// and the gradients of a bias and of sinks.
    pub fn run_with<'c, T: KernelElement, G: KernelElement, O: Element>(
        &'c self,
        inputs: Inputs<'c, T, G>,
        gradients: Gradients<'_, O>,
        sums: &mut [Line],
        mut sweep: impl FnMut(Sweep<'_, 'c>) -> Result<()>,
    ) -> Result<()> {
        self.check(&inputs, &gradients)?;
        AttnError::check_len("lines of sums", self.sums_lines(), sums.len())?;
        let Inputs { q, k, v, out, lse, dy } = inputs;
        let mut job = Job::new(&self.problem, vectors(self.level), [T::input(q), T::input(k), T::input(v)]);
        job.scoring.stop = self.stop;
        let by_bias = 1.0 / self.problem.attn().get_temperature().unwrap_or(1.0);
        let factor = self.problem.scale() * by_bias;
        let (out, dy) = (G::input(out), G::input(dy));
        let score_mod = Mods::has_score_mod(self.problem.attn().get_mods());
        let bf16 = self.level.multiplies_bf16() && T::DTYPE == Dtype::Bf16 && G::DTYPE == Dtype::Bf16;
        let fast = bf16 && self.problem.attn().get_precision() == Precision::Fast;
        let vectors = super::job::Job {
            forward: job,
            layout: self.layout,
            level: if bf16 { self.level.without_tiles() } else { vectors(self.level) },
            fast,
            parts: 0,
            out,
            dy,
            lse,
            factor,
            by_bias,
            score_mod,
        };
        let amx = self.amx.filter(|_| bf16).map(|layout| super::job::Job {
            layout,
            level: self.level,
            parts: parts(fast, O::DTYPE),
            ..vectors
        });
        let (vectors, amx) = (Call(vectors), amx.map(Call));
        let (call, layout) = amx.as_ref().map_or((&vectors, &self.layout), |amx| (amx, &amx.0.layout));
        let mut gradients = gradients;
        let (bias, sinks) = (gradients.bias.take(), gradients.sinks.take());
        if self.by_heads(layout) {
            let queue = HeadQueue::new(gradients, *self.shape());
            let work = |scratch: &mut [Line]| heads::work(&call.0, &queue, scratch);
            let lines = layout.scratch.lines() + layout.sum_lines();
            sweep(Sweep::Heads(&Heads { work: &work, count: layout.heads(), lines }))?;
            return self.run_options(&vectors, bias, sinks, &mut sweep);
        }
        let (dq, sums) = sums[..self.sums_lines()].split_at_mut(lines_for(layout.dq_len()));
        let dq = &mut floats(dq)[..layout.dq_len()];
        sweep(Sweep::Parts(call, dq, sums))?;
        self.run_options(&vectors, bias, sinks, &mut sweep)?;
        let output = Output::new(&call.0, dq, floats(sums), gradients);
        sweep(Sweep::Write(&Writing(&|| output.work())))
    }

    /// The gradients of a bias and of the sinks.
    fn run_options<'c>(
        &'c self,
        call: &Call<'c>,
        bias: Option<ViewMut<'_, f64>>,
        sinks: Option<&mut [f64]>,
        sweep: &mut impl FnMut(Sweep<'_, 'c>) -> Result<()>,
    ) -> Result<()> {
        if let Some(mut to) = bias {
            sweep(Sweep::Bias(&BiasCall::new(call, to.sizes()), &mut to))?;
        }
        if let Some(to) = sinks {
            match SinksCall::of(&call.0) {
                Some(sinks) => sweep(Sweep::Sinks(&sinks, to))?,
                None => to.fill(0.0),
            }
        }
        Ok(())
    }
}

/// Whether gradients of bf16 run on AMX: what keeps a forward call from it keeps this one.
fn on_amx<M: Mods + Sync>(problem: &Problem<'_, '_, M>, level: Level) -> bool {
    let scale = problem.scale();
    level.multiplies_bf16()
        && !level.uses_dot_products()
        && obstacle(problem.shape(), level.is_model(), log2_scale(problem), scale).is_none()
}

/// Parts of a weight on AMX, for gradients of a type. Two err by 2⁻¹⁶, and rounding to bf16 by 2⁻⁹.
pub(super) const fn parts(fast: bool, gradients: Dtype) -> usize {
    match gradients {
        _ if fast => 1,
        Dtype::Bf16 => 2,
        _ => 3,
    }
}

/// The vectors beside the products of a level. The model of pairs is one of portable vectors.
pub(super) fn vectors(level: Level) -> Level {
    if level.is_model() && level.uses_dot_products() { Level::portable() } else { level.vectors() }
}
