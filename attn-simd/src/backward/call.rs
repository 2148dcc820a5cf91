//! A running backward call: its options and inputs, the parts that threads compute, and the sums of a head.

use core::fmt;

use attn_core::{AttnError, Result, ViewMut};

use super::bias::{Piece, Pieces};
use super::buffers::{Buffers, Sums, of_keys};
use super::heads::Heads;
use super::job::Job;
use super::output::Writing;
use super::sinks::SinksCall;
use super::sweep;
use crate::queue::Rows;
use crate::workspace::Line;

/// A backward call, cut into parts. One thread computes each part, and no bit of the gradients depends on which.
///
/// A part has rows of `dq` of its own, and sums of `dk` and `dv` over those rows. The sums of a key/value head are
/// those of its parts, added up in their order.
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

    /// Parts of each key/value head. Those of head `n` of all batch entries start at `n · parts_of_head`.
    pub fn parts_of_head(&self) -> usize {
        self.0.layout.parts
    }

    /// Floats of `dq` of a part; 0 if there is no such part. Those of part `n` follow on those of part `n − 1`.
    pub fn dq_len(&self, part: usize) -> usize {
        if part < self.parts() { self.0.dq_len(part) } else { 0 }
    }

    /// Lines of the sums of `dk` and `dv` of a part, and of a head.
    pub fn sum_lines(&self) -> usize {
        self.0.layout.sum_lines()
    }

    /// Lines of scratch of one thread.
    pub fn scratch_lines(&self) -> usize {
        self.0.layout.scratch.lines()
    }

    /// Computes a part: its rows of `dq`, and its sums of `dk` and `dv`. The old contents of all three slices are not
    /// read. The sums of the first part of a head may be computed in the place of the head's; those of another part are
    /// written for the keys that it sees, and only [`add`](Self::add) can read them.
    ///
    /// # Errors
    /// [`AttnError::Index`] if there is no such part, [`AttnError::Size`] or [`AttnError::TooShort`] where slices do
    /// not fit, [`AttnError::Unsupported`] where a `score_mod` has no derivative, [`AttnError::Stopped`] as
    /// [`Plan::stop_when`](super::Plan::stop_when) says.
    pub fn compute(&self, part: usize, dq: &mut [f32], sums: &mut [Line], scratch: &mut [Line]) -> Result<()> {
        self.check_part(part)?;
        AttnError::check_size("dq of a part", self.dq_len(part), dq.len())?;
        AttnError::check_len("lines of a part", self.sum_lines(), sums.len())?;
        AttnError::check_len("workspace lines", self.scratch_lines(), scratch.len())?;
        let [dk, dv] = of_keys(sums, &self.0.layout);
        let mut buffers = Buffers::new(scratch, &self.0.layout.scratch);
        let (dim, columns) = (self.0.forward.shape.head_dim, self.0.layout.columns[0]);
        let mut left = dq;
        let mut write = |rows: Rows, from: &[f32]| {
            let (to, rest) = core::mem::take(&mut left).split_at_mut(rows.count * dim);
            let rows = to.chunks_exact_mut(dim.max(1)).zip(from.chunks_exact(columns.max(1)));
            rows.for_each(|(to, from)| to.copy_from_slice(&from[..dim]));
            left = rest;
        };
        sweep::part(&self.0, part, &mut Sums { dq: &mut write, dk, dv }, &mut buffers);
        self.0.forward.unless_stopped()?;
        derivative(buffers.work.known)
    }

    /// Adds the sums of a part to those of its head: of the second part, then of the third, and so on.
    ///
    /// # Errors
    /// [`AttnError::Index`] if there is no such part, [`AttnError::TooShort`] if lines are too few.
    pub fn add(&self, part: usize, head: &mut [Line], sums: &mut [Line]) -> Result<()> {
        self.check_part(part)?;
        AttnError::check_len("lines of a head", self.sum_lines(), head.len())?;
        AttnError::check_len("lines of a part", self.sum_lines(), sums.len())?;
        let (layout, keys) = (&self.0.layout, self.0.keys(part));
        let arrays = of_keys(head, layout).into_iter().zip(of_keys(sums, layout));
        for ((to, from), columns) in arrays.zip(layout.columns) {
            let range = keys.start * columns..keys.end * columns;
            to[range.clone()].iter_mut().zip(&from[range]).for_each(|(to, from)| *to += from);
        }
        Ok(())
    }

    fn check_part(&self, part: usize) -> Result<()> {
        if part < self.parts() {
            Ok(())
        } else {
            Err(AttnError::Index { what: "part", at: 0, value: part, limit: self.parts() })
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

/// A task of [`Plan::run_with`](super::Plan::run_with) for the caller's threads.
#[derive(Debug)]
pub enum Sweep<'s, 'c> {
    /// Call [`Heads::work`] on any number of threads: the calls share the heads, and a call does nothing if none is
    /// left. It leaves nothing to [`Write`](Self::Write).
    Heads(&'s Heads<'s>),
    /// Compute all parts: each one's `dq` into its place of the floats, and its sums into its head's, which are
    /// [`Call::sum_lines`] for each head ([`Call::compute`], [`Call::add`]).
    Parts(&'s Call<'c>, &'s mut [f32], &'s mut [Line]),
    /// Call [`BiasCall::compute`] once for each piece, and write its result by [`BiasPiece::write`].
    Bias(&'s BiasCall<'s, 'c>, &'s mut ViewMut<'s, f64>),
    /// Call [`SinksCall::compute`] once for each query head, and store its result in that head's place.
    Sinks(&'s SinksCall<'s>, &'s mut [f64]),
    /// Call [`Writing::work`] on any number of threads: the calls share the rows of the gradients, and a call does
    /// nothing if none is left.
    Write(&'s Writing<'s>),
}

/// The gradient of a bias, cut into pieces. One thread computes each piece, and no bit depends on which.
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
    /// As [`Call::compute`].
    pub fn compute<'s>(&'s self, piece: usize, scratch: &'s mut [Line]) -> Result<BiasPiece<'s>> {
        if piece >= self.pieces() {
            return Err(AttnError::Index { what: "piece", at: 0, value: piece, limit: self.pieces() });
        }
        AttnError::check_len("workspace lines", self.scratch_lines(), scratch.len())?;
        let mut buffers = Buffers::new(scratch, &self.0.call.layout.scratch);
        let piece = self.0.piece(piece);
        sweep::piece(&self.0, &piece, &mut buffers);
        self.0.call.forward.unless_stopped()?;
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
    /// Writes it to its place.
    pub fn write(&self, to: &mut ViewMut<'_, f64>) {
        self.pieces.write(&self.piece, self.sums, to);
    }
}
