//! Caches: from the kinds of the header to those of `attn_core::kv_cache`.

use attn_core::Element;
use attn_core::half::{bf16, f16};
use attn_core::kv_cache::{AppendCache, CacheView, PagedCache, PagedCacheMut, RingCache};
use attn_core::{AttnError, View, ViewMut};
use attn_simd::Input;
use attn_simd::decode::Source;

use crate::error::{Error, Result};
use crate::types::AttnCacheKind;

/// Where a cache's tokens lie.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place<'a> {
    /// In the first slots of each sequence.
    Slots,
    /// In sinks and a ring.
    Ring {
        /// Tokens kept from the beginning.
        sinks: usize,
        /// Tokens kept from the end.
        window: usize,
    },
    /// In the pages of a table.
    Pages(&'a [i32]),
}

impl<'a> Place<'a> {
    /// By the kind's number. Fields of another kind than the one that is named are refused: whoever set them wants that
    /// one.
    pub(crate) fn of(kind: u32, sinks: usize, window: usize, pages: Option<&'a [i32]>) -> Result<Self> {
        let place = match kind {
            _ if kind == AttnCacheKind::Append as u32 => Self::Slots,
            _ if kind == AttnCacheKind::Ring as u32 => Self::Ring { sinks, window },
            _ if kind == AttnCacheKind::Paged as u32 => Self::Pages(pages.unwrap_or_default()),
            _ => return Err(Error::Unknown { what: "AttnCache.kind", value: kind }),
        };
        let (is_ring, is_paged) = (matches!(place, Self::Ring { .. }), matches!(place, Self::Pages(_)));
        let ring = "AttnCache.kind must be ATTN_CACHE_KIND_RING";
        let idle = [
            (!is_ring && sinks != 0, "AttnCache.sinks", ring),
            (!is_ring && window != 0, "AttnCache.window", ring),
            (!is_paged && pages.is_some(), "AttnCache.block_table", "AttnCache.kind must be ATTN_CACHE_KIND_PAGED"),
        ];
        match idle.into_iter().find(|&(is_idle, ..)| is_idle) {
            Some((_, what, needs)) => Err(Error::Idle { what, needs }),
            None => Ok(place),
        }
    }
}

/// A cache to be read.
#[derive(Debug)]
pub(crate) struct Tokens<'a> {
    pub(crate) k: Input<'a>,
    pub(crate) v: Input<'a>,
    pub(crate) lens: &'a [usize],
    pub(crate) place: Place<'a>,
}

impl<'a> Tokens<'a> {
    /// The cache as the kernels read it.
    pub(crate) fn source(&self) -> Result<Source<'a>> {
        match (self.k, self.v) {
            (Input::F32(k), Input::F32(v)) => Ok(Source::F32(self.view(k, v)?)),
            (Input::F16(k), Input::F16(v)) => Ok(Source::F16(self.view(k, v)?)),
            (Input::Bf16(k), Input::Bf16(v)) => Ok(Source::Bf16(self.view(k, v)?)),
            _ => Err(AttnError::Unsupported { what: "a cache whose k and v have different dtypes" }.into()),
        }
    }

    fn view<T: Element>(&self, k: View<'a, T>, v: View<'a, T>) -> Result<CacheView<'a, T>> {
        Ok(match self.place {
            Place::Slots => CacheView::of_slots(k, v, self.lens)?,
            Place::Ring { sinks, window } => CacheView::of_ring(k, v, self.lens, sinks, window)?,
            Place::Pages(table) => PagedCache::new(k, v, table, self.lens)?.view(),
        })
    }
}

/// A cache, and tokens to be appended to it.
#[derive(Debug)]
pub(crate) struct Append<'a, T> {
    pub(crate) k: ViewMut<'a, T>,
    pub(crate) v: ViewMut<'a, T>,
    pub(crate) lens: &'a mut [usize],
    pub(crate) place: Place<'a>,
    /// Keys and values of the new tokens.
    pub(crate) new: [View<'a, T>; 2],
    /// How many of them are tokens of each sequence; `None` for all.
    pub(crate) new_lens: Option<&'a [usize]>,
}

/// The same for any element type.
#[derive(Debug)]
pub(crate) enum Appended<'a> {
    F32(Append<'a, f32>),
    F16(Append<'a, f16>),
    Bf16(Append<'a, bf16>),
}

impl Appended<'_> {
    /// Writes the tokens behind those that are there, and counts them.
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Self::F32(append) => append.run(),
            Self::F16(append) => append.run(),
            Self::Bf16(append) => append.run(),
        }
    }
}

impl<T: Element> Append<'_, T> {
    fn run(self) -> Result<()> {
        let Self { k, v, lens, place, new: [k_new, v_new], new_lens } = self;
        match (place, new_lens) {
            (Place::Slots, None) => AppendCache::new(k, v, lens)?.append(k_new, v_new)?,
            (Place::Slots, Some(counts)) => AppendCache::new(k, v, lens)?.append_ragged(k_new, v_new, counts)?,
            (Place::Pages(table), None) => PagedCacheMut::new(k, v, table, lens)?.append(k_new, v_new)?,
            (Place::Pages(table), Some(counts)) => {
                PagedCacheMut::new(k, v, table, lens)?.append_ragged(k_new, v_new, counts)?;
            }
            (Place::Ring { sinks, window }, None) => RingCache::new(k, v, lens, sinks, window)?.insert(k_new, v_new)?,
            (Place::Ring { .. }, Some(_)) => {
                return Err(AttnError::Unsupported { what: "new_lens with a ring cache" }.into());
            }
        }
        Ok(())
    }
}
