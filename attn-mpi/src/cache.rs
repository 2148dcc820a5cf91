//! A growing cache of keys and values whose tokens are shared out among ranks.
//!
//! A rank holds whole chunks of 512 positions (but for the last of the sequence), so that each leaf of the tree of
//! states is computed by one rank. A token of a new block of chunks belongs to the next rank in turn.

use std::ops::Range;

use attn_core::{AttnError, Element, View};
use bytemuck::{Pod, cast_slice, cast_slice_mut};

use crate::agree::{Record, text};
use crate::cluster::Cluster;
use crate::error::Result;
use crate::nodes::CHUNK;
use crate::sharding::Sharding;
use crate::tensors::{Shard, zeros};

/// Tag of tokens on their way to the rank of their chunk.
const TAG: i32 = 9;

/// This rank's part of a cache, and where all other tokens are. All sequences of the batch have the same length;
/// shorter ones are padded, and hidden by `Mask::kv_lens` or `kv_starts`.
///
/// ```no_run
/// use attn_core::{Attention, Layout, View, ViewMut};
/// use attn_mpi::{Cluster, ShardedCache, mpi};
/// let universe = mpi::initialize().expect("MPI is not initialised yet");
/// let cluster = Cluster::new(&universe.world());
/// let mut cache = ShardedCache::new(&cluster, [1, 2, 64, 64], 4096);
/// let attn = Attention::new();
/// let (q, token, mut out) = ([0.5f32; 8 * 64], [0.25f32; 2 * 64], [0.0f32; 8 * 64]);
/// for _ in 0..1000 {
///     // Every rank has the new token; one of them keeps it.
///     let token = View::new(&token, Layout::Bhsd, [1, 2, 1, 64])?;
///     cache.append(token, token)?;
///     let q = View::new(&q, Layout::Bhsd, [1, 8, 1, 64])?;
///     cluster.decode(&attn, q, &cache, ViewMut::new(&mut out, Layout::Bhsd, [1, 8, 1, 64])?)?;
/// }
/// # Ok::<(), attn_mpi::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ShardedCache<T> {
    rank: usize,
    sizes: [usize; 4],
    block: usize,
    /// Positions of each rank, ascending.
    held: Vec<Vec<Range<usize>>>,
    len: usize,
    /// `[positions of this rank, batch, kv_heads, head_dim]`.
    k: Vec<T>,
    v: Vec<T>,
}

impl<T: Element + Pod> ShardedCache<T> {
    /// A cache without tokens. `sizes` are `[batch, kv_heads, head_dim, value_dim]`; each rank takes `block` tokens in
    /// turn, rounded up to a multiple of 512. Large blocks mean fewer states for a reproducible step. Every rank passes
    /// the same sizes and the same block; no message is sent, and [`Cluster::decode`] finds out if they differ.
    pub fn new(cluster: &Cluster, sizes: [usize; 4], block: usize) -> Self {
        let block = block.max(1).div_ceil(CHUNK).saturating_mul(CHUNK);
        let held = vec![Vec::new(); cluster.ranks()];
        Self { rank: cluster.rank(), sizes, block, held, len: 0, k: Vec::new(), v: Vec::new() }
    }

    /// The cache of a sequence that has been prefilled: `k` and `v` are this rank's shards, as in
    /// [`Cluster::prefill`]. All ranks call it together. Chunks that several ranks hold go to the one that has their
    /// first token: at most 511 tokens for each end of a range.
    ///
    /// # Errors
    /// On every rank, if one has shards that do not fit or if they disagree.
    pub fn of_shards(cluster: &Cluster, keys: &Sharding, k: View<'_, T>, v: View<'_, T>, block: usize) -> Result<Self> {
        let ([batch, heads, n, head_dim], [.., value_dim]) = (k.sizes(), v.sizes());
        let me = cluster.rank();
        let check = || {
            AttnError::check_size("ranks of the sharding of the keys", cluster.ranks(), keys.ranks())?;
            AttnError::check_size("k positions against the sharding", keys.local_len(me), n)?;
            attn_core::AttnShape::new([batch, heads, 0, head_dim], k.sizes(), v.sizes()).map(|_| ())
        };
        Record::new("a cache of shards", cluster.level, cluster.mixed)
            .with("batch", batch as u64)
            .with("kv_heads", heads as u64)
            .with("head_dim", head_dim as u64)
            .with("value_dim", value_dim as u64)
            .with("the block", block as u64)
            .with("the element type of the cache", text(T::DTYPE.name()))
            .with("the bytes of a message", cluster.wire.most as u64)
            .with_sharding("the sharding of the keys", keys)
            .agree(&cluster.wire, check().map_err(Into::into))?;
        let mut cache = Self::new(cluster, [batch, heads, head_dim, value_dim], block);
        cache.fill(cluster, keys, k, v)?;
        Ok(cache)
    }

    /// Takes the tokens of its chunks from whoever has them.
    fn fill(&mut self, cluster: &Cluster, keys: &Sharding, k: View<'_, T>, v: View<'_, T>) -> Result<()> {
        let (me, ranks, [batch, heads, head_dim, value_dim]) = (self.rank, cluster.ranks(), self.sizes);
        let token = batch * heads * (head_dim + value_dim);
        // Who has what, in ascending order: rank, row, positions within one chunk.
        let mut pieces: Vec<(usize, usize, Range<usize>)> = Vec::new();
        for rank in 0..ranks {
            for (row, range) in keys.rows(rank) {
                let mut at = range.start;
                while at < range.end {
                    let end = range.end.min((at / CHUNK + 1) * CHUNK);
                    pieces.push((rank, row + at - range.start, at..end));
                    at = end;
                }
            }
        }
        pieces.sort_by_key(|(.., range)| range.start);
        let mut home = 0;
        let homes: Vec<usize> = pieces
            .iter()
            .map(|(rank, _, range)| {
                home = if range.start.is_multiple_of(CHUNK) { *rank } else { home };
                home
            })
            .collect();
        let with_homes = || pieces.iter().zip(&homes);
        let outgoing: Vec<Vec<T>> = (0..ranks)
            .map(|to| {
                let mut buffer = Vec::new();
                for ((rank, row, range), home) in with_homes() {
                    if *rank == me && *home == to && to != me {
                        (*row..*row + range.len()).for_each(|row| pack_token(k, v, row, &mut buffer));
                    }
                }
                buffer
            })
            .collect();
        let expected = |from: usize| -> usize {
            let mine = with_homes().filter(|((rank, ..), home)| *rank == from && **home == me && from != me);
            mine.map(|((.., range), _)| range.len() * token).sum()
        };
        let mut incoming: Vec<Vec<T>> = (0..ranks).map(|from| zeros(expected(from))).collect();
        let sends: Vec<(usize, &[u8])> = outgoing.iter().map(|x| cast_slice(x)).enumerate().collect();
        let receives: Vec<(usize, &mut [u8])> = incoming.iter_mut().map(|x| cast_slice_mut(x)).enumerate().collect();
        cluster.wire.exchange("tokens of a cache", TAG, &sends, receives, |_| ());
        let mut taken = vec![0; ranks];
        for ((rank, row, range), home) in with_homes() {
            self.note(*home, range.clone());
            if *home != me {
                continue;
            }
            for n in 0..range.len() {
                let mut buffer = Vec::new();
                let tokens = if *rank == me {
                    pack_token(k, v, row + n, &mut buffer);
                    &buffer[..]
                } else {
                    taken[*rank] += token;
                    &incoming[*rank][taken[*rank] - token..taken[*rank]]
                };
                let (k, v) = tokens.split_at(batch * heads * head_dim);
                self.k.extend_from_slice(k);
                self.v.extend_from_slice(v);
            }
        }
        self.len = keys.len();
        Ok(())
    }

    /// Appends tokens that every rank has, `[batch, kv_heads, n, …]`. Each is kept by one rank. No message is sent.
    ///
    /// # Errors
    /// [`AttnError::Size`] if the sizes are not the cache's; nothing has been appended then.
    pub fn append(&mut self, k: View<'_, T>, v: View<'_, T>) -> attn_core::Result<()> {
        let ([batch, heads, head_dim, value_dim], n) = (self.sizes, k.sizes()[2]);
        for (what, cache, given) in [
            ("k batch against the cache", batch, k.sizes()[0]),
            ("kv_heads against the cache", heads, k.sizes()[1]),
            ("k head_dim against the cache", head_dim, k.sizes()[3]),
            ("v batch against the cache", batch, v.sizes()[0]),
            ("v heads against the cache", heads, v.sizes()[1]),
            ("v tokens against k tokens", n, v.sizes()[2]),
            ("value_dim against the cache", value_dim, v.sizes()[3]),
        ] {
            AttnError::check_size(what, cache, given)?;
        }
        for row in 0..n {
            let owner = self.next_owner();
            if owner == self.rank {
                let mut token = Vec::with_capacity(batch * heads * (head_dim + value_dim));
                pack_token(k, v, row, &mut token);
                let (k, v) = token.split_at(batch * heads * head_dim);
                self.k.extend_from_slice(k);
                self.v.extend_from_slice(v);
            }
            self.note(owner, self.len..self.len + 1);
            self.len += 1;
        }
        Ok(())
    }

    /// Who keeps the next token: the rank that keeps the rest of its chunk, or the next in turn.
    fn next_owner(&self) -> usize {
        let last = self.len.checked_sub(1).filter(|_| !self.len.is_multiple_of(CHUNK));
        let holder = last.and_then(|last| {
            self.held.iter().position(|ranges| ranges.last().is_some_and(|range| range.contains(&last)))
        });
        holder.unwrap_or(self.len / self.block % self.held.len().max(1))
    }

    /// Notes that a rank holds these positions, which lie behind all that it holds so far.
    fn note(&mut self, rank: usize, range: Range<usize>) {
        match self.held[rank].last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.held[rank].push(range),
        }
    }

    /// Tokens of the whole sequence.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the cache was made by this cluster or one of the same ranks, as far as numbers say.
    pub(crate) fn check_ranks(&self, cluster: &Cluster) -> attn_core::Result<()> {
        AttnError::check_size("ranks of the cache", cluster.ranks(), self.held.len())?;
        AttnError::check_size("the rank of the cache", cluster.rank(), self.rank)
    }

    /// The positions of all ranks.
    pub(crate) fn held(&self) -> impl Iterator<Item = &[Range<usize>]> {
        self.held.iter().map(Vec::as_slice)
    }

    /// The positions that a rank holds.
    pub fn held_by(&self, rank: usize) -> &[Range<usize>] {
        self.held.get(rank).map_or(&[], Vec::as_slice)
    }

    /// `[batch, kv_heads, head_dim, value_dim]`.
    pub fn sizes(&self) -> [usize; 4] {
        self.sizes
    }

    /// Bytes of this rank's keys and values.
    pub fn bytes(&self) -> usize {
        size_of_val(self.k.as_slice()) + size_of_val(self.v.as_slice())
    }

    /// Keys and values of positions that this rank holds in one range.
    pub(crate) fn part(&self, keys: Range<usize>) -> attn_core::Result<Shard<'_, T>> {
        let [batch, heads, head_dim, value_dim] = self.sizes;
        let mut row = 0;
        for range in self.held_by(self.rank) {
            if range.start <= keys.start && keys.end <= range.end {
                row += keys.start - range.start;
                break;
            }
            row += range.len();
        }
        let view = |x, dim: usize| {
            let strides = [heads * dim, dim, batch * heads * dim, 1].map(usize::cast_signed);
            View::strided(x, [batch, heads, keys.len(), dim], strides, row * batch * heads * dim)
        };
        Ok(Shard { k: view(&self.k, head_dim)?, v: view(&self.v, value_dim)? })
    }
}

/// Appends one token: `[batch, kv_heads, head_dim]`, then `[batch, kv_heads, value_dim]`.
fn pack_token<T: Copy>(k: View<'_, T>, v: View<'_, T>, row: usize, to: &mut Vec<T>) {
    for view in [k, v] {
        let [batch, heads, ..] = view.sizes();
        for pair in 0..batch * heads {
            to.extend(view.row(pair / heads, pair % heads, row).iter());
        }
    }
}
