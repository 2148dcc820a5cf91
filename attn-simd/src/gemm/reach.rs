//! Which keys of a tile each vector of queries needs: scores outside are not computed.

/// Which keys of a tile each vector of queries needs: vector `n` those in `start[n]..end[n]`, neither of which ever
/// decreases.
///
/// Under a causal mask the keys of a diagonal tile end earlier for the first queries of a block; under a window they
/// start later for the last ones. Scores outside of a vector's reach are not computed. That changes no bit, because a
/// hidden key's weight is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reach<const NQ: usize> {
    pub(crate) start: [usize; NQ],
    pub(crate) end: [usize; NQ],
}

impl<const NQ: usize> Reach<NQ> {
    /// All vectors need all keys.
    pub(crate) fn all(keys: usize) -> Self {
        Self { start: [0; NQ], end: [keys; NQ] }
    }

    /// The same of pairs of keys.
    pub(crate) fn halved(&self) -> Self {
        Self { start: self.start.map(|key| key / 2), end: self.end.map(|key| key.div_ceil(2)) }
    }

    /// Whether all vectors need all keys.
    #[inline(always)]
    pub(super) fn is_all(&self, keys: usize) -> bool {
        self.start[NQ - 1] == 0 && self.end[0] == keys
    }

    /// Calls `f` with runs of keys in order, and how many vectors to leave out at the front and at the back.
    #[inline(always)]
    pub(crate) fn runs(&self, mut f: impl FnMut(core::ops::Range<usize>, usize, usize)) {
        if self.start[NQ - 1] > self.end[0] {
            // In ranges so narrow that not all vectors need any key, the left edge is not worth a run of its own.
            f(self.start[0]..self.end[0].max(self.start[0]), 0, 0);
        } else {
            for n in 1..NQ {
                f(self.start[n - 1]..self.start[n], 0, NQ - n);
            }
            f(self.start[NQ - 1]..self.end[0], 0, 0);
        }
        for n in 1..NQ {
            f(self.end[n - 1].max(self.start[0])..self.end[n], n, 0);
        }
    }

    /// The run of keys that begins at `key`: its end, at most `limit`, and how many vectors to leave out at the front
    /// and at the back. The runs are those of [`runs`](Self::runs); between them and at both ends no vector needs any
    /// key.
    #[inline(always)]
    pub(super) fn run_from(&self, key: usize, limit: usize) -> (usize, usize, usize) {
        let narrow = self.start[NQ - 1] > self.end[0];
        let starts = if narrow { [self.start[0]; NQ] } else { self.start };
        let (mut end, mut front, mut back) = (limit, 0, 0);
        for n in 0..NQ {
            front += usize::from(self.end[n] <= key);
            back += usize::from(starts[n] > key);
            for edge in [self.end[n], starts[n]] {
                if edge > key {
                    end = end.min(edge);
                }
            }
        }
        (end, front, back)
    }

    /// How many vectors to leave out, at the front and at the back, for a few keys from `first` on; `None` where none
    /// needs them.
    #[inline(always)]
    pub(super) fn for_keys(&self, first: usize, count: usize) -> Option<(usize, usize)> {
        let front = self.end.iter().filter(|&&end| end <= first).count();
        let back = self.start.iter().filter(|&&start| start >= first + count).count();
        match (front, back) {
            _ if front == NQ || back == NQ => None,
            (0, back) => Some((0, back)),
            (front, _) => Some((front, 0)),
        }
    }
}

/// Calls a function with the constants FRONT and BACK that equal the two counts, of which at most one is above 0.
macro_rules! with_vectors {
    ($front:expr, $back:expr, $NQ:ident, $FRONT:ident, $BACK:ident => $body:expr) => {
        with_vectors!(@arms $front, $back, $NQ, $FRONT, $BACK, $body, [0 0] [1 0] [2 0] [3 0] [0 1] [0 2] [0 3])
    };
    (@arms $front:expr, $back:expr, $NQ:ident, $FRONT:ident, $BACK:ident, $body:expr, $([$f:literal $b:literal])*) => {
        match ($front, $back) {
            $(($f, $b) if $f + $b < $NQ => {
                const $FRONT: usize = $f;
                const $BACK: usize = $b;
                $body
            })*
            _ => {}
        }
    };
}
pub(crate) use with_vectors;

#[cfg(test)]
mod tests {
    use super::*;

    /// Which keys belong to which run, as `(front, back)` of each key.
    fn by_runs(reach: &Reach<3>, keys: usize) -> Vec<Option<(usize, usize)>> {
        let mut all = vec![None; keys];
        reach.runs(|run, front, back| all[run].fill(Some((front, back))));
        all
    }

    #[test]
    fn a_run_from_any_key_is_the_rest_of_one_of_the_runs() {
        const KEYS: usize = if cfg!(miri) { 2 } else { 6 }; // all ways to set six edges; Miri would take an hour
        const EDGES: usize = KEYS + 1;
        let mut seen = 0;
        for code in 0..EDGES.pow(6) {
            let at = |n: u32| code / EDGES.pow(n) % EDGES;
            let reach = Reach { start: [at(0), at(1), at(2)], end: [at(3), at(4), at(5)] };
            let grow = |edges: [usize; 3]| edges.is_sorted();
            if !grow(reach.start) || !grow(reach.end) || (0..3).any(|n| reach.start[n] > reach.end[n]) {
                continue;
            }
            let expected = by_runs(&reach, KEYS);
            for first in 0..KEYS {
                let (end, front, back) = reach.run_from(first, KEYS);
                assert!(first < end && end <= KEYS, "{reach:?}");
                let found = (front < 3 && back < 3).then_some((front, back));
                for key in first..end {
                    assert_eq!(found, expected[key], "key {key} of the run from {first}, {reach:?}");
                }
                seen += 1;
            }
        }
        assert!(seen > EDGES.pow(4), "{seen}");
    }
}
