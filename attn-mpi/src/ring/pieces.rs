//! The rows of a rank's queries and of a shard's keys that one call of the kernels takes together.
//!
//! A rank holds several ranges of positions, and so does a shard. If nothing but a causal mask (or no mask at all)
//! depends on positions, the rows of several ranges are often one call: its mask is causal by rows, not by positions.
//! With zig-zag shards a step of the ring is then one run of calls without a border between stripes. Every other mask
//! and option gets a call for each range of queries and each range of keys.
//!
//! Pieces are bounded, so that MPI is called between them. Bounds depend on shapes alone: no bit on threads.

use std::ops::Range;

use attn_core::mask::Term;
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention};
use attn_simd::KernelElement;

use crate::call::Call;
use crate::part::{Local, Part, moves_by_rows};

/// Multiplications of a call of the kernels, if one is not to last longer than some seconds on one core.
pub(crate) const WORK: usize = 1 << 37;

/// Queries of a piece of a prefill at most, of so many: a quarter, at least 1024 and at most 4096.
pub(crate) fn longest_piece(queries: usize) -> usize {
    queries.div_ceil(4).clamp(1024, 4096)
}

/// Queries and keys of a piece at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Most {
    pub(super) queries: usize,
    pub(super) keys: usize,
}

impl Most {
    /// For a call of so many multiplications a pair of query and key, in which this rank has so many queries: at least
    /// four pieces a step if each has at least `shortest` queries, so that messages move while the rank computes.
    pub(super) fn new(pair: usize, queries: usize, shortest: usize, keys: usize, work: usize) -> Self {
        let pairs = work / pair.max(1);
        let queries = longest_piece(queries).max(shortest).min((pairs / 4096).max(64));
        Self { queries, keys: keys.min((pairs / queries).max(512)) }
    }
}

/// Multiplications for a pair of positions, over all heads.
pub(crate) fn pair<T, M>(call: &Call<'_, '_, T, M>) -> usize {
    let shape = &call.shape;
    shape.batch.saturating_mul(shape.q_heads).saturating_mul(shape.head_dim.saturating_add(shape.value_dim))
}

/// Rows of the rank's queries, rows of the shard's keys, and the options between them.
pub(super) struct Piece<'a, 'p, M> {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    pub(super) local: Local<'a, 'p, M>,
}

/// The pieces of a step of the ring in which some query sees some key.
pub(super) fn pieces<'a, 'p, T, M>(
    call: &'p Call<'_, 'a, T, M>,
    owner: usize,
    most: Most,
) -> Box<dyn Iterator<Item = Piece<'a, 'p, M>> + 'p>
where
    T: KernelElement,
    M: Mods + Sync,
{
    match by_rows(call.attn) {
        Some(align) => Box::new(rows(call, owner, most, align)),
        None => Box::new(ranges(call, owner, most)),
    }
}

/// Whether a call's options depend on positions by a causal mask at most, and its alignment.
fn by_rows<M: Mods>(attn: &Attention<'_, M>) -> Option<Option<Align>> {
    let mut terms = attn.get_mask().terms();
    match (moves_by_rows(attn), terms.next(), terms.next()) {
        (true, None, _) => Some(None),
        (true, Some(Term::Causal(align)), None) => Some(Some(*align)),
        _ => None,
    }
}

/// A piece for each range of queries and each range of keys.
fn ranges<'a, 'p, T, M>(
    call: &'p Call<'_, 'a, T, M>,
    owner: usize,
    most: Most,
) -> impl Iterator<Item = Piece<'a, 'p, M>> + 'p
where
    T: KernelElement,
    M: Mods + Sync,
{
    let queries = call.queries.rows(call.cluster.rank()).flat_map(move |rows| cut(rows, most.queries));
    let both = queries.flat_map(move |queries| {
        let keys = call.keys.rows(owner).flat_map(move |rows| cut(rows, most.keys));
        keys.map(move |keys| (queries.clone(), keys))
    });
    both.filter_map(move |((query_row, queries), (key_row, keys))| {
        let rows = [query_row..query_row + queries.len(), key_row..key_row + keys.len()];
        let local = Local::new(call.attn, call.shape, Part { queries, keys, ..Part::whole(&call.shape) });
        let [queries, keys] = rows;
        local.sees_anything().then_some(Piece { queries, keys, local })
    })
}

/// A range with its first row, in parts of at most so many positions.
fn cut((row, range): (usize, Range<usize>), most: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
    let Range { start, end } = range;
    (start..end).step_by(most).map(move |first| (row + first - start, first..end.min(first + most)))
}

/// Pieces of rows, across ranges.
fn rows<'a, 'p, T, M>(
    call: &'p Call<'_, 'a, T, M>,
    owner: usize,
    most: Most,
    align: Option<Align>,
) -> impl Iterator<Item = Piece<'a, 'p, M>> + 'p
where
    T: KernelElement,
    M: Mods + Sync,
{
    let (n, m) = (call.queries.local_len(call.cluster.rank()), call.keys.local_len(owner));
    let counts = match align {
        Some(align) => counts(call, owner, align),
        None => vec![m; n],
    };
    let mut found = Vec::new();
    for queries in cut((0, 0..n), most.queries).map(|(_, range)| range) {
        for keys in cut((0, 0..m), most.keys).map(|(_, range)| range) {
            let seen: Vec<usize> =
                counts[queries.clone()].iter().map(|&c| c.min(keys.end) - c.min(keys.start)).collect();
            for Run { rows, keys: seen, offset } in runs(&seen) {
                let rows = queries.start + rows.start..queries.start + rows.end;
                found.push((rows, keys.start..keys.start + seen, offset));
            }
        }
    }
    found.into_iter().map(|(queries, keys, offset)| {
        let align = offset.map(Align::Offset);
        Piece { queries, keys, local: Local::by_rows(call.attn, call.shape, align) }
    })
}

/// For each row of the rank's queries, how many keys of a shard it sees under a causal mask: the first ones.
fn counts<T, M>(call: &Call<'_, '_, T, M>, owner: usize, align: Align) -> Vec<usize> {
    let offset = align.offset(call.shape.q_len, call.shape.kv_len);
    let ranges = call.keys.of(owner);
    // Positions grow, and so do the ends of what they see: `whole` keys of ranges that are seen to their end.
    let (mut at, mut whole) = (0, 0);
    let mut count = |query: usize| {
        let end = if offset < 0 {
            (query + 1).saturating_sub(offset.unsigned_abs())
        } else {
            (query + 1).saturating_add(offset.unsigned_abs())
        };
        while let Some(range) = ranges.get(at).filter(|range| range.end <= end) {
            whole += range.len();
            at += 1;
        }
        whole + ranges.get(at).map_or(0, |range| end.saturating_sub(range.start))
    };
    call.queries.of(call.cluster.rank()).iter().cloned().flatten().map(&mut count).collect()
}

/// Rows that are one call: all of them see the first `keys`, or row `i` of them the first `i + offset + 1`, as a causal
/// mask has it, up to `keys`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    rows: Range<usize>,
    keys: usize,
    offset: Option<isize>,
}

/// The fewest runs of rows that see so many keys each; rows that see none are in no run. Counts never fall.
fn runs(counts: &[usize]) -> Vec<Run> {
    let (mut runs, mut at) = (Vec::new(), counts.partition_point(|&count| count == 0));
    while at < counts.len() {
        let first = counts[at];
        let slope = 1 + (at + 1..counts.len()).take_while(|&n| counts[n] == counts[n - 1] + 1).count();
        let top = at + slope;
        let end = (top..counts.len()).find(|&n| counts[n] != counts[top - 1]).unwrap_or(counts.len());
        // The offset of row 0 of the run: it sees `first` keys.
        let offset = (slope > 1).then(|| first.cast_signed() - 1);
        runs.push(Run { rows: at..end, keys: counts[end - 1], offset });
        at = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_see_what_the_counts_say() {
        let check = |counts: &[usize], want: usize| {
            let runs = runs(counts);
            let mut seen = vec![0; counts.len()];
            for Run { rows, keys, offset } in runs.iter().cloned() {
                for (n, row) in rows.enumerate() {
                    let causal = offset.map_or(keys, |offset| n.checked_add_signed(offset + 1).unwrap_or(0));
                    assert_eq!(seen[row], 0);
                    seen[row] = causal.min(keys);
                }
            }
            assert_eq!((seen.as_slice(), runs.len()), (counts, want), "{runs:?}");
        };
        check(&[], 0);
        check(&[0, 0], 0);
        check(&[1, 2, 3, 4], 1); // the shard of the rank's own queries
        check(&[0, 0, 4, 4], 1); // later stripes see all of it
        check(&[2, 2, 2, 2], 1);
        check(&[0, 1, 2, 3, 3], 1);
        check(&[3, 4, 4, 5, 6, 9, 9], 3); // stripes of another length
        check(&[5, 7, 9], 3);
    }

    #[test]
    fn pieces_get_smaller_where_a_pair_takes_more() {
        let of = |pair| Most::new(pair, 1 << 20, 1024, usize::MAX, WORK);
        assert_eq!(of(8 * 128), Most { queries: 4096, keys: 1 << 15 });
        assert_eq!(of(64 * 256), Most { queries: 2048, keys: 4096 });
        for pair in [0, 1, 1 << 20, 1 << 30] {
            let Most { queries, keys } = of(pair);
            assert!(queries.saturating_mul(keys).saturating_mul(pair) <= WORK.max(64 * 512 * pair), "{pair}");
        }
        assert_eq!(Most::new(1024, 5000, 1024, 100, WORK), Most { queries: 1250, keys: 100 });
    }
}
