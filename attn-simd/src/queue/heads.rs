//! Gradients that several threads write, handed out by key/value head: each head exactly once, with its rows of `dk`
//! and `dv`, and the rows of `dq` of the query heads that share it.

#![allow(
    unsafe_code,
    reason = "the leaf: rows of three tensors written by several threads, through claims that are apart"
)]

use core::sync::atomic::{AtomicUsize, Ordering};

use attn_core::backward::Gradients;
use attn_core::{AttnShape, Element};

use super::rows::RowClaim;
use super::{RawView, Rows};

/// The gradients of q, k and v of all key/value heads.
#[derive(Debug)]
pub(crate) struct HeadQueue<'o, T> {
    dq: RawView<'o, T>,
    /// `dk` and `dv`.
    keys: [RawView<'o, T>; 2],
    shape: AttnShape,
    next: AtomicUsize,
}

impl<'o, T: Element> HeadQueue<'o, T> {
    /// The sizes have been checked against the shape.
    pub(crate) fn new(gradients: Gradients<'o, T>, shape: AttnShape) -> Self {
        assert!(gradients.check(&shape).is_ok(), "checked by the caller");
        let Gradients { dq, dk, dv, .. } = gradients;
        Self { dq: RawView::new(dq), keys: [dk, dv].map(RawView::new), shape, next: AtomicUsize::new(0) }
    }

    /// The next head that nobody has, if any.
    pub(crate) fn claim(&self) -> Option<HeadClaim<'_, 'o, T>> {
        let count = self.shape.batch * self.shape.kv_heads;
        // Relaxed is enough: the counter alone hands out heads, and the end of the call joins the threads.
        let number = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < count).then(|| n + 1));
        number.ok().map(|number| HeadClaim { queue: self, number })
    }
}

/// The exclusive right to write the gradients of one key/value head.
#[derive(Debug)]
pub(crate) struct HeadClaim<'q, 'o, T> {
    queue: &'q HeadQueue<'o, T>,
    number: usize,
}

impl<'o, T: Element> HeadClaim<'_, 'o, T> {
    /// Number of the head among those of all batch entries.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    /// Some rows of `dq` of a query head that shares this one.
    pub(crate) fn queries(&mut self, rows: Rows) -> RowClaim<'_, 'o, T> {
        let shape = &self.queue.shape;
        assert!(rows.head < shape.q_heads && rows.count <= shape.q_len && rows.first <= shape.q_len - rows.count);
        assert_eq!((rows.batch, shape.kv_head(rows.head)), self.place(), "another head's rows");
        // SAFETY: the rows lie inside the view, as was just asserted, and belong to this head, which was claimed once.
        // The claim of rows borrows this one exclusively, so that no two of them exist at once.
        unsafe { RowClaim::of(&self.queue.dq, rows, shape.head_dim) }
    }

    /// All rows of `dk` (0) or `dv` (1).
    pub(crate) fn keys(&mut self, which: usize) -> RowClaim<'_, 'o, T> {
        let (shape, (batch, head)) = (&self.queue.shape, self.place());
        let rows = Rows { batch, head, first: 0, count: shape.kv_len };
        // SAFETY: these are the rows of this head, and as above.
        unsafe { RowClaim::of(&self.queue.keys[which], rows, [shape.head_dim, shape.value_dim][which]) }
    }

    /// Batch entry and key/value head.
    fn place(&self) -> (usize, usize) {
        let kv_heads = self.queue.shape.kv_heads;
        (self.number / kv_heads, self.number % kv_heads)
    }
}

#[cfg(test)]
mod tests {
    use std::vec;

    use attn_core::{Layout, ViewMut};

    use super::*;

    #[test]
    fn every_head_is_claimed_exactly_once_and_written_in_its_place() {
        let shape = AttnShape { batch: 2, q_heads: 6, kv_heads: 3, q_len: 5, kv_len: 4, head_dim: 3, value_dim: 2 };
        let sizes = [[2, 6, 5, 3], [2, 3, 4, 3], [2, 3, 4, 2]];
        for layout in [Layout::Bhsd, Layout::Bshd] {
            let [mut dq, mut dk, mut dv] = sizes.map(|sizes| vec![-1.0f32; sizes.iter().product()]);
            let to = |data, sizes| ViewMut::new(data, layout, sizes).unwrap();
            let gradients = Gradients::new(to(&mut dq, sizes[0]), to(&mut dk, sizes[1]), to(&mut dv, sizes[2]));
            let queue = HeadQueue::new(gradients, shape);
            let mut count = 0;
            while let Some(mut head) = queue.claim() {
                assert_eq!(head.number(), count);
                let (batch, kv_head) = (count / 3, count % 3);
                for query_head in [2 * kv_head, 2 * kv_head + 1] {
                    for (first, some) in [(0, 2), (2, 3)] {
                        let mut rows = head.queries(Rows { batch, head: query_head, first, count: some });
                        (0..some).for_each(|n| rows.write(n, |_| (100 * batch + 10 * query_head + first + n) as f32));
                    }
                }
                for which in 0..2 {
                    let mut rows = head.keys(which);
                    (0..4).for_each(|n| rows.write(n, |_| (100 * batch + 10 * kv_head + n) as f32));
                }
                count += 1;
            }
            assert_eq!(count, 6);
            for (data, sizes) in [dq, dk, dv].iter().zip(sizes) {
                let view = attn_core::View::new(data, layout, sizes).unwrap();
                for n in 0..sizes[0] * sizes[1] * sizes[2] {
                    let [b, h, r] = [n / (sizes[1] * sizes[2]), n / sizes[2] % sizes[1], n % sizes[2]];
                    (0..sizes[3]).for_each(|c| assert_eq!(view.row(b, h, r).get(c), (100 * b + 10 * h + r) as f32));
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "another head's rows")]
    fn rows_of_another_head_are_refused() {
        let shape = AttnShape { batch: 1, q_heads: 2, kv_heads: 2, q_len: 1, kv_len: 1, head_dim: 1, value_dim: 1 };
        let [mut dq, mut dk, mut dv] = [[0.0f32; 2]; 3];
        let [dq, dk, dv] = [&mut dq, &mut dk, &mut dv].map(|to| ViewMut::new(to, Layout::Bhsd, [1, 2, 1, 1]).unwrap());
        let queue = HeadQueue::new(Gradients::new(dq, dk, dv), shape);
        queue.claim().unwrap().queries(Rows { batch: 0, head: 1, first: 0, count: 1 });
    }
}
