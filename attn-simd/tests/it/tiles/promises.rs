//! What [`Precision`] promises, for every type of inputs with every type of output.

use super::*;

/// The share of its promise that a call's output uses up: for `f32` of the bound on each element, for a half type of the
/// root mean square error.
fn share<T, O>(level: Level, precision: Precision, (dims, sigma): Sizes) -> f64
where
    T: KernelElement + Number<Compute = f32>,
    O: KernelElement + Number<Compute = f32>,
{
    let inputs = Inputs::<T>::painted(shape(dims), Memory::Bhsd, 43, sigma);
    let attn = Attention::new().precision(precision);
    let exact = oracle(&attn, &inputs);
    let answer = attend::<T, O>(level, &attn, &inputs);
    let fast = precision == Precision::Fast;
    if O::DTYPE != Dtype::F32 {
        let (ours, rounded) = rms(&exact, &answer);
        return ours / rounded / if fast { RMS_FAST } else { RMS_EXACT };
    }
    let of_element = |(n, x): (usize, &O)| {
        let s = exact.score_bound[n / inputs.shape.value_dim];
        let eta = if fast { FAST_F32 * (1.0 + s) } else { ETA.bound(Dtype::F32, s) };
        (Element::to_f64(*x) - exact.out[n]).abs() / (eta * exact.magnitude[n])
    };
    answer.out.iter().enumerate().map(of_element).fold(0.0, f64::max)
}

/// Table-driven, so that no combination is forgotten; prints them all before it fails.
#[test]
fn every_output_of_every_input_is_as_good_as_promised() {
    type Share = fn(Level, Precision, Sizes) -> f64;
    let table: [(&str, Share); 9] = [
        ("bf16 to bf16", share::<bf16, bf16>),
        ("bf16 to f16", share::<bf16, f16>),
        ("bf16 to f32", share::<bf16, f32>),
        ("f16 to bf16", share::<f16, bf16>),
        ("f16 to f16", share::<f16, f16>),
        ("f16 to f32", share::<f16, f32>),
        ("f32 to bf16", share::<f32, bf16>),
        ("f32 to f16", share::<f32, f16>),
        ("f32 to f32", share::<f32, f32>),
    ];
    let mut broken = Vec::new();
    for level in levels() {
        for (name, share) in table {
            for precision in [Precision::Exact, Precision::Fast] {
                let worst = CASES.map(|case| share(level, precision, case)).into_iter().fold(0.0, f64::max);
                println!("{level:?} {name} {precision:?}: {worst:.3} of what is promised");
                if worst > 1.0 {
                    broken.push((level, name, precision, worst));
                }
            }
        }
    }
    assert!(broken.is_empty(), "{broken:?}");
}
