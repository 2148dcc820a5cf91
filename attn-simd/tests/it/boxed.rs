//! The caller's mods in a box change no bit.

use attn_core::score::At;
use attn_core::score_mod::Mods;
use attn_core::{Align, Attention, Layout, Mask, View, ViewMut};
use attn_simd::{BoxedMods, Level, Workspace, forward_at};

/// Tokens of a head: more than one tile, but not for an interpreter.
const LEN: usize = if cfg!(miri) { 18 } else { 70 };
const DIM: usize = if cfg!(miri) { 2 } else { 8 };

fn bits<M: Mods + Sync>(level: Level, attn: &Attention<'_, M>, q_len: usize) -> Vec<u32> {
    // No `sin`: Miri gives it other last bits at each call.
    let x: Vec<f32> = (0..2 * LEN * DIM).map(|n| (n * 37 % 101) as f32 / 50.0 - 1.0).collect();
    let q = View::new(&x[..2 * q_len * DIM], Layout::Bhsd, [1, 2, q_len, DIM]).unwrap();
    let kv = View::new(&x, Layout::Bhsd, [1, 2, LEN, DIM]).unwrap();
    let mut out = vec![0.0f32; 2 * q_len * DIM];
    let to = ViewMut::new(&mut out, Layout::Bhsd, [1, 2, q_len, DIM]).unwrap();
    forward_at(level, attn, q, kv, kv, to, &mut Workspace::new()).unwrap();
    out.iter().map(|x| x.to_bits()).collect()
}

/// None, either and both, for both kernels: a box changes no bit.
#[test]
fn the_same_bits_as_without_a_box() {
    let plain = Attention::new().mask(Mask::causal(Align::BottomRight));
    let shift = |s: f64, at: At| s - 0.1 * at.key as f64;
    let even = |at: At| at.key.is_multiple_of(2);
    for level in Level::available() {
        for q_len in [LEN, 2] {
            let boxed = [
                plain.with_mods(BoxedMods::new),
                plain.score_mod(shift).with_mods(BoxedMods::new),
                plain.mask_mod(even).with_mods(BoxedMods::new),
                plain.score_mod(shift).mask_mod(even).with_mods(BoxedMods::new),
            ];
            let want = |n| match n {
                0 => bits(level, &plain, q_len),
                1 => bits(level, &plain.score_mod(shift), q_len),
                2 => bits(level, &plain.mask_mod(even), q_len),
                _ => bits(level, &plain.score_mod(shift).mask_mod(even), q_len),
            };
            // An interpreter has time for both, not for each.
            for (n, boxed) in boxed.iter().enumerate().skip(if cfg!(miri) { 3 } else { 0 }) {
                let want = want(n);
                assert_eq!(bits(level, boxed, q_len), want, "{} {boxed:?}", level.name());
                assert_eq!(bits(level, &boxed.by_ref(), q_len), want);
            }
        }
    }
}
