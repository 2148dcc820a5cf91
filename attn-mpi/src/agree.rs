//! The agreement of all ranks on a call: a small all-gather of numbers and hashes before anything is computed.

use std::ops::Range;

use attn_core::dropout::Dropout;
use attn_core::mask::{Lengths, Term};
use attn_core::score_mod::Mods;
use attn_core::{Attention, Bias, Element, View};
use attn_simd::Level;

use crate::error::{Error, LEVELS, Result};
use crate::sharding::Sharding;
use crate::wire::Wire;

/// Tag of the records.
const TAG: i32 = 1;

/// What a rank says about its call: names, in a fixed order, and a number for each.
pub(crate) struct Record {
    numbers: Vec<(&'static str, u64)>,
    level: u64,
    mixed: bool,
}

impl Record {
    /// A record of a kind of call.
    pub(crate) fn new(call: &str, level: Level, mixed: bool) -> Self {
        let numbers = vec![("version", text(env!("CARGO_PKG_VERSION"))), ("the call", text(call))];
        // It differs in decoding over bytes alone, which ranks do not share.
        let name = if level.name() == "dotprod" { "portable" } else { level.name() };
        let place = LEVELS.iter().position(|level| *level == name).unwrap_or(LEVELS.len());
        Self { numbers, level: place as u64, mixed }.with("whether levels may be mixed", u64::from(mixed))
    }

    /// With a number.
    pub(crate) fn with(mut self, what: &'static str, number: u64) -> Self {
        self.numbers.push((what, number));
        self
    }

    /// With all shards of a sequence.
    pub(crate) fn with_sharding(self, what: &'static str, sharding: &Sharding) -> Self {
        self.with_ranges(what, (0..sharding.ranks()).map(|rank| sharding.of(rank)))
    }

    /// With the positions that each rank holds.
    pub(crate) fn with_ranges<'r>(self, what: &'static str, ranks: impl Iterator<Item = &'r [Range<usize>]>) -> Self {
        let mut hash = Hash::default();
        for (rank, ranges) in ranks.enumerate() {
            ranges.iter().for_each(|range| hash.numbers([rank, range.start, range.end]));
        }
        self.with(what, hash.0)
    }

    /// With all options. Of the caller's mods only their presence can be compared.
    pub(crate) fn with_options<M: Mods>(self, attn: &Attention<'_, M>) -> Self {
        let real = |x: Option<f64>| x.map_or(u64::MAX, f64::to_bits);
        let singles = |values: Option<&[f32]>| {
            let mut hash = Hash::default();
            values.into_iter().flatten().for_each(|x| hash.number(1 + u64::from(x.to_bits())));
            hash.0
        };
        let mut alibi = Hash::default();
        if let Some(a) = attn.get_alibi() {
            alibi.bytes(format!("{:?}", a.align).as_bytes());
            alibi.number(singles(Some(a.slopes)));
        }
        self.with("the scale", real(attn.get_scale()))
            .with("the soft-cap", real(attn.get_softcap()))
            .with("the temperature", real(attn.get_temperature()))
            .with("the precision", text(&format!("{:?}", attn.get_precision())))
            .with("reproducible", u64::from(attn.is_reproducible()))
            .with("the sinks", singles(attn.get_sinks()))
            .with("alibi", alibi.0)
            .with("the mask", mask(attn))
            .with("the bias", attn.get_bias().map_or(0, bias))
            .with("dropout", dropout(attn.get_dropout()))
            .with("score_mod", u64::from(attn.get_mods().has_score_mod()))
            .with("mask_mod", u64::from(attn.get_mods().has_mask_mod()))
    }

    /// Compares the records of all ranks: an error on one is an error on all of them. `local` is what this rank thinks
    /// of its own arguments.
    pub(crate) fn agree<T>(self, wire: &Wire, local: Result<T>) -> Result<T> {
        let mut words = vec![u64::from(local.is_err()), self.level];
        // A call of another kind has other numbers: the length of all records is the same.
        words.extend(self.numbers.iter().map(|(_, number)| *number));
        words.resize(WORDS, 0);
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (all, _) = wire.all_gather_first("the agreement before a call", TAG, &bytes);
        let all: Vec<u64> = all.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let value = local?;
        let records = || all.chunks_exact(WORDS).enumerate();
        if let Some((rank, _)) = records().find(|(_, record)| record[0] != 0) {
            return Err(Error::Refused { rank });
        }
        let first = &all[..WORDS];
        for (n, (what, _)) in self.numbers.iter().enumerate() {
            if let Some((rank, record)) = records().find(|(_, record)| record[2 + n] != first[2 + n]) {
                return Err(Error::Disagree { what, rank, first: first[2 + n], found: record[2 + n] });
            }
        }
        match records().find(|(_, record)| record[1] != first[1]) {
            Some((rank, record)) if !self.mixed => Err(Error::MixedLevels { rank, first: first[1], found: record[1] }),
            _ => Ok(value),
        }
    }
}

/// After a computation: an error on one rank is an error on all of them.
pub(crate) fn all_good<T>(wire: &Wire, local: Result<T>) -> Result<T> {
    let (all, _) = wire.all_gather("the agreement after a call", TAG, &[u8::from(local.is_err())]);
    let value = local?;
    match all.iter().position(|&failed| failed != 0) {
        Some(rank) => Err(Error::Refused { rank }),
        None => Ok(value),
    }
}

/// Numbers of a record: room for those of every kind of call.
const WORDS: usize = 40;

/// FNV-1a over 64-bit words.
struct Hash(u64);

impl Default for Hash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hash {
    fn number(&mut self, x: u64) {
        self.0 = (self.0 ^ x).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23);
    }

    fn numbers(&mut self, x: impl IntoIterator<Item = usize>) {
        x.into_iter().for_each(|x| self.number(x as u64));
    }

    fn bytes(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&b| self.number(u64::from(b)));
    }

    /// Every element of a tensor.
    fn tensor<T: Copy>(&mut self, view: View<'_, T>, bits: impl Fn(T) -> u64) {
        let [batch, heads, seq, _] = view.sizes();
        self.numbers(view.sizes());
        for (b, h, s) in (0..batch).flat_map(|b| (0..heads).flat_map(move |h| (0..seq).map(move |s| (b, h, s)))) {
            view.row(b, h, s).iter().for_each(|x| self.number(bits(x)));
        }
    }

    fn lengths(&mut self, lengths: &Lengths<'_>) {
        match lengths {
            Lengths::All(n) => self.numbers([0, *n]),
            Lengths::PerBatch(lens) => {
                self.numbers([1, lens.len()]);
                self.numbers(lens.iter().copied());
            }
        }
    }
}

/// A text as a number.
pub(crate) fn text(text: &str) -> u64 {
    let mut hash = Hash::default();
    hash.bytes(text.as_bytes());
    hash.0
}

/// The numbers of a tensor as one.
pub(crate) fn view_hash<T: Element>(view: View<'_, T>) -> u64 {
    let mut hash = Hash::default();
    hash.tensor(view, |x| x.to_f64().to_bits());
    hash.0
}

fn mask<M: Mods>(attn: &Attention<'_, M>) -> u64 {
    let mut hash = Hash::default();
    for term in attn.get_mask().terms() {
        match term {
            Term::Prefix { prefix, align } => {
                hash.bytes(format!("prefix {align:?}").as_bytes());
                hash.lengths(prefix);
            }
            Term::BlockSparse(blocks) => {
                hash.numbers([8, blocks.block_q, blocks.block_k]);
                hash.tensor(blocks.blocks, u64::from);
            }
            Term::Dense(dense) => {
                hash.numbers([9, usize::from(dense.keep)]);
                hash.tensor(dense.mask, u64::from);
            }
            // Tables and numbers: their text says everything.
            other => hash.bytes(format!("{other:?}").as_bytes()),
        }
    }
    hash.0
}

fn bias(bias: &Bias<'_>) -> u64 {
    let mut hash = Hash::default();
    match bias {
        Bias::F64(view) => hash.tensor(*view, f64::to_bits),
        Bias::F32(view) => hash.tensor(*view, |x| u64::from(x.to_bits())),
        Bias::F16(view) => hash.tensor(*view, |x| u64::from(x.to_bits())),
        Bias::Bf16(view) => hash.tensor(*view, |x| u64::from(x.to_bits())),
    }
    hash.0
}

fn dropout(dropout: &Dropout<'_>) -> u64 {
    let mut hash = Hash::default();
    match dropout {
        Dropout::None => {}
        Dropout::Seeded { p, seed } => {
            hash.number(1 + u64::from(p.to_bits()));
            hash.number(*seed);
        }
        Dropout::Keep { mask, p } => {
            hash.number(u64::from(p.to_bits()));
            hash.tensor(*mask, u64::from);
        }
    }
    hash.0
}
