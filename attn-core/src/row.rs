//! One row of a [`View`](crate::View): the numbers of a query, a key or a value.

/// One row of a view: `len` elements a stride apart.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) start: usize,
    pub(crate) stride: isize,
    pub(crate) len: usize,
}

impl<'a, T: Copy> Row<'a, T> {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The row as a slice, if it is empty or its stride is 1.
    #[inline]
    pub fn as_slice(&self) -> Option<&'a [T]> {
        if self.len == 0 {
            return Some(&[]);
        }
        if self.stride != 1 {
            return None;
        }
        self.data.get(self.start..)?.get(..self.len)
    }

    /// The elements in order.
    #[inline]
    pub fn iter(self) -> impl Iterator<Item = T> + 'a {
        let Row { data, start, stride, len } = self;
        let mut index = start;
        (0..len).map_while(move |_| {
            let x = data.get(index).copied();
            index = index.wrapping_add_signed(stride);
            x
        })
    }
}

impl<T: Copy + Default> Row<'_, T> {
    /// One element; the type's zero if `i` is outside.
    #[inline]
    pub fn get(&self, i: usize) -> T {
        if i >= self.len {
            return T::default();
        }
        let index = self.start.wrapping_add_signed((i as isize).wrapping_mul(self.stride));
        self.data.get(index).copied().unwrap_or_default()
    }
}
