//! Heads whose rows are read together, because the rows of a token are next to each other in memory.
//!
//! If a cache keeps the heads of a token side by side, one head after the other would read a short piece of memory for
//! each token, over and over from the first token on: two to three times as slow as a cache that keeps the tokens of a
//! head side by side. So all heads read some tokens, and then all the next ones. What they compute stays apart, and no
//! bit depends on it. [`ahead`](super::ahead) has the turns and the lines that are requested meanwhile. The products of
//! [integers](super::bytes) take turns of a whole tile.

/// The heads whose rows are read together: the same rows of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heads {
    /// The first one, counted from the head that the places are of.
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// The distance in elements from a row of a head to that of the next.
    pub(crate) step: isize,
    /// The query rows of each head.
    pub(crate) rows: usize,
    /// The heads that take turns: as many as `count`, or one of them is alone here.
    pub(crate) beside: usize,
}

impl Heads {
    /// One, that of the places.
    pub(crate) const ONE: Self = Self { first: 0, count: 1, step: 0, rows: 0, beside: 1 };

    /// One of them alone.
    #[inline(always)]
    pub(crate) fn one(self, head: usize) -> Self {
        Self { first: self.first + head, count: 1, ..self }
    }
}

#[cfg(test)]
mod tests {
    use std::vec;
    use std::vec::Vec;

    use attn_core::half::f16;

    use super::*;
    use crate::Level;
    use crate::gemv::{Group, Places, Stored, Sums, TILE, TILES, Unchecked, dots, rows_for, weighted};
    use crate::isa::Isa;
    use crate::level::Run;
    use crate::prefetch::Prefetch;

    /// Scores, outputs and what rounding took from them: of all heads together, or of one after the other.
    struct Both<'a, T> {
        rows: Unchecked<'a, T>,
        group: Group,
        together: bool,
    }

    impl<T: Stored> Run<[Vec<f32>; 3]> for Both<'_, T> {
        #[inline(always)]
        fn run<I: Isa>(self, isa: I) -> [Vec<f32>; 3] {
            let Self { rows, group, together } = self;
            let (columns, heads) = (rows.columns, rows.heads);
            let (all, tiles) = (heads.rows * heads.count, 0..group.count());
            // No sine: Miri's is another each time.
            let floats = |len: usize| -> Vec<f32> { (0..len).map(|n| (n * 37 % 101) as f32 * 0.02 - 1.0).collect() };
            let (q, stride, size) = (floats(all * columns), all * TILE, all * columns);
            let (mut s, p, factors) = (vec![0.0; stride * TILES], floats(stride * TILES), floats(all * TILES));
            let (mut o, mut rest, mut waiting) = (vec![0.5; size], vec![0.0; size], [(); 3].map(|()| vec![0.0; size]));
            let rows = rows.check();
            for head in 0..if together { 1 } else { heads.count } {
                let (rows, before) = if together { (rows, 0) } else { (rows.head(head), head * heads.rows) };
                dots(
                    isa,
                    heads.rows,
                    (&rows, tiles.clone()),
                    &q[before * columns..],
                    (&mut s[before * TILE..], stride),
                );
                let weights = [(&p[before * TILE..], stride), (&factors[before..], all)];
                let waiting = waiting.each_mut().map(|array| array.as_mut_slice());
                let mut sums = Sums { o: &mut o, rest: &mut rest, waiting };
                weighted(isa, heads.rows, (&rows, tiles.clone()), weights, sums.from(before * columns));
            }
            [s, o, rest]
        }
    }

    /// Heads of a token without gaps, with gaps, and some of more heads.
    #[test]
    fn heads_give_the_same_bits_together() {
        fn check<T: Stored>(level: Level, number: fn(f32) -> T) {
            let sizes = [(1, 8, 8, 128), (1, 3, 5, 64), (2, 5, 5, 48), (3, 8, 16, 64), (4, 8, 8, 128), (8, 4, 8, 32)];
            // Miri takes thousands of times as long, and looks for something else.
            for &(rows, count, of, columns) in if cfg!(miri) { &[(1, 3, 5, 16)][..] } else { &sizes } {
                for &gap in if cfg!(miri) { &[16][..] } else { &[0, 16] } {
                    let (step, tokens) = (columns + gap, if cfg!(miri) { 20 } else { 200 });
                    let data: Vec<T> = (0..tokens * of * step).map(|n| number((n as f32 * 0.7).sin())).collect();
                    let (group, mut places) = (Group::new(3, tokens, TILES), Places::NONE);
                    let found = places.find(&group, (of * step) as isize, |token| {
                        (token < tokens).then_some((token * of * step, tokens - token))
                    });
                    assert!(found);
                    let rows = rows_for(rows, level.lanes());
                    let heads = Heads { first: 0, count, step: step as isize, rows, beside: count };
                    let prefetches = [Prefetch::IN_ORDER, Prefetch::OTHER];
                    for &prefetch in if cfg!(miri) { &prefetches[..1] } else { &prefetches } {
                        let rows = Unchecked { data: &data, places: &places, heads, columns, prefetch };
                        let [all, one] = [true, false].map(|together| level.run(Both { rows, group, together }));
                        assert!(all == one, "{}: {heads:?} of {of}, {columns} columns, a gap of {gap}", level.name());
                    }
                }
            }
        }
        for level in Level::available().filter(|level| level.without_tiles() == *level && !level.uses_dot_products()) {
            check::<f32>(level, |x| x);
            check::<f16>(level, f16::from_f32);
            check::<i8>(level, |x| (x * 100.0) as i8);
        }
    }

    /// The last head may not reach outside either, and no distance may overflow.
    #[test]
    fn a_head_outside_is_found() {
        let (data, mut places) = ([0.0f32; 100], Places::NONE);
        places.find(&Group::new(0, 3, 1), 32, |token| (token < 3).then_some((4 + token * 32, 3 - token)));
        let inside = |first, count, step| {
            let heads = Heads { first, count, step, rows: 1, beside: 1 };
            let rows = Unchecked { data: &data, places: &places, heads, columns: 8, prefetch: Prefetch::OTHER };
            rows.is_inside()
        };
        assert!(inside(0, 4, 8) && !inside(0, 5, 8) && inside(3, 1, 8) && !inside(4, 1, 8));
        assert!(inside(0, 2, -4) && !inside(0, 3, -4) && !inside(2, 1, -4) && inside(0, 2, 0));
        assert!(!inside(0, 3, isize::MAX) && !inside(0, 3, isize::MIN) && !inside(usize::MAX, 1, 1));
    }
}
