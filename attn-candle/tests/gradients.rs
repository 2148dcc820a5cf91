//! candle's `backward` through the operation gives candle's own gradients of the formula in f64, for every dtype,
//! stride and option; and what has no gradient is an error that says so.

use std::cell::Cell;

use attn_core::dropout::Dropout;
use attn_core::position::alibi::Alibi;
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, AttnShape, Layout, Mask, View};
use attn_testing::paint::normals;
use attn_testing::tolerance::{GRADIENT_BF16, GRADIENT_F16, GRADIENT_F32};
use candle_core::{D, DType, Device, Result, Tensor, Var};
use candle_nn::ops;

const Q: (usize, usize, usize, usize) = (2, 20, 8, 40); // transposed to (2, 8, 20, 40)
const K: (usize, usize, usize, usize) = (2, 2, 50, 40); // cut to 33 keys
const V: (usize, usize, usize, usize) = (1, 2, 33, 24); // expanded to both sequences
const DY: (usize, usize, usize, usize) = (2, 8, 20, 24);

/// What the formula does between scores and weights; every field is one option.
#[derive(Default)]
struct Formula {
    cap: Option<f64>,
    added: Option<Tensor>,
    score: Option<fn(&Tensor) -> Result<Tensor>>,
    temperature: Option<f64>,
    sinks: Option<Tensor>,
    dropped: Option<Tensor>,
}

impl Formula {
    /// candle's operations, in f64.
    fn run(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let group = q.dim(1)? / k.dim(1)?;
        let repeat = |x: &Tensor| {
            let (b, h, s, d) = x.dims4()?;
            x.unsqueeze(2)?.expand((b, h, group, s, d))?.reshape((b, h * group, s, d))?.contiguous()
        };
        let mut scores = (q.contiguous()?.matmul(&repeat(k)?.t()?.contiguous()?)? * SCALE)?;
        if let Some(cap) = self.cap {
            scores = ((scores / cap)?.tanh()? * cap)?;
        }
        if let Some(added) = &self.added {
            scores = scores.broadcast_add(added)?;
        }
        if let Some(score) = self.score {
            scores = score(&scores)?;
        }
        if let Some(temperature) = self.temperature {
            scores = (scores / temperature)?;
        }
        let (b, h, rows, keys) = scores.dims4()?;
        if let Some(sinks) = &self.sinks {
            let sinks = sinks.reshape((1, h, 1, 1))?.broadcast_as((b, h, rows, 1))?;
            scores = Tensor::cat(&[&scores, &sinks], 3)?;
        }
        let mut weights = ops::softmax(&scores, D::Minus1)?.narrow(3, 0, keys)?.contiguous()?;
        if let Some(dropped) = &self.dropped {
            weights = weights.broadcast_mul(dropped)?;
        }
        weights.matmul(&repeat(v)?)
    }
}

const SCALE: f64 = 0.2;

/// Variables in a dtype, with numbers that all dtypes hold alike.
struct Inputs {
    q: Var,
    k: Var,
    v: Var,
    dy: Tensor,
}

impl Inputs {
    fn new(dtype: DType) -> Result<Self> {
        let var = |shape| Var::from_tensor(&normal(shape)?.to_dtype(dtype)?);
        Ok(Self { q: var(Q)?, k: var(K)?, v: var(V)?, dy: normal(DY)?.to_dtype(dtype)? })
    }

    /// The same numbers in f64.
    fn double(&self) -> Result<Self> {
        let var = |x: &Var| Var::from_tensor(&x.to_dtype(DType::F64)?);
        let dy = self.dy.to_dtype(DType::F64)?;
        Ok(Self { q: var(&self.q)?, k: var(&self.k)?, v: var(&self.v)?, dy })
    }

    /// Strided, with an offset, with a stride of 0.
    fn views(&self) -> Result<[Tensor; 3]> {
        Ok([self.q.transpose(1, 2)?, self.k.narrow(2, 7, 33)?, self.v.expand((2, 2, 33, 24))?])
    }

    /// The gradients of `Σ y·dy` by the variables, and by `more`.
    fn gradients(
        &self,
        more: Option<&Var>,
        attention: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Vec<Tensor>> {
        let [q, k, v] = self.views()?;
        let found = (attention(&q, &k, &v)? * &self.dy)?.sum_all()?.backward()?;
        let of = |var: &Var| found.get(var).expect("a gradient").clone();
        Ok([Some(&self.q), Some(&self.k), Some(&self.v), more].into_iter().flatten().map(of).collect())
    }
}

/// Normal numbers, the same in each run: candle's own on the CPU have no seed.
fn normal(shape: (usize, usize, usize, usize)) -> Result<Tensor> {
    thread_local!(static SEED: Cell<u64> = const { Cell::new(0) }); // each test has a thread
    SEED.set(SEED.get() + 1);
    let numbers: Vec<f32> = normals(SEED.get(), shape.0 * shape.1 * shape.2 * shape.3, 1.0);
    Tensor::from_vec(numbers, shape, &Device::Cpu)
}

/// Compares gradients with those in f64, relative to the largest (or 1).
fn close(name: &str, found: &[Tensor], want: &[Tensor], bound: f64) -> Result<()> {
    assert_eq!(found.len(), want.len());
    for (n, (found, want)) in found.iter().zip(want).enumerate() {
        assert_eq!(found.dims(), want.dims());
        let largest = |x: &Tensor| x.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>();
        let difference = largest(&(found.to_dtype(DType::F64)? - want)?)?;
        let allowed = bound * largest(want)?.max(1.0);
        assert!(difference <= allowed, "{name}, gradient {n}: {difference}, {allowed} is allowed");
    }
    Ok(())
}

const DTYPES: [(DType, f64); 3] =
    [(DType::F32, GRADIENT_F32), (DType::F16, GRADIENT_F16), (DType::BF16, GRADIENT_BF16)];

/// 0 where query i of 20 sees key j of 33, −∞ elsewhere.
fn seen(sees: impl Fn(usize, usize, usize) -> bool) -> Result<Tensor> {
    let numbers = (0..2 * 20 * 33).map(|n| {
        let (batch, i, j) = (n / 660, n / 33 % 20, n % 33);
        if sees(batch, i, j) { 0.0 } else { f64::NEG_INFINITY }
    });
    Tensor::from_iter(numbers, &Device::Cpu)?.reshape((2, 1, 20, 33))
}

#[test]
fn every_dtype_stride_and_argument_of_sdpa() -> Result<()> {
    for (dtype, bound) in DTYPES {
        let inputs = Inputs::new(dtype)?;
        let causal = seen(|_, i, j| j <= i + 13)?;
        for cap in [None, Some(5.0)] {
            for causal_too in [false, true] {
                for mask in [None, Some((2, 8, 20, 33)), Some((1, 8, 20, 1)), Some((1, 1, 1, 33))] {
                    // The same for all keys: no weight changes by it, and its gradient, which is 0, shows the rounding
                    // of a half output 33 times.
                    if dtype != DType::F32 && mask.is_some_and(|(.., keys)| keys == 1) {
                        continue;
                    }
                    let name = format!("{dtype:?}, cap {cap:?}, causal {causal_too}, mask {mask:?}");
                    let mask = mask.map(|shape| Var::from_tensor(&normal(shape)?.to_dtype(dtype)?)).transpose()?;
                    let found = inputs.gradients(mask.as_ref(), |q, k, v| {
                        let (mask, cap) = (mask.as_ref().map(Var::as_tensor), cap.unwrap_or(1.0) as f32);
                        attn_candle::sdpa(q, k, v, mask, causal_too, SCALE as f32, cap)
                    })?;
                    let mask = mask.map(|mask| Var::from_tensor(&mask.to_dtype(DType::F64)?)).transpose()?;
                    let added = match (mask.as_ref(), causal_too) {
                        (None, false) => None,
                        (None, true) => Some(causal.clone()),
                        (Some(mask), false) => Some(mask.as_tensor().clone()),
                        (Some(mask), true) => Some(mask.broadcast_add(&causal)?),
                    };
                    let formula = Formula { cap, added, ..Formula::default() };
                    let want = inputs.double()?.gradients(mask.as_ref(), |q, k, v| formula.run(q, k, v))?;
                    close(&name, &found, &want, bound)?;
                }
            }
        }
    }
    Ok(())
}

/// A mask that is no variable stays with the kernels, and gets no gradient.
#[test]
fn a_constant_mask_is_an_option() -> Result<()> {
    let (inputs, mask) = (Inputs::new(DType::F32)?, normal((8, 1, 20, 33))?.get(0)?);
    let found = inputs.gradients(None, |q, k, v| attn_candle::sdpa(q, k, v, Some(&mask), false, SCALE as f32, 1.0))?;
    let formula = Formula { added: Some(mask.to_dtype(DType::F64)?), ..Formula::default() };
    close("constant", &found, &inputs.double()?.gradients(None, |q, k, v| formula.run(q, k, v))?, GRADIENT_F32)
}

/// Compares any options with a formula.
fn compare<D: Clone + Send + Sync + 'static, M: Mods + Sync + 'static>(
    name: &str,
    data: D,
    options: impl for<'a> Fn(&'a D) -> Attention<'a, M> + Copy + Send + Sync + 'static,
    formula: Formula,
) -> Result<()> {
    for (dtype, bound) in DTYPES {
        let inputs = Inputs::new(dtype)?;
        let ours = |q: &Tensor, k: &Tensor, v: &Tensor| attn_candle::differentiable(data.clone(), options, q, k, v);
        let want = inputs.double()?.gradients(None, |q, k, v| formula.run(q, k, v))?;
        close(&format!("{name}, {dtype:?}"), &inputs.gradients(None, ours)?, &want, bound)?;
    }
    Ok(())
}

#[test]
fn options_that_hide_and_add() -> Result<()> {
    let base = || Attention::new().scale(SCALE);
    let none = Formula::default;
    let window = seen(|_, i, j| j.abs_diff(i + 13) <= 4)?;
    let formula = Formula { added: Some(window), ..none() };
    compare("window", (), move |_| base().mask(Mask::window(4, 4, Align::BottomRight)), formula)?;

    let padded = seen(|batch, _, j| j < [33, 7][batch])?;
    let formula = Formula { added: Some(padded), ..none() };
    compare("lengths", vec![33, 7], move |lens| base().mask(Mask::kv_lens(lens)), formula)?;

    let even = seen(|_, _, j| j % 2 == 0)?;
    compare("mask_mod", (), move |_| base().mask_mod(|at| at.key % 2 == 0), Formula { added: Some(even), ..none() })?;

    let slopes: Vec<f32> = (1..9).map(|n| n as f32 / 64.0).collect();
    let distance = |n: usize| (n / 33 % 20 + 13).abs_diff(n % 33) as f64;
    let numbers = (0..8 * 660).map(|n| -f64::from(slopes[n / 660]) * distance(n));
    let alibi = Tensor::from_iter(numbers, &Device::Cpu)?.reshape((8, 20, 33))?;
    let formula = Formula { added: Some(alibi), ..none() };
    compare("alibi", slopes, move |slopes| base().alibi(Alibi { slopes, align: Align::BottomRight }), formula)?;

    let numbers: Vec<f32> = (0..660).map(|n| (n as f32).sin()).collect();
    let added = Tensor::new(&numbers[..], &Device::Cpu)?.to_dtype(DType::F64)?.reshape((20, 33))?;
    let formula = Formula { added: Some(added), ..none() };
    compare("bias", numbers, move |bias| base().bias(View::matrix(bias, 20, 33).expect("660 numbers")), formula)
}

#[test]
fn options_that_change_scores_and_weights() -> Result<()> {
    let base = || Attention::new().scale(SCALE);
    let none = Formula::default;
    compare("temperature", (), move |_| base().temperature(1.7), Formula { temperature: Some(1.7), ..none() })?;

    let score = |scores: &Tensor| scores + (scores.sqr()? * 0.05)?;
    let formula = Formula { score: Some(score), ..none() };
    compare("score_mod", (), move |_| base().score_mod_with(|s, _| s + 0.05 * s * s, |s, _| 1.0 + 0.1 * s), formula)?;

    let sinks = [2.0, -1.0, 0.0, 3.0, f32::NEG_INFINITY, 0.5, 1.0, -2.0];
    let logits = Tensor::new(&sinks, &Device::Cpu)?.to_dtype(DType::F64)?;
    let formula = Formula { sinks: Some(logits), ..none() };
    compare("sinks", sinks.to_vec(), move |sinks| base().sinks(sinks), formula)?;

    let kept: Vec<bool> = (0..660).map(|n| n * 7 % 5 > 0).collect();
    let numbers = kept.iter().map(|&kept| if kept { 1.25 } else { 0.0 });
    let dropped = Tensor::from_iter(numbers, &Device::Cpu)?.reshape((20, 33))?;
    compare(
        "dropout",
        kept,
        move |kept| base().dropout(Dropout::Keep { mask: View::matrix(kept, 20, 33).expect("660 bools"), p: 0.2 }),
        Formula { dropped: Some(dropped), ..none() },
    )
}

/// Sinks that are learned, of every dtype and strided, with options that are not plain; one is none.
#[test]
fn sinks_have_a_gradient() -> Result<()> {
    let numbers = [2.0, -1.0, 0.0, 3.0, f32::NEG_INFINITY, 0.5, 1.0, -2.0];
    let numbers = Tensor::new(&numbers, &Device::Cpu)?;
    let causal = seen(|_, i, j| j <= i + 13)?;
    for (dtype, bound) in DTYPES {
        let inputs = Inputs::new(dtype)?;
        let sinks = Var::from_tensor(&Tensor::stack(&[&numbers, &numbers], 1)?.to_dtype(dtype)?)?;
        let [q, k, v] = inputs.views()?;
        let with = |sinks: &Tensor, q: &Tensor, k: &Tensor, v: &Tensor| {
            let causal = Attention::new().scale(SCALE).mask(Mask::causal(Align::BottomRight)).temperature(1.7);
            attn_candle::with_sinks(&sinks.narrow(1, 1, 1)?.squeeze(1)?, causal, |attn| *attn, q, k, v)
        };
        let found = inputs.gradients(Some(&sinks), |q, k, v| with(&sinks, q, k, v))?;
        let double = inputs.double()?;
        let by = Var::from_tensor(&sinks.to_dtype(DType::F64)?)?;
        let want = double.gradients(Some(&by), |q, k, v| {
            let sinks = Some(by.narrow(1, 1, 1)?.squeeze(1)?);
            Formula { added: Some(causal.clone()), temperature: Some(1.7), sinks, ..Formula::default() }.run(q, k, v)
        })?;
        assert!(want[3].abs()?.max(0)?.to_vec1::<f64>()?[1] > 0.01);
        close(&format!("sinks, {dtype:?}"), &found, &want, bound)?;
        // Without variables there is no graph, and the same numbers.
        let plain = with(&sinks.detach(), &q.detach(), &k.detach(), &v.detach())?;
        assert!(!plain.track_op());
        assert_eq!(with(&sinks, &q, &k, &v)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?, {
            plain.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?
        });
    }
    let x = normal((1, 2, 5, 8))?;
    let says = |sinks: &Tensor, words: &[&str]| {
        let text = attn_candle::with_sinks(sinks, (), |_| Attention::new(), &x, &x, &x).expect_err("an error");
        assert!(words.iter().all(|word| text.to_string().contains(word)), "{text}");
    };
    says(&Tensor::zeros(3, DType::F32, &Device::Cpu)?, &["sinks", "3", "2"]);
    let two = Tensor::zeros(2, DType::F32, &Device::Cpu)?;
    let text = attn_candle::with_sinks(&two, vec![1.0, 2.0], |sinks| Attention::new().sinks(sinks), &x, &x, &x);
    let text = text.expect_err("sinks twice").to_string();
    assert!(text.contains("the options have sinks"), "{text}");
    says(&Tensor::zeros((2, 1), DType::F32, &Device::Cpu)?, &["2 axes", "(q_heads)"]);
    says(&Tensor::zeros(2, DType::U32, &Device::Cpu)?, &["U32"]);
    Ok(())
}

/// Seeded dropout: the backward pass draws what the forward pass has drawn. `y` is linear in v, so that `dv·v = dy·y`.
#[test]
fn both_passes_draw_the_same_weights() -> Result<()> {
    let inputs = Inputs::new(DType::F32)?;
    let [q, k, v] = inputs.views()?;
    let dropout = Dropout::Seeded { p: 0.4, seed: 9 };
    let y = attn_candle::differentiable((), move |_| Attention::new().dropout(dropout), &q, &k, &v)?;
    let loss = (y * &inputs.dy)?.sum_all()?;
    let dv = loss.backward()?.get(&inputs.v).expect("a gradient").clone();
    let (got, want) = ((dv * inputs.v.as_tensor())?.sum_all()?.to_scalar::<f32>()?, loss.to_scalar::<f32>()?);
    let size = f64::from(want.abs().max(1.0));
    assert!(f64::from((got - want).abs()) < 100.0 * GRADIENT_F32 * size, "{got} {want}"); // a sum of 6400 products
    Ok(())
}

/// A variable that is q, k and v at once gets the sum of three gradients.
#[test]
fn one_tensor_three_times() -> Result<()> {
    let x = Var::from_tensor(&normal((1, 2, 12, 16))?)?;
    let y = attn_candle::sdpa(&x, &x, &x, None, true, SCALE as f32, 1.0)?;
    let found = y.sqr()?.sum_all()?.backward()?.get(&x).expect("a gradient").clone();
    let x = Var::from_tensor(&x.to_dtype(DType::F64)?)?;
    let added = (0..144).map(|n| if n % 12 <= n / 12 { 0.0 } else { f64::NEG_INFINITY });
    let added = Tensor::from_iter(added, &Device::Cpu)?.reshape((12, 12))?;
    let y = Formula { added: Some(added), ..Formula::default() }.run(&x, &x, &x)?;
    let want = y.sqr()?.sum_all()?.backward()?.get(&x).expect("a gradient").clone();
    close("x", &[found], &[want], GRADIENT_F32)
}

/// The kernels compute what they can: bits of `attn_parallel::backward`, not those of the reference.
#[test]
fn gradients_are_those_of_the_kernels() -> Result<()> {
    use attn_core::backward::Gradients;
    use attn_core::{Outputs, ViewMut};
    let sizes = [1, 2, 40, 16];
    let x = Var::from_tensor(&normal((1, 2, 40, 16))?)?;
    let attn = Attention::new().mask(Mask::causal(Align::TopLeft));
    let y = attn_candle::differentiable(attn, |attn| *attn, &x, &x.detach(), &x.detach())?;
    let found = y.sum_all()?.backward()?.get(&x).expect("a gradient").flatten_all()?.to_vec1::<f32>()?;

    let numbers = x.flatten_all()?.to_vec1::<f32>()?;
    let x = View::new(&numbers, Layout::Bhsd, sizes).unwrap();
    let [mut out, mut dq, mut dk, mut dv] = [(); 4].map(|()| vec![0.0f32; numbers.len()]);
    let (mut lse, dy) = (vec![0.0; 80], vec![1.0; numbers.len()]);
    fn to(x: &mut [f32]) -> ViewMut<'_, f32> {
        ViewMut::new(x, Layout::Bhsd, [1, 2, 40, 16]).unwrap()
    }
    attn_parallel::forward(&attn, x, x, x, Outputs::new(to(&mut out)).lse(&mut lse)).unwrap();
    let view = |x| View::new(x, Layout::Bhsd, sizes).unwrap();
    let inputs = attn_simd::backward::Inputs { q: x, k: x, v: x, out: view(&out), lse: &lse, dy: view(&dy) };
    attn_parallel::backward(&attn, inputs, Gradients::new(to(&mut dq), to(&mut dk), to(&mut dv))).unwrap();
    assert_eq!(found, dq);
    assert_eq!(AttnShape::new(sizes, sizes, sizes).unwrap().rows(), lse.len());
    Ok(())
}

#[test]
fn what_has_no_gradient_is_an_error() -> Result<()> {
    let x = Var::from_tensor(&normal((1, 2, 5, 8))?)?;
    let y = attn_candle::differentiable((), |_| Attention::new().score_mod(|s, _| s), &x, &x, &x)?;
    let text = y.sum_all()?.backward().expect_err("no derivative is known").to_string();
    assert!(text.contains("derivative"), "{text}");
    let mask = Var::from_tensor(&normal((1, 1, 5, 6))?)?;
    let text = attn_candle::sdpa(&x, &x, &x, Some(&mask), false, 1.0, 1.0).expect_err("6 keys, not 5").to_string();
    assert!(text.contains('5') && text.contains('6'), "{text}");
    let half = x.to_dtype(DType::F16)?;
    assert!(attn_candle::sdpa(&x, &half, &half, None, false, 1.0, 1.0).is_err());
    // Borrowed options give a leaf.
    let leaf = attn_candle::attention(&Attention::new(), &x, &x, &x)?;
    assert!(!leaf.track_op() && leaf.sum_all()?.backward()?.get(&x).is_none());
    Ok(())
}
