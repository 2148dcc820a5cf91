//! The kernels that multiply bf16, by AMX or AVX512_BF16: the accuracy that each precision promises, and the rows that
//! parts cannot hold. On the models of the instructions, and on the processor's own where it has them.

mod bits;
mod promises;
mod random;

use attn_core::half::{bf16, f16};
use attn_core::{Align, Attention, AttnShape, Dtype, Element, Layout, Mask, Outputs, Precision, ViewMut};
use attn_simd::{KernelElement, Level, Plan, Workspace};
use attn_testing::cases::{Inputs, Memory, shape};
use attn_testing::laws::{Answer, Oracle, oracle};
use attn_testing::tolerance::{ETA, FAST_F32, RMS_EXACT, RMS_FAST, WEIGHTS_OF_TWO_PARTS};
use attn_testing::{Number, paint};

/// The levels with products of bf16. `avx512bf16` computes on vectors what takes more than three of them.
fn levels() -> impl Iterator<Item = Level> {
    attn_testing::levels(["avx512bf16-model", "avx512bf16", "amx-model", "amx"], Level::by_name).into_iter()
}

/// Those that run every type on them.
fn amx_levels() -> impl Iterator<Item = Level> {
    attn_testing::levels(["amx-model", "amx"], Level::by_name).into_iter()
}

fn attend<T: KernelElement + Number, O: KernelElement + Number<Compute = f32>>(
    level: Level,
    attn: &Attention<'_>,
    inputs: &Inputs<T>,
) -> Answer<O> {
    let rows = inputs.shape.rows();
    let mut answer = Answer { out: vec![O::from_f64(7.0); rows * inputs.shape.value_dim], lse: vec![7.0; rows] };
    let view = ViewMut::new(&mut answer.out, Layout::Bhsd, inputs.shape.output()).expect("output");
    let outputs = Outputs::new(view).lse(&mut answer.lse);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    attn_simd::forward_at(level, attn, q, k, v, outputs, &mut Workspace::new()).expect("accepted");
    answer
}

/// Root mean square error, and that of the correctly rounded result.
fn rms<O: Number>(oracle: &Oracle, answer: &Answer<O>) -> (f64, f64) {
    let mean = |errors: &dyn Fn(usize) -> f64| {
        let sum: f64 = (0..oracle.out.len()).map(|n| errors(n) * errors(n)).sum();
        (sum / oracle.out.len() as f64).sqrt()
    };
    (
        mean(&|n| answer.out[n].to_f64() - oracle.out[n]),
        mean(&|n| Element::to_f64(O::from_f64(oracle.out[n])) - oracle.out[n]),
    )
}

/// Sizes as [`shape`] takes them, and the standard deviation of q and k.
type Sizes = ((usize, usize, usize, usize, usize, usize, usize), f64);

/// Shapes and sizes of scores: ordinary ones, and rows in which one or two keys have nearly all the weight.
const CASES: [Sizes; 5] = [
    ((1, 2, 1, 64, 256, 64, 64), 1.0),
    ((1, 1, 1, 40, 333, 40, 72), 1.0),
    ((1, 1, 1, 64, 256, 64, 64), 2.0),
    ((1, 1, 1, 64, 200, 128, 32), 4.0),
    ((1, 1, 1, 64, 200, 128, 32), 8.0),
];

fn half_stays_within<T: KernelElement + Number<Compute = f32>>(precision: Precision, gate: f64) {
    for level in levels() {
        for (dims, sigma) in CASES {
            let inputs = Inputs::<T>::painted(shape(dims), Memory::Bhsd, 31, sigma);
            let attn = Attention::new().precision(precision);
            let (ours, rounded) = rms(&oracle(&attn, &inputs), &attend::<T, T>(level, &attn, &inputs));
            println!("{level:?} {:?} {precision:?} {dims:?} {sigma}: {:.4}", T::DTYPE, ours / rounded);
            assert!(ours <= gate * rounded, "{level:?} {dims:?} {sigma}: {ours:e} against {rounded:e}");
        }
    }
}

#[test]
fn bf16_is_rounded_once_or_nearly() {
    half_stays_within::<bf16>(Precision::Exact, RMS_EXACT);
}

#[test]
fn fast_bf16_is_as_good_as_it_says() {
    half_stays_within::<bf16>(Precision::Fast, RMS_FAST);
}

#[test]
fn f16_is_rounded_once_or_nearly() {
    half_stays_within::<f16>(Precision::Exact, RMS_EXACT);
}

#[test]
fn fast_f16_is_as_good_as_it_says() {
    half_stays_within::<f16>(Precision::Fast, RMS_FAST);
}

/// Inputs of widely different sizes: exponents spread over 2⁻²⁰ to 2²⁰ in q against k, and in v.
fn wide(dims: AttnShape) -> Inputs<f32> {
    let mut inputs = Inputs::<f32>::plain(dims, 33);
    let spread = |d: usize| 2.0f32.powi((d * 7 % 41) as i32 - 20);
    inputs.q.each(|[_, _, _, d], x| *x *= spread(d));
    inputs.k.each(|[_, _, _, d], x| *x /= spread(d));
    inputs.v.each(|[_, _, j, d], x| *x *= spread(j + d));
    inputs
}

/// What f32 may cost on AMX: the gate of every engine, and no more than the prefill kernel does, in the root mean
/// square.
#[test]
fn f32_is_as_exact_as_on_vectors() {
    let mut cases: Vec<_> = CASES
        .iter()
        .map(|&(dims, sigma)| (Inputs::<f32>::painted(shape(dims), Memory::Bhsd, 32, sigma), sigma))
        .collect();
    cases.push((Inputs::painted(shape((1, 1, 1, 32, 256, 64, 32)), Memory::Bhsd, 34, 16.0), 16.0));
    cases.push((wide(shape((1, 1, 1, 32, 256, 64, 64))), 0.0));
    for level in levels() {
        for (inputs, sigma) in &cases {
            let attn = Attention::new();
            let exact = oracle(&attn, inputs);
            let (amx, vectors) = (attend::<f32, f32>(level, &attn, inputs), attend(level.vectors(), &attn, inputs));
            let worst = exact.check(ETA, &amx, &(level, sigma));
            let eta = |answer: &Answer<f32>| {
                let sum: f64 = answer
                    .out
                    .iter()
                    .enumerate()
                    .map(|(n, x)| ((f64::from(*x) - exact.out[n]) / exact.magnitude[n]).powi(2))
                    .sum();
                (sum / answer.out.len() as f64).sqrt()
            };
            let (ours, theirs) = (eta(&amx), eta(&vectors));
            println!(
                "{level:?} {:?} {sigma}: {worst:.3} of the gate; rms eta {ours:.2e}, vectors {theirs:.2e}",
                inputs.shape
            );
            assert!(ours <= 1.5 * theirs, "{level:?} {sigma}: {ours:e} against {theirs:e}");
        }
    }
}

#[test]
fn fast_f32_is_as_good_as_it_says() {
    for level in levels() {
        for (dims, sigma) in CASES {
            let inputs = Inputs::<f32>::painted(shape(dims), Memory::Bhsd, 35, sigma);
            let attn = Attention::new().precision(Precision::Fast);
            let exact = oracle(&attn, &inputs);
            let answer = attend::<f32, f32>(level, &attn, &inputs);
            let mut worst = 0.0f64;
            for (n, x) in answer.out.iter().enumerate() {
                let bound = FAST_F32 * (1.0 + exact.score_bound[n / inputs.shape.value_dim]) * exact.magnitude[n];
                let share = (f64::from(*x) - exact.out[n]).abs() / bound;
                assert!(share <= 1.0, "{level:?} {dims:?} {sigma}: element {n} is {x:e}, not {:e}", exact.out[n]);
                worst = worst.max(share);
            }
            println!("{level:?} {dims:?} {sigma}: {worst:.3} of what fast f32 may be off by");
        }
    }
}

/// Values and keys at the ends of each type: the rows that meet them are computed by the prefill kernel, bit for bit,
/// and the others are what they are without.
#[test]
fn numbers_that_parts_cannot_hold_go_to_the_prefill_kernel() {
    fn check<T: KernelElement + Number<Compute = f32>>(level: Level, extreme: f64) {
        let dims = shape((1, 1, 1, 70, 150, 33, 20));
        let plain = Inputs::<T>::plain(dims, 36);
        let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
        let (key, first) = (121, 121 - 80); // queries from `first` on see the key
        for place in 0..3 {
            let mut inputs = plain.clone();
            let tensor = [&mut inputs.q, &mut inputs.k, &mut inputs.v];
            let row = if place == 0 { first } else { key };
            let at = tensor[place].index([0, 0, row, 5]);
            let [q, k, v] = tensor;
            [q, k, v][place].data[at] = T::from_f64(extreme);
            let amx = attend::<T, T>(level, &attn, &inputs);
            let vectors = attend::<T, T>(level.vectors(), &attn, &inputs);
            let before = attend::<T, T>(level, &attn, &plain);
            for query in 0..70 {
                let meets = if place == 0 { query == first } else { query >= first };
                let want = if meets { &vectors } else { &before };
                let row = query * 20..query * 20 + 20;
                for (got, want) in amx.out[row.clone()].iter().zip(&want.out[row]) {
                    let same = got.bits() == want.bits() || got.to_f64().is_nan() && want.to_f64().is_nan();
                    assert!(
                        same,
                        "{level:?} {:?} {extreme:e} at {place}: row {query} is {got:?}, not {want:?}",
                        T::DTYPE
                    );
                }
            }
        }
    }
    for level in levels() {
        for extreme in [f64::NAN, f64::INFINITY, 3.3e38, -3.4028e38, 1e15] {
            check::<f32>(level, extreme);
        }
        for extreme in [f64::NAN, f64::NEG_INFINITY, 3.3e38] {
            check::<bf16>(level, extreme);
        }
        for extreme in [f64::NAN, f64::INFINITY] {
            check::<f16>(level, extreme);
        }
    }
}

/// Inputs with numbers of any size down to the smallest subnormal: every third number is `tiny` of its place, in one of
/// the tensors.
fn with_tiny<T: Number>(place: usize, tiny: f64) -> Inputs<T> {
    let mut inputs = Inputs::<T>::plain(shape((1, 2, 1, 40, 90, 33, 20)), 39);
    let tensor = [&mut inputs.q, &mut inputs.k, &mut inputs.v];
    let [q, k, v] = tensor;
    [q, k, v][place].each(|[_, _, row, channel], x| {
        if (row + channel) % 3 == 0 {
            *x = T::from_f64(tiny * Element::to_f64(*x));
        }
    });
    inputs
}

/// Tiny numbers cost nothing: beside others they stay on AMX (a row of the prefill kernel has other bits) and within
/// the gate.
#[test]
fn tiny_numbers_stay_on_amx_and_within_the_gate() {
    fn check<T: KernelElement + Number<Compute = f32>>(level: Level, slack: f64) {
        let attn = Attention::new();
        for tiny in [1e-20, 1e-31, 1e-37, 1e-39] {
            for place in 0..3 {
                let inputs = with_tiny::<T>(place, tiny);
                let ours = attend::<T, f32>(level, &attn, &inputs);
                let what = (level, T::DTYPE, place, tiny);
                oracle(&attn, &inputs).near_f32(slack, &ours, &what);
                let vectors = attend::<T, f32>(level.vectors(), &attn, &inputs);
                // Only a bf16 below the normal ones goes to the prefill kernel, and only as a value (the numbers are
                // some tenths).
                let odd = place == 2 && T::DTYPE == Dtype::Bf16 && tiny < 1e-36;
                assert_eq!(ours.out == vectors.out, odd, "{what:?}");
            }
        }
    }
    for level in amx_levels() {
        check::<f32>(level, 0.0);
        check::<bf16>(level, 0.0);
    }
}

/// A value that is tiny itself and has a tiny weight, where nothing else covers what is lost of it: down to where an
/// f32 has no bits left. And the heaviest keys' values being 0, a light key's large value: weights count down to 2⁻¹⁰⁰
/// of the largest, as on vectors.
#[test]
fn light_weights_count_down_to_the_same_floor_as_on_vectors() {
    for level in levels() {
        for (exponent, value) in [
            (69.0, 1.23 * 2.0f64.powi(-50)),
            (30.0, 1.23 * 2.0f64.powi(-90)),
            (96.0, 1.23 * 2.0f64.powi(-24)),
            (89.0, 1.7e9),
            (99.0, 1.1e-1),
            (1.0, 1.0 * 2.0f64.powi(-125)),
            (103.0, 1e9),
        ] {
            // One channel: a key of score 0 whose value is 0, and one of score −exponent (in powers of 2).
            let mut inputs = Inputs::<f32>::plain(shape((1, 1, 1, 20, 40, 1, 1)), 40);
            inputs.q.each(|_, x| *x = 1.0);
            inputs
                .k
                .each(|[_, _, j, _], x| *x = if j == 7 { -(exponent * std::f64::consts::LN_2) as f32 } else { 0.0 });
            inputs.v.each(|[_, _, j, _], x| *x = if j == 7 { value as f32 } else { 0.0 });
            let attn = Attention::new().scale(1.0);
            let (ours, exact) = (attend::<f32, f32>(level, &attn, &inputs), oracle(&attn, &inputs));
            let vectors = attend::<f32, f32>(level.vectors(), &attn, &inputs);
            for (n, x) in ours.out.iter().enumerate() {
                if exponent > 100.0 {
                    assert!(*x == 0.0 && vectors.out[n] == 0.0, "{level:?}: {x:e} at 2^-{exponent}");
                    continue;
                }
                let bound = ETA.bound(Dtype::F32, exact.score_bound[n]) * exact.magnitude[n]
                    + attn_testing::tolerance::rounding::<f32>(exact.out[n]);
                let off = (f64::from(*x) - exact.out[n]).abs();
                assert!(off <= bound, "{level:?} 2^-{exponent}·{value:e}: {x:e}, not {:e} ± {bound:e}", exact.out[n]);
            }
        }
    }
}

/// `Precision::Fast` under masks, grouped heads and strides.
#[test]
fn fast_keeps_its_word_under_masks_groups_and_strides() {
    fn check<T: KernelElement + Number<Compute = f32>>(level: Level) {
        let masks = [
            Mask::causal(Align::BottomRight),
            Mask::window(40, 9, Align::BottomRight),
            Mask::causal(Align::BottomRight).and(Mask::window(70, 0, Align::BottomRight)),
        ];
        for (memory, mask) in Memory::ALL.into_iter().zip(masks.into_iter().cycle()) {
            let inputs = Inputs::<T>::painted(shape((2, 4, 2, 70, 150, 40, 24)), memory, 42, 1.0);
            let attn = Attention::new().precision(Precision::Fast).mask(mask).softcap(20.0);
            let exact = oracle(&attn, &inputs);
            let ours = attend::<T, f32>(level, &attn, &inputs);
            let mut worst = 0.0f64;
            for (n, x) in ours.out.iter().enumerate() {
                let bound = FAST_F32 * (1.0 + exact.score_bound[n / 24]) * exact.magnitude[n];
                worst = worst.max((f64::from(*x) - exact.out[n]).abs() / bound);
            }
            println!("{level:?} {:?} {memory:?}: {worst:.3} of what is promised", T::DTYPE);
            assert!(worst <= 1.0, "{level:?} {:?} {memory:?}: {worst}", T::DTYPE);
        }
    }
    for level in levels() {
        check::<f32>(level);
        check::<f16>(level);
        check::<bf16>(level);
    }
}

/// All of f16 fits into two bfloat16: the ends of its range stay on AMX and are as exact as anything else.
#[test]
fn the_whole_range_of_f16_stays_on_amx() {
    let dims = shape((1, 1, 1, 40, 64, 16, 16));
    let mut inputs = Inputs::<f16>::plain(dims, 37);
    let mut paint = paint::Paint::new(38);
    inputs.v.each(|_, x| *x = paint.pick(&[f16::MAX, f16::MIN, f16::from_bits(1), f16::MIN_POSITIVE_SUBNORMAL, *x]));
    inputs.k.each(|_, x| *x = paint.pick(&[f16::from_bits(3), *x, *x]));
    let attn = Attention::new();
    for level in levels() {
        let answer = attend::<f16, f16>(level, &attn, &inputs);
        oracle(&attn, &inputs).check_with(ETA, WEIGHTS_OF_TWO_PARTS, &answer, &level);
    }
}

#[test]
fn avx512bf16_takes_what_it_makes_faster() {
    let level = Level::by_name("avx512bf16-model").expect("every machine has the model");
    let shape = AttnShape::new([1, 2, 100, 64], [1, 2, 100, 64], [1, 2, 100, 64]).expect("a shape");
    let (exact, fast) = (Attention::new(), Attention::new().precision(Precision::Fast));
    for (attn, input, output, takes) in [
        (exact, Dtype::Bf16, Dtype::Bf16, true),
        (fast, Dtype::Bf16, Dtype::Bf16, true),
        (fast, Dtype::Bf16, Dtype::F32, true),
        (exact, Dtype::Bf16, Dtype::F32, false),
        (exact, Dtype::F32, Dtype::F32, false),
        (fast, Dtype::F16, Dtype::F16, false),
    ] {
        let explain = Plan::new(&attn, shape, level).expect("a plan").explain_into(input, output);
        assert_eq!(explain.multiplies_bf16(), takes, "{explain}");
        let words = if takes { "bf16 by AVX512_BF16" } else { "products of bf16 parts" };
        assert!(explain.to_string().contains(words), "{explain}");
    }
}

#[test]
fn avx512bf16_takes_no_more_padding_than_it_gains() {
    let level = Level::by_name("avx512bf16-model").expect("every machine has the model");
    for (dims, precision, takes) in [
        ([40, 40], Precision::Exact, false),
        ([48, 48], Precision::Exact, false),
        ([64, 40], Precision::Exact, true),
        ([80, 80], Precision::Exact, true),
        ([40, 40], Precision::Fast, true),
        ([16, 16], Precision::Fast, false),
    ] {
        let [q, v] = dims.map(|dim| [1, 2, 100, dim]);
        let shape = AttnShape::new(q, q, v).expect("a shape");
        let attn = Attention::new().precision(precision);
        let plan = Plan::new(&attn, shape, level).expect("a plan");
        let explain = plan.explain(Dtype::Bf16);
        assert_eq!(explain.multiplies_bf16(), takes, "{explain}");
        assert!(takes || explain.to_string().contains("are padded to multiples of 32"), "{explain}");
    }
}

#[test]
fn a_plan_says_what_runs_and_why_not_something_faster() {
    let level = Level::by_name("amx-model").expect("every machine has the model");
    let plan = |sizes: [usize; 4], attn: &Attention<'_>, dtype| {
        let shape = AttnShape::new(sizes, sizes, sizes).expect("a shape");
        let explain = Plan::new(attn, shape, level).expect("a plan").explain(dtype);
        (explain.multiplies_bf16(), explain.to_string())
    };
    let attn = Attention::new();
    let (amx, text) = plan([1, 2, 100, 64], &attn, Dtype::F32);
    assert!(amx && text.contains("exact: bf16 on AMX, 6 products for scores and 6 for values"), "{text}");
    let (_, text) = plan([1, 2, 100, 64], &attn.precision(Precision::Fast), Dtype::Bf16);
    assert!(text.contains("fast: bf16 on AMX, 1 product for scores and 1 for values"), "{text}");
    let sizes = [1, 2, 100, 64];
    let shape = AttnShape::new(sizes, sizes, sizes).expect("a shape");
    for (attn, want) in [
        (attn, "1 product for scores and 3 for values; Precision::Fast takes 1 + 2;"),
        (attn.precision(Precision::Fast), "fast: bf16 on AMX, 1 product for scores and 2 for values; up to"),
    ] {
        let plan = Plan::new(&attn, shape, level).expect("a plan");
        for output in [Dtype::F16, Dtype::F32] {
            let text = plan.explain_into(Dtype::Bf16, output).to_string();
            assert!(text.contains(want), "{text}");
        }
    }
    let (amx, text) = plan([1, 2, 100, 1000], &attn, Dtype::F32);
    assert!(!amx && text.contains("not on AMX: rows of 1000, longer than 512"), "{text}");
    let (amx, text) = plan([1, 2, 100, 64], &attn.scale(1e10), Dtype::F16);
    assert!(!amx && text.contains("not on AMX: a scale above 2^16"), "{text}");
    let (amx, text) = plan([1, 2, 100, 64], &attn.reproducible(), Dtype::F16);
    assert!(!amx && text.contains("decode"), "{text}");
}
