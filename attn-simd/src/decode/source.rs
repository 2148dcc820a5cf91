//! Where a decode call finds keys and values: any cache of any element type.

use attn_core::half::{bf16, f16};
use attn_core::int8::QuantizedView;
use attn_core::kv_cache::{CacheRope, CacheView};
use attn_core::{AttnError, AttnShape, Dtype, Result, View};

use crate::input::KernelElement;
use crate::isa::Isa;
use crate::isa::rows::{self, Starts, Stored, TILE, Unchecked};
use crate::level::{Level, Run};
use crate::workspace::elements_of;

/// A cache of any element type that the kernels read.
#[derive(Clone, Copy, Debug)]
pub enum Source<'c> {
    /// Single precision.
    F32(CacheView<'c, f32>),
    /// Half precision.
    F16(CacheView<'c, f16>),
    /// bfloat16.
    Bf16(CacheView<'c, bf16>),
    /// int8 with scales.
    I8(QuantizedView<'c>),
}

impl<'c, T: KernelElement> From<CacheView<'c, T>> for Source<'c> {
    fn from(cache: CacheView<'c, T>) -> Self {
        T::source(cache)
    }
}

impl<'c> From<QuantizedView<'c>> for Source<'c> {
    fn from(cache: QuantizedView<'c>) -> Self {
        Self::I8(cache)
    }
}

/// Evaluates an expression with the cache of numbers that a source is.
macro_rules! numbers {
    ($source:expr, $cache:ident => $body:expr) => {
        match $source {
            Source::F32($cache) => $body,
            Source::F16($cache) => $body,
            Source::Bf16($cache) => $body,
            Source::I8(quantized) => {
                let $cache = quantized.numbers();
                $body
            }
        }
    };
}

impl<'c> Source<'c> {
    /// Which type it holds; `None` for int8, which is no type of a tensor.
    pub fn dtype(&self) -> Option<Dtype> {
        match self {
            Self::F32(_) => Some(Dtype::F32),
            Self::F16(_) => Some(Dtype::F16),
            Self::Bf16(_) => Some(Dtype::Bf16),
            Self::I8(_) => None,
        }
    }

    /// Bytes of a token of one head: its key and its value, with scales of their own.
    pub fn token_bytes(&self) -> usize {
        let numbers = numbers!(self, cache => cache.k().sizes()[3].saturating_add(cache.v().sizes()[3]));
        let (element, scales) = self.dtype().map_or((1, 2 * size_of::<f32>()), |dtype| (dtype.bytes(), 0));
        numbers.saturating_mul(element).saturating_add(scales)
    }

    /// Sequences.
    pub fn batch(&self) -> usize {
        numbers!(self, cache => cache.batch())
    }

    /// Tokens of one sequence.
    pub(super) fn len(&self, sequence: usize) -> usize {
        numbers!(self, cache => cache.len(sequence))
    }

    /// The number of the first token that is there.
    pub(super) fn first(&self) -> usize {
        numbers!(self, cache => cache.first())
    }

    /// The same tokens, numbered as the continuation of others.
    pub(super) fn after(self, before: usize) -> Result<Self> {
        Ok(match self {
            Self::F32(cache) => Self::F32(cache.after(before)?),
            Self::F16(cache) => Self::F16(cache.after(before)?),
            Self::Bf16(cache) => Self::Bf16(cache.after(before)?),
            Self::I8(cache) => Self::I8(cache.after(before)?),
        })
    }

    /// Sizes of k or v without their third: rows, heads, dims.
    pub(super) fn sizes(&self) -> [usize; 3] {
        numbers!(self, cache => {
            let ([_, heads, _, head_dim], [.., value_dim]) = (cache.k().sizes(), cache.v().sizes());
            [heads, head_dim, value_dim]
        })
    }

    /// [`CacheView::shape`].
    pub(super) fn shape(&self, q: [usize; 4]) -> Result<AttnShape> {
        numbers!(self, cache => cache.shape(q))
    }

    /// Whether a ring has dropped tokens of a sequence.
    pub(super) fn has_dropped(&self, sequence: usize) -> bool {
        numbers!(self, cache => cache.has_dropped(sequence))
    }

    /// Checks the tables of a shared prefix against those of what follows it: the same queries meet both, and stand
    /// behind both.
    pub(super) fn check_rope_before(&self, behind: &Self) -> Result<()> {
        let rows = |source: &Self| match numbers!(source, cache => cache.rope())? {
            CacheRope::Single(tables) => Some(tables.sizes()[2]),
            CacheRope::Double(tables) => Some(tables.sizes()[2]),
        };
        match (rows(self), rows(behind)) {
            (None, None) => Ok(()),
            (Some(rows), Some(_)) => {
                let longest = (0..behind.batch()).map(|sequence| behind.len(sequence)).max().unwrap_or(0);
                AttnError::check_len("rope tables of a shared prefix (tokens of the longest sequence)", longest, rows)
            }
            _ => Err(AttnError::Unsupported {
                what: "rope tables for only one of a shared prefix and the cache behind it",
            }),
        }
    }

    /// Refuses tables that the kernels do not read.
    pub(super) fn check(&self) -> Result<()> {
        match numbers!(self, cache => cache.rope()) {
            Some(CacheRope::Double(_)) => {
                Err(AttnError::Unsupported { what: "rope tables of f64 for a cache of another type" })
            }
            _ => Ok(()),
        }
    }
}

/// The rows of one head of k or of v, tile by tile.
pub(super) struct Located<'s, 'c, T> {
    cache: &'s CacheView<'c, T>,
    view: View<'c, T>,
    sequence: usize,
    head: usize,
    /// Columns rounded up to whole vectors.
    padded: usize,
    /// Whether rows can be read where they lie: in whole vectors, side by side.
    direct: bool,
    /// Index of each row's first element, of two tiles in turn.
    starts: Starts,
    /// Where the present tile's are.
    base: usize,
}

/// [`rows::evenly`] by itself.
struct Evenly<'a> {
    starts: &'a mut [usize; TILE],
    first: usize,
    step: isize,
    len: usize,
}

impl Run<()> for Evenly<'_> {
    #[inline(always)]
    fn run<I: Isa>(self, _: I) {
        rows::evenly(self.starts, self.first, self.step, self.len);
    }
}

impl<'s, 'c, T: Stored> Located<'s, 'c, T> {
    /// Begins with a tile of `tokens` rows from a token on.
    pub(super) fn new(
        level: Level,
        cache: &'s CacheView<'c, T>,
        view: View<'c, T>,
        [sequence, head]: [usize; 2],
        padded: usize,
        (token, tokens): (usize, usize),
    ) -> Self {
        let ([.., columns], [.., unit]) = (view.sizes(), view.strides());
        let direct = unit == 1 && columns > 0 && columns.is_multiple_of(level.lanes());
        let mut this = Self { cache, view, sequence, head, padded, direct, starts: [0; 2 * TILE], base: TILE };
        this.find_next(level, token, tokens);
        this.advance();
        this
    }

    /// Finds the rows of the tile after this one: `tokens` from a token on.
    pub(super) fn find_next(&mut self, level: Level, token: usize, tokens: usize) {
        if !self.direct || tokens == 0 {
            return;
        }
        let [row_step, head_step, slot_step, _] = self.view.strides();
        let step = |n: usize, stride: isize| (n as isize).wrapping_mul(stride);
        let head = self.view.offset().wrapping_add_signed(step(self.head, head_step));
        let Some((starts, _)) = self.starts[TILE - self.base..].split_first_chunk_mut::<TILE>() else { return };
        let mut done = 0;
        while done < tokens {
            let Some(run) = self.cache.run(self.sequence, token + done) else {
                // Tokens whose page was given back are hidden: any row will do for them.
                let gone = self.cache.evicted(self.sequence, token + done);
                // One that is not there has no place: it starts outside of every slice, which the reading door refuses.
                starts[done..].fill(if gone > 0 { head } else { usize::MAX });
                if gone == 0 {
                    return;
                }
                done += gone;
                continue;
            };
            let len = run.len.min(tokens - done);
            let first =
                head.wrapping_add_signed(step(run.row, row_step)).wrapping_add_signed(step(run.slot, slot_step));
            if done == 0 {
                // Usually the whole tile; else what follows is written over.
                level.run(Evenly { starts, first, step: slot_step, len });
            } else {
                for (n, start) in starts[done..].iter_mut().enumerate() {
                    *start = first.wrapping_add_signed(step(n.min(len - 1), slot_step));
                }
            }
            done += len;
        }
    }

    /// Goes on to the next tile.
    pub(super) fn advance(&mut self) {
        self.base = TILE - self.base;
    }

    /// The rows of this tile, which begins at a token: in place, or copied into `scratch`.
    pub(super) fn rows<'r>(&'r mut self, token: usize, tokens: usize, scratch: &'r mut [f32]) -> Unchecked<'r, T> {
        if self.direct {
            let (data, starts, base, columns) = (self.view.data(), &self.starts, self.base, self.padded);
            return Unchecked { data, starts, base, len: tokens, columns };
        }
        let copy = elements_of::<T>(scratch);
        self.starts.fill(0);
        for (n, row) in copy.chunks_exact_mut(self.padded).enumerate().take(tokens) {
            let Some(run) = self.cache.run(self.sequence, token + n) else { continue };
            let src = self.view.row(run.row, self.head, run.slot);
            match src.as_slice() {
                Some(slice) => row[..slice.len()].copy_from_slice(slice),
                None => row.iter_mut().zip(src.iter()).for_each(|(d, x)| *d = x),
            }
            row[src.len()..].fill(T::default());
            self.starts[n] = n * self.padded;
        }
        Unchecked { data: copy, starts: &self.starts, base: 0, len: tokens, columns: self.padded }
    }
}

const _: () = assert!(TILE == crate::tiles::KV_TILE, "a word of mask bits is a tile");
