//! int8 attention against the reference in f64 on the dequantised inputs: every mask, layout, head ratio and output
//! type.

use attn_core::int8::{self, HeadScales, Int8Attention, Int8Output, Quant};
use attn_core::mask::Window;
use attn_core::score::{At, Problem, default_scale};
use attn_core::{Align, Attention, AttnError, AttnShape, Layout, Mask, View, ViewMut, reference};
use attn_testing::cases::{Memory, Tensor4, kinds, shape, sizes};
use attn_testing::paint::Paint;
use attn_testing::tolerance;

/// A tensor of bytes in memory of one kind.
pub(crate) struct Stored {
    pub(crate) data: Vec<i8>,
    pub(crate) sizes: [usize; 4],
    strides: [isize; 4],
    offset: usize,
}

impl Stored {
    /// All 256 numbers, at random.
    pub(crate) fn painted(sizes: [usize; 4], memory: Memory, seed: u64) -> Self {
        let (strides, offset, len) = memory.place(sizes);
        let mut paint = Paint::new(seed);
        Self { data: (0..len).map(|_| paint.next() as i8).collect(), sizes, strides, offset }
    }

    pub(crate) fn view(&self) -> View<'_, i8> {
        View::strided(&self.data, self.sizes, self.strides, self.offset).unwrap()
    }

    fn reals(&self, quant: impl Fn(usize) -> Quant) -> Tensor4<f64> {
        let view = self.view();
        Tensor4::new(self.sizes, Memory::Bhsd, |[b, h, s, d]| {
            let quant = quant(h);
            f64::from(quant.scale()) * (f64::from(view.at(b, h, s, d)) - f64::from(quant.zero_point()))
        })
    }
}

/// q, k and v of one call, and their maps.
pub(crate) struct Int8Inputs {
    pub(crate) q: Stored,
    pub(crate) k: Stored,
    pub(crate) v: Stored,
    pub(crate) quants: [Quant; 4],
}

pub(crate) fn quants(seed: u64, score: f64) -> [Quant; 4] {
    let mut paint = Paint::new(seed);
    // A score is some 74²·√dim times the two scales.
    let scale = (score / 5500.0).sqrt();
    [scale, scale, 0.1, 0.1].map(|s| Quant::new((s * (0.6 + paint.uniform())) as f32, paint.next() as i8).unwrap())
}

impl Int8Inputs {
    pub(crate) fn new(shape: &AttnShape, memory: Memory, seed: u64, score: f64) -> Self {
        let [q, k, v] = sizes(shape);
        Self {
            q: Stored::painted(q, memory, seed),
            k: Stored::painted(k, memory, seed + 1),
            v: Stored::painted(v, memory, seed + 2),
            quants: quants(seed + 3, score),
        }
    }
}

/// The result and each row's bound, from the reference in f64.
struct Exact {
    out: Vec<f64>,
    bound: Vec<f64>,
}

fn exact(dims: &AttnShape, inputs: &Int8Inputs, mask: Mask<'_>, head_scale: impl Fn(usize) -> f32) -> Exact {
    let [q, k, v, _] = inputs.quants;
    let scaled = |quant: Quant, factor: f32| Quant::new(quant.scale() * factor, quant.zero_point()).unwrap();
    let (q, k, v) = (inputs.q.reals(|h| scaled(q, head_scale(h))), inputs.k.reals(|_| k), inputs.v.reals(|_| v));
    let attn = Attention::new().scale(default_scale(dims.head_dim)).mask(mask);
    let mut out = vec![0.0f64; dims.rows() * dims.value_dim];
    let to = ViewMut::new(&mut out, Layout::Bhsd, dims.output()).unwrap();
    reference::forward(&attn, q.view(), k.view(), v.view(), to, &mut vec![0.0; reference::scratch_len(dims)]).unwrap();
    let problem = Problem::of_shape(&attn, *dims).unwrap();
    let mut bound = Vec::new();
    for row in 0..dims.rows() {
        let (batch, head, query) = (row / dims.q_len / dims.q_heads, row / dims.q_len % dims.q_heads, row % dims.q_len);
        let (mut n, mut largest) = (0, 0.0f64);
        problem.for_each_visible(batch, head, query, |At { key, .. }| {
            let kv_head = dims.kv_head(head);
            let dot: f64 =
                (0..dims.head_dim).map(|d| q.at([batch, head, query, d]) * k.at([batch, kv_head, key, d])).sum();
            n += 1;
            largest = largest.max((problem.scale() * dot).abs());
        });
        bound.push(tolerance::int8(n, largest) * 255.0 * f64::from(inputs.quants[2].scale()));
    }
    Exact { out, bound }
}

fn run<O: Int8Output + Default>(dims: &AttnShape, inputs: &Int8Inputs, attn: &Int8Attention<'_>) -> Vec<O> {
    let mut out = vec![O::default(); dims.rows() * dims.value_dim];
    // What scratch held before must not matter.
    let mut scratch = vec![-77; int8::scratch_len(dims)];
    let to = ViewMut::new(&mut out, Layout::Bhsd, dims.output()).unwrap();
    int8::forward(attn, inputs.q.view(), inputs.k.view(), inputs.v.view(), to, &mut scratch).unwrap();
    out
}

fn attention<'a>(dims: &AttnShape, quants: [Quant; 4], mask: Mask<'a>) -> Int8Attention<'a> {
    Int8Attention::new(quants, default_scale(dims.head_dim)).unwrap().mask(mask)
}

/// Compares stored numbers with the exact ones, which the type rounds and saturates.
fn compare(got: impl Iterator<Item = f64>, exact: &Exact, dim: usize, out: Quant, ends: [f64; 2], what: &str) {
    for (i, (got, real)) in got.zip(&exact.out).enumerate() {
        let bound = exact.bound[i / dim] / f64::from(out.scale()) + 0.5 + 1e-6;
        let want = real / f64::from(out.scale()) + f64::from(out.zero_point());
        let (low, high) = ((want - bound).max(ends[0]).min(ends[1]), (want + bound).min(ends[1]).max(ends[0]));
        assert!(low <= got && got <= high, "{what}, element {i}: {got}, not {want} ± {bound}");
    }
}

fn check(dims: &AttnShape, inputs: &Int8Inputs, mask: Mask<'_>, what: &str) {
    let exact = exact(dims, inputs, mask, |_| 1.0);
    let dim = dims.value_dim;
    for (i, (got, real)) in
        run::<f32>(dims, inputs, &attention(dims, inputs.quants, mask)).iter().zip(&exact.out).enumerate()
    {
        let error = (f64::from(*got) - real).abs();
        assert!(error <= exact.bound[i / dim], "{what}, f32 {i}: {got} against {real}: {error:e}");
    }
    // Steps of one thousandth and one hundredth of the values', which is as fine as the types allow.
    let with = |scale: f32, zero_point: i8| {
        let out = Quant::new(inputs.quants[2].scale() * scale, zero_point).unwrap();
        let [q, k, v, _] = inputs.quants;
        (attention(dims, [q, k, v, out], mask), out)
    };
    let (attn, out) = with(1e-3, 0);
    let got = run::<i32>(dims, inputs, &attn);
    compare(got.iter().copied().map(f64::from), &exact, dim, out, [i32::MIN, i32::MAX].map(f64::from), what);
    let (attn, out) = with(1e-2, -5);
    let got = run::<i16>(dims, inputs, &attn);
    compare(got.iter().copied().map(f64::from), &exact, dim, out, [i16::MIN, i16::MAX].map(f64::from), what);
    let (attn, out) = with(0.7, 11); // some outputs saturate
    let got = run::<i8>(dims, inputs, &attn);
    compare(got.iter().copied().map(f64::from), &exact, dim, out, [-128.0, 127.0], what);
}

#[test]
fn every_mask_is_within_its_bound() {
    for (n, dims) in [(2, 4, 2, 9, 13, 8, 5), (1, 2, 1, 6, 33, 16, 16), (2, 3, 3, 12, 7, 3, 1)].into_iter().enumerate()
    {
        let dims = shape(dims);
        for (i, term) in kinds(&dims, 5).iter().enumerate() {
            let memory = Memory::ALL[(i + n) % Memory::ALL.len()];
            let inputs = Int8Inputs::new(&dims, memory, 100 + i as u64, [0.2, 2.0, 10.0][i % 3]);
            check(&dims, &inputs, term.mask(), &format!("{term:?} on {dims:?} in {memory:?}"));
        }
    }
}

#[test]
fn sizes_and_scores_of_all_magnitudes() {
    let lengths = if cfg!(miri) { &[1, 40][..] } else { &[1, 2, 63, 64, 65, 257, 3000] };
    for (i, &kv_len) in lengths.iter().enumerate() {
        for (head_dim, score) in [(1, 1.0f64), (16, 0.0), (64, 30.0), (33, 1000.0)] {
            let dims = shape((1, 2, 1, 2, kv_len, head_dim, 3));
            let inputs = Int8Inputs::new(&dims, Memory::Bshd, 7 * i as u64, score.max(1e-9));
            let causal = Mask::causal(Align::BottomRight);
            check(&dims, &inputs, causal, &format!("{dims:?}, scores of {score}"));
        }
    }
    for dims in [
        (0, 2, 1, 3, 4, 5, 6),
        (1, 0, 0, 3, 4, 5, 6),
        (1, 2, 1, 0, 4, 5, 6),
        (1, 2, 1, 3, 0, 5, 6),
        (1, 2, 1, 3, 4, 0, 6),
        (1, 2, 1, 3, 4, 5, 0),
    ] {
        let dims = shape(dims);
        check(&dims, &Int8Inputs::new(&dims, Memory::Bhsd, 1, 1.0), Mask::none(), &format!("{dims:?}"));
    }
}

#[test]
fn a_row_that_sees_nothing_is_the_zero_point() {
    let dims = shape((1, 1, 1, 4, 4, 2, 3));
    let inputs = Int8Inputs::new(&dims, Memory::Bhsd, 3, 1.0);
    let mask = Mask::causal(Align::Offset(-2));
    let zero = inputs.quants[3].zero_point();
    let out = run::<i8>(&dims, &inputs, &attention(&dims, inputs.quants, mask));
    assert!(zero != 0 && out[..6].iter().all(|&x| x == zero) && out[6..].iter().any(|&x| x != zero));
    assert_eq!(run::<f32>(&dims, &inputs, &attention(&dims, inputs.quants, mask))[..6], [0.0; 6]);
}

#[test]
fn equal_values_come_back_unchanged() {
    let dims = shape((1, 2, 1, 5, 300, 8, 4));
    for value in [-128, -1, 0, 77, 127] {
        let mut inputs = Int8Inputs::new(&dims, Memory::Bhsd, 3, 5.0);
        inputs.v.data.fill(value);
        let [q, k, v, _] = inputs.quants;
        let out = run::<i8>(&dims, &inputs, &attention(&dims, [q, k, v, v], Mask::none()));
        assert!(out.iter().all(|&x| x == value), "{value}: {out:?}");
    }
}

/// Each head as if it were alone, with scales of its own.
#[test]
fn heads_may_have_scales_of_their_own() {
    let dims = shape((2, 4, 2, 5, 9, 8, 3));
    let inputs = Int8Inputs::new(&dims, Memory::Bshd, 9, 3.0);
    let [q, k, v, out] = inputs.quants;
    let factor = |head: usize| [1.0f32, 0.25, 3.0, 0.0625][head];
    let scales: Vec<_> = (0..4)
        .map(|h| HeadScales::new(q.scale() * factor(h), k.scale(), v.scale(), out.scale(), default_scale(8)).unwrap())
        .collect();
    let window =
        Mask::term(attn_core::mask::Term::Window(Window { left: Some(4), right: Some(1), align: Align::TopLeft }));
    let attn = attention(&dims, inputs.quants, window).per_head(&scales);
    let exact = exact(&dims, &inputs, window, factor);
    compare(run::<i8>(&dims, &inputs, &attn).iter().copied().map(f64::from), &exact, 3, out, [-128.0, 127.0], "heads");
    let short = attention(&dims, inputs.quants, window).per_head(&scales[..3]);
    assert_eq!(short.check(&dims), Err(AttnError::Size { what: "int8 scales against q_heads", expected: 4, found: 3 }));
}

/// The largest products that there are: nothing overflows (debug builds would tell), and the largest score wins.
#[test]
fn extremes_do_not_overflow() {
    let dim = if cfg!(miri) { 64 } else { 1 << 15 };
    let dims = shape((1, 1, 1, 2, 3, dim, 1));
    let extreme = |x: &mut [i8], rows: &[i8]| {
        x.chunks_mut(dim).zip(rows).for_each(|(row, &x)| row.fill(x));
    };
    let mut decided = 0;
    for zero_points in [[-128, -128], [127, 127], [-128, 127], [127, -128]] {
        for scale in [1e-30f32, 1e-3, 1.0, 1e30] {
            let mut inputs = Int8Inputs::new(&dims, Memory::Bhsd, 0, 1.0);
            extreme(&mut inputs.q.data, &[-128, 127]);
            extreme(&mut inputs.k.data, &[-128, 127, 0]);
            inputs.v.data.copy_from_slice(&[-128, 127, 1]);
            let quant = |z| Quant::new(scale, z).unwrap();
            let same = Quant::new(1.0, 0).unwrap();
            for factor in [1.0, -1.0] {
                let quants = [quant(zero_points[0]), quant(zero_points[1]), same, same];
                let attn = Int8Attention::new(quants, factor).unwrap();
                let out = run::<i8>(&dims, &inputs, &attn);
                if scale != 1e-3 || cfg!(miri) {
                    continue;
                }
                // Scores of up to two thousand: a key that leads by 30 takes all.
                for (q, got) in [-128, 127].into_iter().zip(out) {
                    let scores = [-128, 127, 0].map(|k| {
                        let product = (q - i32::from(zero_points[0])) * (k - i32::from(zero_points[1]));
                        factor * f64::from(product) * 1e-6 * dim as f64
                    });
                    let best = scores.iter().copied().fold(f64::MIN, f64::max);
                    if scores.iter().filter(|&&s| best - s < 30.0).count() == 1 {
                        let at = scores.iter().position(|&s| s == best).unwrap();
                        assert_eq!(got, [-128, 127, 1][at], "{zero_points:?} {factor} {scores:?}");
                        decided += 1;
                    }
                }
            }
        }
    }
    assert!(decided >= 8 || cfg!(miri), "{decided}");
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let x = [1i8; 24];
    let view = |sizes| View::new(&x, Layout::Bhsd, sizes).unwrap();
    let quant = Quant::new(1.0, 0).unwrap();
    let attn = Int8Attention::new([quant; 4], 1.0).unwrap();
    let (q, k, v) = (view([1, 2, 3, 4]), view([1, 1, 5, 4]), view([1, 1, 5, 2]));
    let refused = |attn: &Int8Attention<'_>, q, k, v, out_sizes: [usize; 4], scratch: usize| {
        let mut out = [99i8; 12];
        let to = ViewMut::new(&mut out, Layout::Bhsd, out_sizes).unwrap();
        let error = int8::forward(attn, q, k, v, to, &mut vec![0; scratch]).unwrap_err();
        assert_eq!(out, [99; 12]);
        error
    };
    let out = [1, 2, 3, 2];
    assert_eq!(refused(&attn, q, k, v, out, 1), AttnError::TooShort { what: "int8 scratch", needed: 2, found: 1 });
    assert!(matches!(refused(&attn, q, k, v, [1, 2, 2, 2], 2), AttnError::Size { expected: 3, found: 2, .. }));
    assert!(matches!(refused(&attn, q, view([1, 1, 5, 3]), v, out, 2), AttnError::Size { expected: 4, found: 3, .. }));
    assert!(matches!(
        refused(&attn, view([1, 3, 2, 4]), view([1, 2, 3, 4]), view([1, 2, 3, 2]), out, 2),
        AttnError::Heads { .. }
    ));
    let lens = [6];
    let masked = attn.mask(Mask::kv_lens(&lens));
    assert!(matches!(refused(&masked, q, k, v, out, 2), AttnError::Index { value: 6, limit: 6, .. }));
    let wide = [0i8; 1];
    let wide = View::strided(&wide, [1, 1, 1, (1 << 15) + 1], [0; 4], 0).unwrap();
    let one = view([1, 1, 1, 1]);
    assert!(matches!(refused(&attn, wide, wide, one, [1, 1, 1, 1], 1), AttnError::Unsupported { .. }));
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(Quant::new(scale, 0), Err(AttnError::Option { .. })), "{scale}");
    }
    assert!(matches!(Int8Attention::new([quant; 4], f64::NAN), Err(AttnError::Option { .. })));
    for n in 0..4 {
        let [q, k, v, out] = core::array::from_fn(|i| if i == n { -1.0 } else { 1.0 });
        assert!(matches!(HeadScales::new(q, k, v, out, 1.0), Err(AttnError::Option { .. })));
    }
}
