//! One decode call, cut over keys: pieces that any threads compute in any order, and a finish that merges them.
//!
//! The rows of a group of heads share a pass over keys and values, which is cut into chunks and those into pieces. How
//! many chunks a piece takes depends on the number of threads and changes nothing else: what a piece leaves behind is a
//! node of the fixed [tree](super::tree). [`round`](super::round) says which queries are computed together,
//! [`parts`](super::parts) lists their pieces.
//!
//! Keys that all sequences share come first: the rows of all sequences go over them together, and what a row has seen
//! there is merged with what it sees of its own sequence.

use core::fmt;
use core::ops::Range;

use attn_core::{AttnError, Result};

use super::chunk::{Buffers, Piece, Sizes, Unit};
use super::output::{RowTarget, Write};
use super::parts::{Part, Parts};
use super::round::{Cut, queries_of};
use super::sight::{self, Jobs, RowAt, RowPlaces};
use super::source::Source;
use super::tree::Fold;
use super::{CHUNK, MAX_ROWS};
use crate::input::Input;
use crate::job::Scoring;
use crate::kernel::finish;
use crate::level::Level;
use crate::workspace::{Cutter, Line, lines_for};

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
    pub(super) fn count(&self) -> usize {
        match self {
            Self::Alike(scoring) => scoring.shape.batch,
            Self::Each(each) => each.count(),
        }
    }

    pub(super) fn q_len(&self, sequence: usize) -> usize {
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

    pub(super) fn with(&self, sequence: usize, f: &mut dyn FnMut(&Scoring<'_>)) {
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
/// let Work::Split(mut split) = plan.work(q, kv, kv, to)? else { unreachable!("one query is decoded") };
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
    /// Keys and values before those of every sequence.
    pub(super) prefix: Option<Source<'w>>,
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
        Cut::all(&self.call, threads)
    }

    /// As [`cut`](Self::cut), but only as many of the first queries as leave behind states of about `floats` (at least
    /// one): a call with many queries is computed in rounds, each [finished](Self::finish) before the
    /// [next](Self::next_round).
    pub fn first_round(&self, threads: usize, floats: usize) -> Cut {
        Cut::first_round(&self.call, threads, floats)
    }

    /// The queries behind those of a round; `None` where there are no more.
    pub fn next_round(&self, cut: Cut) -> Option<Cut> {
        cut.next_round(&self.call)
    }

    /// The pieces, in a fixed order.
    pub fn parts(&self, cut: Cut) -> Parts<'_, 'w> {
        Parts::new(&self.call, cut)
    }

    /// Floats of the states of all pieces.
    pub fn states_len(&self, cut: Cut) -> usize {
        self.parts(cut).map(|part| part.state_len()).sum()
    }

    /// Computes one piece. Any number of threads may do so at once, each with scratch of its own.
    ///
    /// # Errors
    /// [`AttnError`] where the piece is not of this call, the state has not its length or the scratch is too short;
    /// nothing has been done then.
    pub fn compute(&self, part: &Part, state: &mut [f32], workspace: &mut [Line]) -> Result<()> {
        if !self.call.has(part.unit()) {
            return Err(AttnError::Unsupported { what: "a piece that belongs to another call" });
        }
        AttnError::check_size("state of a piece", part.state_len(), state.len())?;
        AttnError::check_len("workspace lines", self.workspace_lines(), workspace.len())?;
        self.call.compute(part, state, &mut Buffers::new(workspace, &self.call.sizes));
        Ok(())
    }

    /// Merges the states of all pieces, which lie in the order of the pieces, and writes the output: of all queries, or
    /// those of one [round](Self::first_round).
    ///
    /// # Errors
    /// [`AttnError::Size`] where the states have another length; nothing has been written then.
    pub fn finish(&mut self, cut: Cut, states: &mut [f32]) -> Result<()> {
        AttnError::check_size("states of all pieces", self.states_len(cut), states.len())?;
        let Self { call, target, lse } = self;
        let mut parts = Parts::new(call, cut).peekable();
        // The states of all pieces of shared keys come first. What is left of them is moved to the front, row by row.
        let (mut shared, mut from) = (0, 0);
        while let Some(part) = parts.next_if(|part| part.unit().shared) {
            let count = pieces(&part, &mut parts);
            let (len, end) = (part.state_len(), from + count * part.state_len());
            fold(call, &part, count, &mut states[from..end]);
            states.copy_within(from..from + len, shared);
            (shared, from) = (shared + len, end);
        }
        let (before, mut rest) = states.split_at_mut(from);
        while let Some(part) = parts.next() {
            let count = pieces(&part, &mut parts);
            let (states, later) = rest.split_at_mut(count * part.state_len());
            rest = later;
            fold(call, &part, count, states);
            let state = call.with_prefix(&part, cut, before, &mut states[..part.state_len()]);
            write_unit(call, target, lse.as_deref_mut(), &part, state);
        }
        if cut.is_last() {
            self.clear_padding();
        }
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
        let (before, lines) = lines.split_at_mut(self.call.prefix_lines());
        let prefix_floats = size_of_val(before) / size_of::<f32>();
        let before = Cutter::new(before).floats(prefix_floats);
        let mut buffers = Buffers::new(lines, &self.call.sizes);
        let floats = if self.call.prefix.is_some() { PREFIX_FLOATS } else { usize::MAX };
        let mut round = Some(self.first_round(1, floats));
        while let Some(cut) = round {
            let (call, mut shared) = (&self.call, 0);
            for part in Parts::new(call, cut) {
                if part.unit().shared {
                    let end = shared + part.state_len();
                    call.compute(&part, &mut before[shared..end], &mut buffers);
                    shared = end;
                    continue;
                }
                let state = &mut state[..part.state_len()];
                call.compute(&part, state, &mut buffers);
                let state = call.with_prefix(&part, cut, before, state);
                write_unit(call, &mut self.target, self.lse.as_deref_mut(), &part, state);
            }
            round = self.next_round(cut);
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

/// How many pieces there are of the unit of `part`, which was taken already; they follow each other.
fn pieces<'s, 'w: 's>(part: &Part, parts: &mut core::iter::Peekable<Parts<'s, 'w>>) -> usize {
    let mut count = 1;
    while parts.next_if(|next| next.unit() == part.unit()).is_some() {
        count += 1;
    }
    count
}

/// Merges the pieces of a unit into the first.
fn fold(call: &Call<'_>, part: &Part, count: usize, states: &mut [f32]) {
    let ((level, number), mut fold) = (part.node(), Fold::new(states, part.state_len(), call.value_dim));
    for n in 0..count {
        fold.take(n);
        fold.push(level, number + n);
    }
    fold.finish();
}

/// Divides and writes the rows of a unit from its whole state.
fn write_unit(call: &Call<'_>, target: &mut RowTarget<'_>, mut lse: Option<&mut [f32]>, part: &Part, state: &[f32]) {
    let [_, heads, q_len, _] = target.sizes();
    let (unit, mut rows) = (part.unit(), [RowAt::default(); MAX_ROWS]);
    let rows = call.rows_of(unit, &mut rows);
    call.calls.with(unit.sequence, &mut |job| {
        let kept = job.dropout.factor();
        for (row, &RowAt { head, place: [batch, query], .. }) in state.chunks_exact(call.value_dim + 2).zip(rows) {
            let sink = job.sinks.map(|sinks| f64::from(sinks[head]));
            let (factor, row_lse) = finish::close(f64::from(row[0]), f64::from(row[1]), sink, kept);
            let values = (row[1] != 0.0).then_some((&row[2..], factor));
            call.level.run(Write { target: &mut *target, at: [batch, head, query], values });
            if let Some(lse) = lse.as_deref_mut() {
                lse[(batch * heads + head) * q_len + query] = row_lse;
            }
        }
    });
}

/// Floats of the states over shared keys that one thread holds at a time, unless a single query has more.
const PREFIX_FLOATS: usize = 1 << 18;

/// Lines that hold the largest state.
pub(super) const fn state_lines(value_dim: usize) -> usize {
    lines_for(MAX_ROWS * (value_dim + 2))
}

/// Lines that hold the states over shared keys of as many queries as are computed together on one thread.
pub(super) fn prefix_lines(queries: usize, query_floats: usize) -> usize {
    let together = (PREFIX_FLOATS / query_floats.max(1)).max(1);
    lines_for(queries.min(together).saturating_mul(query_floats))
}

impl Call<'_> {
    pub(super) fn state_len(&self, rows: usize) -> usize {
        rows * (self.value_dim + 2)
    }

    /// Lines of scratch of one thread.
    pub(super) fn lines(&self) -> usize {
        if self.sizes == Sizes::default() {
            return 0;
        }
        self.sizes.lines() + state_lines(self.value_dim) + self.prefix_lines()
    }

    /// Lines that hold the states over shared keys of as many queries as are computed together on one thread.
    fn prefix_lines(&self) -> usize {
        if self.prefix.is_some() { prefix_lines(queries_of(self), self.query_floats()) } else { 0 }
    }

    /// Floats of the states of one query, all heads.
    pub(super) fn query_floats(&self) -> usize {
        self.heads[0].saturating_mul(self.state_len(self.heads[1]))
    }

    /// Units times chunks of the whole call: what it costs, roughly.
    pub(super) fn work(&self) -> usize {
        let units = |rows: usize| self.heads[0].saturating_mul(rows.div_ceil(MAX_ROWS));
        let mut rows = 0usize;
        let before = self.prefix.map_or(0, |prefix| prefix.len(0));
        let mut of = |sequence: usize| {
            let own = self.heads[1].saturating_mul(self.calls.q_len(sequence));
            rows = rows.saturating_add(own);
            units(own).saturating_mul(self.source.len(sequence).saturating_sub(before).div_ceil(CHUNK))
        };
        let own = match self.calls {
            Calls::Alike(scoring) if scoring.shape.batch == 0 => 0,
            Calls::Alike(scoring) => of(0).saturating_mul(scoring.shape.batch),
            Calls::Each(each) => (0..each.count()).fold(0, |sum: usize, n| sum.saturating_add(of(n))),
        };
        own.saturating_add(units(rows).saturating_mul(before.div_ceil(CHUNK)))
    }

    pub(super) fn compute(&self, part: &Part, state: &mut [f32], buffers: &mut Buffers<'_>) {
        let (unit, chunks, mut rows) = (*part.unit(), part.chunks(), [RowAt::default(); MAX_ROWS]);
        let rows = self.rows_of(&unit, &mut rows);
        let source = self.prefix.as_ref().filter(|_| unit.shared).unwrap_or(&self.source);
        self.calls.with(unit.sequence, &mut |job| {
            let (chunks, state, buffers) = (chunks.clone(), &mut *state, &mut *buffers);
            Piece { job, calls: &self.calls, q: &self.q, unit, rows, chunks, state, buffers }.run(source);
        });
    }

    /// Whether a unit's rows are rows of this call.
    fn has(&self, unit: &Unit) -> bool {
        let sequences = if unit.shared { unit.sequence..self.calls.count() } else { unit.sequence..unit.sequence + 1 };
        unit.sequence < self.calls.count()
            && unit.kv_head < self.heads[0]
            && (self.prefix.is_some() || !unit.shared)
            && {
                let queries = sequences.fold(0usize, |sum, sequence| sum.saturating_add(self.calls.q_len(sequence)));
                unit.first.saturating_add(unit.rows) <= queries.saturating_mul(self.heads[1])
            }
    }

    /// Where the rows of a unit are, of which there [are](Self::has) as many.
    pub(super) fn rows_of<'r>(&self, unit: &Unit, rows: &'r mut RowPlaces) -> &'r [RowAt] {
        let group = self.heads[1];
        let (mut sequence, mut n) = (unit.sequence, unit.first);
        let (mut end, mut place) = (group * self.calls.q_len(sequence), self.calls.place(sequence));
        for row in &mut rows[..unit.rows] {
            while n >= end && sequence < self.calls.count() {
                sequence += 1;
                n = 0;
                (end, place) = (group * self.calls.q_len(sequence), self.calls.place(sequence));
            }
            let (head, query) = (unit.kv_head * group + n % group, n / group);
            *row = RowAt { sequence, head, query, place: [place[0], place[1] + query] };
            n += 1;
        }
        &rows[..unit.rows]
    }

    /// The chunks of keys that any row of a unit sees.
    pub(super) fn chunks(&self, unit: &Unit) -> Range<usize> {
        let (mut seen, mut rows) = (0..0, [RowAt::default(); MAX_ROWS]);
        let rows = self.rows_of(unit, &mut rows);
        self.calls.with(unit.sequence, &mut |job| {
            seen = sight::keys_seen(&Jobs { first: job, sequence: unit.sequence, calls: &self.calls }, rows);
        });
        let seen = match &self.prefix {
            Some(prefix) if unit.shared => seen.start..seen.end.min(prefix.len(0)),
            Some(_) => seen.start.max(self.source.first())..seen.end,
            None => seen,
        };
        if seen.is_empty() { 0..0 } else { seen.start / CHUNK..seen.end.div_ceil(CHUNK) }
    }

    /// The state of a unit together with what its rows have seen of shared keys, whose states of the round lie in
    /// `before`.
    fn with_prefix<'s>(&self, part: &Part, cut: Cut, before: &'s mut [f32], state: &'s mut [f32]) -> &'s [f32] {
        if self.prefix.is_none() {
            return state;
        }
        let first = part.unit().kv_head * self.heads[1] * cut.queries() + part.before();
        let before = &mut before[self.state_len(first)..][..state.len()];
        let merged = attn_core::state::merge_states(before, state, self.value_dim);
        debug_assert!(merged.is_ok(), "as many whole rows of both");
        before
    }
}
