//! What [`Precision`] promises, for every type of inputs with every type of output.

use attn_testing::tolerance::{FAST_LSE_BF16, LSE, RMS_FAST_SINK, rounding};

use super::*;

/// The shares of their promises that a call's output and its lse use up: of an output in `f32` and of the lse those of
/// the bound on each element, of a half type that of the root mean square error.
fn shares<T, O>(level: Level, precision: Precision, inputs: &Inputs<T>, exact: &Oracle) -> [f64; 2]
where
    T: KernelElement + Number<Compute = f32>,
    O: KernelElement + Number<Compute = f32>,
{
    let answer = attend::<T, O>(level, &Attention::new().precision(precision), inputs);
    let fast = precision == Precision::Fast;
    let of_lse = |(row, x): (usize, &f32)| {
        let (s, want) = (exact.score_bound[row], exact.lse[row]);
        let bound = match (T::DTYPE, O::DTYPE) {
            _ if !fast => LSE.bound(Dtype::F32, s + want.abs()),
            (Dtype::Bf16, Dtype::Bf16) => FAST_LSE_BF16,
            _ => FAST_F32 * (1.0 + s) + rounding::<f32>(want),
        };
        (f64::from(*x) - want).abs() / bound
    };
    let lse = answer.lse.iter().enumerate().map(of_lse).fold(0.0, f64::max);
    if O::DTYPE != Dtype::F32 {
        let (ours, rounded) = rms(exact, &answer);
        return [ours / rounded / if fast { RMS_FAST } else { RMS_EXACT }, lse];
    }
    let of_element = |(n, x): (usize, &O)| {
        let s = exact.score_bound[n / inputs.shape.value_dim];
        let eta = if fast { FAST_F32 * (1.0 + s) } else { ETA.bound(Dtype::F32, s) };
        (Element::to_f64(*x) - exact.out[n]).abs() / (eta * exact.magnitude[n])
    };
    [answer.out.iter().enumerate().map(of_element).fold(0.0, f64::max), lse]
}

/// All outputs of one type of inputs, in both precisions: prints them all, and returns how many promises are broken.
fn broken<T: KernelElement + Number<Compute = f32>>() -> usize {
    let cases: Vec<_> = CASES
        .iter()
        .map(|&(dims, sigma)| {
            let inputs = Inputs::<T>::painted(shape(dims), Memory::Bhsd, 43, sigma);
            let exact = oracle(&Attention::new(), &inputs);
            (inputs, exact)
        })
        .collect();
    type Shares<T> = fn(Level, Precision, &Inputs<T>, &Oracle) -> [f64; 2];
    let outputs: [(&str, Shares<T>); 3] =
        [("bf16", shares::<T, bf16>), ("f16", shares::<T, f16>), ("f32", shares::<T, f32>)];
    let mut broken = 0;
    for level in levels() {
        for (name, shares) in outputs {
            for precision in [Precision::Exact, Precision::Fast] {
                let each = cases.iter().map(|(inputs, exact)| shares(level, precision, inputs, exact));
                let [out, lse] = each.fold([0.0, 0.0], |worst: [f64; 2], [o, l]| [worst[0].max(o), worst[1].max(l)]);
                println!("{level:?} {:?} to {name} {precision:?}: {out:.3} of the promise, lse {lse:.3}", T::DTYPE);
                broken += usize::from(out > 1.0) + usize::from(lse > 1.0);
            }
        }
    }
    broken
}

#[test]
fn every_output_of_every_input_is_as_good_as_promised() {
    assert_eq!(broken::<bf16>() + broken::<f16>() + broken::<f32>(), 0, "promises are broken");
}

/// The first key has no value, and a weight that is nearly twice that of the others, which are nearly equal.
#[test]
fn a_sink_costs_bf16_no_more_than_is_said() {
    let mut inputs = Inputs::<bf16>::painted(shape((1, 1, 1, 128, 512, 64, 64)), Memory::Bhsd, 44, 1.0);
    inputs.q.each(|[.., channel], x| *x = bf16::from_f64(if channel == 0 { 8.0 } else { 0.02 * x.to_f64() }));
    inputs.k.each(|[_, _, key, channel], x| {
        if key == 0 || channel == 0 {
            *x = bf16::from_f64(if key == 0 && channel == 0 { 0.65 } else { 0.0 });
        }
    });
    inputs.v.each(|[_, _, key, _], x| *x = if key == 0 { bf16::ZERO } else { *x });
    let exact = oracle(&Attention::new(), &inputs);
    for level in levels() {
        let answer = attend::<bf16, bf16>(level, &Attention::new().precision(Precision::Fast), &inputs);
        let (ours, rounded) = rms(&exact, &answer);
        println!("{level:?}: {:.3} of correct rounding", ours / rounded);
        assert!(ours <= RMS_FAST_SINK * rounded, "{level:?}: {} of correct rounding", ours / rounded);
    }
}
