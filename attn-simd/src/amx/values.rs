//! The value product of a block, a group of chunks behind the scores: which weights wait, and when they are multiplied.

use super::layout::Layout;
use super::product::{AmxUnit, Operand, square};

/// Which weights wait for their values: a group of neighbouring chunks is multiplied at once.
pub(crate) struct Values {
    /// The group that is being written: its number, its chunks so far.
    open: Option<(usize, core::ops::Range<usize>)>,
    /// The group that is complete: the same, and the next piece of the output.
    ready: Option<(usize, core::ops::Range<usize>, usize)>,
    /// Where the open group's weights are; the other buffer holds those of the ready one.
    buffer: usize,
}

impl Values {
    /// Nothing waits.
    pub(crate) fn new() -> Self {
        Self { open: None, ready: None, buffer: 0 }
    }

    /// Makes room for the weights of a chunk; returns how many pieces of the ready group should be multiplied
    /// meanwhile.
    #[inline(always)]
    pub(crate) fn turn_to(
        &mut self,
        chunk: usize,
        unit: &mut dyn AmxUnit,
        layout: &Layout,
        v: &[Operand],
        p: &[&mut [Operand]; 2],
        out: &mut [f32],
    ) -> usize {
        let group = chunk >> layout.method.chunks_log2();
        match &mut self.open {
            Some((open, chunks)) if *open == group => chunks.end = chunk + 1,
            _ => {
                while self.ready.is_some() {
                    self.piece(unit, layout, v, p, out);
                }
                self.ready = self.open.take().map(|(group, chunks)| (group, chunks, 0));
                self.open = Some((group, chunk..chunk + 1));
                self.buffer = 1 - self.buffer;
            }
        }
        let Some((.., next)) = self.ready else { return 0 };
        let left = layout.pieces - next;
        // The one or two chunks of a group share the work on the one before.
        if (chunk + 1) & (layout.method.chunks() - 1) == 0 { left } else { left.div_ceil(2) }
    }

    /// The tiles for the weights of a chunk of the open group.
    #[inline(always)]
    pub(crate) fn weights<'p>(
        &self,
        layout: &Layout,
        chunk: usize,
        p: &'p mut [&mut [Operand]; 2],
    ) -> &'p mut [Operand] {
        let parts = 2 * layout.method.p_parts();
        &mut p[self.buffer][(chunk & (layout.method.chunks() - 1)) * parts..][..parts]
    }

    /// Multiplies the next piece of the ready group.
    #[inline(always)]
    pub(crate) fn piece(
        &mut self,
        unit: &mut dyn AmxUnit,
        layout: &Layout,
        v: &[Operand],
        p: &[&mut [Operand]; 2],
        out: &mut [f32],
    ) {
        let Some((_, chunks, piece)) = &mut self.ready else { return };
        if *piece < layout.pieces {
            multiply_values(unit, layout, chunks.clone(), *piece, v, p[1 - self.buffer], out);
            *piece += 1;
        }
        if *piece == layout.pieces {
            self.ready = None;
        }
    }

    /// Multiplies the rest: the ready group, and what there is of the open one.
    #[inline(always)]
    pub(crate) fn all(
        &mut self,
        unit: &mut dyn AmxUnit,
        layout: &Layout,
        v: &[Operand],
        p: &[&mut [Operand]; 2],
        out: &mut [f32],
    ) {
        while self.ready.is_some() {
            self.piece(unit, layout, v, p, out);
        }
        if let Some((_, chunks)) = &mut self.open {
            for piece in 0..layout.pieces {
                multiply_values(unit, layout, chunks.clone(), piece, v, p[self.buffer], out);
            }
            chunks.start = chunks.end;
        }
    }
}

/// `o[piece] += v·p` over some chunks of one group.
#[inline(always)]
fn multiply_values(
    unit: &mut dyn AmxUnit,
    layout: &Layout,
    chunks: core::ops::Range<usize>,
    piece: usize,
    v: &[Operand],
    p: &[Operand],
    out: &mut [f32],
) {
    if !chunks.is_empty() {
        let p = &p[(chunks.start & (layout.method.chunks() - 1)) * 2 * layout.method.p_parts()..];
        let v = &v[layout.v_start(chunks.start, piece)..];
        unit.block(layout.method.values, v, p, chunks.len(), false, square(out, piece));
    }
}
