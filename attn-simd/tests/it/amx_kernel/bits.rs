//! What bits of a call on AMX may depend on: not on the cut, the thread, the other queries, or what a row does not
//! see. In every type.

use attn_core::half::{bf16, f16};
use attn_core::{Align, Attention, Layout, Mask, Precision, View, ViewMut};
use attn_simd::{KernelElement, Level, Plan, Workspace};
use attn_testing::Number;
use attn_testing::cases::{Inputs, shape};
use attn_testing::laws::{Answer, oracle};

use super::{amx_levels, attend, levels};

/// Blocks of an item share what is packed, and threads share items: neither changes a bit, in any type.
#[test]
fn the_cut_of_a_call_changes_no_bit() {
    fn check<T: KernelElement + Number<Compute = f32>>(level: Level, precision: Precision) {
        // Two super-blocks of keys, and more queries than an item of one thread in twenty.
        let inputs = Inputs::<T>::plain(shape((1, 2, 1, 300, 600, 24, 20)), 41);
        let attn = Attention::new().precision(precision).mask(Mask::causal(Align::BottomRight));
        let plan = Plan::new(&attn, inputs.shape, level).expect("a plan");
        let run = |threads: usize| {
            let mut out = vec![7.0f32; inputs.shape.rows() * 20];
            let view = ViewMut::new(&mut out, Layout::Bhsd, inputs.shape.output()).expect("output");
            let work = plan.work(inputs.q.view(), inputs.k.view(), inputs.v.view(), view).expect("accepted");
            let attn_simd::Work::Blocks(blocks) = work else { panic!("many queries are tiled") };
            let blocks = blocks.shared_by(threads);
            let count = blocks.count();
            let mut workspace = Workspace::new();
            blocks.run(workspace.lines(plan.workspace_lines())).expect("enough scratch");
            (out, count)
        };
        let (alone, whole) = run(1);
        let (shared, parts) = run(20);
        assert_eq!((whole, parts), (2, 6), "one item a head, or items of 128 queries");
        assert!(alone.iter().zip(&shared).all(|(a, b)| a.to_bits() == b.to_bits()), "{level:?} {:?}", T::DTYPE);
        let exact = oracle(&attn, &inputs);
        if precision == Precision::Exact {
            exact.near_f32(0.0, &Answer { out: alone, lse: Vec::new() }, &(level, T::DTYPE));
        }
    }
    for level in amx_levels() {
        check::<f32>(level, Precision::Exact);
        check::<f16>(level, Precision::Exact);
        check::<bf16>(level, Precision::Exact);
        check::<bf16>(level, Precision::Fast);
    }
}

/// A thread that has never used AMX computes what another does.
#[test]
fn fresh_threads_compute_the_same_bits() {
    let inputs = Inputs::<bf16>::plain(shape((1, 2, 1, 64, 96, 32, 32)), 43);
    let attn = Attention::new();
    for level in levels() {
        let here = attend::<bf16, f32>(level, &attn, &inputs).out;
        let there: Vec<Vec<f32>> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|_| scope.spawn(|| attend::<bf16, f32>(level, &attn, &inputs).out)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        assert!(there.iter().all(|out| *out == here), "{level:?}");
    }
}

/// Part of the queries, and keys that none of them sees: the bits of each row are those of the whole call.
#[test]
fn a_row_has_the_same_bits_whatever_stands_beside_it() {
    const LEN: usize = 100;
    fn check<T: KernelElement + Number<Compute = f32>>(level: Level, precision: Precision) {
        let inputs = Inputs::<T>::plain(shape((1, 2, 1, LEN, LEN, 24, 20)), 44);
        let attn = Attention::new().precision(precision).mask(Mask::causal(Align::TopLeft));
        let whole = attend::<T, T>(level, &attn, &inputs);
        // The mask counts from the first query and key of a call: queries up to `to`, and all keys or no more than
        // those see.
        for to in [17, 31, 32, 33, 64, 90] {
            for keys in [to, LEN] {
                let mut part = Inputs::<T>::plain(shape((1, 2, 1, to, keys, 24, 20)), 44);
                part.q.each(|place, x| *x = inputs.q.at(place));
                part.k.each(|place, x| *x = if place[2] < to { inputs.k.at(place) } else { T::from_f64(f64::NAN) });
                part.v
                    .each(|place, x| *x = if place[2] < to { inputs.v.at(place) } else { T::from_f64(f64::INFINITY) });
                let some = attend::<T, T>(level, &attn, &part);
                for head in 0..2 {
                    let (got, want) =
                        (&some.out[head * to * 20..][..to * 20], &whole.out[head * LEN * 20..][..to * 20]);
                    let same = got.iter().zip(want).all(|(a, b)| a.bits() == b.bits());
                    assert!(same, "{level:?} {:?} {precision:?}: {to} queries, {keys} keys", T::DTYPE);
                    let (got, want) = (&some.lse[head * to..][..to], &whole.lse[head * LEN..][..to]);
                    assert!(got.iter().zip(want).all(|(a, b)| a.to_bits() == b.to_bits()), "{level:?} {to} lse");
                }
            }
        }
        // Without a mask, any stretch of queries; by a view into the same memory.
        let attn = Attention::new().precision(precision);
        let whole = attend::<T, T>(level, &attn, &inputs);
        for (from, to) in [(0, 17), (5, 40), (31, 96), (60, LEN)] {
            let sizes = [1, 2, to - from, 24];
            let q = View::strided(&inputs.q.data, sizes, inputs.q.strides, from * 24).expect("rows of q");
            let mut out = vec![T::from_f64(7.0); 2 * (to - from) * 20];
            let view = ViewMut::new(&mut out, Layout::Bhsd, [1, 2, to - from, 20]).expect("output");
            let (k, v) = (inputs.k.view(), inputs.v.view());
            attn_simd::forward_at(level, &attn, q, k, v, view, &mut Workspace::new()).expect("accepted");
            for (head, got) in out.chunks_exact((to - from) * 20).enumerate() {
                let want = &whole.out[(head * LEN + from) * 20..][..got.len()];
                let same = got.iter().zip(want).all(|(a, b)| a.bits() == b.bits());
                assert!(same, "{level:?} {:?} {precision:?}: queries {from} to {to}", T::DTYPE);
            }
        }
    }
    for level in levels() {
        for precision in [Precision::Exact, Precision::Fast] {
            check::<f32>(level, precision);
            check::<f16>(level, precision);
            check::<bf16>(level, precision);
        }
    }
}
