//! What the operation gives is what candle's own matmuls and softmax give, for every dtype, stride and option; and what
//! does not fit is an error that says so.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::ops;

/// The formula in candle, in f32; `added` is the mask.
fn formula(q: &Tensor, k: &Tensor, v: &Tensor, added: Option<&Tensor>, scale: f64, cap: Option<f64>) -> Result<Tensor> {
    let [q, k, v] = [q.to_dtype(DType::F32)?, k.to_dtype(DType::F32)?, v.to_dtype(DType::F32)?];
    let group = q.dim(1)? / k.dim(1)?;
    let repeat = |x: &Tensor| {
        let (b, h, s, d) = x.dims4()?;
        x.unsqueeze(2)?.expand((b, h, group, s, d))?.reshape((b, h * group, s, d))?.contiguous()
    };
    let mut scores = (q.contiguous()?.matmul(&repeat(&k)?.t()?.contiguous()?)? * scale)?;
    if let Some(cap) = cap {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    if let Some(added) = added {
        scores = scores.broadcast_add(&added.to_dtype(DType::F32)?)?;
    }
    ops::softmax_last_dim(&scores)?.matmul(&repeat(&v)?)
}

fn largest(a: &Tensor, b: &Tensor) -> Result<f32> {
    (a.to_dtype(DType::F32)? - b.to_dtype(DType::F32)?)?.abs()?.max(D::Minus1)?.flatten_all()?.max(0)?.to_scalar()
}

fn normal(shape: (usize, usize, usize, usize)) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, &Device::Cpu)
}

/// 0 where query i of 20 sees key j of 33, the last query standing at the last key; −∞ elsewhere.
fn causal() -> Result<Tensor> {
    let of = |i, j| if j > i + 13 { f32::NEG_INFINITY } else { 0.0 };
    Tensor::from_iter((0..20).flat_map(|i| (0..33).map(move |j| of(i, j))), &Device::Cpu)?.reshape((20, 33))
}

#[test]
fn every_dtype_stride_and_option() -> Result<()> {
    let q = normal((2, 20, 8, 64))?.transpose(1, 2)?; // strided
    let k = normal((2, 2, 40, 64))?.narrow(2, 7, 33)?; // with an offset
    let v = normal((1, 2, 33, 48))?.expand((2, 2, 33, 48))?; // with a stride of 0
    let bias = normal((1, 8, 20, 33))?;
    for (dtype, bound) in [(DType::F32, 4e-6), (DType::F16, 2e-3), (DType::BF16, 1.6e-2)] {
        let [q, k, v] = [q.to_dtype(dtype)?, k.to_dtype(dtype)?, v.to_dtype(dtype)?];
        for (name, mask, causal_too, cap) in [
            ("plain", None, false, None),
            ("causal", None, true, None),
            ("soft-cap", None, false, Some(5.0)),
            ("mask", Some(&bias), true, None),
            ("mask of two axes", Some(&causal()?), false, Some(3.0)),
        ] {
            let shown = match (mask, causal_too) {
                (mask, false) => mask.cloned(),
                (None, true) => Some(causal()?),
                (Some(mask), true) => Some(mask.broadcast_add(&causal()?)?),
            };
            let want = formula(&q, &k, &v, shown.as_ref(), 0.2, cap)?;
            let found = attn_candle::sdpa(&q, &k, &v, mask, causal_too, 0.2, cap.unwrap_or(1.0) as f32)?;
            assert_eq!((found.dtype(), found.dims()), (dtype, &[2, 8, 20, 48][..]));
            let difference = largest(&want, &found)?;
            assert!(difference <= bound, "{name}, {dtype:?}: {difference}");
        }
    }
    Ok(())
}

/// `exp(score − lse)` sums to 1 over the keys that a row sees.
#[test]
fn the_log_sum_exp_is_that_of_the_scores() -> Result<()> {
    use attn_core::{Align, Attention, Mask};
    let (q, k, v) = (normal((2, 4, 20, 16))?, normal((2, 2, 33, 16))?, normal((2, 2, 33, 8))?);
    let attn = Attention::new().scale(0.5).mask(Mask::causal(Align::BottomRight));
    let (out, lse) = attn_candle::attention_lse(&attn, &q, &k, &v)?;
    assert_eq!((out.dims(), lse.dims()), (&[2, 4, 20, 8][..], &[2, 4, 20][..]));
    assert_eq!(largest(&out, &attn_candle::attention(&attn, &q, &k, &v)?)?, 0.0);
    let repeated = k.unsqueeze(2)?.expand((2, 2, 2, 33, 16))?.reshape((2, 4, 33, 16))?;
    let scores = (q.matmul(&repeated.t()?.contiguous()?)? * 0.5)?.broadcast_add(&causal()?)?;
    let sums = scores.broadcast_sub(&lse.unsqueeze(3)?)?.exp()?.sum(D::Minus1)?;
    assert!(largest(&sums, &sums.ones_like()?)? < 1e-5);
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error() -> Result<()> {
    let x = normal((1, 2, 5, 8))?;
    let says = |result: Result<Tensor>, words: &[&str]| {
        let text = result.expect_err("an error").to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    says(attn_candle::sdpa(&x, &x.narrow(3, 0, 7)?, &x, None, false, 1.0, 1.0), &["head_dim", "8", "7"]);
    says(attn_candle::sdpa(&x, &x.to_dtype(DType::F16)?, &x, None, false, 1.0, 1.0), &["F16", "F32"]);
    let wide = x.to_dtype(DType::F64)?;
    says(attn_candle::sdpa(&wide, &wide, &wide, None, false, 1.0, 1.0), &["F64"]);
    says(attn_candle::sdpa(&x.get(0)?, &x, &x, None, false, 1.0, 1.0), &["q has 3 axes"]);
    says(attn_candle::sdpa(&x, &x, &x, Some(&x), false, 1.0, 1.0), &["bias", "8"]);
    says(attn_candle::sdpa(&x, &x, &x, Some(&x.to_dtype(DType::U8)?), false, 1.0, 1.0), &["U8"]);
    says(attn_candle::sdpa(&x, &x, &x, None, false, f32::NAN, 1.0), &["scale"]);
    Ok(())
}
