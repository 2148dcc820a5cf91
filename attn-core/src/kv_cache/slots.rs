//! Which slot of a ring with sinks holds which token.
//!
//! ```text
//! sinks = 2, window = 4, after token 8:      slots   0 1 | 6 7 8 5     (5 is the next to go)
//!                                            logical 0 1   5 6 7 8
//! ```

use crate::error::{AttnError, Result};

/// The sizes of a ring: the slots behind the sinks are used in turn, so that nothing is ever moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slots {
    sinks: usize,
    window: usize,
}

/// The tokens that one sequence holds. The division is done once, not for each key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    slots: Slots,
    /// How many there are.
    pub(crate) len: usize,
    /// Tokens behind the sinks that were overwritten.
    gone: usize,
    /// The ring's slot of the oldest token behind the sinks.
    first: usize,
}

impl Slots {
    /// Checks the sizes against the slots that there are.
    pub(crate) fn new(sinks: usize, window: usize, slots: usize) -> Result<Self> {
        if window == 0 {
            return Err(AttnError::Option { name: "ring window", must: "above 0: a token sees itself" });
        }
        let needed = sinks.checked_add(window).ok_or(AttnError::Overflow { what: "sinks + window" })?;
        AttnError::check_len("ring slots (sinks + window)", needed, slots)?;
        Ok(Self { sinks, window })
    }

    /// Tokens held at most.
    pub(crate) fn most(&self) -> usize {
        self.sinks + self.window // fits: checked by `new`
    }

    /// The slot that the token at a place in the stream goes to.
    pub(crate) fn of_position(&self, position: usize) -> usize {
        match position.checked_sub(self.sinks) {
            None => position,
            Some(after) => self.sinks + after.checked_rem(self.window).unwrap_or(0),
        }
    }

    /// The numbers of tokens held, ascending, while `n ≥ 0` more are taken one by one after `seen`.
    pub(crate) fn lengths(&self, seen: usize, n: usize) -> impl Iterator<Item = usize> + use<> {
        let most = self.most();
        let (first, last) = (seen.saturating_add(1).min(most), seen.saturating_add(n).min(most));
        (first..=last).take(n)
    }

    /// What is held once so many tokens have been seen.
    pub(crate) fn held(&self, seen: usize) -> Held {
        let gone = seen.saturating_sub(self.most());
        Held { slots: *self, len: seen.min(self.most()), gone, first: gone.checked_rem(self.window).unwrap_or(0) }
    }
}

impl Held {
    /// The slot of the `i`-th token, by ascending place in the stream, `i < len`.
    #[inline]
    pub(crate) fn slot(&self, i: usize) -> usize {
        let Slots { sinks, window } = self.slots;
        match i.checked_sub(sinks) {
            None => i,
            Some(after) => {
                let ahead = after.wrapping_add(self.first);
                sinks.wrapping_add(if ahead >= window { ahead.wrapping_sub(window) } else { ahead })
            }
        }
    }

    /// How many tokens from the `i`-th on are in neighbouring slots, if there are so many.
    #[inline]
    pub(crate) fn side_by_side(&self, i: usize) -> usize {
        let end = if i < self.slots.sinks { self.slots.sinks } else { self.slots.most() };
        end.wrapping_sub(self.slot(i))
    }

    /// The place in the stream of the `i`-th token.
    pub(crate) fn position(&self, i: usize) -> usize {
        if i < self.slots.sinks { i } else { self.gone.saturating_add(i) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec::Vec;

    /// By simulation: each token goes to its slot, and what is held is read back.
    #[test]
    fn what_is_held_is_what_was_put_there_last() {
        for (sinks, window) in [(0, 1), (0, 4), (2, 3), (3, 1), (5, 2)] {
            let slots = Slots::new(sinks, window, sinks + window).unwrap();
            let mut memory = [usize::MAX; 8];
            for token in 0..30 {
                memory[slots.of_position(token)] = token;
                let held = slots.held(token + 1);
                let places: Vec<_> = (0..held.len).map(|i| held.position(i)).collect();
                let found: Vec<_> = (0..held.len).map(|i| memory[held.slot(i)]).collect();
                let want: Vec<_> = (0..=token).filter(|&j| token - j < window || j < sinks).collect();
                assert_eq!((&places, &found), (&want, &want), "sinks {sinks}, window {window}, token {token}");
                for i in 0..held.len {
                    let run = held.side_by_side(i).min(held.len - i);
                    assert!(run > 0 && (0..run).all(|n| held.slot(i + n) == held.slot(i) + n));
                }
            }
        }
    }
}
