//! The pages of a cache: those of each sequence, and the free ones. `store` holds their content.

use std::ops::Range;

use attn_core::AttnError;
use attn_core::kv_cache::PageTable;
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;

/// Pages of a fixed number of tokens, that sequences take from a common stock and give back.
#[derive(Clone)]
pub(crate) struct Pages {
    page_size: usize,
    /// A row of `width` entries for each sequence; those behind its last page are −1.
    table: Vec<i32>,
    width: usize,
    /// Pages of each sequence.
    held: Vec<usize>,
    /// Pages that were given back; the last one is taken first.
    returned: Vec<i32>,
    /// Pages that nobody has had.
    fresh: Range<i32>,
}

impl Pages {
    /// All pages free.
    pub(crate) fn new(batch: usize, pages: usize, page_size: usize) -> PyResult<Self> {
        if page_size == 0 {
            return Err(PyValueError::new_err("page_size is 0, at least 1 is allowed"));
        }
        let last = i32::try_from(pages)
            .map_err(|_| PyValueError::new_err(format!("pages is {pages}, at most {} is allowed", i32::MAX)))?;
        let (table, returned) = (Vec::new(), Vec::new());
        Ok(Self { page_size, table, width: 0, held: vec![0; batch], returned, fresh: 0..last })
    }

    /// Tokens of a page.
    pub(crate) fn page_size(&self) -> usize {
        self.page_size
    }

    /// Pages that no sequence holds.
    pub(crate) fn free(&self) -> usize {
        self.returned.len() + self.fresh.len()
    }

    /// The pages of each sequence.
    pub(crate) fn rows(&self) -> Vec<Vec<i32>> {
        let row = |(b, &held): (usize, &usize)| self.table[b * self.width..][..held].to_vec();
        self.held.iter().enumerate().map(row).collect()
    }

    /// The table that kernels read, of sequences of these lengths, for which pages were [taken](Self::take).
    pub(crate) fn table<'c>(&'c self, lens: &'c [usize]) -> Result<PageTable<'c>, AttnError> {
        PageTable::padded(&self.table, lens)
    }

    /// Takes pages, so that each sequence has room for so many tokens. An error changes nothing.
    pub(crate) fn take(&mut self, lens: &[usize]) -> PyResult<()> {
        let wanted = |len: &usize| len.div_ceil(self.page_size);
        let missing = |(len, &held): (&usize, &usize)| wanted(len).saturating_sub(held);
        let all = lens.iter().zip(&self.held).map(missing).fold(0usize, usize::saturating_add);
        let free = self.free();
        if all > free {
            let text = format!("the new tokens need {all} pages, {free} are free; truncate() gives pages back");
            return Err(PyValueError::new_err(text));
        }
        let widest = lens.iter().map(wanted).max().unwrap_or(0);
        if widest > self.width {
            self.widen(widest)?;
        }
        for (b, len) in lens.iter().enumerate() {
            while self.held[b] < len.div_ceil(self.page_size)
                && let Some(page) = self.returned.pop().or_else(|| self.fresh.next())
            {
                self.table[b * self.width + self.held[b]] = page;
                self.held[b] += 1;
            }
        }
        Ok(())
    }

    /// Gives back the pages that sequences of these lengths do not need.
    pub(crate) fn give_back(&mut self, lens: &[usize]) {
        for (b, len) in lens.iter().enumerate() {
            while self.held[b] > len.div_ceil(self.page_size) {
                self.held[b] -= 1;
                let entry = &mut self.table[b * self.width + self.held[b]];
                self.returned.push(std::mem::replace(entry, -1));
            }
        }
    }

    /// Gives rows more entries: twice as many as before, so that tables are copied seldom.
    fn widen(&mut self, at_least: usize) -> PyResult<()> {
        let width = at_least.max(self.width.saturating_mul(2));
        let len = width.checked_mul(self.held.len()).ok_or_else(|| no_memory(usize::MAX))?;
        let mut table = Vec::new();
        table.try_reserve_exact(len).map_err(|_| no_memory(len))?;
        for b in 0..self.held.len() {
            table.extend_from_slice(&self.table[b * self.width..][..self.width]);
            table.resize((b + 1) * width, -1);
        }
        (self.table, self.width) = (table, width);
        Ok(())
    }
}

fn no_memory(entries: usize) -> PyErr {
    PyMemoryError::new_err(format!("a page table of {entries} entries cannot be allocated"))
}
