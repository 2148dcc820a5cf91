//! Caches: from the kinds of the header to those of `attn_core::kv_cache`.

use attn_core::Element;
use attn_core::formats::{StoredCache, StoredRing, StoredRows, StoredRowsMut, StoredView, append_paged_stored};
use attn_core::half::{bf16, f16};
use attn_core::kv_cache::{AppendCache, CacheView, PageTable, RingCache, append_paged};
use attn_core::{AttnError, View, ViewMut};
use attn_simd::Input;
use attn_simd::decode::Source;

use crate::error::{Error, Result};
use crate::types::AttnCacheKind;

/// Where a cache's tokens are in memory.
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
    /// In the pages of a padded table, if there is one; the lengths are beside it.
    Pages(Option<&'a [i32]>),
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
            (!is_paged && csr.is_some(), "AttnCache.kv_indptr, kv_indices or kv_last_page_len", paged),
            (csr.is_some() && block_table.is_some(), "AttnCache.block_table", padded),
            (csr.is_some() && has_lens, "AttnCache.lens", padded),
        ];
        if let Some((_, what, needs)) = idle.into_iter().find(|&(is_idle, ..)| is_idle) {
            return Err(Error::Idle { what, needs });
        }
        Ok(match csr {
            _ if is_ring => Self::Ring { sinks, window },
            Some([indptr, indices, last]) => Self::Csr(PageTable::csr(indptr, indices, last)?),
            None if is_paged => Self::Pages(block_table),
            None => Self::Slots,
        })
    }
}

/// A cache to be read.
#[derive(Debug)]
pub(crate) struct Tokens<'a> {
    pub(crate) rows: Rows<'a>,
    pub(crate) lens: &'a [usize],
    pub(crate) place: Place<'a>,
}

/// Keys and values.
#[derive(Debug)]
pub(crate) enum Rows<'a> {
    /// Numbers.
    Plain([Input<'a>; 2]),
    /// Bytes, and their format.
    Stored([(View<'a, u8>, StoredRows<'a>); 2]),
}

impl<'a> Tokens<'a> {
    /// The cache as the kernels read it.
    pub(crate) fn source(&self) -> Result<Source<'a>> {
        match self.rows {
            Rows::Plain([Input::F32(k), Input::F32(v)]) => Ok(Source::F32(self.view(k, v)?)),
            Rows::Plain([Input::F16(k), Input::F16(v)]) => Ok(Source::F16(self.view(k, v)?)),
            Rows::Plain([Input::Bf16(k), Input::Bf16(v)]) => Ok(Source::Bf16(self.view(k, v)?)),
            Rows::Plain(_) => {
                Err(AttnError::Unsupported { what: "a cache whose k and v have different dtypes" }.into())
            }
            Rows::Stored([(k, keys), (v, values)]) => {
                Ok(Source::Stored(StoredView::new(self.view(k, v)?, keys, values)?))
            }
        }
    }

    fn view<T: Copy>(&self, k: View<'a, T>, v: View<'a, T>) -> Result<CacheView<'a, T>> {
        Ok(match self.place {
            Place::Slots => CacheView::of_slots(k, v, self.lens)?,
            Place::Ring { sinks, window } => CacheView::of_ring(k, v, self.lens, sinks, window)?,
            Place::Pages(table) => CacheView::of_pages(k, v, padded(table, self.lens)?)?,
            Place::Csr(table) => CacheView::of_pages(k, v, table)?,
        })
    }
}

/// A padded table. Only caches without tokens need none.
fn padded<'a>(table: Option<&'a [i32]>, lens: &'a [usize]) -> Result<PageTable<'a>> {
    if table.is_none() && lens.iter().any(|&len| len > 0) {
        return Err(Error::Null("AttnCache.block_table of a paged cache without kv_indptr"));
    }
    Ok(PageTable::padded(table.unwrap_or_default(), lens)?)
}

/// Memory of a cache that tokens are written to.
pub(crate) trait Rooms<T>: Sized {
    fn slots(self, lens: &mut [usize], new: [View<'_, T>; 2], counts: Option<&[usize]>) -> attn_core::Result<()>;
    fn ring(self, lens: &mut [usize], sizes: [usize; 2], new: [View<'_, T>; 2]) -> attn_core::Result<()>;
    fn pages(&mut self, table: PageTable<'_>, new: [View<'_, T>; 2], counts: Option<&[usize]>)
    -> attn_core::Result<()>;
}

/// Implements [`Rooms`] by three of attn-core's caches.
macro_rules! rooms {
    ($T:ident: $bound:path, $rows:ty, $cache:ident, $ring:ident, $append_paged:ident) => {
        impl<$T: $bound> Rooms<$T> for [$rows; 2] {
            fn slots(
                self,
                lens: &mut [usize],
                [k_new, v_new]: [View<'_, $T>; 2],
                counts: Option<&[usize]>,
            ) -> attn_core::Result<()> {
                let [k, v] = self;
                let mut cache = $cache::new(k, v, lens)?;
                match counts {
                    None => cache.append(k_new, v_new),
                    Some(counts) => cache.append_ragged(k_new, v_new, counts),
                }
            }

            fn ring(
                self,
                lens: &mut [usize],
                [sinks, window]: [usize; 2],
                [k_new, v_new]: [View<'_, $T>; 2],
            ) -> attn_core::Result<()> {
                let [k, v] = self;
                $ring::new(k, v, lens, sinks, window)?.insert(k_new, v_new)
            }

            fn pages(
                &mut self,
                table: PageTable<'_>,
                [k_new, v_new]: [View<'_, $T>; 2],
                counts: Option<&[usize]>,
            ) -> attn_core::Result<()> {
                let [k, v] = self;
                $append_paged(k, v, table, k_new, v_new, counts)
            }
        }
    };
}

rooms!(T: Element, ViewMut<'_, T>, AppendCache, RingCache, append_paged);
rooms!(T: Element<Compute = f32>, StoredRowsMut<'_>, StoredCache, StoredRing, append_paged_stored);

/// A cache, and tokens to be appended to it.
#[derive(Debug)]
pub(crate) struct Append<'a, T, R> {
    pub(crate) rooms: R,
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
    F32(Append<'a, f32, [ViewMut<'a, f32>; 2]>),
    F16(Append<'a, f16, [ViewMut<'a, f16>; 2]>),
    Bf16(Append<'a, bf16, [ViewMut<'a, bf16>; 2]>),
    F32Stored(Append<'a, f32, [StoredRowsMut<'a>; 2]>),
    F16Stored(Append<'a, f16, [StoredRowsMut<'a>; 2]>),
    Bf16Stored(Append<'a, bf16, [StoredRowsMut<'a>; 2]>),
}

impl Appended<'_> {
    /// Writes the tokens behind those that are there, and counts them.
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Self::F32(append) => append.run(),
            Self::F16(append) => append.run(),
            Self::Bf16(append) => append.run(),
            Self::F32Stored(append) => append.run(),
            Self::F16Stored(append) => append.run(),
            Self::Bf16Stored(append) => append.run(),
        }
    }
}

impl<T: Element, R: Rooms<T>> Append<'_, T, R> {
    fn run(self) -> Result<()> {
        let Self { mut rooms, lens, place, new, new_lens } = self;
        match (place, new_lens) {
            (Place::Slots, counts) => rooms.slots(lens, new, counts)?,
            (Place::Pages(table), counts) => {
                let [.., given, _] = new[0].sizes();
                let count = |b: usize| counts.map_or(given, |counts| counts.get(b).copied().unwrap_or(0));
                // A table counts the new tokens already. A call that fails leaves the lengths as they were.
                lens.iter_mut().enumerate().for_each(|(b, len)| *len = len.wrapping_add(count(b)));
                let appended = padded(table, lens).and_then(|table| Ok(rooms.pages(table, new, counts)?));
                if appended.is_err() {
                    lens.iter_mut().enumerate().for_each(|(b, len)| *len = len.wrapping_sub(count(b)));
                }
                appended?;
            }
            (Place::Csr(table), counts) => rooms.pages(table, new, counts)?,
            (Place::Ring { sinks, window }, None) => rooms.ring(lens, [sinks, window], new)?,
            (Place::Ring { .. }, Some(_)) => {
                return Err(AttnError::Unsupported { what: "new_lens with a ring cache" }.into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tokens_need_a_table() {
        assert!(padded(None, &[]).is_ok() && padded(None, &[0, 0]).is_ok() && padded(Some(&[3]), &[1]).is_ok());
        assert!(matches!(padded(None, &[0, 1]), Err(Error::Null(_))));
    }
}
