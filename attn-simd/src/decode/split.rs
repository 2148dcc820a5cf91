//! One decode call, cut over keys: pieces that any threads compute in any order, and a finish that merges them.
//!
//! The rows of a group of heads share a pass over keys and values, which is cut into chunks and those into pieces. How many chunks
//! a piece takes depends on the number of threads and changes nothing else: what a piece leaves behind is a node of the fixed
//! [tree](super::tree).

use core::fmt;
use core::ops::Range;

use attn_core::{AttnError, Result};

use super::chunk::{Buffers, Piece, Sizes, Unit};
use super::output::{RowTarget, Write};
use super::source::Source;
use super::tree::Fold;
use super::{CHUNK, MAX_ROWS};
use crate::input::Input;
use crate::job::Scoring;
use crate::kernel::finish;
use crate::level::Level;
use crate::workspace::{Cutter, Line, lines_for};

/// Pieces that a thread gets: with fewer, a thread that was interrupted once would be waited for.
const PARTS_PER_THREAD: usize = 8;

/// Sequences that differ: what a call over a cache is made of.
pub(crate) trait Sequences: Sync {
    /// How many.
    fn count(&self) -> usize;
    /// Queries of one sequence.
    fn q_len(&self, sequence: usize) -> usize;
    /// Where they lie: index on the first axis of q and the output, and of the first query on the third.
    fn place(&self, sequence: usize) -> [usize; 2];
    /// Query rows after them that are none: which of them are written as zeros.
    fn padding(&self, sequence: usize) -> Range<usize>;
    /// Calls `f` with what happens to the scores of one sequence.
    fn with(&self, sequence: usize, f: &mut dyn FnMut(&Scoring<'_>));
}

/// The sequences of a call.
#[derive(Clone, Copy)]
pub(crate) enum Calls<'w> {
    /// All alike.
    Alike(Scoring<'w>),
    /// Each of its own lengths.
    Each(&'w dyn Sequences),
}

impl Calls<'_> {
    fn count(&self) -> usize {
        match self {
            Self::Alike(scoring) => scoring.shape.batch,
            Self::Each(each) => each.count(),
        }
    }

    fn q_len(&self, sequence: usize) -> usize {
        match self {
            Self::Alike(scoring) => scoring.shape.q_len,
            Self::Each(each) => each.q_len(sequence),
        }
    }

    fn place(&self, sequence: usize) -> [usize; 2] {
        match self {
            Self::Alike(_) => [sequence, 0],
            Self::Each(each) => each.place(sequence),
        }
    }

    fn with(&self, sequence: usize, f: &mut dyn FnMut(&Scoring<'_>)) {
        match self {
            Self::Alike(scoring) => f(scoring),
            Self::Each(each) => each.with(sequence, f),
        }
    }
}

/// One decode call, ready to be computed: [`run`](Self::run) on one thread, or in [parts](Self::parts) on several.
///
/// ```
/// use attn_core::{Attention, AttnShape, Layout, View, ViewMut};
/// use attn_simd::{Level, Line, Plan, Work};
/// let shape = AttnShape::new([1, 8, 1, 64], [1, 2, 3000, 64], [1, 2, 3000, 64])?;
/// let (q, kv) = (vec![0.5f32; 8 * 64], vec![0.25f32; 2 * 3000 * 64]);
/// let (q, kv) = (View::new(&q, Layout::Bhsd, [1, 8, 1, 64])?, View::new(&kv, Layout::Bhsd, [1, 2, 3000, 64])?);
/// let (attn, mut out) = (Attention::new(), vec![0.0f32; 8 * 64]);
/// let plan = Plan::new(&attn, shape, Level::detect())?;
/// let to = ViewMut::new(&mut out, Layout::Bhsd, shape.output())?;
/// let Work::Split(split) = plan.work(q, kv, kv, to)? else { unreachable!("one query is decoded") };
///
/// // Pieces for four threads; which thread takes which, and when, changes no bit.
/// let cut = split.cut(4);
/// let (mut states, mut lines) = (vec![0.0; split.states_len(cut)], vec![Line::ZERO; split.workspace_lines()]);
/// let mut rest = states.as_mut_slice();
/// for part in split.parts(cut) {
///     let (state, later) = rest.split_at_mut(part.state_len());
///     split.compute(&part, state, &mut lines)?;
///     rest = later;
/// }
/// split.finish(cut, &mut states)?;
/// assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-6));
/// # Ok::<(), attn_core::AttnError>(())
/// ```
pub struct Split<'w> {
    call: Call<'w>,
    target: RowTarget<'w>,
    lse: Option<&'w mut [f32]>,
}

/// What all pieces read.
pub(super) struct Call<'w> {
    pub(super) level: Level,
    pub(super) calls: Calls<'w>,
    pub(super) source: Source<'w>,
    pub(super) q: Input<'w>,
    /// Key/value heads, and query heads of each.
    pub(super) heads: [usize; 2],
    pub(super) value_dim: usize,
    pub(super) sizes: Sizes,
}

impl fmt::Debug for Split<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let call = &self.call;
        f.debug_struct("Split")
            .field("level", &call.level)
            .field("sequences", &call.calls.count())
            .finish_non_exhaustive()
    }
}

/// Into how large pieces a call is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Chunks that a piece may have at most.
    chunks: usize,
}

/// One piece: some rows that share keys and values, over some of those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    unit: Unit,
    /// Node of the tree that it computes.
    node: (u32, usize),
    state_len: usize,
}

impl Part {
    /// Floats of the state that it leaves behind.
    pub fn state_len(&self) -> usize {
        self.state_len
    }

    pub(super) fn unit(&self) -> &Unit {
        &self.unit
    }

    fn chunks(&self) -> Range<usize> {
        let (level, number) = self.node;
        number << level..(number + 1) << level
    }
}

impl Cut {
    /// Not cut at all.
    pub(super) const WHOLE: Self = Self { chunks: usize::MAX };
}

impl<'w> Split<'w> {
    /// The output and, where wanted, one lse per row of it.
    pub(super) fn new(call: Call<'w>, target: RowTarget<'w>, lse: Option<&'w mut [f32]>) -> Self {
        Self { call, target, lse }
    }

    /// Lines of scratch that one thread needs. Does not depend on how the call is cut.
    pub fn workspace_lines(&self) -> usize {
        self.call.lines()
    }

    /// Row blocks times chunks of keys: into how many pieces the call could be cut at most.
    pub fn parts_at_most(&self) -> usize {
        self.call.work()
    }

    /// How to cut the call for a number of threads: several pieces for each, so that none waits long for the last.
    pub fn cut(&self, threads: usize) -> Cut {
        match threads {
            0 | 1 => Cut::WHOLE,
            _ => Cut { chunks: self.call.work() / threads.saturating_mul(PARTS_PER_THREAD) },
        }
    }

    /// The pieces, in a fixed order.
    pub fn parts(&self, cut: Cut) -> Parts<'_, 'w> {
        Parts::new(&self.call, cut)
    }

    /// Floats of the states of all pieces.
    pub fn states_len(&self, cut: Cut) -> usize {
        self.parts(cut).map(|part| part.state_len).sum()
    }

    /// Computes one piece. Any number of threads may do so at once, each with scratch of its own.
    ///
    /// # Errors
    /// [`AttnError`] where the state has not the piece's length or the scratch is too short; nothing has been done then.
    pub fn compute(&self, part: &Part, state: &mut [f32], workspace: &mut [Line]) -> Result<()> {
        AttnError::check_size("state of a piece", part.state_len, state.len())?;
        AttnError::check_len("workspace lines", self.workspace_lines(), workspace.len())?;
        self.call.compute(part, state, &mut Buffers::new(workspace, &self.call.sizes));
        Ok(())
    }

    /// Merges the states of all pieces, which lie in the order of the pieces, and writes the output.
    ///
    /// # Errors
    /// [`AttnError::Size`] where the states have another length; nothing has been written then.
    pub fn finish(mut self, cut: Cut, states: &mut [f32]) -> Result<()> {
        AttnError::check_size("states of all pieces", self.states_len(cut), states.len())?;
        let mut rest = states;
        let mut parts = Parts::new(&self.call, cut).peekable();
        while let Some(Part { unit, node: (level, number), state_len }) = parts.next() {
            // The pieces of a unit follow each other.
            let mut count = 1;
            while parts.next_if(|part| part.unit == unit).is_some() {
                count += 1;
            }
            let (states, later) = rest.split_at_mut(count * state_len);
            rest = later;
            let mut fold = Fold::new(states, state_len, self.call.value_dim);
            for n in 0..count {
                fold.take(n);
                fold.push(level, number + n);
            }
            if let Some(state) = fold.finish() {
                write_unit(&self.call, &mut self.target, self.lse.as_deref_mut(), unit, state);
            }
        }
        self.clear_padding();
        Ok(())
    }

    /// Computes everything on this thread.
    ///
    /// # Errors
    /// [`AttnError::TooShort`] where the scratch is; nothing has been done then.
    pub fn run(mut self, workspace: &mut [Line]) -> Result<()> {
        AttnError::check_len("workspace lines", self.workspace_lines(), workspace.len())?;
        if self.call.sizes == Sizes::default() {
            self.clear_padding(); // no sequence has a query, but rows may have been given
            return Ok(());
        }
        let (state, lines) = workspace.split_at_mut(state_lines(self.call.value_dim));
        let state = Cutter::new(state).floats(self.call.state_len(MAX_ROWS));
        let mut buffers = Buffers::new(lines, &self.call.sizes);
        for part in Parts::new(&self.call, self.cut(1)) {
            let state = &mut state[..part.state_len];
            self.call.compute(&part, state, &mut buffers);
            write_unit(&self.call, &mut self.target, self.lse.as_deref_mut(), part.unit, state);
        }
        self.clear_padding();
        Ok(())
    }

    /// Rows behind a sequence's last query are 0, their lse −∞.
    fn clear_padding(&mut self) {
        let Calls::Each(each) = self.call.calls else { return };
        let [_, heads, q_len, _] = self.target.sizes();
        for sequence in 0..each.count() {
            let [batch, first] = each.place(sequence);
            for query in each.padding(sequence) {
                for head in 0..heads {
                    self.call.level.run(Write {
                        target: &mut self.target,
                        at: [batch, head, first + query],
                        values: None,
                    });
                    if let Some(lse) = self.lse.as_deref_mut() {
                        lse[(batch * heads + head) * q_len + first + query] = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// Divides and writes the rows of a unit from its whole state.
fn write_unit(call: &Call<'_>, target: &mut RowTarget<'_>, mut lse: Option<&mut [f32]>, unit: Unit, state: &[f32]) {
    let [_, heads, q_len, _] = target.sizes();
    let [batch, before] = unit.place;
    call.calls.with(unit.sequence, &mut |job| {
        let kept = job.dropout.factor();
        for (r, row) in state.chunks_exact(call.value_dim + 2).enumerate() {
            let (head, query) = unit.row(r, call.heads[1]);
            let sink = job.sinks.map(|sinks| f64::from(sinks[head]));
            let (factor, row_lse) = finish::close(f64::from(row[0]), f64::from(row[1]), sink, kept);
            let at = [batch, head, before + query];
            call.level.run(Write { target: &mut *target, at, values: Some((&row[2..], factor)) });
            if let Some(lse) = lse.as_deref_mut() {
                lse[(batch * heads + head) * q_len + before + query] = row_lse;
            }
        }
    });
}

/// Lines that hold the largest state.
pub(super) const fn state_lines(value_dim: usize) -> usize {
    lines_for(MAX_ROWS * (value_dim + 2))
}

impl Call<'_> {
    pub(super) fn state_len(&self, rows: usize) -> usize {
        rows * (self.value_dim + 2)
    }

    fn lines(&self) -> usize {
        if self.sizes == Sizes::default() { 0 } else { self.sizes.lines() + state_lines(self.value_dim) }
    }

    /// Rows of one key/value head of a sequence.
    fn rows(&self, sequence: usize) -> usize {
        self.heads[1] * self.calls.q_len(sequence)
    }

    /// Units times chunks of the whole call: what it costs, roughly.
    fn work(&self) -> usize {
        let of = |sequence: usize| {
            let units = self.heads[0].saturating_mul(self.rows(sequence).div_ceil(MAX_ROWS));
            units.saturating_mul(self.source.len(sequence).div_ceil(CHUNK))
        };
        match self.calls {
            Calls::Alike(scoring) if scoring.shape.batch == 0 => 0,
            Calls::Alike(scoring) => of(0).saturating_mul(scoring.shape.batch),
            Calls::Each(each) => (0..each.count()).fold(0, |sum: usize, n| sum.saturating_add(of(n))),
        }
    }

    pub(super) fn compute(&self, part: &Part, state: &mut [f32], buffers: &mut Buffers<'_>) {
        self.calls.with(part.unit.sequence, &mut |job| {
            let (unit, chunks) = (part.unit, part.chunks());
            let (state, buffers) = (&mut *state, &mut *buffers);
            Piece { job, q: &self.q, unit, chunks, state, buffers }.run(&self.source);
        });
    }

    /// The chunks of keys that any row of a unit sees.
    fn chunks(&self, unit: &Unit) -> Range<usize> {
        let mut seen = 0..0;
        self.calls.with(unit.sequence, &mut |job| seen = super::chunk::keys_seen(job, unit));
        if seen.is_empty() { 0..0 } else { seen.start / CHUNK..seen.end.div_ceil(CHUNK) }
    }
}

/// The pieces of a call, in order: by sequence, key/value head, rows, chunks.
pub struct Parts<'s, 'w> {
    call: &'s Call<'w>,
    cut: Cut,
    /// The unit whose pieces come next.
    unit: Unit,
    /// Its rows in all, over all units of its sequence and head.
    rows: usize,
    level: u32,
    nodes: Range<usize>,
}

impl fmt::Debug for Parts<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parts").field("unit", &self.unit).field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

impl<'s, 'w> Parts<'s, 'w> {
    pub(super) fn new(call: &'s Call<'w>, cut: Cut) -> Self {
        let unit = Unit { sequence: 0, place: [0, 0], kv_head: 0, first: 0, rows: 0 };
        let mut this = Self { call, cut, unit, rows: 0, level: 0, nodes: 0..0 };
        this.open_sequence();
        this
    }

    /// Goes on to the first unit of the present sequence, or of the next one that has any.
    fn open_sequence(&mut self) {
        while self.unit.sequence < self.call.calls.count() {
            self.rows = self.call.rows(self.unit.sequence);
            (self.unit.kv_head, self.unit.first) = (0, 0);
            if self.rows > 0 && self.call.heads[0] > 0 {
                self.unit.place = self.call.calls.place(self.unit.sequence);
                return self.open_unit();
            }
            self.unit.sequence += 1;
        }
    }

    /// Cuts the present unit. One whose rows see nothing has a piece all the same: somebody must write zeros.
    fn open_unit(&mut self) {
        self.unit.rows = (self.rows - self.unit.first).min(MAX_ROWS);
        let chunks = self.call.chunks(&self.unit);
        // The largest power of two that the cut allows, and no larger than needed.
        let whole = usize::BITS - chunks.end.leading_zeros();
        self.level = self.cut.chunks.checked_ilog2().unwrap_or(0).min(whole);
        self.nodes =
            chunks.start >> self.level..(chunks.end.div_ceil(1 << self.level)).max((chunks.start >> self.level) + 1);
    }
}

impl Iterator for Parts<'_, '_> {
    type Item = Part;

    fn next(&mut self) -> Option<Part> {
        if self.nodes.is_empty() {
            if self.unit.sequence >= self.call.calls.count() {
                return None;
            }
            self.unit.first += self.unit.rows;
            if self.unit.first >= self.rows {
                (self.unit.kv_head, self.unit.first) = (self.unit.kv_head + 1, 0);
            }
            if self.unit.kv_head < self.call.heads[0] {
                self.open_unit();
            } else {
                self.unit.sequence += 1;
                self.open_sequence();
            }
        }
        let number = self.nodes.next()?;
        Some(Part { unit: self.unit, node: (self.level, number), state_len: self.call.state_len(self.unit.rows) })
    }
}
