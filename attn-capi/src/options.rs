//! From the options of the header to those of the engines.
//!
//! Options come in three parts: the struct itself, the [`Tables`] it points to (short; a plan keeps a [`Kept`] copy),
//! and the tensors it points to ([`Masks`]; large, never copied).

use attn_core::dropout::Dropout;
use attn_core::mask::Term;
use attn_core::mask::{BlockSparse, DenseMask, Documents, Lengths, Tree, Window};
use attn_core::position::alibi::Alibi;
use attn_core::{Align, Attention, AttnError, Bias, Mask, Precision, View};

use crate::error::{Error, Result};
use crate::types::{ATTN_UNBOUNDED, AttnAlign, AttnOptions, AttnPrecision};

/// The tables that options point to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tables<'a> {
    pub(crate) prefix: Option<&'a [usize]>,
    pub(crate) kv_lens: Option<&'a [usize]>,
    pub(crate) kv_starts: Option<&'a [usize]>,
    pub(crate) q_lens: Option<&'a [usize]>,
    pub(crate) cu_q: Option<&'a [usize]>,
    pub(crate) cu_k: Option<&'a [usize]>,
    /// As C gives them: −1 for a root.
    pub(crate) parents: Option<&'a [isize]>,
    pub(crate) slopes: Option<&'a [f32]>,
    pub(crate) sinks: Option<&'a [f32]>,
}

/// Tables of its own, for a plan.
#[derive(Clone, Debug, Default)]
pub(crate) struct Kept {
    prefix: Option<Box<[usize]>>,
    kv_lens: Option<Box<[usize]>>,
    kv_starts: Option<Box<[usize]>>,
    q_lens: Option<Box<[usize]>>,
    cu_q: Option<Box<[usize]>>,
    cu_k: Option<Box<[usize]>>,
    parents: Option<Box<[isize]>>,
    slopes: Option<Box<[f32]>>,
    sinks: Option<Box<[f32]>>,
}

impl Tables<'_> {
    /// A copy of all.
    pub(crate) fn kept(&self) -> Kept {
        Kept {
            prefix: self.prefix.map(Box::from),
            kv_lens: self.kv_lens.map(Box::from),
            kv_starts: self.kv_starts.map(Box::from),
            q_lens: self.q_lens.map(Box::from),
            cu_q: self.cu_q.map(Box::from),
            cu_k: self.cu_k.map(Box::from),
            parents: self.parents.map(Box::from),
            slopes: self.slopes.map(Box::from),
            sinks: self.sinks.map(Box::from),
        }
    }

    /// The tree's nodes as the engines want them; empty without a tree.
    ///
    /// # Errors
    /// A parent below −1. (One that does not come before its child is refused by the mask itself.)
    pub(crate) fn nodes(&self) -> Result<Vec<Option<usize>>> {
        let node = |(at, &parent): (usize, &isize)| match usize::try_from(parent) {
            Ok(parent) => Ok(Some(parent)),
            Err(_) if parent == -1 => Ok(None),
            Err(_) => Err(AttnError::Index { what: "tree_parents", at, value: usize::MAX, limit: at }.into()),
        };
        self.parents.unwrap_or_default().iter().enumerate().map(node).collect()
    }
}

impl Kept {
    /// What options point to.
    pub(crate) fn tables(&self) -> Tables<'_> {
        Tables {
            prefix: self.prefix.as_deref(),
            kv_lens: self.kv_lens.as_deref(),
            kv_starts: self.kv_starts.as_deref(),
            q_lens: self.q_lens.as_deref(),
            cu_q: self.cu_q.as_deref(),
            cu_k: self.cu_k.as_deref(),
            parents: self.parents.as_deref(),
            slopes: self.slopes.as_deref(),
            sinks: self.sinks.as_deref(),
        }
    }
}

/// The tensors that options point to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Masks<'a> {
    pub(crate) keep: Option<View<'a, bool>>,
    pub(crate) drop: Option<View<'a, bool>>,
    pub(crate) blocks: Option<View<'a, bool>>,
    pub(crate) dropout_keep: Option<View<'a, bool>>,
    pub(crate) bias: Option<Bias<'a>>,
}

/// An alignment, by its number; `None` for ATTN_ALIGN_NONE.
fn align(what: &'static str, value: u32, offset: isize) -> Result<Option<Align>> {
    match value {
        _ if value == AttnAlign::None as u32 => Ok(None),
        _ if value == AttnAlign::TopLeft as u32 => Ok(Some(Align::TopLeft)),
        _ if value == AttnAlign::BottomRight as u32 => Ok(Some(Align::BottomRight)),
        _ if value == AttnAlign::Offset as u32 => Ok(Some(Align::Offset(offset))),
        _ => Err(Error::Unknown { what, value }),
    }
}

fn window(align: Option<Align>, left: usize, right: usize) -> Option<Window> {
    let bound = |distance| (distance != ATTN_UNBOUNDED).then_some(distance);
    align.map(|align| Window { left: bound(left), right: bound(right), align })
}

/// A table of one entry holds for all sequences.
fn lengths(table: &[usize]) -> Lengths<'_> {
    match table {
        [one] => Lengths::All(*one),
        _ => Lengths::PerBatch(table),
    }
}

/// The mask: every term that the options name, all of which must show a key.
fn mask<'a>(o: &AttnOptions, tables: &Tables<'a>, masks: &Masks<'a>, nodes: &'a [Option<usize>]) -> Result<Mask<'a>> {
    let mut mask = Mask::none();
    let mut and = |term| mask = mask.and(Mask::term(term));
    if let Some(align) = align("causal", o.causal, o.causal_offset)? {
        and(Term::Causal(align));
    }
    if let Some(window) = window(align("window", o.window, o.window_offset)?, o.window_left, o.window_right) {
        and(Term::Window(window));
    }
    match (align("prefix", o.prefix, o.prefix_offset)?, tables.prefix) {
        (Some(align), Some(table)) => and(Term::Prefix { prefix: lengths(table), align }),
        (None, None) => {}
        (Some(_), None) => return Err(Error::Null("prefix_lens")),
        (None, Some(_)) => return Err(Error::Idle { what: "prefix_lens", needs: PREFIX }),
    }
    if let Some(table) = tables.kv_lens {
        and(Term::KvLens(lengths(table)));
    }
    if let Some(table) = tables.kv_starts {
        and(Term::KvStarts(lengths(table)));
    }
    if let Some(table) = tables.q_lens {
        and(Term::QLens(lengths(table)));
    }
    if let Some(documents) = documents(o, tables)? {
        and(Term::Documents(documents));
    }
    if let Some(blocks) = masks.blocks {
        and(Term::BlockSparse(BlockSparse { blocks, block_q: o.block_q, block_k: o.block_k }));
    }
    if tables.parents.is_some() {
        and(Term::Tree(Tree { parents: nodes }));
    }
    if let Some(mask) = masks.keep {
        and(Term::Dense(DenseMask { mask, keep: true }));
    }
    if let Some(mask) = masks.drop {
        and(Term::Dense(DenseMask { mask, keep: false }));
    }
    Ok(mask)
}

fn documents<'a>(o: &AttnOptions, tables: &Tables<'a>) -> Result<Option<Documents<'a>>> {
    let (cu_q, cu_k) = match (tables.cu_q, tables.cu_k) {
        (Some(cu_q), Some(cu_k)) => (cu_q, cu_k),
        (None, None) => return Ok(None),
        (None, Some(_)) => return Err(Error::Null("cu_q")),
        (Some(_), None) => return Err(Error::Null("cu_k")),
    };
    let mut documents = Documents::new(cu_q, cu_k);
    if let Some(align) = align("document_causal", o.document_causal, o.document_causal_offset)? {
        documents = documents.causal(align);
    }
    let aligned = align("document_window", o.document_window, o.document_window_offset)?;
    if let Some(window) = window(aligned, o.document_window_left, o.document_window_right) {
        documents = documents.window(window);
    }
    Ok(Some(documents))
}

const PREFIX: &str = "prefix must be an AttnAlign other than ATTN_ALIGN_NONE";
const ALIBI: &str = "alibi must be an AttnAlign other than ATTN_ALIGN_NONE";
const WINDOW: &str = "window must be an AttnAlign other than ATTN_ALIGN_NONE";
const DOCUMENT_WINDOW: &str = "document_window must be an AttnAlign other than ATTN_ALIGN_NONE";

/// Refuses options that nothing would heed, such as an offset beside an alignment that has none: what was meant is not
/// what would run.
fn no_idle(o: &AttnOptions, tables: &Tables<'_>, masks: &Masks<'_>) -> Result<()> {
    let is_none = |align: u32| align == AttnAlign::None as u32;
    let offset = |align: u32, offset: isize| align != AttnAlign::Offset as u32 && offset != 0;
    let bounds = |align: u32, both: [usize; 2]| is_none(align) && both.iter().any(|&x| x != 0 && x != ATTN_UNBOUNDED);
    let (documents, has_blocks) = (tables.cu_q.is_some(), masks.blocks.is_some());
    let (draws, keeps) = (o.dropout_p != 0.0, masks.dropout_keep.is_some());
    let calls = o.score_mod.is_some() || o.mask_mod.is_some();
    let idle = [
        (o.has_scale == 0 && o.scale != 0.0, "scale", "has_scale must be 1"),
        (bounds(o.window, [o.window_left, o.window_right]), "window_left or window_right", WINDOW),
        (
            bounds(o.document_window, [o.document_window_left, o.document_window_right]),
            "document_window_left or document_window_right",
            DOCUMENT_WINDOW,
        ),
        (o.document_causal != 0 && !documents, "document_causal", "cu_q and cu_k must be given"),
        (o.document_window != 0 && !documents, "document_window", "cu_q and cu_k must be given"),
        (o.alibi != 0 && tables.slopes.is_none(), "alibi", "alibi_slopes must be given"),
        (offset(o.causal, o.causal_offset), "causal_offset", "causal must be ATTN_ALIGN_OFFSET"),
        (offset(o.window, o.window_offset), "window_offset", "window must be ATTN_ALIGN_OFFSET"),
        (offset(o.prefix, o.prefix_offset), "prefix_offset", "prefix must be ATTN_ALIGN_OFFSET"),
        (
            offset(o.document_causal, o.document_causal_offset),
            "document_causal_offset",
            "document_causal must be ATTN_ALIGN_OFFSET",
        ),
        (
            offset(o.document_window, o.document_window_offset),
            "document_window_offset",
            "document_window must be ATTN_ALIGN_OFFSET",
        ),
        (offset(o.alibi, o.alibi_offset), "alibi_offset", "alibi must be ATTN_ALIGN_OFFSET"),
        (!has_blocks && o.block_q != 0, "block_q", "blocks must be given"),
        (!has_blocks && o.block_k != 0, "block_k", "blocks must be given"),
        (keeps && o.dropout_seed != 0, "dropout_seed", "dropout_keep must be null"),
        (!draws && o.dropout_seed != 0, "dropout_seed", "dropout_p must be above 0"),
        (!calls && !o.user_data.is_null(), "user_data", "score_mod or mask_mod must be given"),
    ];
    match idle.into_iter().find(|&(is_idle, ..)| is_idle) {
        Some((_, what, needs)) => Err(Error::Idle { what, needs }),
        None => Ok(()),
    }
}

/// The options of the engines. `nodes` are those of `tables`.
pub(crate) fn attention<'a>(
    o: &AttnOptions,
    tables: &Tables<'a>,
    masks: &Masks<'a>,
    nodes: &'a [Option<usize>],
) -> Result<Attention<'a>> {
    for (what, value) in [("AttnOptions.reserved", o.reserved), ("AttnOptions.reserved_too", o.reserved_too)] {
        if value != 0 {
            return Err(Error::Unknown { what, value });
        }
    }
    let mask = mask(o, tables, masks, nodes)?;
    no_idle(o, tables, masks)?;
    let mut attn = Attention::new().mask(mask);
    match o.precision {
        value if value == AttnPrecision::Exact as u32 => {}
        value if value == AttnPrecision::Fast as u32 => attn = attn.precision(Precision::Fast),
        value => return Err(Error::Unknown { what: "precision", value }),
    }
    if o.reproducible != 0 {
        attn = attn.reproducible();
    }
    if o.has_scale != 0 {
        attn = attn.scale(o.scale);
    }
    // Not "above 0": what is negative or NaN goes on, and is refused by name.
    if o.softcap != 0.0 {
        attn = attn.softcap(o.softcap);
    }
    if o.temperature != 0.0 {
        attn = attn.temperature(o.temperature);
    }
    if let Some(bias) = masks.bias {
        attn = attn.bias(bias);
    }
    if let Some(slopes) = tables.slopes {
        let aligned = align("alibi", o.alibi, o.alibi_offset)?;
        let align = aligned.ok_or(Error::Idle { what: "alibi_slopes", needs: ALIBI })?;
        attn = attn.alibi(Alibi { slopes, align });
    }
    if let Some(sinks) = tables.sinks {
        attn = attn.sinks(sinks);
    }
    if let Some(mask) = masks.dropout_keep {
        attn = attn.dropout(Dropout::Keep { mask, p: o.dropout_p });
    } else if o.dropout_p != 0.0 {
        attn = attn.dropout(Dropout::Seeded { p: o.dropout_p, seed: o.dropout_seed });
    }
    Ok(attn)
}
