//! The calls that every board and the host make, with their results as bits, one line each:
//!
//! ```text
//! case streaming/causal 3e1a7b2c bd0f…       the output's bits
//! cost streaming/causal streaming 6 312 1044  entry, tokens, bytes of stack, ticks
//! ```
//!
//! Fixed shapes and attention in parts must give the bits of the streaming engine; that is checked where they run.

use attn_core::dropout::Dropout;
use attn_core::int8::{Int8Attention, Quant};
use attn_core::mask::{Documents, Window};
use attn_core::position::alibi::Alibi;
use attn_core::resume::{Cursor, Progress};
use attn_core::score::default_scale;
use attn_core::{Align, Attention, Mask, Result, View, ViewMut};
use attn_layers::Linear;
use attn_layers::module::{MultiHeadAttention, Sources, Streaming};
use attn_layers::worked_example::{W_K, W_Q, W_V, X};

use crate::board::{Cost, mark, measure};
use crate::entries::{self, Fixed, Sizes};
use crate::paint::Paint;
use crate::say;

/// Four query heads over two key/value heads of 16; six queries, twelve keys, `[seq][heads][dim]`.
const SIZES: Sizes = [[1, 4, 6, 16], [1, 2, 12, 16], [1, 2, 12, 16], [1, 4, 6, 16]];
const QUERIES: usize = 6 * 4 * 16;
const KEYS: usize = 12 * 2 * 16;
/// The same heads, one token at a time.
const ONE: Sizes = [[1, 4, 1, 16], [1, 2, 1, 16], [1, 2, 1, 16], [1, 4, 1, 16]];
/// A ring of one sink and a window of four.
const RING: [[usize; 4]; 2] = [[1, 2, 5, 16]; 2];
const RULE: [usize; 2] = [1, 4];

/// Runs all cases; `false` if one fails.
pub fn run() -> bool {
    let all: [(&str, fn() -> Result<bool>); 7] = [
        ("worked", worked),
        ("streaming", streaming),
        ("ring", ring),
        ("layer", layer),
        ("int8", int8),
        ("int8-ring", int8_ring),
        ("quantized-ring", quantized_ring),
    ];
    let mut passed = true;
    for (name, case) in all {
        match case() {
            Ok(true) => {}
            Ok(false) => {
                say!("{name}: bits that must be equal are not");
                passed = false;
            }
            Err(error) => {
                say!("{name}: {error}");
                passed = false;
            }
        }
    }
    passed
}

/// One line of bits.
fn bits<T: Copy>(name: &str, values: &[T], word: impl Fn(T) -> u32) {
    // Few writes: each one stops an emulator, and is slow on a real probe.
    let mut line = [0u8; 64];
    for (n, chunk) in values.chunks(7).enumerate() {
        let mut len = 0;
        for &x in chunk {
            let word = word(x);
            for shift in (0..8).rev() {
                let digit = (word >> (4 * shift) & 15) as u8;
                line[len] = if digit < 10 { b'0' + digit } else { b'a' + digit - 10 };
                len += 1;
            }
            line[len] = b' ';
            len += 1;
        }
        say!("case {name}.{n} {}", core::str::from_utf8(&line[..len - 1]).unwrap_or("?"));
    }
}

fn reals(name: &str, values: &[f32]) {
    bits(name, values, f32::to_bits);
}

fn bytes(name: &str, values: &[i8]) {
    bits(name, values, |x| x as u32);
}

fn cost(name: &str, entry: &str, tokens: usize, Cost { stack, ticks }: Cost) {
    say!("cost {name} {entry} {tokens} {stack} {ticks}");
}

/// Measures one call.
fn measured(f: impl FnOnce() -> Result<()>) -> Result<Cost> {
    let (mut f, mut done) = (Some(f), Ok(()));
    let cost = measure(&mut || {
        if let Some(f) = f.take() {
            done = f();
        }
    });
    done.map(|()| cost)
}

/// "The cat sat on the mat".
#[inline(never)]
fn worked() -> Result<bool> {
    let x = View::matrix(X.as_flattened(), 6, 4)?;
    let (mut q, mut k, mut v, mut out) = ([0.0f32; 24], [0.0f32; 24], [0.0f32; 24], [0.0f32; 24]);
    for (weight, to) in [(&W_Q, &mut q), (&W_K, &mut k), (&W_V, &mut v)] {
        Linear::new(weight.as_flattened(), 4, 4)?.forward(x, &mut ViewMut::matrix(to, 6, 4)?)?;
    }
    let sizes = [[1, 1, 6, 4]; 4];
    for (name, attn) in
        [("worked/plain", Attention::new()), ("worked/causal", Attention::new().mask(Mask::causal(Align::TopLeft)))]
    {
        entries::streaming(&attn, [&q, &k, &v], &sizes, &mut out, None, &mut [0.0; 4])?;
        reals(name, &out);
    }
    Ok(true)
}

/// Inputs and outputs of the cases of one size.
struct Buffers {
    q: [f32; QUERIES],
    k: [f32; KEYS],
    v: [f32; KEYS],
    out: [f32; QUERIES],
    scratch: [f32; 16],
}

impl Buffers {
    /// One call of the streaming engine.
    #[inline(never)]
    fn stream(&mut self, name: &str, attn: &Attention<'_>) -> Result<()> {
        let mut lse = [0.0f32; 24];
        let Self { q, k, v, out, scratch } = self;
        let took = measured(|| {
            mark();
            entries::streaming(attn, [q, k, v], &SIZES, out, Some(&mut lse), scratch)
        })?;
        reals(name, out);
        reals("lse", &lse);
        cost(name, "streaming", 6, took);
        Ok(())
    }

    #[inline(never)]
    fn masks(&mut self) -> Result<()> {
        self.stream("streaming/plain", &Attention::new())?;
        self.stream("streaming/window", &Attention::new().mask(Mask::window(3, 1, Align::TopLeft)))?;
        self.stream("streaming/lengths", &Attention::new().mask(Mask::kv_lens(&[7])))?;
        let documents = Documents::new(&[0, 2, 6], &[0, 5, 12]).causal(Align::BottomRight);
        self.stream("streaming/documents", &Attention::new().mask(Mask::documents(documents)))
    }

    /// Every option at once.
    #[inline(never)]
    fn everything(&mut self, bias: &[f32; 12]) -> Result<()> {
        let mask = Mask::causal(Align::BottomRight).and(Mask::window(8, 0, Align::BottomRight));
        let attn = Attention::new()
            .scale(0.3)
            .softcap(4.0)
            .temperature(1.25)
            .mask(mask)
            .bias(View::broadcast(bias, &[12])?)
            .alibi(Alibi { slopes: &[0.5, 0.25, 0.125, 0.0625], align: Align::BottomRight })
            .sinks(&[0.5, -1.0, 2.0, 0.25])
            .dropout(Dropout::Seeded { p: 0.25, seed: 7 });
        self.stream("streaming/everything", &attn)
    }

    /// The causal call with a budget of 25 keys at a time.
    #[inline(never)]
    fn in_parts(&mut self) -> Result<()> {
        let attn = Attention::new().mask(Mask::causal(Align::BottomRight));
        let Self { q, k, v, out, scratch } = self;
        let (mut cursor, mut whole) = (Cursor::new(), Cost::default());
        loop {
            let mut done = Progress::Pending;
            let took = measured(|| {
                mark();
                done = entries::resume(&attn, [q, k, v], &SIZES, out, scratch, &mut cursor, 25)?;
                Ok(())
            })?;
            whole = Cost { stack: whole.stack.max(took.stack), ticks: whole.ticks + took.ticks };
            if done == Progress::Done {
                cost("resume/causal", "resume", 6, whole);
                return Ok(());
            }
        }
    }

    /// The causal call with sizes known when compiling.
    #[inline(never)]
    fn fixed(&mut self) -> Result<()> {
        let (q, k) = (self.q.as_chunks::<16>().0.as_chunks::<4>().0, self.k.as_chunks::<16>().0.as_chunks::<2>().0);
        let v = self.v.as_chunks::<16>().0.as_chunks::<2>().0;
        let out = self.out.as_chunks_mut::<16>().0.as_chunks_mut::<4>().0;
        let took = measured(|| {
            mark();
            entries::fixed(&Fixed::new(), q, [k, v], out)
        })?;
        cost("fixed/causal", "fixed", 6, took);
        Ok(())
    }
}

/// The streaming engine, with fixed shapes and in parts.
#[inline(never)]
fn streaming() -> Result<bool> {
    let mut paint = Paint::new(1);
    let mut all =
        Buffers { q: [0.0; QUERIES], k: [0.0; KEYS], v: [0.0; KEYS], out: [0.0; QUERIES], scratch: [0.0; 16] };
    [&mut all.q[..], &mut all.k, &mut all.v].into_iter().for_each(|x| paint.fill(x));
    all.masks()?;
    all.everything(&paint.reals())?;
    all.stream("streaming/causal", &Attention::new().mask(Mask::causal(Align::BottomRight)))?;

    let want = all.out;
    all.out.fill(0.0);
    all.in_parts()?;
    let mut equal = all.out == want;
    all.out.fill(0.0);
    all.fixed()?;
    equal &= all.out == want;
    Ok(equal)
}

/// A decoder's steps over a ring cache.
#[inline(never)]
fn ring() -> Result<bool> {
    let mut paint = Paint::new(2);
    let attn = Attention::new();
    let (mut k, mut v, mut seen, mut scratch) = ([0.0f32; 160], [0.0f32; 160], [0], [0.0f32; 16]);
    for token in 0..12 {
        let (q, kn, vn, mut out) = (paint.reals::<64>(), paint.reals::<32>(), paint.reals::<32>(), [0.0f32; 64]);
        let took = measured(|| {
            let cache = (&RING, &mut seen[..], RULE);
            mark();
            entries::ring(&attn, [&mut k, &mut v], cache, [&q, &kn, &vn], &ONE, &mut out, &mut scratch)
        })?;
        reals("ring", &out);
        if token == 11 {
            cost("ring/decode", "ring", 1, took);
        }
    }
    Ok(true)
}

/// Multi-head attention with projections: 16 features, four query heads over two.
#[inline(never)]
fn layer() -> Result<bool> {
    let mut paint = Paint::new(3);
    let (wq, wkv, wo) = (paint.reals::<256>(), paint.reals::<256>(), paint.reals::<256>());
    let bias = paint.reals::<16>();
    let x = paint.reals::<96>();
    let (wk, wv) = wkv.split_at(128);
    let layer = MultiHeadAttention::new(
        4,
        2,
        Linear::new(&wq, 16, 16)?.bias(&bias)?,
        Linear::new(wk, 16, 8)?,
        Linear::new(wv, 16, 8)?,
    )?
    .output(Linear::transposed(&wo, 16, 16)?)?;
    let (mut out, mut scratch) = ([0.0f32; 96], [0.0f32; 400]);
    let attn = Attention::new().scale(0.1).mask(Mask::causal(Align::TopLeft));
    let took = measured(|| {
        let x = Sources::same(View::matrix(&x, 6, 16)?);
        mark();
        layer.forward(&mut Streaming, &attn, x, ViewMut::matrix(&mut out, 6, 16)?, &mut scratch)
    })?;
    reals("layer", &out);
    cost("layer/causal", "layer", 6, took);
    Ok(true)
}

/// A scale of a model, known when compiling.
const fn quant(scale: f32, zero_point: i8) -> Quant {
    match Quant::new(scale, zero_point) {
        Ok(quant) => quant,
        Err(_) => panic!("a scale is not above 0"),
    }
}

const INT8: Int8Attention<'static> =
    match Int8Attention::new([quant(0.02, 3), quant(0.015, -5), quant(0.04, 11), quant(0.03, -7)], default_scale(16)) {
        Ok(attn) => attn,
        Err(_) => panic!("a scale is not finite"),
    };

/// int8 attention.
#[inline(never)]
fn int8() -> Result<bool> {
    let mut paint = Paint::new(4);
    let (q, k, v) = (paint.bytes::<QUERIES>(), paint.bytes::<KEYS>(), paint.bytes::<KEYS>());
    let (mut out, mut scratch) = ([0i8; QUERIES], [0i32; 16]);
    let lens = [7];
    let window = Window { left: Some(3), right: Some(0), align: Align::BottomRight };
    for (name, attn) in [
        ("int8/plain", INT8),
        ("int8/causal", INT8.mask(Mask::causal(Align::BottomRight))),
        ("int8/window", INT8.mask(Mask::term(attn_core::mask::Term::Window(window)))),
        ("int8/lengths", INT8.mask(Mask::kv_lens(&lens))),
    ] {
        let took = measured(|| {
            mark();
            entries::int8(&attn, [&q, &k, &v], &SIZES, &mut out, &mut scratch)
        })?;
        bytes(name, &out);
        cost(name, "int8", 6, took);
    }
    Ok(true)
}

/// A decoder's steps over an int8 ring cache.
#[inline(never)]
fn int8_ring() -> Result<bool> {
    let mut paint = Paint::new(5);
    let (mut k, mut v, mut seen, mut scratch) = ([0i8; 160], [0i8; 160], [0], [0i32; 16]);
    for token in 0..12 {
        let (q, kn, vn, mut out) = (paint.bytes::<64>(), paint.bytes::<32>(), paint.bytes::<32>(), [0i8; 64]);
        let took = measured(|| {
            let cache = (&RING, &mut seen[..], RULE);
            mark();
            entries::int8_ring(&INT8, [&mut k, &mut v], cache, [&q, &kn, &vn], &ONE, &mut out, &mut scratch)
        })?;
        bytes("int8-ring", &out);
        if token == 11 {
            cost("int8-ring/decode", "int8-ring", 1, took);
        }
    }
    Ok(true)
}

/// A decoder's steps in f32 over a cache in int8.
#[inline(never)]
fn quantized_ring() -> Result<bool> {
    let mut paint = Paint::new(6);
    let (mut k, mut v, mut seen, mut scratch) = ([0i8; 160], [0i8; 160], [0], [0.0f32; 16]);
    let attn = Attention::new();
    let (mut k_scales, mut v_scales) = ([0.0f32; 10], [0.0f32; 10]);
    for token in 0..12 {
        let (q, kn, vn, mut out) = (paint.reals::<64>(), paint.reals::<32>(), paint.reals::<32>(), [0.0f32; 64]);
        let took = measured(|| {
            mark();
            entries::quantized_ring(
                &attn,
                [&mut k, &mut v],
                [&mut k_scales, &mut v_scales],
                (&RING, &mut seen[..], RULE),
                [&q, &kn, &vn],
                &ONE,
                &mut out,
                &mut scratch,
            )
        })?;
        reals("quantized-ring", &out);
        if token == 11 {
            cost("quantized-ring/decode", "quantized-ring", 1, took);
        }
    }
    Ok(true)
}
