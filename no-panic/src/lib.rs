//! Entry points into every engine of `attn-core`, linked into one image in which no panic may be reachable.
//!
//! Options, views and tables arrive behind references that the optimiser cannot see through, so that every branch on
//! them is live: what `cargo xtask no-panic` finds to be out of reach is out of reach for all inputs. The functions are
//! never called. Exported names are the only thing here that counts as `unsafe`.
#![no_std]

mod embedded;
mod engines;
mod learned;
mod stateful;
mod tensors;

/// Reached by nothing, unless something can panic.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        core::hint::spin_loop();
    }
}

/// What the check must find: an index that may be out of bounds.
#[cfg(feature = "control")]
#[unsafe(no_mangle)]
pub fn attn_entry_control(x: &[f32], i: usize) -> f32 {
    x[i]
}
