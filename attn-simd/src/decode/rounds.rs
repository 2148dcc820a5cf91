//! The rounds of a call: which queries are computed together, and how large the pieces of their keys are.
//!
//! Each piece leaves a state of `2 + value_dim` numbers per row. The states of a long prompt must not all exist at
//! once, so its queries are computed in rounds of bounded size. This changes no bit, because a row is computed alike in
//! any round.

use super::call::Call;

/// Pieces per thread. With fewer, all threads would wait for one that was interrupted.
const PIECES_PER_THREAD: usize = 8;

/// Pieces per thread at least, where several heads are read together: to read them so is worth larger pieces.
const PIECES_OF_HEADS: usize = 2;

/// Some queries, and the size of the pieces of their keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// The largest number of chunks in a piece, over its heads; but at least one of each head.
    chunks: usize,
    /// The largest number of key/value heads in a piece.
    heads: usize,
    /// The sequence of the first query, and its number there.
    first: [usize; 2],
    /// The number of queries, which go on through the sequences.
    queries: usize,
    /// Whether this is the last round.
    last: bool,
}

impl Round {
    /// All queries, in pieces that are not cut.
    pub(super) const WHOLE: Self =
        Self { chunks: usize::MAX, heads: usize::MAX, first: [0, 0], queries: usize::MAX, last: true };

    /// All queries, in pieces for a number of threads.
    pub(super) fn all(call: &Call<'_>, threads: usize) -> Self {
        let whole = Self { queries: call.sequences.all_queries(), ..Self::WHOLE };
        if threads <= 1 {
            return whole;
        }
        let chunks = call.work() / threads.saturating_mul(PIECES_PER_THREAD);
        let heads = (call.work() / threads.saturating_mul(PIECES_OF_HEADS)).max(1);
        Self { chunks, heads, ..whole }
    }

    /// The largest number of chunks in a piece, over its heads; but at least one of each head.
    pub(super) const fn chunks(&self) -> usize {
        self.chunks
    }

    /// The largest number of key/value heads in a piece.
    pub(super) const fn heads(&self) -> usize {
        self.heads
    }

    /// The sequence of the first query, and its number there.
    pub(super) const fn first(&self) -> [usize; 2] {
        self.first
    }

    /// The number of queries.
    pub(super) const fn queries(&self) -> usize {
        self.queries
    }

    /// Whether this is the last round.
    pub(super) const fn is_last(&self) -> bool {
        self.last
    }
}

impl Round {
    /// The first queries, as many as leave states of about `floats`, in pieces for a number of threads.
    pub(super) fn first_round(call: &Call<'_>, threads: usize, floats: usize) -> Self {
        let all = Self::all(call, threads);
        let most = (floats / call.query_floats().max(1)).max(1);
        if all.queries <= most {
            return all;
        }
        let chunks = match threads {
            0 | 1 => usize::MAX,
            // The share of one round in the whole call.
            _ => (all.chunks as f64 * most as f64 / all.queries as f64) as usize,
        };
        let heads = (all.heads as f64 * most as f64 / all.queries as f64) as usize;
        Self { chunks, heads: heads.max(1), first: [0, 0], queries: most, last: false }
    }

    /// The next queries, at most as many as here.
    pub(super) fn next_round(self, call: &Call<'_>) -> Option<Self> {
        if self.last {
            return None;
        }
        let [mut sequence, mut query] = self.first;
        let mut left = self.queries;
        while sequence < call.sequences.count() && left >= call.sequences.q_len(sequence) - query {
            left -= call.sequences.q_len(sequence) - query;
            (sequence, query) = (sequence + 1, 0);
        }
        query += left;
        let rest =
            (sequence..call.sequences.count()).fold(0usize, |sum, n| sum.saturating_add(call.sequences.q_len(n)));
        let rest = rest.saturating_sub(query);
        let queries = self.queries.min(rest);
        (rest > 0).then_some(Self { first: [sequence, query], queries, last: queries == rest, ..self })
    }
}
