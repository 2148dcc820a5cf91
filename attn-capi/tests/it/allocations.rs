//! Once its scratch is there, a call on one thread allocates nothing.

use attn::types::{AttnDtype, AttnStatus};

use crate::c::{self, Arguments, Plan, Workspace, allocations, floats, options, tensor_mut};

#[test]
fn a_call_on_one_thread_allocates_nothing() {
    let shape = [2, 3, 50, 16];
    let (x, mut out) = (vec![0.5f32; 4800], vec![0.0f32; 4800]);
    let lens = [40usize, 50];
    let mut options = options();
    (options.threads, options.causal) = (1, 1);
    (options.kv_lens, options.kv_lens_len) = (lens.as_ptr(), 2);
    let plan = Plan::new(&options, &c::sizes(shape, 50)).unwrap();
    let workspace = Workspace::new(Some(&plan), 1).unwrap();
    let (x, out) = (floats(&x, shape), tensor_mut(&mut out, AttnDtype::F32, shape));
    let lse = (std::ptr::null_mut(), 0);
    let a = Arguments { options: Some(&options), q: Some(&x), k: Some(&x), v: Some(&x), out: Some(&out), lse };
    assert_eq!(allocations(|| assert_eq!(plan.run(Some(&workspace), a), AttnStatus::Ok)), 0, "plan and workspace");
    c::forward(a); // the thread's own scratch is made once
    assert_eq!(allocations(|| assert_eq!(c::forward(a), AttnStatus::Ok)), 0, "attn_forward");
    let narrow = Arguments { v: None, ..a };
    assert_eq!(allocations(|| assert_eq!(c::forward(narrow), AttnStatus::NullPointer)), 0, "an error");
    assert!(allocations(|| drop(Plan::new(&options, &c::sizes(shape, 50)))) > 0, "this test counts");
}
