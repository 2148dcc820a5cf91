//! A step over a cache allocates nothing once its scratch is there. A program of its own: the count is that of the
//! process.

use attn_core::kv_cache::{CacheView, Queries};
use attn_core::{Attention, Layout, View, ViewMut};
use attn_parallel::{DecodePlan, Runner, attend_cache};
use attn_simd::{Level, Workspace};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The most bytes allocated at once in `f` beyond those before.
fn grown(f: impl FnOnce()) -> usize {
    HEAP.reset_peak_usage();
    let before = HEAP.current_usage();
    f();
    HEAP.peak_usage() - before
}

#[test]
fn a_step_over_a_long_cache_allocates_nothing() {
    let (q_sizes, kv_sizes) = ([2, 8, 1, 64], [2, 2, 32_768, 64]);
    let (q, kv) = (vec![0.5f32; 2 * 8 * 64], vec![0.25f32; kv_sizes.iter().product()]);
    let mut out = vec![0.0f32; 2 * 8 * 64];
    let (q, kv) = (View::new(&q, Layout::Bhsd, q_sizes).unwrap(), View::new(&kv, Layout::Bhsd, kv_sizes).unwrap());
    let prompt = View::new(&kv.data()[..2 * 4096 * 64], Layout::Bhsd, [1, 2, 4096, 64]).unwrap();
    let (lens, attn) = ([32_768, 20_000], Attention::new());
    let cache = CacheView::of_slots(kv, kv, &lens).unwrap();
    let prefix = CacheView::of_tensors(prompt, prompt).unwrap();

    // Plan and run on this thread, with the caller's scratch.
    let mut scratch = Workspace::new();
    let mut one = || {
        let plan = DecodePlan::new(&attn, q_sizes, Queries::All, cache, Level::detect()).unwrap();
        let to = ViewMut::new(&mut out, Layout::Bhsd, q_sizes).unwrap();
        plan.split(q, to).unwrap().run(scratch.lines(plan.workspace_lines())).unwrap();
    };
    one();
    assert_eq!(grown(&mut one), 0, "one thread");

    // On a pool whose threads have each had their scratch: they all take part in a step sooner or later.
    let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
    // From inside of the pool: a call from elsewhere waits in rayon's queue, which takes a block of memory for every 63
    // of them.
    let mut all = |shared: bool| {
        let to = ViewMut::new(&mut out, Layout::Bhsd, q_sizes).unwrap();
        if shared {
            let level = Level::detect();
            let plan = DecodePlan::with_prefix(&attn, q_sizes, Queries::All, prefix, cache, level).unwrap();
            Runner::new().attend_cache_planned(&plan, q, to).unwrap();
        } else {
            attend_cache(&attn, q, Queries::All, cache, to).unwrap();
        }
    };
    for shared in [false, true] {
        // A thread that has slept through the first steps makes its scratch in a later one; and rayon's queues may grow
        // once.
        let quiet = pool.install(|| (0..200).map(|_| grown(|| all(shared))).collect::<Vec<_>>());
        let still = quiet.iter().rev().take_while(|&&bytes| bytes == 0).count();
        assert!(still >= 100, "shared prefix {shared}: bytes of each step {quiet:?}");
    }
    let boxed = grown(|| drop(std::hint::black_box(Box::new([0u8; 100]))));
    assert_eq!(boxed, 100, "this test counts");
}
