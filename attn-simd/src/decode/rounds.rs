//! Which queries of a call are computed together, and into how large pieces their keys are cut.
//!
//! A piece leaves a state of `2 + value_dim` numbers per row behind, so that a long prompt's states must not all exist
//! at once: the queries are taken in rounds of bounded size. No bit depends on that: a row is computed alike in any
//! round.

use super::call::Call;

/// Pieces that a thread gets: with fewer, a thread that was interrupted once would be waited for.
const PIECES_PER_THREAD: usize = 8;

/// Some queries, and into how large pieces of keys they are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Round {
    /// Chunks that a piece may have at most.
    chunks: usize,
    /// Sequence and number of the first query.
    first: [usize; 2],
    /// How many queries, counted on through the sequences.
    queries: usize,
    /// Whether there are none behind them.
    last: bool,
}

impl Round {
    /// All queries, not cut at all.
    pub(super) const WHOLE: Self = Self { chunks: usize::MAX, first: [0, 0], queries: usize::MAX, last: true };

    /// All queries, cut for a number of threads.
    pub(super) fn all(call: &Call<'_>, threads: usize) -> Self {
        let chunks = match threads {
            0 | 1 => usize::MAX,
            _ => call.work() / threads.saturating_mul(PIECES_PER_THREAD),
        };
        Self { chunks, queries: call.sequences.all_queries(), ..Self::WHOLE }
    }

    /// Chunks that a piece may have at most.
    pub(super) const fn chunks(&self) -> usize {
        self.chunks
    }

    /// Sequence and number of the first query.
    pub(super) const fn first(&self) -> [usize; 2] {
        self.first
    }

    /// How many queries.
    pub(super) const fn queries(&self) -> usize {
        self.queries
    }

    /// Whether there are no queries behind them.
    pub(super) const fn is_last(&self) -> bool {
        self.last
    }
}

impl Round {
    /// The first queries, as many as leave behind states of about `floats`, cut for a number of threads.
    pub(super) fn first_round(call: &Call<'_>, threads: usize, floats: usize) -> Self {
        let all = Self::all(call, threads);
        let most = (floats / call.query_floats().max(1)).max(1);
        if all.queries <= most {
            return all;
        }
        let chunks = match threads {
            0 | 1 => usize::MAX,
            // The share that a round has of everything.
            _ => (all.chunks as f64 * most as f64 / all.queries as f64) as usize,
        };
        Self { chunks, first: [0, 0], queries: most, last: false }
    }

    /// As many queries behind these.
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
