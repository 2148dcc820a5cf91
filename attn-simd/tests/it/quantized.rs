//! Caches in int8: the accuracy of the kernels on the dequantised numbers, and what quantising costs at most.

use attn_core::formats::Format;
use attn_core::half::{bf16, f16};
use attn_core::int8::{
    KeyScales, QuantizedRingCache, QuantizedView, ScaledRows, channel_scales, quantize, quantize_by,
};
use attn_core::kv_cache::{CacheView, Queries};
use attn_core::{Align, Attention, AttnError, AttnShape, Layout, Mask, Outputs, Precision, View, ViewMut};
use attn_simd::decode::{DecodePlan, Source};
use attn_simd::{KernelElement, Level, Workspace};
use attn_testing::Number;
use attn_testing::cases::{Inputs, Memory, Tensor4, shape};
use attn_testing::laws::{Answer, oracle};
use attn_testing::stored::{ScaleOf, Stored};
use attn_testing::tolerance::{ETA, FAST_INT8, FAST_INT8_EVEN, FAST_INT8_SCORE};

/// A step in which all of q are queries; the output is wide.
pub(super) fn step<'c, Q: KernelElement>(
    level: Level,
    attn: &Attention<'_>,
    q: View<'_, Q>,
    cache: impl Into<Source<'c>>,
    value_dim: usize,
) -> Result<Answer<f32>, AttnError> {
    let [batch, heads, q_len, _] = q.sizes();
    let rows = batch * heads * q_len;
    let mut answer = Answer { out: vec![-7.0f32; rows * value_dim], lse: vec![-7.0f32; rows] };
    let to = ViewMut::new(&mut answer.out, Layout::Bhsd, [batch, heads, q_len, value_dim])?;
    let plan = DecodePlan::new(attn, q.sizes(), Queries::All, cache, level)?;
    plan.split(q, Outputs::new(to).lse(&mut answer.lse))?.run(Workspace::new().lines(plan.workspace_lines()))?;
    Ok(answer)
}

/// Keys and values in int8, and the numbers that they stand for.
struct Quantized {
    sizes: [[usize; 4]; 2],
    numbers: [Vec<i8>; 2],
    /// Per token of k, per channel of k, per token of v.
    scales: [Vec<f32>; 3],
    per_channel: bool,
}

impl Quantized {
    fn new(inputs: &Inputs<f32>, per_channel: bool) -> Self {
        let dense = |x: &Tensor4<f32>| Tensor4::<f32>::new(x.sizes, Memory::Bhsd, |at| f64::from(x.at(at)));
        let (k, v) = (dense(&inputs.k), dense(&inputs.v));
        let [batch, heads, tokens, dim] = k.sizes;
        assert_eq!(batch, 1, "scales of channels are those of the only sequence");
        let mut this = Self {
            sizes: [k.sizes, v.sizes],
            numbers: [vec![0; k.data.len()], vec![0; v.data.len()]],
            scales: [vec![0.0; heads * tokens], vec![0.0; heads * dim], vec![0.0; heads * tokens]],
            per_channel,
        };
        let [token_scales, channel, value_scales] = &mut this.scales;
        for (head, scales) in channel.chunks_mut(dim).enumerate() {
            channel_scales(k.view(), 0, head, scales);
        }
        let rows = k.data.chunks(dim).zip(this.numbers[0].chunks_mut(dim)).zip(token_scales);
        for (n, ((x, numbers), scale)) in rows.enumerate() {
            match per_channel {
                true => quantize_by(&channel[n / tokens * dim..][..dim], x, numbers),
                false => *scale = quantize(x, numbers),
            }
        }
        let wide = v.sizes[3];
        for ((x, numbers), scale) in v.data.chunks(wide).zip(this.numbers[1].chunks_mut(wide)).zip(value_scales) {
            *scale = quantize(x, numbers);
        }
        this
    }

    fn view(&self) -> QuantizedView<'_> {
        let number = |n: usize| View::new(&self.numbers[n], Layout::Bhsd, self.sizes[n]).expect("numbers");
        let [batch, heads, tokens, dim] = self.sizes[0];
        let per_token = |x| View::new(x, Layout::Bhsd, [batch, heads, tokens, 1]).expect("scales");
        let keys = match self.per_channel {
            true => {
                KeyScales::PerChannel(View::new(&self.scales[1], Layout::Bhsd, [1, heads, 1, dim]).expect("scales"))
            }
            false => KeyScales::PerToken(per_token(&self.scales[0])),
        };
        let numbers = CacheView::of_tensors(number(0), number(1)).expect("a cache");
        QuantizedView::new(numbers, keys, per_token(&self.scales[2])).expect("fits")
    }

    /// The same call on the numbers that are meant.
    fn dequantised(&self, inputs: &Inputs<f32>) -> Inputs<f32> {
        let mut meant = inputs.clone();
        let view = self.view();
        let row = |read: &dyn Fn(usize, usize, &mut [f32]), [_, head, token, channel]: [usize; 4], dim: usize| {
            let mut row = vec![0.0; dim];
            read(head, token, &mut row);
            row[channel]
        };
        let [k_dim, v_dim] = self.sizes.map(|sizes| sizes[3]);
        meant.k.each(|at, x| *x = row(&|head, token, out| view.key(0, head, token, out), at, k_dim));
        meant.v.each(|at, x| *x = row(&|head, token, out| view.value(0, head, token, out), at, v_dim));
        meant
    }
}

fn options() -> [Attention<'static>; 3] {
    let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
    [causal, causal.softcap(20.0), causal.mask(causal.get_mask().and(Mask::window(300, 0, Align::BottomRight)))]
}

/// On the dequantised numbers, the gate of every engine; queries in all types.
#[test]
fn as_exact_as_on_the_dequantised_numbers() {
    fn check<Q: KernelElement + Number>(level: Level, dims: AttnShape) {
        let mut inputs = Inputs::<f32>::plain(dims, 71);
        // What a narrow query holds.
        inputs.q.each(|_, x| *x = Q::from_f64(f64::from(*x)).widen());
        let q = Tensor4::<Q>::new(inputs.q.sizes, Memory::Bshd, |at| f64::from(inputs.q.at(at)));
        for per_channel in [false, true] {
            let cache = Quantized::new(&inputs, per_channel);
            let meant = cache.dequantised(&inputs);
            for attn in options() {
                let got = step(level, &attn, q.view(), cache.view(), dims.value_dim).expect("accepted");
                oracle(&attn, &meant).check(ETA, &got, &(level, dims, per_channel));
            }
        }
    }
    for level in Level::available() {
        check::<f32>(level, shape((1, 6, 2, 1, 1100, 64, 48)));
        check::<f32>(level, shape((1, 6, 2, 3, 700, 40, 20))); // columns that are copied
        check::<f16>(level, shape((1, 4, 1, 1, 515, 32, 32)));
        check::<bf16>(level, shape((1, 4, 1, 2, 63, 32, 17)));
    }
}

/// Levels that multiply bytes round a query to integers of 24 bits. Channels of little weight beside one large number,
/// which keys do not have, show it; the bound counts each as at least half of the largest.
#[test]
fn queries_of_wide_range_err_as_stated() {
    for level in Level::available() {
        for (group, head_dim) in [(1, 16), (2, 48), (3, 64), (4, 80), (5, 128), (7, 200), (8, 256), (9, 272)] {
            let dims = shape((1, 2 * group, 2, 1, 203, head_dim, 16));
            let mut inputs = Inputs::<f32>::plain(dims, 73);
            inputs.q.each(|[.., c], x| *x = if c == 5 { 1000.0 } else { *x / 8.0 });
            inputs.k.each(|[.., c], x| *x = if c == 5 { 0.0 } else { *x });
            let cache = Quantized::new(&inputs, false);
            let (meant, attn) = (cache.dequantised(&inputs), Attention::new());
            let q = Tensor4::<f32>::new(inputs.q.sizes, Memory::Bshd, |at| f64::from(inputs.q.at(at)));
            let got = step(level, &attn, q.view(), cache.view(), dims.value_dim).expect("accepted");
            let (mut want, mut floored) = (oracle(&attn, &meant), meant.clone());
            floored.q.each(|_, x| *x = x.abs().max(500.0));
            want.score_bound = oracle(&attn, &floored).score_bound;
            want.check(ETA, &got, &(level, dims));
        }
    }
}

fn rows(x: &Tensor4<f32>) -> impl Iterator<Item = Vec<f64>> + '_ {
    let [batch, heads, tokens, dim] = x.sizes;
    let at = move |n: usize| [n / tokens / heads, n / tokens % heads, n % tokens];
    (0..batch * heads * tokens).map(move |n| {
        let [b, h, t] = at(n);
        (0..dim).map(|c| f64::from(x.at([b, h, t, c]))).collect()
    })
}

fn largest(row: &[f64]) -> f64 {
    row.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// What rounding queries to 16 bits may change any score by.
fn score_error(q: &Tensor4<f32>, k: &Tensor4<f32>) -> f64 {
    let keys = rows(k).map(|row| row.iter().map(|x| x.abs()).sum::<f64>()).fold(0.0, f64::max);
    let queries = rows(q).map(|row| largest(&row)).fold(0.0, f64::max);
    FAST_INT8_SCORE * queries * keys / (q.sizes[3] as f64).sqrt()
}

/// `Precision::Fast` rounds queries and weights to 16 bits where heads share keys, and then errs as stated: over int8
/// and q8_0, of even weights and of steep ones, for any number of heads. One head alone has the bits of `Exact`.
#[test]
fn fast_errs_as_stated() {
    let (mut worst, mut differs) = (0.0f64, false);
    for (group, q_len, dim, wide) in [
        (1, 1, 64, 64),
        (2, 1, 64, 32),
        (3, 1, 96, 64),
        (4, 1, 128, 128),
        (4, 3, 32, 96),
        (5, 1, 80, 48),
        (5, 1, 40, 24),
        (7, 1, 256, 192),
        (8, 2, 128, 256),
        (9, 1, 64, 112),
        (2, 1, 64, 272),
    ] {
        for steep in [1.0, 12.0] {
            let dims = shape((1, 2 * group, 2, q_len, 203, dim, wide));
            let mut inputs = Inputs::<f32>::plain(dims, 75);
            inputs.q.each(|_, x| *x *= steep);
            let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
            let cache = Quantized::new(&inputs, group == 3);
            let blocks = dim % 32 == 0 && wide % 32 == 0;
            let blocks = blocks.then(|| Stored::new(&inputs, [Format::Q8_0; 2], ScaleOf::Token));
            let sources = [(Source::from(cache.view()), cache.dequantised(&inputs))].into_iter();
            let sources = sources.chain(blocks.iter().map(|x| (Source::from(x.view()), x.decoded(&inputs))));
            for (n, (source, meant)) in sources.enumerate() {
                let want = oracle(&attn, &meant);
                let share = if steep > 1.0 { FAST_INT8 } else { FAST_INT8_EVEN };
                let values = rows(&meant.v).map(|row| largest(&row)).fold(0.0, f64::max);
                let bound = ((2.0 * score_error(&inputs.q, &meant.k)).exp_m1() + share) * values;
                for level in Level::available() {
                    let run = |attn: &Attention<'_>| {
                        step(level, attn, inputs.q.view(), source, dims.value_dim).expect("accepted")
                    };
                    let (exact, fast) = (run(&attn), run(&attn.precision(Precision::Fast)));
                    want.check(ETA, &exact, &(level, dims, n));
                    let same = exact.out.iter().zip(&fast.out).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same || group > 1, "{level:?} {dims:?}: one head alone");
                    differs |= !same;
                    for (at, (got, want)) in fast.out.iter().zip(&want.out).enumerate() {
                        let off = (f64::from(*got) - want).abs() / bound;
                        worst = worst.max(off);
                        assert!(off <= 1.0, "{level:?} {dims:?} {n} {steep} element {at}: {off}");
                    }
                }
            }
        }
    }
    let integers = Level::available().any(|level| level.lanes() >= 8 || level.name() == "dotprod");
    assert!(worst > 1e-3 || !integers, "a bound that means something: {worst}");
    assert_eq!(differs, integers, "levels with bytes round, and no others");
}

/// Scales below 0, weights that are tiny or infinite, and hidden tokens of any scale, under `Precision::Fast`.
#[test]
fn fast_leaves_to_floats_what_is_none_of_integers() {
    let dims = shape((1, 8, 2, 1, 200, 64, 64));
    let inputs = Inputs::<f32>::plain(dims, 76);
    let attn = Attention::new().mask(Mask::window(90, 0, Align::BottomRight)).precision(Precision::Fast);
    for level in Level::available() {
        let run = |cache: &Quantized, attn: &Attention<'_>| {
            step(level, attn, inputs.q.view(), cache.view(), 64).expect("accepted")
        };
        let mut cache = Quantized::new(&inputs, false);
        let want = run(&cache, &attn);
        for head in 0..2 {
            cache.scales[2][head * 200..][..109].fill([f32::NAN, f32::NEG_INFINITY][head]);
        }
        assert_eq!(run(&cache, &attn), want, "{level:?}");
        // What floats compute, they compute exactly: here all tiles of both heads.
        for (first, second) in [(-1.0, 1e-30), (1e32, -0.5)] {
            let mut cache = Quantized::new(&inputs, false);
            for head in 0..2 {
                let factor = [first, second][head];
                cache.scales[2][head * 200..][..200].iter_mut().for_each(|x| *x *= factor);
            }
            let meant = cache.dequantised(&inputs);
            for mask in [attn.get_mask(), &Mask::none()] {
                let attn = Attention::new().mask(*mask);
                let got = run(&cache, &attn.precision(Precision::Fast));
                let slack = (2.0 * score_error(&inputs.q, &meant.k)).exp_m1();
                oracle(&attn, &meant).near_f32(slack, &got, &(level, first));
            }
        }
        let mut cache = Quantized::new(&inputs, false);
        cache.scales[2][150] = f32::NAN; // seen by the first key/value head
        let got = run(&cache, &attn);
        assert!(got.out[..4 * 64].iter().all(|x| x.is_nan()) && got.out[4 * 64..] == want.out[4 * 64..], "{level:?}");
    }
}

/// Rows that integers cannot hold are computed in f32, and the rows beside them as ever.
#[test]
fn rows_that_are_no_integers_change_no_other_row() {
    let row = |n: usize| -> Vec<f32> {
        let plain = (0..80).map(|c| ((c * 7 + n * 3) as f32 * 0.37).sin());
        match n {
            1 => plain.enumerate().map(|(c, x)| if c == 3 { f32::INFINITY } else { x }).collect(),
            2 => plain.enumerate().map(|(c, x)| if c == 79 { f32::NAN } else { x }).collect(),
            3 => plain.map(|x| x * 1e35).collect(),
            4 => plain.map(|x| x * 1e-30).collect(),
            5 => plain.map(|x| x * 1e-42).collect(),
            6 => vec![0.0; 80],
            _ => plain.collect(),
        }
    };
    let inputs = Inputs::<f32>::plain(shape((1, 9, 1, 1, 131, 80, 24)), 74);
    for per_channel in [false, true] {
        let cache = Quantized::new(&inputs, per_channel);
        let q: Vec<f32> = (0..9).flat_map(row).collect();
        for level in Level::available() {
            let run = |precision: Precision, q: &[f32], heads: usize| {
                let q = View::new(q, Layout::Bhsd, [1, heads, 1, 80]).expect("queries");
                let attn = Attention::new().precision(precision);
                let got = step(level, &attn, q, cache.view(), 24).expect("accepted");
                got.out.into_iter().map(|x| if x.is_nan() { 0 } else { x.to_bits() }).collect::<Vec<_>>()
            };
            let (all, fast) = (run(Precision::Exact, &q, 9), run(Precision::Fast, &q, 9));
            for n in 0..9 {
                let alone = run(Precision::Exact, &row(n), 1);
                assert_eq!(all[n * 24..][..24], alone[..], "{} row {n} {per_channel}", level.name());
                // Integers are for heads that share keys.
                let twice = run(Precision::Fast, &[row(n), row(n)].concat(), 2);
                for alone in twice.chunks(24) {
                    assert_eq!(fast[n * 24..][..24], alone[..], "{} fast, row {n} {per_channel}", level.name());
                }
            }
            let is_nan = |n: usize| all[n * 24..][..24].iter().all(|&x| x == 0);
            assert_eq!([0, 1, 2, 3, 7].map(is_nan), [false, true, true, false, false], "{}", level.name());
            assert!((0..9).all(|n| is_nan(n) == fast[n * 24..][..24].iter().all(|&x| x == 0)), "{}", level.name());
        }
    }
}

/// Against the numbers before: within the bound that `QuantizedView` states.
#[test]
fn quantising_costs_what_is_stated_at_most() {
    let dims = shape((1, 4, 2, 1, 600, 64, 32));
    let inputs = Inputs::<f32>::plain(dims, 72);
    let attn = Attention::new();
    let want = oracle(&attn, &inputs);
    for per_channel in [false, true] {
        let cache = Quantized::new(&inputs, per_channel);
        let got = step(Level::detect(), &attn, inputs.q.view(), cache.view(), 32).expect("accepted");
        let mut worst = 0.0f64;
        for head in 0..4 {
            let kv_head = head / 2;
            let scale_of = |token: usize, c: usize| match per_channel {
                true => f64::from(cache.scales[1][kv_head * 64 + c]),
                false => f64::from(cache.scales[0][kv_head * 600 + token]),
            };
            let key = |token: usize, c: usize| f64::from(inputs.k.at([0, kv_head, token, c]));
            let query = |c: usize| f64::from(inputs.q.at([0, head, 0, c]));
            let sum = |f: &dyn Fn(usize) -> f64, n: usize| (0..n).map(f).sum::<f64>();
            let off = (0..600).map(|j| sum(&|c| query(c).abs() * scale_of(j, c), 64)).fold(0.0, f64::max);
            let delta = 0.125 * 0.5 * off;
            let score: Vec<f64> = (0..600).map(|j| 0.125 * sum(&|c| query(c) * key(j, c), 64)).collect();
            let p: Vec<f64> = score.iter().map(|s| (s - f64::from(want.lse[head] as f32)).exp()).collect();
            let value_scales = sum(&|j| p[j] * f64::from(cache.scales[2][kv_head * 600 + j]), 600);
            for c in 0..32 {
                let magnitude = sum(&|j| p[j] * f64::from(inputs.v.at([0, kv_head, j, c]).abs()), 600);
                let bound = (2.0 * delta).exp_m1() * magnitude + (2.0 * delta).exp() * 0.5 * value_scales;
                let error = (f64::from(got.out[head * 32 + c]) - want.out[head * 32 + c]).abs();
                worst = worst.max(error / bound);
                assert!(error <= bound * 1.001, "head {head}, channel {c}: {error} above {bound}");
            }
        }
        assert!(worst > 1e-3, "a bound that means something: {worst}");
    }
}

/// Tokens that nobody sees may hold anything, scales as well.
#[test]
fn scales_of_hidden_tokens_change_no_bit() {
    let dims = shape((1, 4, 2, 1, 200, 32, 32));
    let inputs = Inputs::<f32>::plain(dims, 73);
    let attn = Attention::new().mask(Mask::window(90, 0, Align::BottomRight));
    for level in Level::available() {
        let mut cache = Quantized::new(&inputs, false);
        let want = step(level, &attn, inputs.q.view(), cache.view(), 32).expect("accepted");
        for n in [0, 2] {
            for head in 0..2 {
                cache.scales[n][head * 200..][..109].fill(if head == 0 { f32::NAN } else { f32::INFINITY });
            }
        }
        let got = step(level, &attn, inputs.q.view(), cache.view(), 32).expect("accepted");
        assert_eq!(got, want, "{level:?}");
        cache.scales[2][109] = f32::NAN; // the oldest that is seen
        let got = step(level, &attn, inputs.q.view(), cache.view(), 32).expect("accepted");
        assert!(got.out[..64].iter().all(|x| x.is_nan()) && got.out[64..] == want.out[64..], "{level:?}");
    }
}

/// A ring that quantises its tokens is read as the ring attends itself.
#[test]
fn a_quantised_ring_can_be_read() {
    let (heads, dim, tokens, slots) = (2, 16, 90, 40);
    let painted = |seed| Tensor4::<f32>::painted([1, heads, tokens, dim], Memory::Bhsd, seed, 1.0);
    let (q, k, v) = (painted(74), painted(75), painted(76));
    let (mut k_numbers, mut v_numbers) = (vec![0i8; heads * slots * dim], vec![0i8; heads * slots * dim]);
    let (mut k_scales, mut v_scales) = (vec![0.0f32; heads * slots], vec![0.0f32; heads * slots]);
    let numbers = |x| ViewMut::new(x, Layout::Bshd, [1, heads, slots, dim]).expect("numbers");
    let scales = |x| ViewMut::new(x, Layout::Bshd, [1, heads, slots, 1]).expect("scales");
    let keys = ScaledRows::new(numbers(&mut k_numbers), scales(&mut k_scales)).expect("fits");
    let values = ScaledRows::new(numbers(&mut v_numbers), scales(&mut v_scales)).expect("fits");
    let mut seen = [0];
    let mut ring = QuantizedRingCache::new(keys, values, &mut seen, 3, slots - 3).expect("fits");
    let mut all = vec![0.0f32; heads * tokens * dim];
    let to = ViewMut::new(&mut all, Layout::Bhsd, [1, heads, tokens, dim]).expect("output");
    ring.advance(&Attention::new(), q.view(), k.view(), v.view(), to, &mut [0.0; 16]).expect("accepted");
    let last =
        Tensor4::<f32>::new([1, heads, 1, dim], Memory::Bhsd, |[_, h, _, d]| f64::from(q.at([0, h, tokens - 1, d])));
    for level in Level::available() {
        let got = step(level, &Attention::new(), last.view(), ring.view(), dim).expect("accepted");
        for (head, got) in got.out.chunks(dim).enumerate() {
            let want = &all[(head * tokens + tokens - 1) * dim..][..dim];
            assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 2e-6), "{level:?}: {got:?} {want:?}");
        }
    }
}

#[test]
fn scales_of_other_sizes_are_refused() {
    let (x, scales) = ([0i8; 24], [0.0f32; 24]);
    let numbers = View::new(&x, Layout::Bhsd, [1, 2, 3, 4]).expect("numbers");
    let numbers = CacheView::of_tensors(numbers, numbers).expect("a cache");
    let scale = |sizes: [usize; 4]| View::new(&scales[..sizes.iter().product()], Layout::Bhsd, sizes).expect("scales");
    let (good, channels) = (scale([1, 2, 3, 1]), scale([1, 2, 1, 4]));
    assert!(QuantizedView::new(numbers, KeyScales::PerToken(good), good).is_ok());
    assert!(QuantizedView::new(numbers, KeyScales::PerChannel(channels), good).is_ok());
    for (keys, values) in [
        (KeyScales::PerToken(channels), good),
        (KeyScales::PerChannel(good), good),
        (KeyScales::PerToken(good), channels),
        (KeyScales::PerToken(scale([1, 1, 3, 1])), good),
    ] {
        let refused = QuantizedView::new(numbers, keys, values);
        assert!(matches!(refused, Err(AttnError::Size { .. })), "{refused:?}");
    }
}
