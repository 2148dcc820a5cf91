//! Gradients of random calls against `attn_core::backward` in `f64`: all options, layouts and lengths that
//! `attn_testing::cases` draws, with the gradients of sinks and of a bias of any sizes, at every level.
//! `ATTN_RANDOM_CALLS=10000 cargo test -p attn-simd --test it backward_random` draws more.

use attn_core::backward::{self as oracle, Gradients};
use attn_core::{AttnShape, Layout, Outputs, View, ViewMut, reference};
use attn_simd::backward::{self, Inputs as Saved};
use attn_simd::{Level, Workspace};
use attn_testing::cases::{Case, Inputs, Tensor4};
use attn_testing::tolerance::GRADIENT_F32;

/// dq, dk, dv, and the gradients of the sinks and of the bias.
type Five = [Vec<f64>; 5];

/// What a call of a case gives; `f` computes it.
fn gradients<O: attn_core::Element>(
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

/// The gradient of a bias from that of all scores, and the sums of their sizes.
fn summed(all: &[f64], [_, heads, rows, keys]: [usize; 4], to: [usize; 4]) -> (Vec<f64>, Vec<f64>) {
    let mut sums = (vec![0.0; to.iter().product()], vec![0.0; to.iter().product()]);
    for (n, x) in all.iter().enumerate() {
        let place = [n / keys / rows / heads, n / keys / rows % heads, n / keys % rows, n % keys];
        let at = place.iter().zip(to).fold(0, |at, (&i, size)| at * size + if size == 1 { 0 } else { i });
        sums.0[at] += x;
        sums.1[at] += x.abs();
    }
    sums
}

#[test]
fn gradients_of_random_calls_match_the_reference() {
    let asked = std::env::var("ATTN_RANDOM_CALLS").ok().and_then(|n| n.parse().ok());
    let calls = asked.unwrap_or(if attn_testing::is_emulated() { 40 } else { 250 });
    let mut worst = (0.0, String::new());
    for n in 0..calls {
        let mut case = Case::random(90_000 + n);
        // Sharper weights show the rounding of scores, which grows with them, and not that of gradients.
        case.sigma = case.sigma.min(1.0);
        let (shape, attn) = (case.shape, case.options.attention());
        let inputs: Inputs<f32> = case.inputs();
        let dy = Tensor4::<f32>::painted(shape.output(), case.memory, case.seed + 3, 1.0);
        let (q, k, v, dy) = (inputs.q.view(), inputs.k.view(), inputs.v.view(), dy.view());
        let scores = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
        let mut bias = scores;
        bias.iter_mut().enumerate().filter(|(axis, _)| case.seed >> axis & 1 == 1).for_each(|(_, size)| *size = 1);

        let mut scratch = vec![0.0; oracle::scratch_len(&shape).unwrap()];
        let mut want = gradients::<f64>(&shape, scores, |to| oracle::gradients(&attn, q, k, v, dy, to, &mut scratch));
        let (summed, sizes_summed) = summed(&want[4], scores, bias);
        want[4] = summed;
        let (mut out, mut lse) = (vec![0.0f32; shape.output().iter().product()], vec![0.0f32; shape.rows()]);
        let to = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap()).lse(&mut lse);
        reference::forward(&attn, q, k, v, to, &mut vec![0.0; shape.kv_len]).unwrap();
        let out = View::new(&out, Layout::Bhsd, shape.output()).unwrap();
        for level in Level::available() {
            let saved = Saved { q, k, v, out, lse: &lse, dy };
            let mut workspace = Workspace::new();
            let found =
                gradients::<f32>(&shape, bias, |to| backward::gradients_at(level, &attn, saved, to, &mut workspace));
            for (which, (found, want)) in found.iter().zip(&want).enumerate() {
                // A sum that is 0, such as one over all keys, shows the rounding of what it adds up. So does a gradient
                // by scores that move no weight, as where each row sees one key: of as many terms as rows share keys,
                // each as large as dropout makes it.
                let sizes = if which == 4 { &sizes_summed } else { want };
                let most = sizes.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let zero = attn.get_dropout().factor() * ((shape.q_len * shape.group()) as f64).sqrt();
                let most = if most < 1e-9 { zero } else { most.max(1.0) };
                for (found, want) in found.iter().zip(want) {
                    let off = (found - want).abs() / most / GRADIENT_F32;
                    if (off > worst.0 || off.is_nan()) && !(found.is_nan() && want.is_nan()) {
                        let name = ["dq", "dk", "dv", "dsinks", "dbias"][which];
                        worst = (off, format!("{name} at {}: {found}, not {want}; {case:?}", level.name()));
                    }
                }
            }
        }
    }
    eprintln!("{calls} calls, worst {} of the tolerance: {}", worst.0, worst.1);
    assert!(worst.0 <= 1.0, "{} of the tolerance: {}", worst.0, worst.1);
}
