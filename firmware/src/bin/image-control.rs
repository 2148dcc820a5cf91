//! An image that can panic, and so must not link.
#![cfg_attr(target_os = "none", no_std, no_main)]

attn_firmware::image!(index);

fn index(x: &[f32], i: usize) -> f32 {
    x[i]
}
