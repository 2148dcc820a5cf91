//! Tokens appended to pages.
//!
//! The layout is PagedAttention's (Kwon et al. 2023, vLLM, arXiv 2309.06180). The caller decides which page belongs to
//! which sequence. Every entry of the table is checked before use, and a page that is used twice is not written.

use super::checks::{check_at_most, check_new};
use super::memory::Memory;
use super::page_table::{PageTable, Pages};
use crate::element::Element;
use crate::error::{AttnError, Result};
use crate::view::{View, ViewMut};

/// Writes new tokens into pages: `k_new` `[batch, kv_heads, n, head_dim]`, `v_new` `[batch, kv_heads, n, value_dim]`.
///
/// The table counts the new tokens already, as in FlashInfer's `append_paged_kv_cache`: they are the last tokens of
/// their sequences. With `new_lens` only the first `new_lens[b]` of the `n` tokens belong to sequence `b`. The others
/// are padding and are not read.
///
/// ```
/// use attn_core::kv_cache::{PageTable, append_paged};
/// use attn_core::{Layout, View, ViewMut};
/// let (mut k, mut v) = ([0.0f32; 6], [0.0f32; 6]); // three pages of two tokens of dim 1
/// fn pages(x: &mut [f32]) -> attn_core::Result<ViewMut<'_, f32>> {
///     ViewMut::new(x, Layout::Bshd, [3, 1, 2, 1])
/// }
/// let new = [1.0f32, 2.0, 3.0, 4.0];
/// let new = View::new(&new, Layout::Bhsd, [2, 1, 2, 1])?;
/// // Two tokens of the first sequence go to pages 2 and 0, one of the second sequence to page 1.
/// let table = PageTable::csr(&[0, 2, 3], &[2, 0, 1], &[1, 1])?; // lengths 3 and 1
/// append_paged(&mut pages(&mut k)?, &mut pages(&mut v)?, table, new, new, Some(&[2, 1]))?;
/// assert_eq!(k, [2.0, 0.0, 3.0, 0.0, 0.0, 1.0]);
/// # Ok::<(), attn_core::AttnError>(())
/// ```
///
/// # Errors
/// As [`CacheView::of_pages`](super::CacheView::of_pages); [`AttnError::Index`] if a sequence has fewer tokens than new
/// ones, or a new token has no page; [`AttnError::Overlap`] if a page that would be written is used a second time;
/// [`AttnError::Size`]. Nothing has been written then.
pub fn append_paged<T: Element>(
    k: &mut ViewMut<'_, T>,
    v: &mut ViewMut<'_, T>,
    table: PageTable<'_>,
    k_new: View<'_, T>,
    v_new: View<'_, T>,
    new_lens: Option<&[usize]>,
) -> Result<()> {
    append_to_pages(k, v, table, k_new, v_new, new_lens)
}

/// The same for any memory.
#[inline]
pub(crate) fn append_to_pages<T: Element>(
    k: &mut impl Memory<T>,
    v: &mut impl Memory<T>,
    table: PageTable<'_>,
    k_new: View<'_, T>,
    v_new: View<'_, T>,
    new_lens: Option<&[usize]>,
) -> Result<()> {
    let (k_sizes, v_sizes) = (k.of_numbers(), v.of_numbers());
    let pages = Pages::new(k_sizes, v_sizes, table)?;
    let batch = pages.batch();
    let of_batch = |[_, heads, slots, dim]: [usize; 4]| [batch, heads, slots, dim];
    let given = check_new(of_batch(k_sizes), of_batch(v_sizes), k_new.sizes(), v_new.sizes())?;
    if let Some(new_lens) = new_lens {
        AttnError::check_size("new_lens against batch", batch, new_lens.len())?;
    }
    let count = |b: usize| new_lens.map_or(given, |counts| counts.get(b).copied().unwrap_or(0));
    for b in 0..batch {
        check_at_most("new_lens", b, count(b), given)?;
        check_at_most("new tokens against the page table's", b, count(b), pages.len(b))?;
        pages.check_entries(b, first_written(&pages, b, count(b)))?;
    }
    check_alone(&pages, &count)?;
    for b in 0..batch {
        let first = pages.len(b).saturating_sub(count(b));
        for token in 0..count(b) {
            let to = pages.place(b, first.saturating_add(token));
            k.store(k_new, (b, token), to);
            v.store(v_new, (b, token), to);
        }
    }
    Ok(())
}

/// Which page of a sequence is the first that its last `count` tokens are written to; none of them if there are no such
/// tokens.
fn first_written(pages: &Pages<'_>, sequence: usize, count: usize) -> usize {
    let first = pages.len(sequence).saturating_sub(count);
    if count > 0 { first.checked_div(pages.page_size()).unwrap_or(0) } else { usize::MAX }
}

/// Checks that no page which new tokens would be written to is used a second time. The pages to be written are taken
/// some at a time, and all tables are searched once for each of these portions.
fn check_alone(pages: &Pages<'_>, count: &impl Fn(usize) -> usize) -> Result<()> {
    let of = |b: usize, from: usize| (from..pages.used(b)).filter_map(move |i| pages.page(b, i));
    let twice = AttnError::Overlap {
        what: "page table, which names a page for new tokens twice",
        size: pages.page_size(),
        stride: 0,
    };
    let sequences = 0..pages.batch();
    let mut written = sequences.clone().flat_map(|b| of(b, first_written(pages, b, count(b))));
    loop {
        let mut portion = PageSet::new();
        for page in written.by_ref().take(PageSet::ROOM) {
            if !portion.insert(page) {
                return Err(twice);
            }
        }
        // Each is in a table once, where it is to be written.
        let found = sequences.clone().flat_map(|b| of(b, 0)).filter(|&page| portion.holds(page));
        match portion.len {
            0 => return Ok(()),
            len if found.take(len.saturating_add(1)).count() > len => return Err(twice),
            _ => {}
        }
    }
}

/// A few pages, to be found again in constant time.
struct PageSet {
    /// Each at its place or behind it; `usize::MAX` is none.
    slots: [usize; 2 * Self::ROOM],
    len: usize,
}

impl PageSet {
    /// How many it takes.
    const ROOM: usize = 64;

    const fn new() -> Self {
        Self { slots: [usize::MAX; 2 * Self::ROOM], len: 0 }
    }

    /// Slots in the order in which a page may take them.
    fn places(page: usize) -> impl Iterator<Item = usize> {
        // The golden ratio scatters neighbours.
        let start = ((page as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        (0..2 * Self::ROOM).map(move |n| start.wrapping_add(n) & (2 * Self::ROOM - 1))
    }

    /// Says whether the page was not there.
    fn insert(&mut self, page: usize) -> bool {
        for place in Self::places(page) {
            match self.slots.get_mut(place) {
                Some(slot) if *slot == usize::MAX => {
                    *slot = page;
                    self.len += 1;
                    return true;
                }
                Some(slot) if *slot == page => return false,
                _ => {}
            }
        }
        false
    }

    fn holds(&self, page: usize) -> bool {
        let mut slots = Self::places(page).filter_map(|place| self.slots.get(place));
        slots.find(|&&slot| slot == page || slot == usize::MAX) == Some(&page)
    }
}
