//! The options of a call, as a part of it needs them: some heads, some queries, some keys.
//!
//! A rank calls the kernels with the rows that it holds, numbered from 0 on. Masks mean global positions. Most options
//! can be moved: alignments get an offset, tables are cut, tensors are sliced without a copy. Others (an order inside
//! documents, blocks that a part cuts, a tree) stay the global mask. A `mask_mod` looks it up for each position that
//! the other terms leave visible. The caller's own mods see global positions in the same way.

use std::ops::Range;

use attn_core::dropout::Dropout;
use attn_core::mask::{BlockSparse, DenseMask, Documents, Lengths, Term, Window};
use attn_core::position::alibi::Alibi;
use attn_core::score::At;
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, AttnError, AttnShape, Bias, Mask, Result, View};

/// Which part of a call: ranges of the whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) heads: Range<usize>,
    pub(crate) queries: Range<usize>,
    pub(crate) keys: Range<usize>,
}

impl Part {
    /// Everything of a call.
    pub(crate) fn whole(shape: &AttnShape) -> Self {
        Self { heads: 0..shape.q_heads, queries: 0..shape.q_len, keys: 0..shape.kv_len }
    }
}

/// A term of the mask, moved; tables that had to be changed are its own.
enum Moved<'a> {
    Term(Term<'a>),
    Prefix(Vec<usize>, Align),
    KvLens(Vec<usize>),
    KvStarts(Vec<usize>),
    QLens(Vec<usize>),
    Documents(Vec<usize>, Vec<usize>),
}

/// The options of a part; [`attention`](Self::attention) borrows them.
pub(crate) struct Local<'a, 'p, M> {
    attn: &'p Attention<'a, M>,
    shape: AttnShape,
    part: Part,
    terms: Vec<Moved<'a>>,
    /// What is looked up by global positions.
    global: Mask<'a>,
}

impl<'a, 'p, M: Mods + Sync> Local<'a, 'p, M> {
    /// Moves the options of a call of this shape, which have been checked against it.
    pub(crate) fn new(attn: &'p Attention<'a, M>, shape: AttnShape, part: Part) -> Self {
        let (mut terms, mut global) = (Vec::new(), Mask::none());
        for term in attn.get_mask().terms() {
            let (moved, is_all) = moved(term, &shape, &part);
            terms.extend(moved);
            if !is_all {
                global = global.and(Mask::term(*term));
            }
        }
        Self { attn, shape, part, terms, global }
    }

    /// Options that are the same for every part but for a causal mask, here by the rows of a part.
    pub(crate) fn by_rows(attn: &'p Attention<'a, M>, shape: AttnShape, causal: Option<Align>) -> Self {
        let terms = causal.map(|align| Moved::Term(Term::Causal(align))).into_iter().collect();
        Self { attn, shape, part: Part::whole(&shape), terms, global: Mask::none() }
    }

    /// Whether some query of the part may see some key of it.
    pub(crate) fn sees_anything(&self) -> bool {
        let (shape, keys) = (&self.shape, &self.part.keys);
        self.attn.get_mask().is_none()
            || (0..shape.batch).any(|batch| {
                self.part.queries.clone().any(|query| {
                    let range = self.attn.get_mask().row_range(shape, batch, self.part.heads.start, query);
                    range.start.max(keys.start) < range.end.min(keys.end)
                })
            })
    }

    /// The options, without the sinks: they join at the end.
    pub(crate) fn attention(&self) -> Attention<'_, Global<'_, M>> {
        let (attn, part) = (self.attn, &self.part);
        let mut mask = Mask::none();
        for term in &self.terms {
            mask = mask.and(match term {
                Moved::Term(term) => Mask::term(*term),
                Moved::Prefix(lens, align) => Mask::prefix_lm(Lengths::PerBatch(lens), *align),
                Moved::KvLens(lens) => Mask::kv_lens(lens),
                Moved::KvStarts(starts) => Mask::kv_starts(starts),
                Moved::QLens(lens) => Mask::q_lens(lens),
                Moved::Documents(cu_q, cu_k) => Mask::documents(Documents::new(cu_q, cu_k)),
            });
        }
        let first = [part.heads.start, part.queries.start, part.keys.start];
        let global = (!self.global.is_none()).then_some((&self.global, &self.shape));
        let mut local = Attention::new().mask(mask).precision(attn.get_precision());
        if let Some(scale) = attn.get_scale() {
            local = local.scale(scale);
        }
        if let Some(cap) = attn.get_softcap() {
            local = local.softcap(cap);
        }
        if let Some(t) = attn.get_temperature() {
            local = local.temperature(t);
        }
        if let Some(bias) = attn.get_bias() {
            local = local.bias(slice_bias(bias, part));
        }
        if let Some(alibi) = attn.get_alibi() {
            let slopes = alibi.slopes.get(part.heads.clone()).unwrap_or(&[]);
            local = local.alibi(Alibi { slopes, align: align(alibi.align, &self.shape, part) });
        }
        if let Dropout::Keep { mask, p } = attn.get_dropout() {
            local = local.dropout(Dropout::Keep { mask: slice(*mask, part), p: *p });
        }
        if attn.is_reproducible() {
            local = local.reproducible();
        }
        local.with_mods(|()| Global { mods: attn.get_mods(), first, mask: global })
    }

    /// As [`attention`](Self::attention), with the sinks.
    pub(crate) fn with_sinks(&self) -> Attention<'_, Global<'_, M>> {
        match self.attn.get_sinks() {
            Some(sinks) => self.attention().sinks(sinks.get(self.part.heads.clone()).unwrap_or(&[])),
            None => self.attention(),
        }
    }
}

/// What a part cannot express.
pub(crate) fn check_parts<M: Mods>(attn: &Attention<'_, M>) -> Result<()> {
    match attn.get_dropout() {
        Dropout::Seeded { .. } => Err(AttnError::Unsupported { what: "seeded dropout over ranks (Dropout::Keep)" }),
        _ => Ok(()),
    }
}

/// Whether no option but the mask depends on positions.
pub(crate) fn moves_by_rows<M: Mods>(attn: &Attention<'_, M>) -> bool {
    let (mods, dropout) = (attn.get_mods(), attn.get_dropout());
    attn.get_bias().is_none()
        && attn.get_alibi().is_none()
        && matches!(dropout, Dropout::None)
        && !mods.has_score_mod()
        && !mods.has_mask_mod()
}

/// The caller's mods and the global mask, called with global positions.
pub(crate) struct Global<'l, M> {
    mods: &'l M,
    first: [usize; 3],
    mask: Option<(&'l Mask<'l>, &'l AttnShape)>,
}

impl<M> Global<'_, M> {
    fn at(&self, at: At) -> At {
        let [head, query, key] = self.first;
        At { batch: at.batch, head: at.head + head, query: at.query + query, key: at.key + key }
    }
}

impl<M: Mods> Mods for Global<'_, M> {
    const SCORE_MOD: bool = M::SCORE_MOD;
    const MASK_MOD: bool = true;
    fn has_score_mod(&self) -> bool {
        self.mods.has_score_mod()
    }
    fn has_mask_mod(&self) -> bool {
        self.mask.is_some() || self.mods.has_mask_mod()
    }
    fn score_mod(&self, score: f64, at: At) -> f64 {
        self.mods.score_mod(score, self.at(at))
    }
    fn mask_mod(&self, at: At) -> bool {
        let at = self.at(at);
        self.mask.is_none_or(|(mask, shape)| mask.visible(shape, at)) && self.mods.mask_mod(at)
    }
    fn derivative(&self, score: f64, at: At) -> Option<f64> {
        self.mods.derivative(score, self.at(at))
    }
}

/// Where query 0 of the part stands among its keys.
fn align(align: Align, shape: &AttnShape, part: &Part) -> Align {
    let offset = align.offset(shape.q_len, shape.kv_len);
    Align::Offset(offset.saturating_add_unsigned(part.queries.start).saturating_sub_unsigned(part.keys.start))
}

/// A term as the part needs it, and whether that is all of it.
fn moved<'a>(term: &Term<'a>, shape: &AttnShape, part: &Part) -> (Option<Moved<'a>>, bool) {
    let Part { queries, keys, .. } = part;
    let cut = |x: usize, range: &Range<usize>| x.clamp(range.start, range.end) - range.start;
    let lens = |lens: &Lengths<'_>, range: &Range<usize>| -> Vec<usize> {
        (0..shape.batch).map(|batch| cut(lens.of(batch), range)).collect()
    };
    let term = match *term {
        Term::Causal(a) => Moved::Term(Term::Causal(align(a, shape, part))),
        Term::Window(window) => Moved::Term(Term::Window(Window { align: align(window.align, shape, part), ..window })),
        Term::Prefix { prefix, align: a } => Moved::Prefix(lens(&prefix, keys), align(a, shape, part)),
        Term::KvLens(l) => Moved::KvLens(lens(&l, keys)),
        Term::KvStarts(l) => Moved::KvStarts(lens(&l, keys)),
        Term::QLens(l) => Moved::QLens(lens(&l, queries)),
        Term::Dense(DenseMask { mask, keep }) => Moved::Term(Term::Dense(DenseMask { mask: slice(mask, part), keep })),
        Term::BlockSparse(BlockSparse { blocks, block_q, block_k }) => {
            if queries.start % block_q.max(1) != 0 || keys.start % block_k.max(1) != 0 {
                return (None, false);
            }
            let of = |range: &Range<usize>, block: usize| range.start / block..range.end.div_ceil(block);
            let (queries, keys) = (of(queries, block_q.max(1)), of(keys, block_k.max(1)));
            let [_, heads, ..] = blocks.sizes();
            let axes = [pick(heads, &part.heads), queries, keys];
            Moved::Term(Term::BlockSparse(BlockSparse { blocks: cut_view(blocks, axes), block_q, block_k }))
        }
        // Keys before the forest are visible to all; there is nothing to say about them.
        Term::Tree(_) => return (None, keys.end <= shape.kv_len.saturating_sub(shape.q_len)),
        Term::Documents(documents) => {
            let [cu_q, cu_k] = documents.bounds();
            let of = |cu: &[usize], range| cu.iter().map(|&x| cut(x, range)).collect();
            return (Some(Moved::Documents(of(cu_q, queries), of(cu_k, keys))), documents.is_plain());
        }
        _ => return (None, false),
    };
    (Some(term), true)
}

/// The range of an axis, or all of one that broadcasts.
fn pick(size: usize, range: &Range<usize>) -> Range<usize> {
    if size == 1 { 0..1 } else { range.clone() }
}

/// The part of a tensor that broadcasts to `[batch, q_heads, q_len, kv_len]`.
fn slice<'a, T: Copy>(view: View<'a, T>, part: &Part) -> View<'a, T> {
    let [_, heads, queries, keys] = view.sizes();
    cut_view(view, [pick(heads, &part.heads), pick(queries, &part.queries), pick(keys, &part.keys)])
}

fn slice_bias<'a>(bias: &Bias<'a>, part: &Part) -> Bias<'a> {
    match bias {
        Bias::F64(view) => slice(*view, part).into(),
        Bias::F32(view) => slice(*view, part).into(),
        Bias::F16(view) => slice(*view, part).into(),
        Bias::Bf16(view) => slice(*view, part).into(),
    }
}

/// Some heads, positions and channels of a view, which has them; without a copy.
pub(crate) fn cut_view<'a, T: Copy>(view: View<'a, T>, axes: [Range<usize>; 3]) -> View<'a, T> {
    let ([batch, ..], strides) = (view.sizes(), view.strides());
    let [heads, seq, dim] = axes;
    let sizes = [batch, heads.len(), seq.len(), dim.len()];
    let step = |first: usize, axis: usize| strides[axis].saturating_mul(first as isize);
    let empty = sizes.contains(&0) || view.is_empty();
    let more = step(heads.start, 1) + step(seq.start, 2) + step(dim.start, 3);
    let offset = if empty { 0 } else { view.offset().wrapping_add_signed(more) };
    let data = view.data();
    View::strided(data, sizes, strides, offset).unwrap_or(view)
}
