//! A prefix that sequences share: the result of a cache that holds it for each of them, read once for all.

use attn_core::half::f16;
use attn_core::kv_cache::{CacheView, Queries, RingCache};
use attn_core::position::alibi::Alibi;
use attn_core::{Align, Attention, AttnError, Layout, Mask, Outputs, View, ViewMut};
use attn_simd::decode::{DecodePlan, Source};
use attn_simd::{Level, Line, Workspace};
use attn_testing::cases::{Inputs, Memory, Tensor4, shape};
use attn_testing::laws::{Answer, oracle, same_bits};
use attn_testing::tolerance::TWICE;

const HEADS: usize = 4;
const DIM: usize = 24;
const WIDE: usize = 20;
/// Tokens of each sequence behind the prefix, and how many of them are queries.
const LENS: [usize; 3] = [5, 530, 1];
const COUNTS: [usize; 3] = [1, 18, 0];

/// Whole sequences, prefix and all, and the parts that a plan takes.
struct Parts {
    whole: Inputs<f32>,
    prefix: [Tensor4<f32>; 2],
    own: [Tensor4<f32>; 2],
    q: Tensor4<f32>,
}

impl Parts {
    fn new(before: usize) -> Self {
        let longest = before + 530;
        let mut whole = Inputs::<f32>::plain(shape((3, HEADS, 2, longest, longest, DIM, WIDE)), 81);
        // The first tokens are those of sequence 0.
        for x in [&mut whole.k, &mut whole.v] {
            let first = x.clone();
            x.each(|[b, h, s, d], x| *x = first.at([if s < before { 0 } else { b }, h, s, d]));
        }
        let cut = |x: &Tensor4<f32>, batch: usize, from: usize, len: usize| {
            let [_, heads, _, dim] = x.sizes;
            Tensor4::<f32>::new([batch, heads, len, dim], Memory::Bshd, |[b, h, s, d]| {
                f64::from(x.at([b, h, from + s, d]))
            })
        };
        let prefix = [cut(&whole.k, 1, 0, before), cut(&whole.v, 1, 0, before)];
        let own = [cut(&whole.k, 3, before, 530), cut(&whole.v, 3, before, 530)];
        let q = Tensor4::<f32>::new([3, HEADS, 18, DIM], Memory::Bhsd, |[b, h, i, d]| match i < COUNTS[b] {
            true => f64::from(whole.q.at([b, h, before + LENS[b] - COUNTS[b] + i, d])),
            false => f64::NAN,
        });
        Self { whole, prefix, own, q }
    }

    fn caches(&self) -> [CacheView<'_, f32>; 2] {
        let prefix = CacheView::of_tensors(self.prefix[0].view(), self.prefix[1].view()).expect("a prefix");
        [prefix, CacheView::of_slots(self.own[0].view(), self.own[1].view(), &LENS).expect("a cache")]
    }
}

fn new_answer() -> Answer<f32> {
    Answer { out: vec![-7.0; 3 * HEADS * 18 * WIDE], lse: vec![-7.0; 3 * HEADS * 18] }
}

fn outputs(answer: &mut Answer<f32>) -> Outputs<'_, f32> {
    let to = ViewMut::new(&mut answer.out, Layout::Bhsd, [3, HEADS, 18, WIDE]).expect("output");
    Outputs::new(to).lse(&mut answer.lse)
}

fn run(plan: &DecodePlan<'_, '_, '_>, q: View<'_, f32>) -> Answer<f32> {
    let mut answer = new_answer();
    let call = plan.split(q, outputs(&mut answer)).expect("accepted");
    call.run(Workspace::new().lines(plan.workspace_lines())).expect("enough scratch");
    answer
}

/// Every option, prefixes around the edges of chunks: the numbers of the whole sequences.
#[test]
fn as_if_each_sequence_held_the_prefix() {
    let slopes = [0.5, 0.25, 0.125, 0.0625];
    let sinks = [0.5, -1.0, 2.0, 0.0];
    let plain = Attention::new();
    let all = [
        plain.softcap(5.0).sinks(&sinks),
        plain.alibi(Alibi { slopes: &slopes, align: Align::BottomRight }),
        plain.mask(Mask::window(40, 0, Align::BottomRight)), // what some sequences see of the prefix
    ];
    for before in [0, 1, 63, 511, 512, 700] {
        let checked: Vec<_> = if before == 700 { all.to_vec() } else { vec![plain] };
        for attn in checked {
            check(before, &attn, |_| attn);
        }
    }
}

/// A step's numbers are those of each sequence by itself, to which `alone` gives the options.
fn check<'a>(before: usize, attn: &Attention<'_>, alone: impl Fn(usize) -> Attention<'a>) {
    let parts = Parts::new(before);
    let [prefix, cache] = parts.caches();
    for level in Level::available() {
        let plan = DecodePlan::with_prefix(attn, parts.q.sizes, Queries::First(&COUNTS), prefix, cache, level);
        let got = run(&plan.expect("accepted"), parts.q.view());
        for b in 0..3 {
            // The sequence by itself, from its first query on.
            let (end, count, attn) = (before + LENS[b], COUNTS[b], alone(b));
            let cut = |x: &Tensor4<f32>, from: usize| {
                let [_, heads, _, dim] = x.sizes;
                Tensor4::<f32>::new([1, heads, end - from, dim], Memory::Bhsd, |[_, h, s, d]| {
                    f64::from(x.at([b, h, from + s, d]))
                })
            };
            let inputs = Inputs {
                shape: shape((1, HEADS, 2, count, end, DIM, WIDE)),
                q: cut(&parts.whole.q, end - count),
                k: cut(&parts.whole.k, 0),
                v: cut(&parts.whole.v, 0),
            };
            let causal = attn.mask(attn.get_mask().and(Mask::causal(Align::BottomRight)));
            let rows = (0..HEADS).flat_map(|h| (0..count).map(move |i| (b * HEADS + h) * 18 + i));
            let (out, lse) = rows.map(|n| (&got.out[n * WIDE..][..WIDE], got.lse[n])).unzip::<_, _, Vec<_>, _>();
            let mine = Answer { out: out.concat(), lse };
            oracle(&causal, &inputs).check(TWICE, &mine, &(level, before, b));
            for i in count..18 {
                let n = b * HEADS * 18 + i;
                assert!(got.out[n * WIDE..][..WIDE].iter().all(|x| x.to_bits() == 0), "padding {b} {i}");
            }
        }
    }
}

/// Cut for any number of threads, in rounds of any size: the same bits.
#[test]
fn cuts_and_rounds_change_no_bit() {
    let (parts, attn) = (Parts::new(1100), Attention::new());
    let [prefix, cache] = parts.caches();
    for level in Level::available() {
        for shared in [true, false] {
            let q = parts.q.sizes;
            let plan = match shared {
                true => DecodePlan::with_prefix(&attn, q, Queries::First(&COUNTS), prefix, cache, level),
                false => DecodePlan::new(&attn, q, Queries::First(&COUNTS), cache, level),
            };
            let plan = plan.expect("accepted");
            let want = run(&plan, parts.q.view());
            for (threads, floats) in [(1, usize::MAX), (3, usize::MAX), (64, usize::MAX), (1, 0), (2, 500), (16, 0)] {
                let mut got = new_answer();
                let mut call = plan.split(parts.q.view(), outputs(&mut got)).expect("accepted");
                let mut lines = vec![Line::ZERO; call.workspace_lines()];
                let (mut next, mut rounds) = (Some(call.first_round(threads, floats)), 0);
                while let Some(round) = next {
                    let mut states = vec![f32::NAN; call.states_len(round)];
                    let mut rest = states.as_mut_slice();
                    for piece in call.pieces(round).collect::<Vec<_>>().into_iter().rev() {
                        let (later, state) = rest.split_at_mut(rest.len() - piece.state_len());
                        call.compute(&piece, state, &mut lines).expect("the right sizes");
                        rest = later;
                    }
                    call.finish(round, &mut states).expect("the right length");
                    (next, rounds) = (call.next_round(round), rounds + 1);
                }
                assert_eq!(
                    rounds,
                    if floats == usize::MAX {
                        1
                    } else if floats == 0 {
                        19
                    } else {
                        4
                    },
                    "{floats}"
                );
                same_bits(&got.out, &want.out, &(level, shared, threads, floats));
                same_bits(&got.lse, &want.lse, &(level, shared, threads, floats));
            }
        }
    }
}

/// A narrow prefix before wide tokens: as the widened prefix.
#[test]
fn the_two_caches_may_differ_in_type() {
    let (parts, attn) = (Parts::new(300), Attention::new());
    let [_, cache] = parts.caches();
    let narrow = parts.prefix.each_ref().map(|x| Tensor4::<f16>::new(x.sizes, Memory::Bhsd, |at| f64::from(x.at(at))));
    let wide = narrow.each_ref().map(|x| Tensor4::<f32>::new(x.sizes, Memory::Bhsd, |at| x.at(at).to_f64()));
    for level in Level::available() {
        let of = |prefix: Source<'_>| {
            let plan = DecodePlan::with_prefix(&attn, parts.q.sizes, Queries::First(&COUNTS), prefix, cache, level);
            run(&plan.expect("accepted"), parts.q.view())
        };
        let narrow = of(CacheView::of_tensors(narrow[0].view(), narrow[1].view()).expect("a prefix").into());
        assert!(narrow == of(CacheView::of_tensors(wide[0].view(), wide[1].view()).expect("a prefix").into()));
        // Rounding the prefix shows, so it is the narrow one that was read.
        let [unrounded, _] = parts.caches();
        assert!(narrow != of(unrounded.into()));
    }
}

/// What the prefix of one step holds is read once for all rows that share a pass.
#[test]
fn the_prefix_counts_once() {
    let (parts, attn, level) = (Parts::new(1000), Attention::new(), Level::detect());
    let [prefix, cache] = parts.caches();
    let bytes = |plan: Result<DecodePlan<'_, '_, '_>, AttnError>| plan.expect("accepted").bytes();
    let own = bytes(DecodePlan::new(&attn, parts.q.sizes, Queries::First(&COUNTS), cache, level));
    let both = bytes(DecodePlan::with_prefix(&attn, parts.q.sizes, Queries::First(&COUNTS), prefix, cache, level));
    assert_eq!(both - own, 2 * 1000 * (DIM + WIDE) * 4);
}

#[test]
fn prefixes_that_do_not_fit_are_refused() {
    let (parts, attn, level) = (Parts::new(10), Attention::new(), Level::detect());
    let [prefix, cache] = parts.caches();
    let refused = |prefix: CacheView<'_, f32>, queries: Queries<'_>| {
        DecodePlan::with_prefix(&attn, parts.q.sizes, queries, prefix, cache, level).map(|_| ()).expect_err("refused")
    };
    let counts = Queries::First(&COUNTS);
    assert!(matches!(refused(cache, counts), AttnError::Size { expected: 1, found: 3, .. }));
    let other = CacheView::of_tensors(parts.prefix[0].view(), parts.prefix[0].view()).expect("a prefix");
    assert!(matches!(refused(other, counts), AttnError::Size { expected: WIDE, found: DIM, .. }));
    assert!(matches!(refused(prefix.after(3).expect("few"), counts), AttnError::Size { expected: 0, found: 3, .. }));
    // Queries are tokens of the sequence itself, not of the prefix.
    assert!(matches!(refused(prefix, Queries::First(&[1, 1, 2])), AttnError::Index { at: 2, value: 2, limit: 2, .. }));
    assert!(matches!(cache.after(usize::MAX), Err(AttnError::Overflow { .. })));
    // A ring that is full is a prefix as good as any; one that has dropped tokens is not, for what it held was seen by
    // later ones.
    let [mut k, mut v] = [DIM, WIDE].map(|dim| vec![0.0f32; 2 * 10 * dim]);
    let mut seen = [0];
    let keys = ViewMut::new(&mut k, Layout::Bhsd, [1, 2, 10, DIM]).expect("keys");
    let values = ViewMut::new(&mut v, Layout::Bhsd, [1, 2, 10, WIDE]).expect("values");
    let mut ring = RingCache::new(keys, values, &mut seen, 2, 8).expect("a ring");
    ring.insert(parts.prefix[0].view(), parts.prefix[1].view()).expect("fits");
    assert!(DecodePlan::with_prefix(&attn, parts.q.sizes, counts, ring.view(), cache, level).is_ok());
    let first = |x: &Tensor4<f32>| Tensor4::<f32>::new([1, 2, 1, x.sizes[3]], Memory::Bhsd, |at| f64::from(x.at(at)));
    let (k, v) = (first(&parts.prefix[0]), first(&parts.prefix[1]));
    ring.insert(k.view(), v.view()).expect("fits");
    assert!(matches!(refused(ring.view(), counts), AttnError::Unsupported { .. }));
}
