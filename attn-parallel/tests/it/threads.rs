//! The bits of a result do not depend on how many threads there are, nor on whose they are.

use attn_core::dropout::Dropout;
use attn_core::mask::Documents;
use attn_core::{Align, Attention, AttnShape, Layout, Mask, Outputs, View, ViewMut};
use attn_parallel::Runner;
use attn_simd::Level;

/// Numbers in −2…2 without a pattern.
pub(super) fn paint(len: usize, seed: u32) -> Vec<f32> {
    let mut x = seed;
    (0..len)
        .map(|_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 8) as f32 / (1 << 22) as f32 - 2.0
        })
        .collect()
}

fn bits(attn: &Attention<'_>, shape: AttnShape, level: Level) -> Vec<u32> {
    let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
    let (q, k, v) = (
        paint(batch * q_heads * q_len * head_dim, 1),
        paint(batch * kv_heads * kv_len * head_dim, 2),
        paint(batch * kv_heads * kv_len * value_dim, 3),
    );
    let (mut out, mut lse) = (vec![f32::NAN; shape.rows() * value_dim], vec![f32::NAN; shape.rows()]);
    let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap()).lse(&mut lse);
    Runner::new()
        .level(level)
        .forward(
            attn,
            View::new(&q, Layout::Bhsd, [batch, q_heads, q_len, head_dim]).unwrap(),
            View::new(&k, Layout::Bhsd, [batch, kv_heads, kv_len, head_dim]).unwrap(),
            View::new(&v, Layout::Bhsd, [batch, kv_heads, kv_len, value_dim]).unwrap(),
            outputs,
        )
        .unwrap();
    out.iter().chain(&lse).map(|x| x.to_bits()).collect()
}

#[test]
fn the_same_bits_for_one_to_sixteen_threads() {
    let cu = [0, 3, 130, 131, 300];
    let documents = Mask::documents(Documents::new(&cu, &cu).causal(Align::TopLeft));
    let calls = [
        Attention::new(),
        Attention::new().mask(Mask::causal(Align::BottomRight)),
        Attention::new().mask(documents).dropout(Dropout::Seeded { p: 0.2, seed: 5 }).softcap(3.0),
    ];
    let shape = AttnShape::new([2, 4, 300, 40], [2, 2, 300, 40], [2, 2, 300, 24]).unwrap();
    for level in Level::available().chain(Level::model_names().filter_map(|name| Level::by_name(name).ok())) {
        let small = AttnShape::new([1, 2, 140, 8], [1, 1, 100, 8], [1, 1, 100, 8]).unwrap();
        // The model of AMX is slow.
        let (shape, calls) = if level.name().ends_with("-model") { (small, &calls[..2]) } else { (shape, &calls[..]) };
        for (n, attn) in calls.iter().enumerate() {
            let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            let want = alone.install(|| bits(attn, shape, level));
            for threads in 2..=16 {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                assert!(pool.install(|| bits(attn, shape, level)) == want, "call {n}, {level:?}, {threads} threads");
            }
        }
    }
}

#[test]
fn calls_from_many_threads_at_once_do_not_disturb_each_other() {
    let shape = AttnShape::new([1, 2, 200, 32], [1, 2, 200, 32], [1, 2, 200, 32]).unwrap();
    let attn = Attention::new().mask(Mask::causal(Align::TopLeft));
    let want = bits(&attn, shape, Level::detect());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..4).for_each(|_| assert!(bits(&attn, shape, Level::detect()) == want)));
        }
    });
}

#[test]
fn a_closure_may_attend_itself() {
    // A closure of the caller that comes back into this crate finds the thread's scratch taken, and gets its own.
    let shape = AttnShape::new([1, 1, 2, 8], [1, 1, 2, 8], [1, 1, 2, 8]).unwrap();
    let want = bits(&Attention::new(), shape, Level::detect());
    let nested = Attention::new().mask_mod(|_| bits(&Attention::new(), shape, Level::detect()) == want);
    let x = paint(16, 9);
    let x = View::new(&x, Layout::Bhsd, [1, 1, 2, 8]).unwrap();
    let (mut a, mut b) = (vec![0.0f32; 16], vec![0.0f32; 16]);
    let to = |out| ViewMut::new(out, Layout::Bhsd, [1, 1, 2, 8]).unwrap();
    attn_parallel::forward(&nested, x, x, x, to(&mut a)).unwrap();
    attn_parallel::forward(&Attention::new(), x, x, x, to(&mut b)).unwrap();
    assert_eq!(a, b);
}

#[test]
fn decoding_gives_the_same_bits_for_one_to_sixteen_threads() {
    let causal = Attention::new().mask(Mask::causal(Align::BottomRight));
    for (shape, attn) in [
        (AttnShape::new([1, 4, 1, 40], [1, 1, 5000, 40], [1, 1, 5000, 24]).unwrap(), Attention::new()),
        (AttnShape::new([3, 8, 4, 32], [3, 2, 1700, 32], [3, 2, 1700, 32]).unwrap(), causal),
        (AttnShape::new([1, 2, 900, 16], [1, 2, 900, 16], [1, 2, 900, 16]).unwrap(), causal.reproducible()),
    ] {
        for level in Level::available() {
            let alone = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            let want = alone.install(|| bits(&attn, shape, level));
            for threads in [2, 3, 8, 16] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                assert!(pool.install(|| bits(&attn, shape, level)) == want, "{shape:?}, {level:?}, {threads} threads");
            }
        }
    }
}
