//! The pieces of a call, in order: first those of the keys that all sequences share, then those of each sequence.

use core::fmt;
use core::ops::Range;

use super::call::{Call, MAX_ROWS, RowGroup, heads_together};
use super::mask::chunks_of;
use super::rounds::Round;
use crate::gemv;

/// One piece: a group of rows over some of its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    group: RowGroup,
    /// The node of the tree that this piece computes.
    node: (u32, usize),
    state_len: usize,
    /// Rows of the same key/value head that precede this group in the round.
    before: usize,
}

impl Piece {
    /// Floats of the piece's state.
    pub fn state_len(&self) -> usize {
        self.state_len
    }

    pub(super) fn group(&self) -> &RowGroup {
        &self.group
    }

    /// Level and number of the node that this piece computes.
    pub(super) fn node(&self) -> (u32, usize) {
        self.node
    }

    /// Rows of the same key/value head that precede this group in the round.
    pub(super) fn before(&self) -> usize {
        self.before
    }

    pub(super) fn chunks(&self) -> Range<usize> {
        let (level, number) = self.node;
        number << level..(number + 1) << level
    }
}

/// The pieces of a call, in order. Pieces of shared keys come first, by key/value head, rows, chunks. The others
/// follow, by sequence, key/value head, rows, chunks.
pub struct Pieces<'s, 'w> {
    call: &'s Call<'w>,
    round: Round,
    /// The group whose pieces come next.
    group: RowGroup,
    /// Rows of its key/value head that precede it in this round.
    before: usize,
    /// Rows per key/value head that precede its sequence in this round; 0 for shared keys.
    earlier: usize,
    /// The range of its key/value head's rows, over all groups. It covers one sequence, or all if the keys are shared.
    rows: Range<usize>,
    level: u32,
    nodes: Range<usize>,
}

impl fmt::Debug for Pieces<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pieces").field("group", &self.group).field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

impl<'s, 'w> Pieces<'s, 'w> {
    pub(super) fn new(call: &'s Call<'w>, round: Round) -> Self {
        let shared = call.prefix.is_some();
        let sequence = round.first()[0];
        let group = RowGroup { sequence, kv_head: 0, heads: 1, first: 0, of_head: 0, rows: 0, shared };
        let mut this = Self { call, round, group, before: 0, earlier: 0, rows: 0..0, level: 0, nodes: 0..0 };
        let rows = call.heads()[1].saturating_mul(round.queries());
        if shared && rows > 0 && call.heads()[0] > 0 {
            this.open_shared();
        } else {
            this.group.shared = false;
            this.open_sequence();
        }
        this
    }

    /// Opens the first group of shared keys of the present head.
    fn open_shared(&mut self) {
        let ([sequence, query], heads) = (self.round.first(), self.call.heads()[1]);
        (self.group.sequence, self.group.first, self.before) = (sequence, query * heads, 0);
        self.rows = 0..heads * self.round.queries();
        self.skip_to_row(0);
        self.open_group();
    }

    /// Moves the first row of a group of shared keys on by some rows, into later sequences if its own ends.
    fn skip_to_row(&mut self, rows: usize) {
        let heads = self.call.heads()[1];
        self.group.first += rows;
        while self.group.sequence < self.call.sequences.count() {
            let end = heads * self.call.sequences.q_len(self.group.sequence);
            if self.group.first < end {
                return;
            }
            self.group.first -= end;
            self.group.sequence += 1;
        }
    }

    /// Opens the first group of the present sequence. If the sequence has no row in this round, the next one's.
    fn open_sequence(&mut self) {
        let ([first, query], heads) = (self.round.first(), self.call.heads()[1]);
        while self.group.sequence < self.call.sequences.count() {
            let from = if self.group.sequence == first { query } else { 0 };
            let left = self.round.queries().saturating_sub(self.earlier / heads.max(1));
            let end = self.call.sequences.q_len(self.group.sequence).min(from.saturating_add(left));
            self.rows = heads * from..heads * end;
            (self.group.kv_head, self.group.first, self.before) = (0, self.rows.start, self.earlier);
            if !self.rows.is_empty() && self.call.heads()[0] > 0 {
                return self.open_group();
            }
            self.group.sequence += 1;
        }
    }

    /// Cuts the present group into nodes. A group that sees nothing has one piece too: it writes zeros.
    fn open_group(&mut self) {
        let left = match self.group.shared {
            true => self.rows.end - self.before,
            false => self.rows.end - self.group.first,
        };
        self.group.of_head = left.min(MAX_ROWS);
        self.group.heads = self.heads();
        self.group.rows = match self.group.heads {
            1 => self.group.of_head,
            heads => heads * gemv::padded(self.group.of_head, self.call.scoring.level.lanes()),
        };
        let chunks = chunks_of(self.call, &self.group);
        // The largest power of two that the round allows, but no larger than the group needs.
        let whole = usize::BITS - chunks.end.leading_zeros();
        let most = self.round.chunks() / self.group.heads;
        self.level = most.checked_ilog2().unwrap_or(0).min(whole);
        self.nodes =
            chunks.start >> self.level..(chunks.end.div_ceil(1 << self.level)).max((chunks.start >> self.level) + 1);
    }

    /// The key/value heads that the present group's first one is read together with, itself among them.
    fn heads(&self) -> usize {
        if !self.call.beside || self.group.shared {
            return 1;
        }
        let ([heads, _], lanes) = (self.call.heads(), self.call.scoring.level.lanes());
        let most = heads_together(heads, self.rows.len(), lanes).min(self.round.heads());
        heads.div_ceil(heads.div_ceil(most)).min(heads - self.group.kv_head)
    }

    /// Opens the next group; `None` if there is none.
    fn next_group(&mut self) -> Option<()> {
        if self.group.sequence >= self.call.sequences.count() && !self.group.shared {
            return None;
        }
        let rows = self.group.of_head;
        self.before += rows;
        if self.group.shared {
            if self.before < self.rows.end {
                self.skip_to_row(rows);
                self.open_group();
            } else if self.group.kv_head + 1 < self.call.heads()[0] {
                self.group.kv_head += 1;
                self.open_shared();
            } else {
                (self.group.shared, self.group.sequence) = (false, self.round.first()[0]);
                self.open_sequence();
            }
            return Some(());
        }
        self.group.first += rows;
        if self.group.first >= self.rows.end {
            (self.group.kv_head, self.group.first) = (self.group.kv_head + self.group.heads, self.rows.start);
            self.before = self.earlier;
        }
        if self.group.kv_head < self.call.heads()[0] {
            self.open_group();
        } else {
            self.earlier += self.rows.len();
            self.group.sequence += 1;
            self.open_sequence();
        }
        Some(())
    }
}

impl Iterator for Pieces<'_, '_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.nodes.is_empty() {
            self.next_group()?;
        }
        let (number, state_len) = (self.nodes.next()?, self.call.state_len(self.group.rows));
        Some(Piece { group: self.group, node: (self.level, number), state_len, before: self.before })
    }
}
