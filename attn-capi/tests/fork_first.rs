//! A process whose first call was not a computation, forked. In a program of its own: whose pool there is, is known
//! once per process.
#![cfg(all(unix, not(miri)))]

#[path = "it/c.rs"]
#[allow(dead_code, reason = "shared with the other tests")]
mod c;

use attn::types::{AttnDtype, AttnStatus};
use c::{Arguments, Workspace, floats, options, tensor_mut};

/// Large enough that several threads take part.
fn computes() -> bool {
    let shape = [1, 4, 200, 32];
    let x = vec![0.5f32; 25_600];
    let mut out = vec![0.0f32; 25_600];
    let mut options = options();
    options.threads = 2;
    let x = floats(&x, shape);
    let to = tensor_mut(&mut out, AttnDtype::F32, shape);
    let lse = (std::ptr::null_mut(), 0);
    let status =
        c::forward(Arguments { options: Some(&options), q: Some(&x), k: Some(&x), v: Some(&x), out: Some(&to), lse });
    status == AttnStatus::Ok && out.iter().all(|x| (x - 0.5).abs() < 1e-5)
}

#[test]
fn a_child_of_a_process_that_only_made_a_workspace_computes() {
    let _workspace = Workspace::new(None, 0).unwrap(); // asks how many threads there are, which starts the pool
    assert_eq!(c::in_child(computes), Some(true), "None: the child hung");
}
