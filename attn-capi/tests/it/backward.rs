//! Gradients: what `attn_backward` gives is what the reference gives, whatever the dtypes; and what it refuses.

use attn::types::{AttnAlign, AttnDtype, AttnGradients, AttnOptions, AttnStatus, AttnTensor};
use attn_core::backward::{self, Gradients};
use attn_core::half::{bf16, f16};
use attn_core::score::At;
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, AttnShape, Element, Layout, Mask, View, ViewMut};

use crate::c::{self, Arguments, options, tensor, tensor_mut};

/// Two sequences, four query heads over two key heads, 7 queries, 9 keys, values narrower than keys.
const Q: [usize; 4] = [2, 4, 7, 8];
const K: [usize; 4] = [2, 2, 9, 8];
const V: [usize; 4] = [2, 2, 9, 5];
const OUT: [usize; 4] = [2, 4, 7, 5];
const ROWS: usize = 2 * 4 * 7;
const SINKS: [f32; 4] = [0.5, -1.0, 0.0, 2.0];

fn len(shape: [usize; 4]) -> usize {
    shape.into_iter().product()
}

/// Numbers in −2…2 without a pattern, rounded to a type.
fn paint<T: Element>(shape: [usize; 4], mut x: u32) -> Vec<T> {
    let mut next = || {
        x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        T::from_f64(f64::from(x >> 8) / f64::from(1 << 22) - 2.0)
    };
    (0..len(shape)).map(|_| next()).collect()
}

/// Everything of a call of one dtype, of which a test may break something.
struct Case<T> {
    options: AttnOptions,
    dtype: AttnDtype,
    inputs: [Vec<T>; 3],
    out: Vec<T>,
    lse: Vec<f32>,
    dout: Vec<T>,
}

impl<T: Element> Case<T> {
    /// After the forward call.
    fn new(options: AttnOptions, dtype: AttnDtype) -> Self {
        let inputs = [paint(Q, 1), paint(K, 2), paint(V, 3)];
        let (mut out, mut lse) = (vec![T::from_f64(f64::NAN); len(OUT)], vec![f32::NAN; ROWS]);
        let [q, k, v] = &inputs;
        let status = c::forward(Arguments {
            options: Some(&options),
            q: Some(&tensor(q, dtype, Q)),
            k: Some(&tensor(k, dtype, K)),
            v: Some(&tensor(v, dtype, V)),
            out: Some(&tensor_mut(&mut out, dtype, OUT)),
            lse: (lse.as_mut_ptr(), lse.len()),
        });
        assert_eq!(status, AttnStatus::Ok, "{}", c::last_error());
        Self { options, dtype, inputs, out, lse, dout: paint(OUT, 4) }
    }

    /// The gradients as doubles, or what was refused; then nothing has been written.
    fn run(&self, breaks: impl FnOnce(&mut c::Backward, &mut AttnGradients)) -> Result<[Vec<f64>; 4], AttnStatus> {
        let nothing = || T::from_f64(77.0);
        let [mut dq, mut dk, mut dv] = [Q, K, V].map(|shape| vec![nothing(); len(shape)]);
        let mut dsinks = [77.0f64; 4];
        let [to_q, to_k, to_v] =
            [(&mut dq, Q), (&mut dk, K), (&mut dv, V)].map(|(to, shape)| tensor_mut(to, self.dtype, shape));
        let [q, k, v] = &self.inputs;
        let mut call = c::Backward {
            options: self.options,
            q: tensor(q, self.dtype, Q),
            k: tensor(k, self.dtype, K),
            v: tensor(v, self.dtype, V),
            out: tensor(&self.out, self.dtype, OUT),
            lse: (self.lse.as_ptr(), self.lse.len()),
            dout: tensor(&self.dout, self.dtype, OUT),
        };
        let mut gradients = c::gradients([&to_q, &to_k, &to_v], &mut dsinks);
        breaks(&mut call, &mut gradients);
        let status = c::backward(&call, &gradients);
        let wide = |x: &[T]| x.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
        let found = [wide(&dq), wide(&dk), wide(&dv), dsinks.to_vec()];
        match status {
            AttnStatus::Ok => Ok(found),
            refused => {
                assert!(found.iter().flatten().all(|&x| x == 77.0), "an error wrote");
                Err(refused)
            }
        }
    }

    /// The gradients by the reference, in doubles.
    fn want<M: Mods>(&self, attn: &Attention<'_, M>) -> [Vec<f64>; 4] {
        let [q, k, v] = &self.inputs;
        let view = |x, shape| View::new(x, Layout::Bhsd, shape).unwrap();
        let [mut dq, mut dk, mut dv] = [Q, K, V].map(|shape| vec![0.0f64; len(shape)]);
        let mut dsinks = vec![0.0; 4];
        let [to_q, to_k, to_v] =
            [(&mut dq, Q), (&mut dk, K), (&mut dv, V)].map(|(to, s)| ViewMut::new(to, Layout::Bhsd, s).unwrap());
        let to = Gradients::new(to_q, to_k, to_v).sinks(&mut dsinks);
        let mut scratch = vec![0.0; backward::scratch_len(&AttnShape::new(Q, K, V).unwrap()).unwrap()];
        let dout = view(&self.dout, OUT);
        backward::gradients(attn, view(q, Q), view(k, K), view(v, V), dout, to, &mut scratch).unwrap();
        [dq, dk, dv, dsinks]
    }

    fn agree<M: Mods>(&self, name: &str, attn: &Attention<'_, M>, tolerance: f64) {
        let found = self.run(|_, _| {}).unwrap_or_else(|status| panic!("{name}: {status:?}, {}", c::last_error()));
        for (what, (found, want)) in ["dq", "dk", "dv", "dsinks"].into_iter().zip(found.iter().zip(&self.want(attn))) {
            let most = want.iter().fold(1.0f64, |most, x| most.max(x.abs()));
            for (n, (found, want)) in found.iter().zip(want).enumerate() {
                assert!((found - want).abs() <= tolerance * most, "{name}: {what}[{n}] is {found}, not {want}");
            }
        }
    }
}

fn with(set: impl FnOnce(&mut AttnOptions)) -> AttnOptions {
    let mut o = options();
    set(&mut o);
    o
}

extern "C-unwind" fn visible(_: usize, _: usize, query: usize, key: usize, _: *mut std::ffi::c_void) -> i32 {
    i32::from(!(query + key).is_multiple_of(3))
}

#[test]
fn gradients_are_those_of_the_reference() {
    let agree = |name: &str, options, attn: &Attention<'_>| {
        Case::<f32>::new(options, AttnDtype::F32).agree(name, attn, attn_testing::tolerance::GRADIENT_F32);
    };
    agree("plain", options(), &Attention::new());
    let causal = with(|o| o.causal = AttnAlign::BottomRight as u32);
    agree("causal", causal, &Attention::new().mask(Mask::causal(Align::BottomRight)));
    let options = with(|o| {
        (o.softcap, o.temperature, o.has_scale, o.scale) = (3.0, 1.5, 1, 0.4);
        (o.window, o.window_left, o.window_right) = (AttnAlign::TopLeft as u32, 3, 1);
        (o.sinks, o.sinks_len, o.threads) = (SINKS.as_ptr(), 4, 1);
    });
    let window = Mask::window(3, 1, Align::TopLeft);
    let attn = Attention::new().softcap(3.0).temperature(1.5).scale(0.4).mask(window).sinks(&SINKS);
    agree("window, sinks and numbers", options, &attn);
}

#[test]
fn a_mask_function_is_heeded() {
    let case = Case::<f32>::new(with(|o| o.mask_mod = Some(visible)), AttnDtype::F32);
    let attn = Attention::new().mask_mod(|At { query, key, .. }| !(query + key).is_multiple_of(3));
    case.agree("mask_mod", &attn, attn_testing::tolerance::GRADIENT_F32);
}

/// As tensors without elements, the lse of no rows may be null.
#[test]
fn no_rows_need_no_lse() {
    let case = Case::<f32>::new(options(), AttnDtype::F32);
    let nothing = [Q, OUT].map(|[batch, heads, _, dim]| tensor::<f32>(&[], AttnDtype::F32, [batch, heads, 0, dim]));
    let empty = |call: &mut c::Backward, to: &mut AttnGradients| {
        (call.q, call.out, call.dout, to.dq) = (nothing[0], nothing[1], nothing[1], &raw const nothing[0]);
        call.lse = (std::ptr::null(), 0);
    };
    let [_, dk, dv, dsinks] = case.run(empty).unwrap_or_else(|status| panic!("{status:?}, {}", c::last_error()));
    assert!(dk.iter().chain(&dv).chain(&dsinks).all(|&x| x == 0.0));
}

/// The square of a score, times tenths that the address of `user_data` counts.
extern "C-unwind" fn squared(score: f64, _: usize, _: usize, _: usize, _: usize, data: *mut std::ffi::c_void) -> f64 {
    score * score * data.addr() as f64 / 10.0
}

/// Its derivative.
extern "C-unwind" fn slope(score: f64, _: usize, _: usize, _: usize, _: usize, data: *mut std::ffi::c_void) -> f64 {
    2.0 * score * data.addr() as f64 / 10.0
}

#[test]
fn a_score_function_is_gone_back_through() {
    let case = Case::<f32>::new(
        with(|o| {
            o.score_mod = Some(squared);
            o.mask_mod = Some(visible);
            o.user_data = std::ptr::without_provenance_mut(3);
        }),
        AttnDtype::F32,
    );
    let attn = Attention::new().mask_mod(|At { query, key, .. }| !(query + key).is_multiple_of(3));
    let attn = attn.score_mod_with(|s, _| 0.3 * s * s, |s, _| 0.6 * s);
    let found = case.run(|_, to| to.score_mod_derivative = Some(slope)).unwrap();
    close(&found, &case.want(&attn));
}

/// A bias that heads and queries share.
#[test]
fn a_bias_has_a_gradient() {
    let numbers: Vec<f64> = (0..18).map(|n| (f64::from(n) * 0.7).sin()).collect();
    let bias = tensor(&numbers, AttnDtype::F64, [2, 1, 1, 9]);
    let case = Case::<f32>::new(with(|o| (o.bias, o.temperature) = (&raw const bias, 1.5)), AttnDtype::F32);
    let mut dbias = [77.0f64; 18];
    let to_bias = tensor_mut(&mut dbias, AttnDtype::F64, [2, 1, 1, 9]);
    let found = case.run(|_, to| to.dbias = &raw const to_bias).unwrap();

    let attn = Attention::new().bias(View::new(&numbers, Layout::Bhsd, [2, 1, 1, 9]).unwrap()).temperature(1.5);
    close(&found, &case.want(&attn));
    let [q, k, v] = &case.inputs;
    let view = |x, shape| View::new(x, Layout::Bhsd, shape).unwrap();
    let [mut dq, mut dk, mut dv] = [Q, K, V].map(|shape| vec![0.0f64; len(shape)]);
    let [to_q, to_k, to_v] =
        [(&mut dq, Q), (&mut dk, K), (&mut dv, V)].map(|(to, s)| ViewMut::new(to, Layout::Bhsd, s).unwrap());
    let mut want = vec![0.0f64; 18];
    let to = Gradients::new(to_q, to_k, to_v).bias(ViewMut::new(&mut want, Layout::Bhsd, [2, 1, 1, 9]).unwrap());
    let mut scratch = vec![0.0; backward::scratch_len(&AttnShape::new(Q, K, V).unwrap()).unwrap()];
    backward::gradients(&attn, view(q, Q), view(k, K), view(v, V), view(&case.dout, OUT), to, &mut scratch).unwrap();
    close(&[dbias.to_vec()], &[want]);
}

/// Within what the kernels promise of gradients in f32.
fn close(found: &[Vec<f64>], want: &[Vec<f64>]) {
    for (n, (found, want)) in found.iter().zip(want).enumerate() {
        let most = want.iter().fold(1.0f64, |most, x| most.max(x.abs()));
        for (found, want) in found.iter().zip(want) {
            let off = (found - want).abs() / most;
            assert!(off <= attn_testing::tolerance::GRADIENT_F32, "gradient {n}: {found}, not {want}");
        }
    }
}

#[test]
fn halves() {
    let attn = Attention::new();
    Case::<f16>::new(options(), AttnDtype::F16).agree("f16", &attn, attn_testing::tolerance::GRADIENT_F16);
    Case::<bf16>::new(options(), AttnDtype::Bf16).agree("bf16", &attn, attn_testing::tolerance::GRADIENT_BF16);
}

/// The call is refused with this status, and the text says these words.
fn refuses(status: AttnStatus, words: &[&str], breaks: impl FnOnce(&mut c::Backward, &mut AttnGradients)) {
    let found = Case::<f32>::new(options(), AttnDtype::F32).run(breaks);
    assert_eq!(found, Err(status), "{words:?}: {}", c::last_error());
    for word in words {
        assert!(c::last_error().contains(word), "{:?} does not say {word:?}", c::last_error());
    }
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_written() {
    extern "C-unwind" fn double(score: f64, _: usize, _: usize, _: usize, _: usize, _: *mut std::ffi::c_void) -> f64 {
        2.0 * score
    }
    let null = std::ptr::null();
    refuses(AttnStatus::NullPointer, &["lse is null"], |call, _| call.lse.0 = null);
    refuses(AttnStatus::NullPointer, &["lse is null"], |call, _| call.lse = (null, 0));
    refuses(AttnStatus::NullPointer, &["dq is null"], |_, to| to.dq = std::ptr::null());
    refuses(AttnStatus::Shape, &["lse", "56", "55"], |call, _| call.lse.1 -= 1);
    refuses(AttnStatus::Shape, &["out seq", "7", "6"], |call, _| call.out.shape[2] = 6);
    refuses(AttnStatus::Shape, &["output gradient dim", "5", "4"], |call, _| call.dout.shape[3] = 4);
    refuses(AttnStatus::Shape, &["dk seq", "9", "8"], |_, to| {
        let dk = AttnTensor { shape: [2, 2, 8, 8], ..*c::borrowed(to.dk) };
        to.dk = Box::leak(Box::new(dk));
    });
    refuses(AttnStatus::Shape, &["sink", "4", "3"], |_, to| to.dsinks_len = 3);
    refuses(AttnStatus::Overlap, &["dk", "dq"], |_, to| to.dk = to.dq);
    refuses(AttnStatus::Overlap, &["dv", "v"], |call, to| {
        let dv = AttnTensor { data: call.v.data, ..*c::borrowed(to.dv) };
        to.dv = Box::leak(Box::new(dv));
    });
    refuses(AttnStatus::StructSize, &["AttnGradients"], |_, to| to.struct_size = 3);
    refuses(AttnStatus::Unsupported, &["score_mod_derivative"], |call, _| call.options.score_mod = Some(double));
    refuses(AttnStatus::Option, &["score_mod_derivative", "no score_mod"], |_, to| {
        to.score_mod_derivative = Some(double);
    });
    let mut place = [77.0f64; 9];
    let mut bias = tensor_mut(&mut place, AttnDtype::F64, [1, 1, 1, 8]);
    refuses(AttnStatus::Shape, &["bias", "9", "8"], |_, to| to.dbias = &raw const bias);
    bias.dtype = AttnDtype::F32 as u32;
    refuses(AttnStatus::Option, &["dbias", "F64"], |_, to| to.dbias = &raw const bias);
    assert_eq!(place, [77.0; 9]);
    refuses(AttnStatus::Unsupported, &["out and dout"], |call, _| call.dout.dtype = AttnDtype::F16 as u32);
    refuses(AttnStatus::Option, &["dout"], |call, _| call.dout.dtype = AttnDtype::Bool as u32);
}

#[test]
fn sinks_may_be_left_out() {
    let case = Case::<f32>::new(options(), AttnDtype::F32);
    let found = case.run(|_, to| (to.dsinks, to.dsinks_len) = (std::ptr::null_mut(), 0)).unwrap();
    assert_eq!(found[3], [77.0; 4]);
    assert_eq!(found[..3], case.run(|_, _| {}).unwrap()[..3]);
}
