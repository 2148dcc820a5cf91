//! Memory that a cluster keeps from call to call: fresh pages cost more than some kernels.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::{Pod, cast_slice, cast_slice_mut};

/// Buffers that nobody uses at the moment.
#[derive(Default)]
pub(crate) struct Scratch {
    free: RefCell<Vec<Vec<u64>>>,
}

/// A buffer, until it is dropped.
pub(crate) struct Lent<'s, T> {
    home: &'s Scratch,
    words: Vec<u64>,
    len: usize,
    of: PhantomData<T>,
}

impl Scratch {
    /// A buffer of so many numbers, whatever they are.
    pub(crate) fn lend<T: Pod>(&self, len: usize) -> Lent<'_, T> {
        const { assert!(align_of::<T>() <= align_of::<u64>()) };
        let needed = (len * size_of::<T>()).div_ceil(size_of::<u64>());
        let mut free = self.free.borrow_mut();
        // The smallest that is large enough, or else the largest, which is replaced.
        let fits = (0..free.len()).filter(|&n| free[n].len() >= needed).min_by_key(|&n| free[n].len());
        let found = fits.or_else(|| (0..free.len()).max_by_key(|&n| free[n].len()));
        let mut words = found.map(|n| free.swap_remove(n)).unwrap_or_default();
        if words.len() < needed {
            drop(words); // before the other is there
            words = vec![0; needed];
        }
        Lent { home: self, words, len, of: PhantomData }
    }

    /// A buffer of zeros.
    pub(crate) fn zeros<T: Pod>(&self, len: usize) -> Lent<'_, T> {
        let mut lent = self.lend(len);
        lent.fill(T::zeroed());
        lent
    }
}

impl<T: Pod> Deref for Lent<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        let bytes: &[u8] = cast_slice(&self.words);
        cast_slice(&bytes[..self.len * size_of::<T>()])
    }
}

impl<T: Pod> DerefMut for Lent<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes: &mut [u8] = cast_slice_mut(&mut self.words);
        cast_slice_mut(&mut bytes[..self.len * size_of::<T>()])
    }
}

impl<T> Drop for Lent<'_, T> {
    fn drop(&mut self) {
        self.home.free.borrow_mut().push(std::mem::take(&mut self.words));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_come_back_and_fit() {
        let scratch = Scratch::default();
        let (large, small) = (scratch.zeros::<f32>(1000), scratch.lend::<u8>(3));
        assert_eq!((large.len(), small.len()), (1000, 3));
        let place = large.as_ptr();
        drop((large, small));
        let (small, large) = (scratch.lend::<u16>(2), scratch.lend::<f64>(400));
        assert_eq!((large.as_ptr().cast(), large.len(), small.len()), (place, 400, 2));
        assert!(scratch.free.borrow().is_empty());
        drop((large, small));
        assert!(scratch.zeros::<u8>(0).is_empty() && scratch.free.borrow().len() == 2);
    }
}
