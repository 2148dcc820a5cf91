//! The value product of a block, a group of tiles behind the scores: which weights wait, and when they are multiplied.

use super::layout::Layout;
use super::product::{AmxUnit, Operand, square};

/// Which weights wait for their values: a group of neighbouring tiles is multiplied at once.
pub(crate) struct Values {
    /// The group that is being written: its number, its tiles so far.
    open: Option<(usize, core::ops::Range<usize>)>,
    /// The group that is complete: the same, and the next square of the output.
    ready: Option<(usize, core::ops::Range<usize>, usize)>,
    /// Where the open group's weights are; the other buffer holds those of the ready one.
    buffer: usize,
}

impl Values {
    /// Nothing waits.
    pub(crate) fn new() -> Self {
        Self { open: None, ready: None, buffer: 0 }
    }

    /// Makes room for the weights of a tile; returns how many squares of the ready group should be multiplied
    /// meanwhile.
    pub(crate) fn open_tile(
        &mut self,
        tile: usize,
        unit: &mut dyn AmxUnit,
        layout: &Layout,
        v: &[Operand],
        p: &[&mut [Operand]; 2],
        out: &mut [f32],
    ) -> usize {
        let group = tile >> layout.method.tiles_log2();
        match &mut self.open {
            Some((open, tiles)) if *open == group => tiles.end = tile + 1,
            _ => {
                while self.ready.is_some() {
                    self.next_square(unit, layout, v, p, out);
                }
                self.ready = self.open.take().map(|(group, tiles)| (group, tiles, 0));
                self.open = Some((group, tile..tile + 1));
                self.buffer = 1 - self.buffer;
            }
        }
        let Some((.., next)) = self.ready else { return 0 };
        let left = layout.squares - next;
        // The one or two tiles of a group share the work on the one before.
        if (tile + 1) & (layout.method.tiles() - 1) == 0 { left } else { left.div_ceil(2) }
    }

    /// The operands for the weights of a tile of the open group.
    #[inline(always)]
    pub(crate) fn weights<'p>(
        &self,
        layout: &Layout,
        tile: usize,
        p: &'p mut [&mut [Operand]; 2],
    ) -> &'p mut [Operand] {
        let parts = 2 * layout.method.p_parts();
        &mut p[self.buffer][(tile & (layout.method.tiles() - 1)) * parts..][..parts]
    }

    /// Multiplies the next square of the ready group.
    pub(crate) fn next_square(
        &mut self,
        unit: &mut dyn AmxUnit,
        layout: &Layout,
        v: &[Operand],
        p: &[&mut [Operand]; 2],
        out: &mut [f32],
    ) {
        let Some((_, tiles, nth)) = &mut self.ready else { return };
        if *nth < layout.squares {
            multiply_values(unit, layout, tiles.clone(), *nth, v, p[1 - self.buffer], out);
            *nth += 1;
        }
        if *nth == layout.squares {
            self.ready = None;
        }
    }

    /// Multiplies the rest: the ready group, and what there is of the open one.
    pub(crate) fn all(
        &mut self,
        unit: &mut dyn AmxUnit,
        layout: &Layout,
        v: &[Operand],
        p: &[&mut [Operand]; 2],
        out: &mut [f32],
    ) {
        while self.ready.is_some() {
            self.next_square(unit, layout, v, p, out);
        }
        if let Some((_, tiles)) = &mut self.open {
            for nth in 0..layout.squares {
                multiply_values(unit, layout, tiles.clone(), nth, v, p[self.buffer], out);
            }
            tiles.start = tiles.end;
        }
    }
}

/// `o[square] += v·p` over some tiles of one group.
fn multiply_values(
    unit: &mut dyn AmxUnit,
    layout: &Layout,
    tiles: core::ops::Range<usize>,
    nth: usize,
    v: &[Operand],
    p: &[Operand],
    out: &mut [f32],
) {
    if !tiles.is_empty() {
        let p = &p[(tiles.start & (layout.method.tiles() - 1)) * 2 * layout.method.p_parts()..];
        let v = &v[layout.v_start(tiles.start, nth)..];
        unit.block(layout.method.values, v, p, tiles.len(), false, square(out, nth));
    }
}
