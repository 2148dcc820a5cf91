//! The pieces of a call, in order: first those of keys that all sequences share, then each sequence's own.

use core::fmt;
use core::ops::Range;

use super::MAX_ROWS;
use super::chunk::Unit;
use super::round::Cut;
use super::split::Call;

/// One piece: some rows that share keys and values, over some of those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    unit: Unit,
    /// Node of the tree that it computes.
    node: (u32, usize),
    state_len: usize,
    /// Rows of its key/value head that come before its first in this round.
    before: usize,
}

impl Part {
    /// Floats of the state that it leaves behind.
    pub fn state_len(&self) -> usize {
        self.state_len
    }

    pub(super) fn unit(&self) -> &Unit {
        &self.unit
    }

    /// Level and number of its node of the tree.
    pub(super) fn node(&self) -> (u32, usize) {
        self.node
    }

    /// Rows of its key/value head that come before its first in this round.
    pub(super) fn before(&self) -> usize {
        self.before
    }

    pub(super) fn chunks(&self) -> Range<usize> {
        let (level, number) = self.node;
        number << level..(number + 1) << level
    }
}

/// The pieces of a call, in order: shared keys by key/value head, rows, chunks; then the others by sequence, key/value
/// head, rows, chunks.
pub struct Parts<'s, 'w> {
    call: &'s Call<'w>,
    cut: Cut,
    /// The unit whose pieces come next.
    unit: Unit,
    /// Rows of its key/value head before it, in this round.
    before: usize,
    /// Rows of this round that come before its sequence, per key/value head; of shared keys 0.
    earlier: usize,
    /// Its rows in all, over all units of its key/value head (and of its sequence, unless keys are shared): from and
    /// to.
    rows: Range<usize>,
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
        let shared = call.prefix.is_some();
        let unit = Unit { sequence: cut.first()[0], kv_head: 0, first: 0, rows: 0, shared };
        let mut this = Self { call, cut, unit, before: 0, earlier: 0, rows: 0..0, level: 0, nodes: 0..0 };
        let rows = call.heads[1].saturating_mul(cut.queries());
        if shared && rows > 0 && call.heads[0] > 0 {
            this.open_shared();
        } else {
            this.unit.shared = false;
            this.open_sequence();
        }
        this
    }

    /// Goes on to the first unit of shared keys of the present head.
    fn open_shared(&mut self) {
        let ([sequence, query], group) = (self.cut.first(), self.call.heads[1]);
        (self.unit.sequence, self.unit.first, self.before) = (sequence, query * group, 0);
        self.rows = 0..group * self.cut.queries();
        self.skip_to_row(0);
        self.open_unit();
    }

    /// Moves the first row of a unit of shared keys on by some rows, into later sequences where there are no more.
    fn skip_to_row(&mut self, rows: usize) {
        let group = self.call.heads[1];
        self.unit.first += rows;
        while self.unit.sequence < self.call.calls.count() {
            let end = group * self.call.calls.q_len(self.unit.sequence);
            if self.unit.first < end {
                return;
            }
            self.unit.first -= end;
            self.unit.sequence += 1;
        }
    }

    /// Goes on to the first unit of the present sequence, or of the next one that has any in this round.
    fn open_sequence(&mut self) {
        let ([first, query], group) = (self.cut.first(), self.call.heads[1]);
        while self.unit.sequence < self.call.calls.count() {
            let from = if self.unit.sequence == first { query } else { 0 };
            let left = self.cut.queries().saturating_sub(self.earlier / group.max(1));
            let end = self.call.calls.q_len(self.unit.sequence).min(from.saturating_add(left));
            self.rows = group * from..group * end;
            (self.unit.kv_head, self.unit.first, self.before) = (0, self.rows.start, self.earlier);
            if !self.rows.is_empty() && self.call.heads[0] > 0 {
                return self.open_unit();
            }
            self.unit.sequence += 1;
        }
    }

    /// Cuts the present unit. One whose rows see nothing has a piece all the same: somebody must write zeros.
    fn open_unit(&mut self) {
        let left = match self.unit.shared {
            true => self.rows.end - self.before,
            false => self.rows.end - self.unit.first,
        };
        self.unit.rows = left.min(MAX_ROWS);
        let chunks = self.call.chunks(&self.unit);
        // The largest power of two that the cut allows, and no larger than needed.
        let whole = usize::BITS - chunks.end.leading_zeros();
        self.level = self.cut.chunks().checked_ilog2().unwrap_or(0).min(whole);
        self.nodes =
            chunks.start >> self.level..(chunks.end.div_ceil(1 << self.level)).max((chunks.start >> self.level) + 1);
    }

    /// Goes on to the next unit; `None` where there is none.
    fn next_unit(&mut self) -> Option<()> {
        if self.unit.sequence >= self.call.calls.count() && !self.unit.shared {
            return None;
        }
        let rows = self.unit.rows;
        self.before += rows;
        if self.unit.shared {
            if self.before < self.rows.end {
                self.skip_to_row(rows);
                self.open_unit();
            } else if self.unit.kv_head + 1 < self.call.heads[0] {
                self.unit.kv_head += 1;
                self.open_shared();
            } else {
                (self.unit.shared, self.unit.sequence) = (false, self.cut.first()[0]);
                self.open_sequence();
            }
            return Some(());
        }
        self.unit.first += rows;
        if self.unit.first >= self.rows.end {
            (self.unit.kv_head, self.unit.first) = (self.unit.kv_head + 1, self.rows.start);
            self.before = self.earlier;
        }
        if self.unit.kv_head < self.call.heads[0] {
            self.open_unit();
        } else {
            self.earlier += self.rows.len();
            self.unit.sequence += 1;
            self.open_sequence();
        }
        Some(())
    }
}

impl Iterator for Parts<'_, '_> {
    type Item = Part;

    fn next(&mut self) -> Option<Part> {
        if self.nodes.is_empty() {
            self.next_unit()?;
        }
        let (number, state_len) = (self.nodes.next()?, self.call.state_len(self.unit.rows));
        Some(Part { unit: self.unit, node: (self.level, number), state_len, before: self.before })
    }
}
