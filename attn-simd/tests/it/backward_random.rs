//! Gradients of random calls against `attn_core::backward` in `f64`: all options, layouts and lengths that
//! `attn_testing::cases` draws, functions of the caller, and the gradients of sinks and of a bias of any sizes, at
//! every level.
//! `ATTN_RANDOM_CALLS=10000 cargo test -p attn-simd --test it backward_random` draws more.

use attn_core::backward::{self as oracle, Gradients};
use attn_core::half::bf16;
use attn_core::score::{At, Problem};
use attn_core::score_mod::Mods;
use attn_core::{Attention, AttnShape, Dtype, Element, Layout, Outputs, Precision, View, ViewMut, reference};
use attn_simd::backward::{self, Inputs as Saved};
use attn_simd::{Level, Workspace};
use attn_testing::cases::{Case, Inputs, Tensor4};
use attn_testing::tolerance::{FAST_GRADIENT, FAST_LSE_BF16, GRADIENT_ETA, TWICE, TWO_PARTS_GRADIENT};

/// dq, dk, dv, and the gradients of the sinks and of the bias.
type Five = [Vec<f64>; 5];

/// What a call of a case gives; `f` computes it.
fn gradients<O: Element>(
    shape: &AttnShape,
    bias: [usize; 4],
    f: impl FnOnce(Gradients<'_, O>) -> attn_core::Result<()>,
) -> Five {
    let sizes = attn_testing::cases::sizes(shape);
    let [mut dq, mut dk, mut dv] = sizes.map(|sizes| vec![O::from_f64(f64::NAN); sizes.iter().product()]);
    let (mut sinks, mut dbias) = (vec![f64::NAN; shape.q_heads], vec![f64::NAN; bias.iter().product()]);
    f(Gradients::new(
        ViewMut::new(&mut dq, Layout::Bhsd, sizes[0]).unwrap(),
        ViewMut::new(&mut dk, Layout::Bhsd, sizes[1]).unwrap(),
        ViewMut::new(&mut dv, Layout::Bhsd, sizes[2]).unwrap(),
    )
    .sinks(&mut sinks)
    .bias(ViewMut::new(&mut dbias, Layout::Bhsd, bias).unwrap()))
    .unwrap();
    let wide = |x: Vec<O>| x.into_iter().map(|x| x.to_f64()).collect();
    [wide(dq), wide(dk), wide(dv), sinks, dbias]
}

/// For each gradient the sum of the sizes of what it adds up: what rounding is measured by, whatever cancels; and the
/// `S` of the bound, of all rows.
fn sizes_of_terms<T: Element, M: Mods>(
    attn: &Attention<'_, M>,
    shape: AttnShape,
    bias: [usize; 4],
    [q, k, v, dy, out]: [View<'_, T>; 5],
    lse: &[f32],
) -> (Five, f64) {
    let mut largest = 0.0f64;
    let problem = Problem::of_shape(attn, shape).unwrap();
    let AttnShape { batch, q_heads, q_len, .. } = shape;
    let mut sums: Five = gradients::<f64>(&shape, bias, |_| Ok(()));
    sums.iter_mut().for_each(|sum| sum.fill(0.0));
    let number = |x: View<'_, T>, [b, h, s, d]: [usize; 4]| x.at(b, h, s, d).to_f64();
    let by_score = problem.scale().abs() / attn.get_temperature().unwrap_or(1.0);
    for (b, head, i) in (0..batch * q_heads * q_len).map(|n| (n / q_len / q_heads, n / q_len % q_heads, n % q_len)) {
        let (kv_head, lse) = (shape.kv_head(head), f64::from(lse[shape.row(b, head, i)]));
        let (rows, of_dv) = (shape.head_dim, shape.value_dim);
        let delta: f64 = (0..of_dv).map(|d| (number(dy, [b, head, i, d]) * number(out, [b, head, i, d])).abs()).sum();
        if let Some(sink) = problem.sink(head) {
            sums[3][head] += (f64::from(sink) - lse).exp() * delta;
        }
        let (q_row, first) = (shape.row(b, head, i) * rows, (b * shape.kv_heads + kv_head) * shape.kv_len);
        problem.for_each_visible(b, head, i, |at| {
            let products = (0..rows).map(|d| number(q, [b, head, i, d]) * number(k, [b, kv_head, at.key, d]));
            let (dot, size) = products.fold((0.0, 0.0), |(dot, size), x| (dot + x, size + x.abs()));
            let added = attn.get_bias().map_or(0.0, |bias| bias.at(at).abs());
            let added = added + attn.get_alibi().map_or(0.0, |_| (problem.score::<f64>(0.0, at)).abs());
            largest = largest.max(size * by_score + added / attn.get_temperature().unwrap_or(1.0));
            let weight = (problem.score::<f64>(dot, at) - lse).exp();
            let kept = problem.dropout_factor(at);
            let dots: f64 =
                (0..of_dv).map(|d| (number(dy, [b, head, i, d]) * number(v, [b, kv_head, at.key, d])).abs()).sum();
            let size =
                weight * (kept * dots + delta) * if attn.get_mods().has_score_mod() { factor(at).abs() } else { 1.0 };
            for d in 0..rows {
                sums[0][q_row + d] += size * by_score * number(k, [b, kv_head, at.key, d]).abs();
                sums[1][(first + at.key) * rows + d] += size * by_score * number(q, [b, head, i, d]).abs();
            }
            for d in 0..of_dv {
                sums[2][(first + at.key) * of_dv + d] += weight * kept * number(dy, [b, head, i, d]).abs();
            }
            let place = [b, head, i, at.key].into_iter().zip(bias);
            let place = place.fold(0, |at, (i, size)| at * size + if size == 1 { 0 } else { i });
            sums[4][place] += size / attn.get_temperature().unwrap_or(1.0);
        });
    }
    (sums, largest)
}

fn calls() -> u64 {
    let asked = std::env::var("ATTN_RANDOM_CALLS").ok().and_then(|n| n.parse().ok());
    asked.unwrap_or(if attn_testing::is_emulated() { 40 } else { 250 })
}

/// The sizes of the gradient of a bias: those of the scores, of which each may be 1.
fn bias_of(Case { shape, seed, .. }: &Case) -> [usize; 4] {
    let mut bias = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
    bias.iter_mut().enumerate().filter(|(axis, _)| seed >> axis & 1 == 1).for_each(|(_, size)| *size = 1);
    bias
}

/// What functions of the caller multiply a score by, of either sign.
fn factor(at: At) -> f64 {
    [1.0, -0.5, 0.25][(at.head + at.query + at.key) % 3]
}

#[test]
fn gradients_of_random_calls_match_the_reference() {
    let calls = calls();
    let mut worst = (0.0, String::new());
    for n in 0..calls {
        let mut case = Case::random(90_000 + n);
        // Sharper weights show the rounding of scores, which grows with them, and not that of gradients.
        case.sigma = case.sigma.min(1.0);
        let attn = case.options.attention();
        match n % 4 {
            1 => compare(&case, &attn.mask_mod(|at| (7 * at.key + 3 * at.query + at.head) % 5 > 0), &mut worst),
            2 => compare(&case, &attn.score_mod_with(|s, at| factor(at) * s, |_, at| factor(at)), &mut worst),
            _ => compare(&case, &attn, &mut worst),
        }
    }
    eprintln!("{calls} calls, worst {} of the tolerance: {}", worst.0, worst.1);
    assert!(worst.0 <= 1.0, "{} of the tolerance: {}", worst.0, worst.1);
}

/// Compares a case at every level; `worst` is the largest share of the tolerance so far, and where it was found.
fn compare<M: Mods + Sync>(case: &Case, attn: &Attention<'_, M>, worst: &mut (f64, String)) {
    let (shape, bias) = (case.shape, bias_of(case));
    let inputs: Inputs<f32> = case.inputs();
    let dy = Tensor4::<f32>::painted(shape.output(), case.memory, case.seed + 3, 1.0);
    let (q, k, v, dy) = (inputs.q.view(), inputs.k.view(), inputs.v.view(), dy.view());
    let mut scratch = vec![0.0; oracle::scratch_len(&shape).unwrap()];
    let want = gradients::<f64>(&shape, bias, |to| oracle::gradients(attn, q, k, v, dy, to, &mut scratch));
    let (mut out, mut lse) = (vec![0.0f32; shape.output().iter().product()], vec![0.0f32; shape.rows()]);
    let to = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap()).lse(&mut lse);
    reference::forward(attn, q, k, v, to, &mut vec![0.0; shape.kv_len]).unwrap();
    let out = View::new(&out, Layout::Bhsd, shape.output()).unwrap();
    let (sizes, largest) = sizes_of_terms(attn, shape, bias, [q, k, v, dy, out], &lse);
    let bound = GRADIENT_ETA.bound(Dtype::F32, largest);
    for level in Level::available() {
        let saved = Saved { q, k, v, out, lse: &lse, dy };
        let mut workspace = Workspace::new();
        let found = gradients::<f32>(&shape, bias, |to| backward::gradients_at(level, attn, saved, to, &mut workspace));
        for which in 0..5 {
            for ((found, want), size) in found[which].iter().zip(&want[which]).zip(&sizes[which]) {
                let off = (found - want).abs() / (size + 1e-30) / bound;
                if off > worst.0 || off.is_nan() {
                    let name = ["dq", "dk", "dv", "dsinks", "dbias"][which];
                    *worst = (off, format!("{name} at {}: {found}, not {want}; {case:?}", level.name()));
                }
            }
        }
    }
}

/// Calls of bf16 where bf16 is multiplied, beside those of floats at another level, from the same output and lse.
/// `Exact` promises of both what f32 does; `Fast` rounds weights and gradients of scores. The lse of a `Fast` call adds
/// its own error.
#[test]
fn products_of_bf16_keep_their_promise() {
    let mut worst = [(); 4].map(|()| (0.0, String::new()));
    for n in 0..if attn_testing::is_emulated() { 4 } else { calls() } {
        let mut case = Case::random(190_000 + n);
        case.sigma = case.sigma.min(1.0);
        let (shape, attn, bias) = (case.shape, case.options.attention(), bias_of(&case));
        let inputs: Inputs<bf16> = case.inputs();
        let dy = Tensor4::<bf16>::painted(shape.output(), case.memory, case.seed + 3, 1.0);
        let (q, k, v, dy) = (inputs.q.view(), inputs.k.view(), inputs.v.view(), dy.view());
        let (mut out, mut lse) = (vec![bf16::ZERO; shape.output().iter().product()], vec![0.0f32; shape.rows()]);
        let to = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap()).lse(&mut lse);
        reference::forward(&attn, q, k, v, to, &mut vec![0.0; shape.kv_len]).unwrap();
        let out = View::new(&out, Layout::Bhsd, shape.output()).unwrap();
        let (sizes, largest) = sizes_of_terms(&attn, shape, bias, [q, k, v, dy, out], &lse);
        let bound = TWICE.factor / 2.0 * GRADIENT_ETA.bound(Dtype::F32, largest);
        let saved = Saved { q, k, v, out, lse: &lse, dy };
        let found = |level: Level, attn: &Attention<'_>, lse: &[f32]| {
            let saved = Saved { lse, ..saved };
            gradients::<f32>(&shape, bias, |to| backward::gradients_at(level, attn, saved, to, &mut Workspace::new()))
        };
        let found_halves = |level: Level, attn: &Attention<'_>| {
            gradients::<bf16>(&shape, bias, |to| backward::gradients_at(level, attn, saved, to, &mut Workspace::new()))
        };
        let floats = found(Level::portable(), &attn, &lse);
        let levels = ["avx512bf16", "avx512bf16-model", "amx", "amx-model"];
        for level in attn_testing::levels(levels, Level::by_name) {
            // Into f32 by both precisions, and into bf16, which rounds each gradient by 2⁻⁸ of itself at most.
            let fast_lse = {
                let (mut out, mut lse) = (vec![bf16::ZERO; out.data().len()], vec![0.0f32; shape.rows()]);
                let to = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap()).lse(&mut lse);
                let (fast, mut workspace) = (attn.precision(Precision::Fast), Workspace::new());
                attn_simd::forward_at(level, &fast, q, k, v, to, &mut workspace).unwrap();
                lse
            };
            let ways = [Precision::Exact, Precision::Fast, Precision::Exact, Precision::Fast];
            for (n, precision) in ways.into_iter().enumerate() {
                let attn = attn.precision(precision);
                let lse = if n == 3 { &fast_lse } else { &lse };
                let found = if n == 2 { found_halves(level, &attn) } else { found(level, &attn, lse) };
                let bound = bound + [0.0, FAST_GRADIENT, TWO_PARTS_GRADIENT, FAST_GRADIENT + FAST_LSE_BF16][n];
                for which in 0..5 {
                    let rounding = if n == 2 && which < 3 { 1.0 / 256.0 } else { 0.0 };
                    for ((found, want), size) in found[which].iter().zip(&floats[which]).zip(&sizes[which]) {
                        let off = ((found - want).abs() - rounding * want.abs()) / (size + 1e-30) / bound;
                        if off > worst[n].0 || off.is_nan() {
                            let name = ["dq", "dk", "dv", "dsinks", "dbias"][which];
                            let text = format!("{name} at {}: {found}, not {want}; {case:?}", level.name());
                            worst[n] = (off, text);
                        }
                    }
                }
            }
        }
    }
    for (share, text) in worst {
        eprintln!("worst {share} of the tolerance: {text}");
        assert!(share <= 1.0, "{share} of the tolerance: {text}");
    }
}
