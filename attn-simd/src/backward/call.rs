//! A running backward call: its options and inputs, the parts that threads compute, and what becomes of their sums.

use core::fmt;

use attn_core::backward::Gradients;
use attn_core::{AttnError, AttnShape, Element, Result, ViewMut};

use super::bias::{Piece, Pieces};
use super::buffers::{Buffers, Sums};
use super::job::{Job, product};
use super::sweep;
use crate::workspace::Line;

/// A backward call, cut into parts. Each part is computed by one thread, into lines of its own, and the bits of the
/// gradients do not depend on which.
pub struct Call<'c>(pub(super) Job<'c>);

impl fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call").field("parts", &self.parts()).finish_non_exhaustive()
    }
}

impl Call<'_> {
    /// Parts in all.
    pub fn parts(&self) -> usize {
        self.0.layout.count()
    }

    /// Lines of the sums of one part.
    pub fn part_lines(&self) -> usize {
        self.0.layout.part_lines()
    }

    /// Lines of scratch of one thread.
    pub fn scratch_lines(&self) -> usize {
        self.0.layout.scratch.lines()
    }

    /// Computes the sums of a part. `scratch` may hold anything.
    ///
    /// # Errors
    /// [`AttnError::Index`] if there is no such part, [`AttnError::TooShort`] where lines are too few,
    /// [`AttnError::Unsupported`] where a `score_mod` has no derivative.
    pub fn compute(&self, part: usize, sums: &mut [Line], scratch: &mut [Line]) -> Result<()> {
        if part >= self.parts() {
            return Err(AttnError::Index { what: "part", at: 0, value: part, limit: self.parts() });
        }
        AttnError::check_len("lines of a part", self.part_lines(), sums.len())?;
        AttnError::check_len("workspace lines", self.scratch_lines(), scratch.len())?;
        let (mut sums, mut buffers) = (Sums::new(sums, &self.0.layout), Buffers::new(scratch, &self.0.layout.scratch));
        sweep::part(&self.0, part, &mut sums, &mut buffers);
        derivative(buffers.work.known)
    }

    /// Adds up the sums of all parts, in order, and writes the gradients, whose sizes have been checked.
    pub(super) fn finish<O: Element>(&self, sums: &mut [Line], gradients: Gradients<'_, O>) {
        let Gradients { mut dq, mut dk, mut dv, sinks, .. } = gradients;
        let (layout, shape) = (&self.0.layout, &self.0.forward.shape);
        if let Some(sinks) = sinks {
            self.sinks(sinks);
        }
        let mut first = 0;
        for lines in sums.chunks_mut((layout.parts * layout.part_lines()).max(1)).take(shape.batch * shape.kv_heads) {
            let mut parts = lines.chunks_exact_mut(layout.part_lines().max(1));
            let Some(lines) = parts.next() else { return };
            let mut all = Sums::new(lines, layout);
            self.write_dq(first, all.dq, &mut dq);
            for (n, lines) in parts.enumerate() {
                let part = Sums::new(lines, layout);
                self.write_dq(first + n + 1, part.dq, &mut dq);
                add(all.dk, part.dk);
                add(all.dv, part.dv);
            }
            let [batch, head, _] = layout.place(first);
            for (to, from, columns, factor) in [
                (&mut dk, &mut all.dk, layout.columns[0], self.0.factor),
                (&mut dv, &mut all.dv, layout.columns[1], 1.0),
            ] {
                let [.., dim] = to.sizes();
                for (key, row) in from.chunks_exact(columns.max(1)).enumerate() {
                    write_row(to, [batch, head, key], &row[..dim], factor);
                }
            }
            first += layout.parts;
        }
    }

    /// Writes the rows of `dq` of a part.
    fn write_dq<O: Element>(&self, part: usize, from: &[f32], to: &mut ViewMut<'_, O>) {
        let mut rows = from.chunks_exact(self.0.forward.shape.head_dim.max(1));
        for block in self.0.layout.blocks(self.0.layout.place(part)) {
            for (n, row) in rows.by_ref().take(block.count).enumerate() {
                write_row(to, [block.batch, block.head, block.first + n], row, self.0.factor);
            }
        }
    }

    /// `dsink = −Σ p_sink·δ` over the rows of a head, in order.
    fn sinks(&self, to: &mut [f64]) {
        to.fill(0.0);
        let (shape, Some(sinks)) = (&self.0.forward.shape, self.0.forward.sinks) else { return };
        let AttnShape { batch, q_heads, q_len, .. } = *shape;
        for b in 0..batch {
            for head in 0..q_heads {
                for query in 0..q_len {
                    let lse = f64::from(self.0.lse[shape.row(b, head, query)]);
                    let product = |channel: usize| {
                        let at = [b, head, query, channel];
                        product(self.0.out.at(at), self.0.dy.at(at))
                    };
                    let delta: f64 = (0..shape.value_dim).map(product).sum();
                    to[head] -= libm::exp(f64::from(sinks[head]) - lse) * delta;
                }
            }
        }
    }
}

/// An error unless every derivative of `score_mod` was known.
fn derivative(known: bool) -> Result<()> {
    if known {
        Ok(())
    } else {
        Err(AttnError::Unsupported { what: "the gradient of a score function without a derivative" })
    }
}

/// What [`Plan::run_with`](super::Plan::run_with) has a caller's threads do.
#[derive(Debug)]
pub enum Sweep<'s, 'c> {
    /// Call [`Call::compute`] once for each part, into lines `part · part_lines` and following.
    Parts(&'s Call<'c>, &'s mut [Line]),
    /// Call [`BiasCall::compute`] once for each piece, and have what it gives written.
    Bias(&'s BiasCall<'s, 'c>, &'s mut ViewMut<'s, f64>),
}

/// The gradient of a bias, cut into pieces. Each is computed by one thread, and no bit depends on which.
pub struct BiasCall<'b, 'c>(Pieces<'b, 'c>);

impl fmt::Debug for BiasCall<'_, '_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BiasCall").field("pieces", &self.pieces()).finish_non_exhaustive()
    }
}

impl<'b, 'c> BiasCall<'b, 'c> {
    /// Of a bias of sizes that broadcast to those of the scores.
    pub(super) fn new(call: &'b Call<'c>, sizes: [usize; 4]) -> Self {
        Self(Pieces::of(&call.0, sizes))
    }

    /// Pieces in all.
    pub fn pieces(&self) -> usize {
        self.0.count()
    }

    /// Lines of scratch of one thread.
    pub fn scratch_lines(&self) -> usize {
        self.0.call.layout.scratch.lines()
    }

    /// Computes a piece, in `scratch`, which may hold anything.
    ///
    /// # Errors
    /// [`AttnError::Index`] if there is no such piece, [`AttnError::TooShort`] where lines are too few.
    pub fn compute<'s>(&'s self, piece: usize, scratch: &'s mut [Line]) -> Result<BiasPiece<'s>> {
        if piece >= self.pieces() {
            return Err(AttnError::Index { what: "piece", at: 0, value: piece, limit: self.pieces() });
        }
        AttnError::check_len("workspace lines", self.scratch_lines(), scratch.len())?;
        let mut buffers = Buffers::new(scratch, &self.0.call.layout.scratch);
        let piece = self.0.piece(piece);
        sweep::piece(&self.0, &piece, &mut buffers);
        derivative(buffers.work.known)?;
        Ok(BiasPiece { pieces: &self.0, piece, sums: buffers.bias_sums })
    }
}

/// A computed piece of the gradient of a bias.
pub struct BiasPiece<'s> {
    pieces: &'s Pieces<'s, 's>,
    piece: Piece,
    sums: &'s [f64],
}

impl fmt::Debug for BiasPiece<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BiasPiece").finish_non_exhaustive()
    }
}

impl BiasPiece<'_> {
    /// Writes it into its place.
    pub fn write(&self, to: &mut ViewMut<'_, f64>) {
        self.pieces.write(&self.piece, self.sums, to);
    }
}

/// `to += from`.
fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

/// Rounds a row, times a factor, into its place.
fn write_row<O: Element>(to: &mut ViewMut<'_, O>, [batch, head, seq]: [usize; 3], row: &[f32], factor: f64) {
    match to.row_mut(batch, head, seq) {
        Some(to) => to.iter_mut().zip(row).for_each(|(to, &x)| *to = O::from_f64(f64::from(x) * factor)),
        None => {
            for (channel, &x) in row.iter().enumerate() {
                to.set(batch, head, seq, channel, O::from_f64(f64::from(x) * factor));
            }
        }
    }
}
