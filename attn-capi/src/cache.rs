//! Caches: from the kinds of the header to those of `attn_core::kv_cache`.

use attn_core::Element;
use attn_core::half::{bf16, f16};
use attn_core::kv_cache::{AppendCache, CacheView, PageTable, RingCache, append_paged};
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
    /// In the pages of a padded table; the lengths are beside it.
    Pages(&'a [i32]),
    /// In the pages of compressed tables, which say the lengths too.
    Csr(PageTable<'a>),
}

/// The fields of a cache that belong to some kinds only.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a> {
    pub(crate) kind: u32,
    pub(crate) sinks: usize,
    pub(crate) window: usize,
    pub(crate) block_table: Option<&'a [i32]>,
    /// `kv_indptr`, `kv_indices`, `kv_last_page_len`, if one of them is set.
    pub(crate) csr: Option<[&'a [i32]; 3]>,
    /// Whether there are lengths.
    pub(crate) has_lens: bool,
}

impl<'a> Place<'a> {
    /// By the kind's number. Fields of another kind than the one that is named are refused: whoever set them wants that
    /// one.
    pub(crate) fn of(fields: Fields<'a>) -> Result<Self> {
        let Fields { kind, sinks, window, block_table, csr, has_lens } = fields;
        let is = |wanted: AttnCacheKind| kind == wanted as u32;
        let (is_ring, is_paged) = (is(AttnCacheKind::Ring), is(AttnCacheKind::Paged));
        if !(is_ring || is_paged || is(AttnCacheKind::Append)) {
            return Err(Error::Unknown { what: "AttnCache.kind", value: kind });
        }
        let ring = "AttnCache.kind must be ATTN_CACHE_KIND_RING";
        let paged = "AttnCache.kind must be ATTN_CACHE_KIND_PAGED";
        let padded = "AttnCache.kv_indptr, kv_indices and kv_last_page_len must be null";
        let idle = [
            (!is_ring && sinks != 0, "AttnCache.sinks", ring),
            (!is_ring && window != 0, "AttnCache.window", ring),
            (!is_paged && block_table.is_some(), "AttnCache.block_table", paged),
            (!is_paged && csr.is_some(), "AttnCache.kv_indptr", paged),
            (csr.is_some() && block_table.is_some(), "AttnCache.block_table", padded),
            (csr.is_some() && has_lens, "AttnCache.lens", padded),
        ];
        if let Some((_, what, needs)) = idle.into_iter().find(|&(is_idle, ..)| is_idle) {
            return Err(Error::Idle { what, needs });
        }
        Ok(match csr {
            _ if is_ring => Self::Ring { sinks, window },
            Some([indptr, indices, last]) => Self::Csr(PageTable::csr(indptr, indices, last)?),
            None if is_paged => Self::Pages(block_table.unwrap_or_default()),
            None => Self::Slots,
        })
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
            Place::Pages(block_table) => CacheView::of_pages(k, v, PageTable::padded(block_table, self.lens)?)?,
            Place::Csr(table) => CacheView::of_pages(k, v, table)?,
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
        let Self { mut k, mut v, lens, place, new: [k_new, v_new], new_lens } = self;
        match (place, new_lens) {
            (Place::Slots, None) => AppendCache::new(k, v, lens)?.append(k_new, v_new)?,
            (Place::Slots, Some(counts)) => AppendCache::new(k, v, lens)?.append_ragged(k_new, v_new, counts)?,
            (Place::Pages(block_table), counts) => {
                let [.., given, _] = k_new.sizes();
                let count = |b: usize| counts.map_or(given, |counts| counts.get(b).copied().unwrap_or(0));
                // A table counts the new tokens already. A call that fails leaves the lengths as they were.
                lens.iter_mut().enumerate().for_each(|(b, len)| *len = len.wrapping_add(count(b)));
                let appended = PageTable::padded(block_table, lens)
                    .and_then(|table| append_paged(&mut k, &mut v, table, k_new, v_new, counts));
                if appended.is_err() {
                    lens.iter_mut().enumerate().for_each(|(b, len)| *len = len.wrapping_sub(count(b)));
                }
                appended?;
            }
            (Place::Csr(table), counts) => append_paged(&mut k, &mut v, table, k_new, v_new, counts)?,
            (Place::Ring { sinks, window }, None) => RingCache::new(k, v, lens, sinks, window)?.insert(k_new, v_new)?,
            (Place::Ring { .. }, Some(_)) => {
                return Err(AttnError::Unsupported { what: "new_lens with a ring cache" }.into());
            }
        }
        Ok(())
    }
}
