//! Options and sizes at the edge of what f32 holds, at every level: what the random laws draw too seldom.

use attn_core::half::{bf16, f16};
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, Bias, Dtype, Element, Layout, Mask, Outputs, Result, View, ViewMut, reference};
use attn_simd::{Level, Workspace, forward_at};
use attn_testing::tolerance::ETA;

const KEYS: usize = 70;

/// Output and lse of one head of 20 queries and 70 keys of dim 3, by an engine, and by the reference.
fn both<M: Mods + Sync>(
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
        let capped = Attention::new().bias(bias).score_mod(|s, _| 2.0 * (s / 2.0).tanh());
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

/// One head of dims 1 over these keys and values, whose queries are these.
fn one_channel(level: Level, attn: &Attention<'_>, q: &[f32], k: &[f32], v: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (mut out, mut lse) = (vec![-1.0f32; q.len()], vec![-1.0f32; q.len()]);
    let outputs = Outputs::new(ViewMut::matrix(&mut out, q.len(), 1).unwrap()).lse(&mut lse);
    let view = |data, rows| View::matrix(data, rows, 1).unwrap();
    let (q, k, v) = (view(q, q.len()), view(k, k.len()), view(v, v.len()));
    forward_at(level, attn, q, k, v, outputs, &mut Workspace::new()).unwrap();
    (out, lse)
}

/// Long sums keep what they lose: of an infinite one that is nothing, not NaN.
#[test]
fn an_infinite_value_with_weight_stays_infinite() {
    for level in super::levels_and_model() {
        for keys in [30, 65, 100, 129, 257, 600, 1300] {
            for (queries, grows) in [(1, false), (1, true), (20, false), (20, true)] {
                let (mut k, mut v) = (vec![0.0f32; keys], vec![1.0f32; keys]);
                v[3] = f32::INFINITY;
                if grows {
                    k[keys - 20] = 3.0;
                }
                // The maximum of the last row never moves.
                let mut q = vec![1.0f32; queries];
                if queries > 1 {
                    q[queries - 1] = 0.0;
                }
                for attn in [Attention::new().scale(1.0), Attention::new().scale(1.0).reproducible()] {
                    let (out, _) = one_channel(level, &attn, &q, &k, &v);
                    assert_eq!(out, vec![f32::INFINITY; queries], "{level:?} {keys} keys, grows: {grows}");
                }
            }
        }
    }
}

/// Factors that are next to nothing, and products near the largest float: a reference that goes ahead of the scores
/// must not leave them behind.
#[test]
fn references_follow_scores_of_any_size() {
    let keys = 200;
    let ramp = |top: f32| (0..keys).map(|j| top * (j as f32 / keys as f32)).collect::<Vec<_>>();
    let sinks = [(keys as f32).ln()];
    let scaled = |scale| Attention::new().scale(scale);
    // What scores are multiplied by in all, and how the options say it.
    let calls = [
        (1.0f32, ramp(1.0), 1e-100, scaled(1e-100).sinks(&sinks)),
        (1.0, ramp(1.0), 1e-300, scaled(1e-300)),
        (1.0, ramp(1.0), 1e-60, scaled(1.0).temperature(1e60).sinks(&sinks)),
        (1.8e19, ramp(1.8e19), 1e-38, scaled(1e-38)),
        (1.0, ramp(3e38), 1.2e-38, scaled(1.2e-38)),
        (1.0, ramp(3e38), 4.1e-39, scaled(4.1e-39)),
    ];
    let v: Vec<f32> = (1..=keys).map(|j| j as f32 / keys as f32).collect();
    let mut wrong = Vec::new();
    for level in super::levels_and_model() {
        for (q, k, scale, attn) in &calls {
            let sink = if attn.get_sinks().is_some() { keys as f64 } else { 0.0 };
            let weights: Vec<f64> = k.iter().map(|&k| (f64::from(*q) * f64::from(k) * scale).exp()).collect();
            let sum = weights.iter().sum::<f64>() + sink;
            let want = weights.iter().zip(&v).map(|(w, &v)| w * f64::from(v)).sum::<f64>() / sum;
            for queries in [1, 20] {
                let (out, lse) = one_channel(level, attn, &vec![*q; queries], k, &v);
                let near = |got: f32, want: f64| (f64::from(got) - want).abs() <= ETA.bound(Dtype::F32, 20.0) * want;
                if !out.iter().all(|&x| near(x, want)) || !lse.iter().all(|&x| near(x, sum.ln())) {
                    let got = (out[0], lse[0]);
                    wrong.push(format!(
                        "{level:?}, {queries} × {q:e} by {scale:e}: {got:?}, not {:?}",
                        (want, sum.ln())
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A row's bits do not depend on what the rows beside it see. What is missing in a sum may be half of its last bit,
/// above all where the second group of keys adds more than the first; a group of which a row sees nothing must not
/// move that into the sum.
#[test]
fn keys_that_only_neighbours_see_change_no_bit() {
    let (keys, dim) = (1300, 64);
    let mut paint = attn_testing::paint::Paint::new(4);
    let (mut differ, mut all) = (Vec::new(), 0);
    for level in super::levels_and_model() {
        for (round, queries) in [(0, 2), (1, 20), (2, 2), (3, 20), (4, 20)] {
            let (q, k) = (vec![0.0f32; queries], vec![0.0f32; keys]);
            // A little, then more, then what rows of even numbers do not see, then so much that it rounds what is
            // missing.
            let v: Vec<f32> = (0..keys * dim)
                .map(|n| match n / dim {
                    0..240 => (0.2 + 0.3 * paint.uniform()) as f32,
                    240..512 => (0.9 + 0.08 * paint.uniform()) as f32,
                    _ => (2.3 + 0.2 * paint.uniform()) as f32,
                })
                .collect();
            let run = |sees: &dyn Fn(usize, usize) -> bool| {
                let keep: Vec<bool> = (0..queries * keys).map(|n| sees(n / keys, n % keys)).collect();
                let attn = Attention::new().mask(Mask::keep(View::matrix(&keep, queries, keys).unwrap()));
                let mut out = vec![-1.0f32; queries * dim];
                let to = ViewMut::matrix(&mut out, queries, dim).unwrap();
                let (q, k) = (View::matrix(&q, queries, 1).unwrap(), View::matrix(&k, keys, 1).unwrap());
                let v = View::matrix(&v, keys, dim).unwrap();
                forward_at(level, &attn, q, k, v, to, &mut Workspace::new()).unwrap();
                out
            };
            let alone = run(&|_, key| !(512..1024).contains(&key));
            let among = run(&|query, key| !(512..1024).contains(&key) || query % 2 == 1);
            for n in (0..queries * dim).filter(|n| n / dim % 2 == 0) {
                all += 1;
                if alone[n].to_bits() != among[n].to_bits() {
                    differ.push((level, round, n));
                }
            }
        }
    }
    assert!(all > 0 && differ.is_empty(), "{} of {all} differ, the first: {:?}", differ.len(), differ.first());
}

/// A bias in any type, shared by queries or keys or not, side by side or apart, has the bits of the same numbers in
/// `f32`; one query, a few, and many.
#[test]
fn a_bias_of_any_type_has_the_bits_of_its_numbers() {
    /// All outputs under a bias whose numbers lie `apart`.
    fn outputs<'a, T: Element>(
        level: Level,
        data: &'a [T],
        [queries, per_query, per_key]: [usize; 3],
        apart: usize,
    ) -> Vec<f32>
    where
        Bias<'a>: From<View<'a, T>>,
    {
        let sizes = [1, 2, per_query, per_key];
        let row = per_key * apart;
        let strides = [0, (per_query * row) as isize, row as isize, apart as isize];
        let bias = View::strided(data, sizes, strides, 0).expect("inside");
        let wave = |n: usize, f: f32| (0..2 * n * 3).map(|n| (n as f32 * f).sin()).collect::<Vec<_>>();
        let (q, k, v) = (wave(queries, 0.7), wave(KEYS, 1.3), wave(KEYS, 2.1));
        let of = |x, rows| View::new(x, Layout::Bhsd, [1, 2, rows, 3]).expect("sizes");
        let mut out = vec![-1.0f32; q.len()];
        let to = ViewMut::new(&mut out, Layout::Bhsd, [1, 2, queries, 3]).expect("sizes");
        let attn = Attention::new().bias(bias);
        let (q, k, v) = (of(&q[..], queries), of(&k[..], KEYS), of(&v[..], KEYS));
        forward_at(level, &attn, q, k, v, Outputs::new(to), &mut Workspace::new()).expect("accepted");
        out
    }
    let numbers: Vec<f64> = (0..2 * 2 * 37 * KEYS)
        .map(|n| if n % 7 == 3 { f64::NEG_INFINITY } else { (n * 5 % 33) as f64 / 8.0 - 2.0 })
        .collect();
    let floats: Vec<f32> = numbers.iter().map(|&x| x as f32).collect();
    let halves: Vec<f16> = numbers.iter().map(|&x| f16::from_f64(x)).collect();
    let brain: Vec<bf16> = numbers.iter().map(|&x| bf16::from_f64(x)).collect();
    for level in Level::available() {
        for queries in [1, 3, 37] {
            for (per_query, per_key) in [(queries, KEYS), (1, KEYS), (queries, 1)] {
                for apart in [1, 2] {
                    let sizes = [queries, per_query, per_key];
                    let want = outputs(level, &floats, sizes, apart);
                    for (name, got) in [
                        ("f64", outputs(level, &numbers, sizes, apart)),
                        ("f16", outputs(level, &halves, sizes, apart)),
                        ("bf16", outputs(level, &brain, sizes, apart)),
                    ] {
                        let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{} {name} {sizes:?}, {apart} apart", level.name());
                    }
                }
            }
        }
    }
}
