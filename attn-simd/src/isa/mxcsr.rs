//! A test: the caller's floating-point control register is as it was, whatever it says, and no flag is raised that is not due.
#![allow(unsafe_code, reason = "reads and writes the register")]

use core::arch::asm;

use attn_core::{Align, Attention, Layout, Mask, View, ViewMut};

use crate::{Level, Workspace, forward_at};

/// Invalid operation, as a flag.
const INVALID: u32 = 1;
/// What programs set to have subnormals flushed.
const FLUSH: u32 = 1 << 15 | 1 << 6;
/// All exceptions masked, as programs start.
const DEFAULT: u32 = 0x1f80;

fn read() -> u32 {
    let mut word = 0u32;
    // SAFETY: stores four bytes at the address of `word`; every x86-64 processor has the register.
    unsafe { asm!("stmxcsr [{}]", in(reg) &mut word, options(nostack)) };
    word
}

fn write(word: u32) {
    // SAFETY: loads four bytes of `word`; only bits that the processor defines are set, and all exceptions stay masked.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &word, options(nostack, readonly)) };
}

#[test]
fn the_control_register_is_as_before() {
    // A few keys and many, few queries (decoded) and many.
    for (level, q_len) in Level::available().flat_map(|level| [(level, 5), (level, 70)]) {
        for mask in [Mask::none(), Mask::causal(Align::BottomRight), Mask::window(3, 0, Align::BottomRight)] {
            let sizes = |len| [1, 1, len, 24];
            let numbers = |n: usize| (0..n * 24).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect::<Vec<_>>();
            let (q, k, mut out) = (numbers(q_len), numbers(150), vec![0.0f32; q_len * 24]);
            let mut results = Vec::new();
            // Rounding to nearest, up, and with subnormals flushed.
            for control in [DEFAULT, DEFAULT | 2 << 13, DEFAULT | FLUSH] {
                let view = |x, len| View::new(x, Layout::Bhsd, sizes(len)).unwrap();
                let to = ViewMut::new(&mut out, Layout::Bhsd, sizes(q_len)).unwrap();
                let attn = Attention::new().mask(mask);
                let mut workspace = Workspace::new();
                write(control);
                let result =
                    forward_at(level, &attn, view(&q, q_len), view(&k, 150), view(&k, 150), to, &mut workspace);
                let after = read();
                write(DEFAULT);
                result.unwrap();
                assert_eq!(after & !0x3f, control, "{level:?}: control bits");
                assert_eq!(after & INVALID, 0, "{level:?}, {q_len} queries: an invalid operation on finite numbers");
                results.push(out.clone());
            }
            assert_eq!(
                results[0], results[2],
                "{level:?}: normal numbers do not depend on what is done to subnormal ones"
            );
        }
    }
}
