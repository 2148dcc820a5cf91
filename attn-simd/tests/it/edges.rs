//! Options and sizes at the edge of what f32 holds, at every level: what the random laws draw too seldom.

use attn_core::{Align, Attention, Dtype, Element, Layout, Mask, Modifier, Outputs, Result, View, ViewMut, reference};
use attn_simd::{Level, Workspace, forward_at};
use attn_testing::tolerance::ETA;

const KEYS: usize = 70;

/// Output and lse of one head of 20 queries and 70 keys of dim 3, by an engine, and by the reference.
fn both<M: Modifier + Sync>(
    level: Level,
    attn: &Attention<'_, M>,
    [q, k, v]: [&[f32]; 3],
) -> Result<[(Vec<f64>, Vec<f64>); 2]> {
    let (q, k, v) = (View::matrix(q, 20, 3)?, View::matrix(k, KEYS, 3)?, View::matrix(v, KEYS, 3)?);
    let (mut out, mut lse) = (vec![-1.0f32; 60], vec![-1.0f32; 20]);
    let outputs = Outputs::new(ViewMut::matrix(&mut out, 20, 3)?).lse(&mut lse);
    forward_at(level, attn, q, k, v, outputs, &mut Workspace::new())?;
    let (mut want, mut want_lse) = (vec![-1.0f64; 60], vec![-1.0f64; 20]);
    let outputs = Outputs::new(ViewMut::matrix(&mut want, 20, 3)?).lse(&mut want_lse);
    reference::forward(attn, q, k, v, outputs, &mut [0.0; KEYS])?;
    let wide = |x: Vec<f32>| x.into_iter().map(f64::from).collect();
    Ok([(wide(out), wide(lse)), (want, want_lse)])
}

/// Queries, keys and values of moderate size.
fn inputs() -> [Vec<f32>; 3] {
    let wave = |rows: usize, f: f32| (0..rows * 3).map(|n| (n as f32 * f).sin()).collect();
    [wave(20, 0.7), wave(KEYS, 1.3), wave(KEYS, 2.1)]
}

fn assert_close(what: &str, got: &[f64], want: &[f64]) {
    for (n, (&got, &want)) in got.iter().zip(want).enumerate() {
        // Values are of size 1 and scores below 20.
        assert!(got == want || (got - want).abs() <= ETA.bound(Dtype::F32, 20.0), "{what}: {n} is {got}, not {want}");
    }
}

/// A closure that makes a finite number of −∞ does not bring back what a bias has hidden, nor the NaN that stands
/// there.
#[test]
fn a_closure_does_not_show_what_a_bias_hides() {
    let [q, mut k, mut v] = inputs();
    for j in (1..KEYS).step_by(3) {
        k[3 * j] = f32::NAN;
        v[3 * j + 1] = f32::NAN;
    }
    let bias: Vec<f32> = (0..KEYS).map(|j| if j % 3 == 1 { f32::NEG_INFINITY } else { 0.25 }).collect();
    let bias = View::broadcast(&bias, &[KEYS]).expect("a row");
    for level in Level::available() {
        let capped = Attention::new().bias(bias).map_score(|s, _| 2.0 * (s / 2.0).tanh());
        for attn in [capped, capped.mask(Mask::causal(Align::BottomRight))] {
            let [(out, lse), (want, want_lse)] = both(level, &attn, [&q, &k, &v]).expect("accepted");
            assert!(want.iter().all(|x| x.is_finite()));
            assert_close(level.name(), &out, &want);
            assert_close(level.name(), &lse, &want_lse);
        }
    }
}

/// The largest and smallest factors that are accepted: 0 times them is 0, and a row that sees nothing is 0.
#[test]
fn huge_and_tiny_options_make_no_nan() {
    let [_, k, v] = inputs();
    let q = [0.0; 60];
    let masked = Mask::causal(Align::Offset(-10));
    for level in Level::available() {
        let base = Attention::new().mask(masked);
        for (what, attn) in [
            ("scale", base.scale(1.8e19)),
            ("negative scale", base.scale(-1.8e19)),
            ("scale before a soft-cap", base.scale(1.8e19).softcap(3.0)),
            ("scale over soft-cap", base.scale(1e19).softcap(1e-30)),
            ("soft-cap", base.softcap(1e300)),
            ("temperature", base.temperature(1e-19)),
            ("tiny quotient", base.temperature(1e200).scale(1e-200)),
        ] {
            let [(out, lse), (want, want_lse)] = both(level, &attn, [&q, &k, &v]).expect("accepted");
            assert_close(&format!("{} {what}", level.name()), &out, &want);
            assert_close(&format!("{} {what} lse", level.name()), &lse, &want_lse);
        }
    }
}

/// A row whose bias is `f64::MIN` throughout sees all keys alike: finite entries do not hide.
#[test]
fn the_lowest_double_in_a_bias_is_not_a_mask() {
    let [q, k, v] = inputs();
    for (sizes, len) in [(vec![1], 1), (vec![20, 1], 20), (vec![20, KEYS], 20 * KEYS)] {
        let bias = vec![f64::MIN; len];
        let attn = Attention::new().bias(View::broadcast(&bias, &sizes).expect("broadcasts"));
        for level in Level::available() {
            let [(out, lse), (want, _)] = both(level, &attn, [&q, &k, &v]).expect("accepted");
            assert_close(level.name(), &out, &want);
            assert!(lse.iter().all(|&x| x == f64::from(f32::MIN)), "{}: {lse:?}", level.name());
        }
    }
}

/// Tensors without rows cost nothing, however long their rows would be.
#[test]
fn huge_dims_without_rows_need_no_scratch() {
    let huge = 1usize << (usize::BITS - 15);
    let (x, mut out) = ([0.0f32; 0], [0.0f32; 0]);
    let none = View::new(&x, Layout::Bhsd, [1, 1, 0, huge]).expect("an empty tensor");
    for level in Level::available() {
        let mut workspace = Workspace::new();
        let view = ViewMut::new(&mut out, Layout::Bhsd, [1, 1, 0, huge]).expect("an empty tensor");
        forward_at(level, &Attention::new(), none, none, none, view, &mut workspace).expect("empty sizes are valid");
        assert_eq!(workspace.bytes(), 0, "{}", level.name());
    }
}

/// No memory bounds the number of rows that have no elements and no lse: nothing is computed for them.
#[test]
#[cfg(target_pointer_width = "64")]
fn rows_that_write_nothing_cost_nothing() {
    let x = [0.0f32; 0];
    let q = View::new(&x, Layout::Bhsd, [1, 1, 1 << 40, 0]).expect("an empty tensor");
    let k = View::new(&x, Layout::Bhsd, [1, 1, KEYS, 0]).expect("an empty tensor");
    for level in Level::available() {
        let mut out = [0.0f32; 0];
        let view = ViewMut::new(&mut out, Layout::Bhsd, [1, 1, 1 << 40, 0]).expect("output");
        forward_at(level, &Attention::new(), q, k, k, view, &mut Workspace::new()).expect("empty sizes are valid");
    }
}

/// Rows without elements may have any strides.
#[test]
fn strides_of_empty_rows_are_not_looked_at() {
    let x = [0.0f32; 0];
    let q = View::strided(&x, [2, 2, 20, 0], [isize::MAX; 4], 0).expect("an empty tensor");
    let k = View::strided(&x, [2, 2, KEYS, 0], [isize::MIN, isize::MAX, isize::MIN, 1], 7).expect("an empty tensor");
    let values = vec![2.0f32; 4 * KEYS];
    let v = View::new(&values, Layout::Bhsd, [2, 2, KEYS, 1]).expect("values");
    for level in Level::available() {
        let mut out = vec![0.0f32; 80];
        let view = ViewMut::new(&mut out, Layout::Bhsd, [2, 2, 20, 1]).expect("output");
        forward_at(level, &Attention::new(), q, k, v, view, &mut Workspace::new()).expect("empty sizes are valid");
        assert!(out.iter().all(|x| (x.to_f64() - 2.0).abs() < 1e-6), "{}: {out:?}", level.name());
    }
}
