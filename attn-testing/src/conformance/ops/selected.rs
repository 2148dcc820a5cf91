//! `selected_attention`: queries that see listed keys only.
//!
//! The library has no lists of keys; masks say the same. Each case is run through two of them, a mask of blocks and a
//! mask of single keys, and both answers are compared.

use attn_core::mask::BlockSparse;
use attn_core::{Layout, Mask, View};

use super::attention::{Tables, attend, options};
use super::wide::values;
use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::engine::{Engine, Number};

/// The lists as masks.
struct Lists {
    /// `[batch, q_heads or 1, query blocks, key blocks]`.
    blocks: (Vec<bool>, [usize; 4]),
    /// `[batch, q_heads or 1, q_len, kv_len]`.
    keys: (Vec<bool>, [usize; 4]),
    block_q: usize,
    block_k: usize,
}

impl Lists {
    fn of(loaded: Loaded<'_>, [batch, heads, q_len, _]: [usize; 4], kv_len: usize) -> Result<Self, Stop> {
        let (block_q, block_k) = (loaded.case.required_size("query_block")?, loaded.case.required_size("key_block")?);
        let indices = loaded.input("indices")?;
        let [found, groups, lists, most] = indices.sizes()?;
        if block_q == 0 || block_k == 0 || groups == 0 || heads % groups != 0 {
            return Err(Stop::Fail(format!("blocks of {block_q} by {block_k}, {groups} lists for {heads} heads")));
        }
        let (q_blocks, k_blocks) = (q_len.div_ceil(block_q), kv_len.div_ceil(block_k));
        if [found, lists] != [batch, q_blocks] {
            return Err(Stop::Fail(format!("indices of shape {:?}", indices.shape)));
        }
        // Lists that all heads share are a mask that they share.
        let (mask_heads, group) = if groups == 1 { (1, heads) } else { (heads, heads / groups) };
        let block_sizes = [batch, mask_heads, q_blocks, k_blocks];
        let key_sizes = [batch, mask_heads, q_len, kv_len];
        let mut blocks = vec![false; block_sizes.iter().product()];
        let mut keys = vec![false; key_sizes.iter().product()];
        let all = indices.integers()?;
        for b in 0..batch {
            for h in 0..mask_heads {
                for i in 0..q_len {
                    let row = (b * mask_heads + h) * q_len + i;
                    let block_row = (b * mask_heads + h) * q_blocks + i / block_q;
                    let list = ((b * groups + h / group) * lists + i / block_q) * most;
                    for &n in all[list..][..most].iter().filter(|&&n| n != -1) {
                        let Some(n) = usize::try_from(n).ok().filter(|&n| n < k_blocks) else {
                            return Err(Stop::Fail(format!("entry {n} of a list, with {k_blocks} blocks of keys")));
                        };
                        blocks[block_row * k_blocks + n] = true;
                        let end = ((n + 1) * block_k).min(kv_len);
                        keys[row * kv_len + n * block_k..row * kv_len + end].fill(true);
                    }
                }
            }
        }
        Ok(Self { blocks: (blocks, block_sizes), keys: (keys, key_sizes), block_q, block_k })
    }

    fn masks(&self) -> Result<[Mask<'_>; 2], Stop> {
        let blocks = View::new(&self.blocks.0, Layout::Bhsd, self.blocks.1)?;
        let keys = View::new(&self.keys.0, Layout::Bhsd, self.keys.1)?;
        let (block_q, block_k) = (self.block_q, self.block_k);
        Ok([Mask::block_sparse(BlockSparse { blocks, block_q, block_k }), Mask::keep(keys)])
    }
}

pub(super) fn attention<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<E: Engine, T: Number + Stored>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let (q, k) = (loaded.input("q")?.view::<T>()?, loaded.input("k")?.view()?);
        let v = values(loaded, k)?;
        let ([batch, heads, q_len, _], [_, _, kv_len, value_dim]) = (q.sizes(), v.sizes());
        let tables = Tables::of(loaded, kv_len)?;
        let attn = options(loaded, &tables)?;
        let lists = Lists::of(loaded, q.sizes(), kv_len)?;
        let mut produced = Produced::default();
        for mask in lists.masks()? {
            let attn = attn.mask(attn.get_mask().and(mask));
            let (y, lse) = attend(engine, &attn, q, k, v, Layout::Bhsd)?;
            produced.put("y", &[batch, heads, q_len, value_dim], &y);
            produced.put("lse", &[batch, heads, q_len], &lse);
        }
        Ok(produced)
    }
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}
