//! Random calls in every type and precision against the reference in doubles: shapes, masks, options and layouts of the
//! grid's generator. `PROPTEST_CASES` asks for more of them.

use attn_core::half::{bf16, f16};
use attn_core::{Dtype, Precision};
use attn_simd::{KernelElement, Level};
use attn_testing::Number;
use attn_testing::cases::Case;
use attn_testing::laws::oracle;
use attn_testing::tolerance::{ETA, FAST_F32, WEIGHTS_OF_TWO_PARTS, rounding};

use super::{attend, levels};

/// One call: outputs of the inputs' type, and of f32, in both precisions.
fn check<T: KernelElement + Number<Compute = f32>>(level: Level, case: &Case) {
    let (inputs, attn) = (case.inputs::<T>(), case.options.attention());
    let (exact, what) = (oracle(&attn, &inputs), (level, T::DTYPE, case));
    let slack = if T::DTYPE == Dtype::F32 { 0.0 } else { WEIGHTS_OF_TWO_PARTS };
    exact.check_with(ETA, slack, &attend::<T, T>(level, &attn, &inputs), &what);
    exact.near_f32(0.0, &attend::<T, f32>(level, &attn, &inputs), &what);
    let fast = attend::<T, f32>(level, &attn.precision(Precision::Fast), &inputs);
    for (n, x) in fast.out.iter().enumerate() {
        let bound = FAST_F32 * (1.0 + exact.score_bound[n / case.shape.value_dim]) * exact.magnitude[n];
        let off = (f64::from(*x) - exact.out[n]).abs();
        assert!(
            off <= bound + rounding::<f32>(exact.out[n]),
            "{what:?} fast: {x:e}, not {:e} ± {bound:e}",
            exact.out[n]
        );
    }
}

#[test]
fn random_calls_match_the_reference_in_every_type() {
    let count = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    for level in levels() {
        for seed in 0..count {
            let case = Case::random(70_000 + seed);
            check::<f32>(level, &case);
            check::<f16>(level, &case);
            check::<bf16>(level, &case);
        }
    }
}
