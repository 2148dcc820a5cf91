//! Mask terms that own their tables, and what each means by definition.
//!
//! [`OwnedTerm::sees`] is written from the definitions, key by key, without ranges, bits or tiles: the brute force that
//! masks are tested against.

use attn_core::mask::Term;
use attn_core::mask::{BlockSparse, Documents, Lengths, Tree, Window};
use attn_core::score::At;
use attn_core::{Align, AttnShape, Mask, View};

use super::Table;
use crate::paint::{Paint, bools};

/// One mask term with its tables.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "each variant owns what the term of the same name borrows")]
pub enum OwnedTerm {
    Causal(Align),
    Window(Window),
    Prefix(Vec<usize>, Align),
    PrefixAll(usize, Align),
    KvLens(Vec<usize>),
    KvStarts(Vec<usize>),
    QLens(Vec<usize>),
    Documents { cu_q: Vec<usize>, cu_k: Vec<usize>, causal: Option<Align>, window: Option<Window> },
    BlockSparse { sizes: [usize; 4], blocks: Table<bool>, block_q: usize, block_k: usize },
    Tree(Vec<Option<usize>>),
    Keep([usize; 4], Table<bool>),
    Drop([usize; 4], Table<bool>),
}

/// The key position of query `i`.
fn position(align: Align, i: usize, q_len: usize, kv_len: usize) -> i128 {
    i as i128
        + match align {
            Align::TopLeft => 0,
            Align::BottomRight => kv_len as i128 - q_len as i128,
            Align::Offset(offset) => offset as i128,
        }
}

fn in_window(window: &Window, p: i128, j: usize) -> bool {
    window.left.is_none_or(|l| j as i128 >= p - l as i128) && window.right.is_none_or(|r| j as i128 <= p + r as i128)
}

impl OwnedTerm {
    /// The mask of this term alone.
    pub fn mask(&self) -> Mask<'_> {
        let dense = |sizes: &[usize; 4]| *sizes;
        match self {
            Self::Causal(align) => Mask::causal(*align),
            Self::Window(window) => Mask::term(Term::Window(*window)),
            Self::Prefix(lens, align) => Mask::prefix_lm(Lengths::PerBatch(lens), *align),
            Self::PrefixAll(len, align) => Mask::prefix_lm(Lengths::All(*len), *align),
            Self::KvLens(lens) => Mask::kv_lens(lens),
            Self::KvStarts(starts) => Mask::kv_starts(starts),
            Self::QLens(lens) => Mask::q_lens(lens),
            Self::Documents { cu_q, cu_k, causal, window } => {
                let mut documents = Documents::new(cu_q, cu_k);
                if let Some(align) = causal {
                    documents = documents.causal(*align);
                }
                if let Some(window) = window {
                    documents = documents.window(*window);
                }
                Mask::documents(documents)
            }
            Self::BlockSparse { sizes, blocks, block_q, block_k } => {
                let blocks = View::broadcast(blocks, &dense(sizes)).expect("blocks of their own shape");
                Mask::block_sparse(BlockSparse { blocks, block_q: *block_q, block_k: *block_k })
            }
            Self::Tree(parents) => Mask::tree(Tree { parents }),
            Self::Keep(sizes, mask) => {
                Mask::keep(View::broadcast(mask, &dense(sizes)).expect("a mask of its own shape"))
            }
            Self::Drop(sizes, mask) => {
                Mask::drop(View::broadcast(mask, &dense(sizes)).expect("a mask of its own shape"))
            }
        }
    }

    /// Whether query `at.query` sees key `at.key`, by definition.
    pub fn sees(&self, shape: &AttnShape, at: At) -> bool {
        let At { batch, head, query: i, key: j } = at;
        let (q_len, kv_len) = (shape.q_len, shape.kv_len);
        let dense = |sizes: &[usize; 4], mask: &[bool]| {
            let place = [batch, head, i, j];
            let index =
                (0..4).fold(0, |index, axis| index * sizes[axis] + if sizes[axis] == 1 { 0 } else { place[axis] });
            mask[index]
        };
        match self {
            Self::Causal(align) => j as i128 <= position(*align, i, q_len, kv_len),
            Self::Window(window) => in_window(window, position(window.align, i, q_len, kv_len), j),
            Self::Prefix(lens, align) => j < lens[batch] || j as i128 <= position(*align, i, q_len, kv_len),
            Self::PrefixAll(len, align) => j < *len || j as i128 <= position(*align, i, q_len, kv_len),
            Self::KvLens(lens) => j < lens[batch],
            Self::KvStarts(starts) => j >= starts[batch],
            Self::QLens(lens) => i < lens[batch],
            Self::Documents { cu_q, cu_k, causal, window } => (0..cu_q.len() - 1).any(|n| {
                let (q_start, q_end, k_start, k_end) = (cu_q[n], cu_q[n + 1], cu_k[n], cu_k[n + 1]);
                if !(q_start..q_end).contains(&i) || !(k_start..k_end).contains(&j) {
                    return false;
                }
                let (i, j, q_len, kv_len) = (i - q_start, j - k_start, q_end - q_start, k_end - k_start);
                causal.is_none_or(|align| j as i128 <= position(align, i, q_len, kv_len))
                    && window.as_ref().is_none_or(|w| in_window(w, position(w.align, i, q_len, kv_len), j))
            }),
            Self::BlockSparse { sizes, blocks, block_q, block_k } => {
                let place = [batch, head, i / block_q, j / block_k];
                let index = (0..4).fold(0, |index, axis| {
                    index * sizes[axis] + if axis < 2 && sizes[axis] == 1 { 0 } else { place[axis] }
                });
                blocks[index]
            }
            Self::Tree(parents) => {
                let first = kv_len - q_len;
                let mut node = Some(i);
                j < first
                    || core::iter::from_fn(|| {
                        let this = node?;
                        node = parents[this];
                        Some(this)
                    })
                    .any(|ancestor| first + ancestor == j)
            }
            Self::Keep(sizes, mask) => dense(sizes, mask),
            Self::Drop(sizes, mask) => !dense(sizes, mask),
        }
    }
}

/// One of each kind of term, and more if a kind has several forms, for a shape; tables drawn from the seed.
pub fn kinds(shape: &AttnShape, seed: u64) -> Vec<OwnedTerm> {
    let mut paint = Paint::new(seed);
    let &AttnShape { batch, q_heads, q_len, kv_len, .. } = shape;
    let aligns = [Align::TopLeft, Align::BottomRight, Align::Offset(-2), Align::Offset(3), Align::Offset(isize::MAX)];
    let mut all: Vec<OwnedTerm> = aligns.map(OwnedTerm::Causal).to_vec();
    let window = |left, right, align| OwnedTerm::Window(Window { left, right, align });
    all.extend([
        window(Some(0), Some(0), Align::TopLeft),
        window(Some(3), Some(0), Align::BottomRight),
        window(Some(2), Some(5), Align::Offset(1)),
        window(None, Some(1), Align::TopLeft),
        window(Some(4), None, Align::BottomRight),
        window(Some(usize::MAX), Some(usize::MAX), Align::TopLeft),
    ]);
    let mut lengths = |limit: usize| (0..batch).map(|_| paint.below(limit + 1)).collect::<Vec<usize>>();
    all.extend([
        OwnedTerm::Prefix(lengths(kv_len), Align::TopLeft),
        OwnedTerm::PrefixAll(kv_len / 2, Align::BottomRight),
        OwnedTerm::KvLens(lengths(kv_len)),
        OwnedTerm::KvStarts(lengths(kv_len)),
        OwnedTerm::QLens(lengths(q_len)),
    ]);
    let mut bounds = |limit: usize| {
        let mut cu: Vec<usize> = (0..3).map(|_| paint.below(limit + 1)).collect();
        cu.sort_unstable();
        // A first bound above 0 and a last below the limit: rows before and behind all documents.
        cu
    };
    let (cu_q, cu_k) = (bounds(q_len), bounds(kv_len));
    let all_of = |len: usize| vec![0, len / 3, len / 3, len];
    all.push(OwnedTerm::Documents { cu_q, cu_k, causal: None, window: None });
    for causal in [Align::TopLeft, Align::BottomRight] {
        let (cu_q, cu_k) = (all_of(q_len), all_of(kv_len));
        all.push(OwnedTerm::Documents { cu_q, cu_k, causal: Some(causal), window: None });
    }
    all.push(OwnedTerm::Documents {
        cu_q: all_of(q_len),
        cu_k: all_of(kv_len),
        causal: None,
        window: Some(Window { left: Some(2), right: Some(1), align: Align::BottomRight }),
    });
    for (block_q, block_k, sizes) in
        [(3, 5, [1, q_heads]), (16, 16, [batch, 1]), (1, 1, [1, 1]), (200, 64, [batch, q_heads])]
    {
        let sizes = [sizes[0], sizes[1], q_len.div_ceil(block_q), kv_len.div_ceil(block_k)];
        let blocks = Table(bools(paint.next(), sizes.iter().product(), 0.5));
        all.push(OwnedTerm::BlockSparse { sizes, blocks, block_q, block_k });
    }
    if kv_len >= q_len {
        let parents =
            (0..q_len).map(|n| if n == 0 || paint.chance(0.2) { None } else { Some(paint.below(n)) }).collect();
        all.push(OwnedTerm::Tree(parents));
    }
    for (n, sizes) in [
        [batch, q_heads, q_len, kv_len],
        [1, 1, q_len, kv_len],
        [batch, 1, 1, kv_len],
        [1, q_heads, q_len, 1],
        [1, 1, 1, 1],
    ]
    .into_iter()
    .enumerate()
    {
        let mask = Table(bools(paint.next(), sizes.iter().product(), 0.6));
        all.push(if n % 2 == 0 { OwnedTerm::Keep(sizes, mask) } else { OwnedTerm::Drop(sizes, mask) });
    }
    all
}
