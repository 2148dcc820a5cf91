//! Memory for tokens: numbers as they are, or bytes of a [format](crate::formats).

use super::checks::copy_token;
use crate::element::Element;
use crate::view::{View, ViewMut};

/// The keys, or the values, of a cache: rows by their index on the first axis, head and slot.
pub(crate) trait Memory<T: Element> {
    /// `[batch or pages, kv_heads, slots, dim]`, dim in numbers.
    fn of_numbers(&self) -> [usize; 4];

    /// Writes token `from.1` of sequence `from.0` to row `to.1` of `to.0`, all heads.
    fn store(&mut self, x: View<'_, T>, from: (usize, usize), to: (usize, usize));
}

impl<T: Element> Memory<T> for ViewMut<'_, T> {
    #[inline]
    fn of_numbers(&self) -> [usize; 4] {
        self.sizes()
    }

    #[inline]
    fn store(&mut self, x: View<'_, T>, from: (usize, usize), to: (usize, usize)) {
        copy_token(x, from, self, to);
    }
}
