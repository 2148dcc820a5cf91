//! Threads and processes: many callers at once, and a child that was forked.

use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};

use attn::types::{AttnDtype, AttnStatus};

use crate::c::{self, Arguments, Plan, Workspace, floats, options, tensor_mut};

/// Large enough that several threads take part; as bits.
fn compute(threads: usize) -> Vec<u32> {
    let shape = [1, 4, 200, 32];
    let x: Vec<f32> = (0..25_600).map(|n| (n as f32 * 0.37).sin()).collect();
    let mut out = vec![0.0f32; 25_600];
    let mut options = options();
    (options.threads, options.causal) = (threads, 2);
    let x = floats(&x, shape);
    let to = tensor_mut(&mut out, AttnDtype::F32, shape);
    let lse = (std::ptr::null_mut(), 0);
    let a = Arguments { options: Some(&options), q: Some(&x), k: Some(&x), v: Some(&x), out: Some(&to), lse };
    assert_eq!(c::forward(a), AttnStatus::Ok, "{}", c::last_error());
    out.iter().map(|x| x.to_bits()).collect()
}

#[test]
#[cfg_attr(miri, ignore = "large")]
fn the_same_bits_for_any_number_of_threads_and_callers() {
    let want = compute(1);
    std::thread::scope(|scope| {
        for threads in [0, 0, 1, 2, 3, usize::MAX] {
            let want = &want;
            scope.spawn(move || (0..3).for_each(|_| assert!(compute(threads) == *want, "{threads} threads")));
        }
    });
}

#[test]
#[cfg(all(unix, not(miri)))]
fn a_forked_child_computes_with_several_threads() {
    let want = compute(0); // the pool's threads are there now, and will not be in the child
    assert_eq!(c::in_child(|| compute(0) == want && compute(3) == want), Some(true), "None: the child hung");
    assert!(compute(0) == want, "the parent is as before");
}

#[test]
fn a_workspace_serves_one_call_at_a_time() {
    // Calls from two threads that certainly overlap: the first one waits in the caller's function until the second is
    // back.
    static INSIDE: Barrier = Barrier::new(2);
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    extern "C-unwind" fn wait(_: usize, _: usize, _: usize, _: usize, _: *mut std::ffi::c_void) -> i32 {
        if CALLS.fetch_add(1, Ordering::SeqCst) == 0 {
            INSIDE.wait(); // the second caller may start
            INSIDE.wait(); // the second caller is back
        }
        1
    }
    let shape = [1, 1, 1, 8];
    let mut options = options();
    options.threads = 1;
    options.mask_mod = Some(wait);
    let plan = Plan::new(&options, &c::sizes(shape, 1)).unwrap();
    let workspace = Workspace::new(Some(&plan), 1).unwrap();
    let run = || {
        let (x, mut out) = ([1.0f32; 8], [0.0f32; 8]);
        let (x, to) = (floats(&x, shape), tensor_mut(&mut out, AttnDtype::F32, shape));
        let lse = (std::ptr::null_mut(), 0);
        plan.run(
            Some(&workspace),
            Arguments { options: None, q: Some(&x), k: Some(&x), v: Some(&x), out: Some(&to), lse },
        )
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(run);
        INSIDE.wait();
        assert_eq!(run(), AttnStatus::Busy);
        INSIDE.wait();
        assert_eq!(first.join().unwrap(), AttnStatus::Ok);
    });
    assert_eq!(run(), AttnStatus::Ok);
}
