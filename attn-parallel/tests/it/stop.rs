//! Calls that their caller stops while they run: no row of an output or of a gradient is written in part.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use attn_parallel::attn_core::backward::Gradients;
use attn_parallel::attn_core::kv_cache::{CacheView, Queries};
use attn_parallel::attn_core::score::At;
use attn_parallel::attn_simd::backward::Inputs;
use attn_parallel::{Attention, AttnError, Layout, Level, Outputs, Runner, View, ViewMut, forward};

use crate::threads::paint;

const SIZES: [usize; 4] = [1, 4, 200, 16];
const LEN: usize = 4 * 200 * 16;
const UNTOUCHED: f32 = 7.0;

/// A mask that sets a flag when it is asked for the `after`-th time.
fn mask<'s>(after: usize, stop: &'s AtomicBool) -> impl Fn(At) -> bool + Sync + 's {
    let asked = AtomicUsize::new(0);
    move |at| {
        if asked.fetch_add(1, Relaxed) == after {
            stop.store(true, Relaxed);
        }
        at.key != 5
    }
}

/// Refuses an output that has a row which is neither as it was nor as the whole call gives it; returns how many rows
/// are as they were.
fn untouched(out: &[f32], want: &[f32]) -> usize {
    let rows = out.chunks_exact(SIZES[3]).zip(want.chunks_exact(SIZES[3]));
    rows.filter(|(row, want)| {
        let left = row.iter().all(|&x| x == UNTOUCHED);
        assert!(left || row == want, "a row in part: {row:?}, {want:?}");
        left
    })
    .count()
}

#[test]
fn rows_are_whole_or_as_they_were() {
    let (q, k, v) = (paint(LEN, 1), paint(LEN, 2), paint(LEN, 3));
    let [q, k, v] = [&q, &k, &v].map(|x| View::new(x, Layout::Bhsd, SIZES).unwrap());
    for level in Level::available().chain(Level::model_names().filter_map(|name| Level::by_name(name).ok())) {
        for (reproducible, threads) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
            let run = |sees: &(dyn Fn(At) -> bool + Sync), stop: &AtomicBool| {
                let attn = Attention::new();
                let attn = if reproducible { attn.reproducible() } else { attn }.mask_mod(sees);
                let mut out = vec![UNTOUCHED; LEN];
                let to = ViewMut::new(&mut out, Layout::Bhsd, SIZES).unwrap();
                let mut runner = Runner::new().level(level).threads(threads).stop_when(stop);
                (runner.forward(&attn, q, k, v, to), out)
            };
            let (done, want) = run(&mask(usize::MAX, &AtomicBool::new(false)), &AtomicBool::new(false));
            done.unwrap();
            for after in [0, 10_000, 100_000] {
                let stop = AtomicBool::new(false);
                let (result, out) = run(&mask(after, &stop), &stop);
                assert_eq!(result, Err(AttnError::Stopped), "{} {reproducible} {threads} {after}", level.name());
                assert!(untouched(&out, &want) > 0);
            }
        }
    }
}

#[test]
fn a_flag_that_was_set_stops_a_step_over_a_cache() {
    let (q, kv) = (paint(LEN, 1), paint(LEN, 2));
    let (q, kv) = (View::new(&q, Layout::Bhsd, SIZES).unwrap(), View::new(&kv, Layout::Bhsd, SIZES).unwrap());
    for threads in [1, 2] {
        let (mut out, stop) = (vec![UNTOUCHED; LEN], AtomicBool::new(true));
        let to = ViewMut::new(&mut out, Layout::Bhsd, SIZES).unwrap();
        let cache = CacheView::of_tensors(kv, kv).unwrap();
        let mut runner = Runner::new().threads(threads).stop_when(&stop);
        let result = runner.attend_cache(&Attention::new(), q, Queries::All, cache, to);
        assert_eq!(result, Err(AttnError::Stopped));
        assert!(out.iter().all(|&x| x == UNTOUCHED));
    }
}

#[test]
fn rows_of_gradients_are_whole_or_as_they_were() {
    let x = paint(LEN, 1);
    let x = View::new(&x, Layout::Bhsd, SIZES).unwrap();
    let (mut out, mut lse) = (vec![0.0; LEN], vec![0.0; LEN / SIZES[3]]);
    let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, SIZES).unwrap()).lse(&mut lse);
    forward(&Attention::new().mask_mod(|at: At| at.key != 5), x, x, x, outputs).unwrap();
    let inputs = Inputs { q: x, k: x, v: x, out: View::new(&out, Layout::Bhsd, SIZES).unwrap(), lse: &lse, dy: x };
    // A score_mod that changes nothing: then no gradient is written before all have been computed.
    for at_once in [false, true] {
        let run = |after: usize, threads: usize| {
            let stop = AtomicBool::new(false);
            let (attn, same) = (Attention::new().mask_mod(mask(after, &stop)), |score: f64, _: At| score);
            let gradients = &mut [(); 3].map(|()| vec![UNTOUCHED; LEN]);
            let to = gradients.each_mut().map(|to| ViewMut::new(to, Layout::Bhsd, SIZES).unwrap());
            let [to_q, to_k, to_v] = to;
            let (to, mut runner) = (Gradients::new(to_q, to_k, to_v), Runner::new().threads(threads).stop_when(&stop));
            let result = if at_once {
                runner.backward(&attn.score_mod_with(same, |_, _| 1.0), inputs, to)
            } else {
                runner.backward(&attn, inputs, to)
            };
            (result, gradients.clone())
        };
        let (done, want) = run(usize::MAX, 1);
        done.unwrap();
        for threads in [1, 2] {
            for after in [0, 10_000, 100_000] {
                let (result, got) = run(after, threads);
                assert_eq!(result, Err(AttnError::Stopped), "{at_once} {threads} {after}");
                let left = got.iter().zip(&want).map(|(got, want)| untouched(got, want));
                let (left, rows) = (left.sum::<usize>(), 3 * LEN / SIZES[3]);
                assert!(if at_once { left == rows } else { left > 0 }, "{at_once} {threads} {after}: {left} rows");
            }
        }
    }
}
