//! The plan of one call over a cache: queries of many sequences, decode steps and prefill chunks together.

use attn_core::kv_cache::Queries;
use attn_core::score::{Problem, default_scale};
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, AttnError, AttnShape, Mask, Outputs, Result, View};

use super::call::{CHUNK, Call, MAX_ROWS, Sequences, Sizes, prefix_lines, state_lines};
use super::run::DecodeCall;
use super::tree;
use crate::dtype::{KernelElement, Source};
use crate::level::Level;
use crate::scoring::Scoring;
use crate::workspace::check_dims;

/// One call over a cache, checked: any mixture of sequences with one query and with many.
///
/// To the options each sequence is a call of its own shape, as in [`attn_core::kv_cache`]: causal at the bottom right,
/// `batch` as in the cache, its own `kv_len`. A row gets the bits of a [reproducible](Attention::reproducible) call
/// without a cache. Neither the layout of the cache, nor the other sequences, nor the cuts of the stream into calls
/// change them.
///
/// ```
/// use attn_core::kv_cache::{CacheView, PageTable, Queries};
/// use attn_core::{Attention, Layout, View, ViewMut};
/// use attn_simd::decode::DecodePlan;
/// use attn_simd::{Level, Workspace};
/// // Two sequences of 5 and 3 tokens in pages of 4; the first decodes one token, the second prefills three.
/// let pages: Vec<f32> = (0..3 * 4 * 16).map(|n| (n as f32).sin()).collect();
/// let pages = View::new(&pages, Layout::Bshd, [3, 1, 4, 16])?;
/// let (table, lens) = ([2, 0, 1, -1], [5, 3]);
/// let cache = CacheView::of_pages(pages, pages, PageTable::padded(&table, &lens)?)?;
/// let (q, mut out) = (vec![0.5f32; 4 * 16], vec![0.0f32; 4 * 16]);
/// let q = View::new(&q, Layout::Bhsd, [1, 1, 4, 16])?;
/// let attn = Attention::new();
/// let plan = DecodePlan::new(&attn, q.sizes(), Queries::Packed(&[0, 1, 4]), cache, Level::detect())?;
/// let to = ViewMut::new(&mut out, Layout::Bhsd, [1, 1, 4, 16])?;
/// plan.split(q, to)?.run(Workspace::new().lines(plan.workspace_lines()))?;
/// // The second sequence's first token sees itself.
/// assert_eq!(out[16..32], pages.row(1, 0, 0).iter().collect::<Vec<_>>());
/// # Ok::<(), attn_core::AttnError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DecodePlan<'p, 'a, 'c, M = ()> {
    attn: Attention<'a, &'p M>,
    /// Sizes of q and of the output; `kv_len` is that of the longest sequence.
    shape: AttnShape,
    /// The largest number of queries of a sequence.
    most: usize,
    queries: Queries<'c>,
    source: Source<'c>,
    /// The shared tokens, which precede those of every sequence.
    prefix: Option<Source<'c>>,
    level: Level,
}

impl<'p, 'a, 'c, M: Mods + Sync> DecodePlan<'p, 'a, 'c, M> {
    /// Checks every sequence: its queries against its tokens, the options against its shape. `cache` is a
    /// [`CacheView`](attn_core::kv_cache::CacheView) of any element type, whatever the type of the queries; or a
    /// [`QuantizedView`](attn_core::int8::QuantizedView), in int8; or a [`StoredView`](attn_core::formats::StoredView),
    /// in packed formats.
    ///
    /// # Errors
    /// [`AttnError`] if sizes disagree, lengths do not fit, or a decode call cannot have an option, such as dropout.
    pub fn new(
        attn: &'p Attention<'a, M>,
        q: [usize; 4],
        queries: Queries<'c>,
        cache: impl Into<Source<'c>>,
        level: Level,
    ) -> Result<Self> {
        Self::of(attn, q, queries, None, cache.into(), level)
    }

    /// As [`new`](Self::new), if every sequence begins with the tokens of `prefix`, a cache of one sequence: a system
    /// prompt that many answers share. To the options these are the first tokens of each sequence. The tokens in
    /// `cache` follow them, and all queries are among those.
    ///
    /// The queries of all sequences share passes over the prefix, up to 32 rows of a key/value head in each. So the
    /// prefix is read once for as many rows, not once for each sequence. The state of a row over the prefix is merged
    /// with its state over its own sequence ([`RowState`](attn_core::softmax::RowState)): results differ from those of
    /// one cache that holds both by rounding only. The two caches may be of different types.
    ///
    /// ```
    /// use attn_core::kv_cache::{CacheView, Queries};
    /// use attn_core::{Attention, Layout, View, ViewMut};
    /// use attn_simd::decode::DecodePlan;
    /// use attn_simd::{Level, Workspace};
    /// // A prompt of 100 tokens, and three answers to it of one, two and five tokens so far: each decodes its last.
    /// let (prompt, tokens) = (vec![0.5f32; 100 * 16], vec![0.25f32; 3 * 8 * 16]);
    /// let prompt = View::new(&prompt, Layout::Bhsd, [1, 1, 100, 16])?;
    /// let tokens = View::new(&tokens, Layout::Bhsd, [3, 1, 8, 16])?;
    /// let (prefix, lens) = (CacheView::of_tensors(prompt, prompt)?, [1, 2, 5]);
    /// let cache = CacheView::of_slots(tokens, tokens, &lens)?;
    /// let (q, mut out) = (vec![0.0f32; 3 * 16], vec![0.0f32; 3 * 16]); // every score 0: outputs are means
    /// let (q, attn) = (View::new(&q, Layout::Bhsd, [3, 1, 1, 16])?, Attention::new());
    /// let plan = DecodePlan::with_prefix(&attn, q.sizes(), Queries::All, prefix, cache, Level::detect())?;
    /// let to = ViewMut::new(&mut out, Layout::Bhsd, [3, 1, 1, 16])?;
    /// plan.split(q, to)?.run(Workspace::new().lines(plan.workspace_lines()))?;
    /// for (out, len) in out.chunks(16).zip(lens) {
    ///     let mean = (100.0 * 0.5 + len as f32 * 0.25) / (100 + len) as f32;
    ///     assert!(out.iter().all(|x| (x - mean).abs() < 1e-6));
    /// }
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    ///
    /// # Errors
    /// As [`new`](Self::new); [`AttnError::Size`] if the prefix is not one sequence, has other heads or dims, or is a
    /// continuation itself; [`AttnError::TooShort`] if its rope tables have no rows for the tokens that follow;
    /// [`AttnError::Unsupported`] if it has dropped tokens, or if only one of the two caches has rope tables.
    pub fn with_prefix(
        attn: &'p Attention<'a, M>,
        q: [usize; 4],
        queries: Queries<'c>,
        prefix: impl Into<Source<'c>>,
        cache: impl Into<Source<'c>>,
        level: Level,
    ) -> Result<Self> {
        let (prefix, cache) = (prefix.into(), cache.into());
        AttnError::check_size("sequences of a shared prefix", 1, prefix.batch())?;
        for ((what, cache), prefix) in [
            "kv_heads of a shared prefix against the cache's",
            "head_dim of a shared prefix against the cache's",
            "value_dim of a shared prefix against the cache's",
        ]
        .into_iter()
        .zip(cache.sizes())
        .zip(prefix.sizes())
        {
            AttnError::check_size(what, cache, prefix)?;
        }
        AttnError::check_size("first token of a shared prefix", 0, prefix.first())?;
        if prefix.has_dropped(0) {
            return Err(AttnError::Unsupported { what: "a shared prefix in a ring cache that has dropped tokens" });
        }
        let cache = cache.after(prefix.len(0))?;
        prefix.check_rope_before(&cache)?;
        Self::of(attn, q, queries, Some(prefix), cache, level)
    }

    fn of(
        attn: &'p Attention<'a, M>,
        q: [usize; 4],
        queries: Queries<'c>,
        prefix: Option<Source<'c>>,
        source: Source<'c>,
        level: Level,
    ) -> Result<Self> {
        if !attn.get_dropout().is_none() {
            return Err(AttnError::Unsupported { what: "dropout over a cache" });
        }
        source.check()?;
        prefix.as_ref().map_or(Ok(()), Source::check)?;
        let batch = source.batch();
        queries.check(q, batch)?;
        let ([_, q_heads, q_len, head_dim], [.., value_dim]) = (q, source.sizes());
        check_dims([head_dim, value_dim])?;
        let shape = source.shape([batch, q_heads, q_len, head_dim])?;
        let mask = attn.get_mask().and(Mask::causal(Align::BottomRight));
        // The root is computed digit by digit: once here, not for every piece.
        let scale = attn.get_scale().unwrap_or_else(|| default_scale(shape.head_dim));
        let attn = attn.by_ref().mask(mask).scale(scale);
        let mut this = Self { attn, shape, most: 0, queries, source, prefix, level: level.without_tiles() };
        let before = this.source.first();
        for sequence in 0..batch {
            let (q_len, kv_len) = (queries.len(sequence, shape.q_len), this.source.len(sequence));
            if q_len > 1 && this.source.has_dropped(sequence) {
                return Err(AttnError::Unsupported {
                    what: "several queries over a ring cache that has dropped tokens which they see",
                });
            }
            if q_len > kv_len - before {
                let what = "queries of a sequence against its cached tokens";
                return Err(AttnError::Index { what, at: sequence, value: q_len, limit: kv_len - before + 1 });
            }
            Problem::of_shape(&this.attn, AttnShape { q_len, kv_len, ..shape })?;
            this.most = this.most.max(q_len);
        }
        Ok(this)
    }

    /// Bytes of keys and values of all sequences, those of a shared prefix once: the most that one pass reads.
    pub fn bytes(&self) -> usize {
        let before = self.prefix.map_or(0, |prefix| prefix.len(0));
        let own = (0..self.shape.batch).map(|n| self.source.len(n).saturating_sub(before));
        let own = own.fold(0, usize::saturating_add).saturating_mul(self.source.token_bytes());
        let shared = self.prefix.map_or(0, |prefix| before.saturating_mul(prefix.token_bytes()));
        own.saturating_add(shared).saturating_mul(self.shape.kv_heads)
    }

    /// The largest number of passes over keys and values: each serves as many rows as can share one.
    pub fn passes(&self) -> usize {
        self.shape.group().saturating_mul(self.most).div_ceil(MAX_ROWS)
    }

    /// Lines of scratch that one thread needs.
    pub fn workspace_lines(&self) -> usize {
        let (sizes, AttnShape { q_heads, value_dim, .. }) = (self.sizes(), self.shape);
        if sizes == Sizes::default() {
            return 0;
        }
        let before = match self.prefix {
            None => 0,
            Some(_) => prefix_lines(self.sequences().all_queries(), q_heads.saturating_mul(value_dim + 2)),
        };
        sizes.lines() + state_lines(value_dim) + before
    }

    /// Whether heads are read together.
    fn is_beside(&self) -> bool {
        self.prefix.is_none() && self.source.has_heads_beside()
    }

    fn sequences(&self) -> Sequences<'_> {
        Sequences { shape: self.shape, queries: self.queries, lens: Some(self.source) }
    }

    fn sizes(&self) -> Sizes {
        let AttnShape { kv_len, head_dim, value_dim, .. } = self.shape;
        let together = if self.prefix.is_some() { self.sequences().all_queries() } else { self.most };
        match self.shape.group().saturating_mul(together) {
            0 => Sizes::default(),
            rows => {
                let slots = tree::slots_for(kv_len.div_ceil(CHUNK));
                let heads = if self.is_beside() { self.shape.kv_heads } else { 1 };
                Sizes::new(self.level, (rows, heads), [head_dim, value_dim], slots)
            }
        }
    }

    /// The call on tensors of these sizes, to be [run](DecodeCall::run) or shared by threads.
    ///
    /// # Errors
    /// [`AttnError::Size`] if q or the outputs have other sizes; [`AttnError::Unsupported`] if the outputs include the
    /// full weights.
    pub fn split<'w, 'o: 'w, Q: KernelElement, O: KernelElement>(
        &'w self,
        q: View<'w, Q>,
        outputs: impl Into<Outputs<'o, O>>,
    ) -> Result<DecodeCall<'w>> {
        let shape = self.shape;
        let batch = if matches!(self.queries, Queries::Packed(_)) { 1 } else { shape.batch };
        let planned = [batch, shape.q_heads, shape.q_len, shape.head_dim];
        for ((what, planned), given) in [
            "q batch against the plan",
            "q heads against the plan",
            "q_len against the plan",
            "head_dim against the plan",
        ]
        .into_iter()
        .zip(planned)
        .zip(q.sizes())
        {
            AttnError::check_size(what, planned, given)?;
        }
        let outputs = outputs.into();
        outputs.check(&AttnShape { batch, ..shape })?;
        if outputs.weights.is_some() {
            return Err(AttnError::Unsupported { what: "weights as an output over a cache" });
        }
        let Outputs { out, lse, .. } = outputs;
        let scale = self.attn.get_scale().unwrap_or_else(|| default_scale(shape.head_dim));
        let call = Call {
            scoring: Scoring::new(&self.attn, scale, self.level),
            sequences: self.sequences(),
            source: self.source,
            prefix: self.prefix,
            q: Q::input(q),
            sizes: self.sizes(),
            beside: self.is_beside(),
        };
        Ok(DecodeCall::new(call, O::row_target(out), lse))
    }
}
