//! The caller's floating-point control register is as it was, whatever it says, and no flag is raised that is
//! not due.
#![allow(unsafe_code, reason = "reads and writes the register")]

use core::arch::asm;

use attn_core::half::{bf16, f16};
use attn_core::mask::Documents;
use attn_core::{Align, Attention, AttnShape, Layout, Mask, Outputs, Precision, View, ViewMut};
use attn_testing::Number;
use attn_testing::cases::{Case, Inputs, shape};

use attn_simd::{KernelElement, Level, Workspace, forward_at};

use crate::levels_and_model;

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

/// Runs a call with the register as told; returns its output and what the register says then.
fn under<T: KernelElement, O: KernelElement>(
    control: u32,
    level: Level,
    attn: &Attention<'_>,
    inputs: &Inputs<T>,
) -> (Vec<O>, u32) {
    let mut out = vec![O::from_f64(7.0); inputs.shape.rows() * inputs.shape.value_dim];
    let mut lse = vec![7.0; inputs.shape.rows()];
    let to = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, inputs.shape.output()).unwrap()).lse(&mut lse);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let mut workspace = Workspace::new();
    write(control);
    let result = forward_at(level, attn, q, k, v, to, &mut workspace);
    let after = read();
    write(DEFAULT);
    result.unwrap();
    (out, after)
}

/// As [`under`], up to three times while an invalid operation is told.
///
/// What our code raises, it raises each time: equal inputs take equal steps. Once a virtual machine told a flag, under
/// AddressSanitizer, that no later run of the same call showed. Such a flag is printed, and does not count.
fn under_again<T: KernelElement, O: KernelElement>(
    control: u32,
    level: Level,
    attn: &Attention<'_>,
    inputs: &Inputs<T>,
) -> (Vec<O>, u32) {
    let mut result = under(control, level, attn, inputs);
    for _ in 0..2 {
        if result.1 & INVALID == 0 {
            break;
        }
        eprintln!("{level:?}, control {control:x}: an invalid operation; does it come again?");
        result = under(control, level, attn, inputs);
    }
    result
}

#[test]
fn the_control_register_is_as_before() {
    // A few keys and many, few queries (decoded) and many.
    for (level, q_len) in levels_and_model().into_iter().flat_map(|level| [(level, 5), (level, 70)]) {
        for mask in [Mask::none(), Mask::causal(Align::BottomRight), Mask::window(3, 0, Align::BottomRight)] {
            let inputs = Inputs::<f32>::plain(shape((1, 1, 1, q_len, 150, 24, 24)), 61);
            let attn = Attention::new().mask(mask);
            // Rounding to nearest, up, and with subnormals flushed.
            let results = [DEFAULT, DEFAULT | 2 << 13, DEFAULT | FLUSH].map(|control| {
                let (out, after) = under_again::<f32, f32>(control, level, &attn, &inputs);
                assert_eq!(after & !0x3f, control, "{level:?}: control bits");
                let what = format!("{level:?}, {q_len} queries, {mask:?}, control {control:x}");
                assert_eq!(after & INVALID, 0, "{what}: an invalid operation on finite numbers");
                out
            });
            assert_eq!(
                results[0], results[2],
                "{level:?}: normal numbers do not depend on what is done to subnormal ones"
            );
        }
    }
}

/// How many of the calls of a type raise an invalid operation: on each level, under both precisions, into each type.
fn invalid<T: KernelElement + Number>(attn: &Attention<'_>, inputs: &Inputs<T>, what: &str) -> usize {
    let mut count = 0;
    for level in levels_and_model() {
        for precision in [Precision::Exact, Precision::Fast] {
            let attn = attn.precision(precision);
            let flags = [
                ("f32", under_again::<T, f32>(DEFAULT, level, &attn, inputs).1),
                ("f16", under_again::<T, f16>(DEFAULT, level, &attn, inputs).1),
                ("bf16", under_again::<T, bf16>(DEFAULT, level, &attn, inputs).1),
            ];
            for (to, _) in flags.iter().filter(|(_, flags)| flags & INVALID != 0) {
                eprintln!("{level:?} {:?} to {to} {precision:?} {what}: an invalid operation", T::DTYPE);
                count += 1;
            }
        }
    }
    count
}

/// The same of every type.
fn invalid_in_any(attn: &Attention<'_>, shape: AttnShape, what: &str) -> usize {
    invalid(attn, &Inputs::<f32>::plain(shape, 62), what)
        + invalid(attn, &Inputs::<f16>::plain(shape, 62), what)
        + invalid(attn, &Inputs::<bf16>::plain(shape, 62), what)
}

/// Rows that see nothing of a tile, of the first ones, of all; decoded and not. Who traps invalid operations would be
/// ended by one.
#[test]
fn no_mask_raises_an_invalid_operation() {
    let mut count = 0;
    for (q_len, kv_len) in [(5, 150), (40, 150), (90, 40)] {
        let shape = shape((1, 1, 1, q_len, kv_len, 9, 7));
        let (queries, keys) =
            ([0, 20 * q_len / 70, 20 * q_len / 70, q_len], [0, 64 * kv_len / 150, kv_len / 2, kv_len]);
        let strewn: Vec<bool> = (0..q_len * kv_len).map(|n| n % kv_len % 64 == n / kv_len).collect();
        let rows_without: Vec<bool> = (0..q_len * kv_len).map(|n| n / kv_len % 3 == 0 && n % 5 == 0).collect();
        let dense = |bits| View::new(bits, Layout::Bhsd, [1, 1, q_len, kv_len]).unwrap();
        let hiding: Vec<f32> = strewn.iter().map(|&seen| if seen { 0.5 } else { f32::NEG_INFINITY }).collect();
        let hiding = View::new(&hiding, Layout::Bhsd, [1, 1, q_len, kv_len]).unwrap();
        let (padded, starts) = ([q_len.min(kv_len) * 2 / 3], [37.min(kv_len)]);
        let documents = Documents::new(&queries, &keys);
        let masks = [
            ("none", Mask::none()),
            ("causal top-left", Mask::causal(Align::TopLeft)),
            ("causal bottom-right", Mask::causal(Align::BottomRight)),
            ("window top-left", Mask::window(3, 0, Align::TopLeft)),
            ("window bottom-right", Mask::window(40, 2, Align::BottomRight)),
            ("documents", Mask::documents(documents)),
            ("causal documents", Mask::documents(documents.causal(Align::BottomRight))),
            ("padding", Mask::padding(&padded)),
            ("left padding", Mask::kv_starts(&starts)),
            ("all hidden", Mask::kv_lens(&[0])),
            ("strewn keys", Mask::keep(dense(&strewn))),
            ("rows without keys", Mask::keep(dense(&rows_without))),
        ];
        for (name, mask) in masks {
            let what = format!("{q_len} queries, {kv_len} keys, {name}");
            count += invalid_in_any(&Attention::new().mask(mask), shape, &what);
        }
        let attn = Attention::new().bias(hiding).softcap(5.0).sinks(&[0.25]);
        count += invalid_in_any(&attn, shape, &format!("{q_len} queries, {kv_len} keys, bias, cap, sink"));
        let attn = Attention::new().scale(0.0).mask(Mask::causal(Align::TopLeft));
        count += invalid_in_any(&attn, shape, &format!("{q_len} queries, {kv_len} keys, scale 0"));
    }
    assert_eq!(count, 0, "invalid operations on finite numbers");
}

/// Lanes that stand for no row see as many tiles as the others; what they hold may not grow until it is infinite.
#[test]
fn lanes_without_rows_raise_none_over_many_tiles() {
    let mut count = 0;
    for q_len in [5, 33] {
        let (shape, what) = (shape((1, 1, 1, q_len, 330, 9, 7)), format!("{q_len} queries, 330 keys, scale 3"));
        count += invalid_in_any(&Attention::new().scale(3.0), shape, &what);
    }
    assert_eq!(count, 0, "invalid operations on finite numbers");
}

/// Numbers at the ends of their types, which AMX leaves to vectors, and calls with any options.
#[test]
fn large_numbers_and_any_options_raise_none_either() {
    let mut count = 0;
    for place in 0..3 {
        for size in [1e15, 1e18] {
            let mut inputs = Inputs::<f32>::plain(shape((1, 1, 1, 40, 70, 9, 7)), 63);
            let tensor = [&mut inputs.q, &mut inputs.k, &mut inputs.v];
            let [q, k, v] = tensor;
            [q, k, v][place].each(|[_, _, row, _], x| *x *= if row % 7 == 3 { size } else { 1.0 });
            count += invalid(&Attention::new(), &inputs, &format!("{size:e} at {place}"));
        }
    }
    for seed in 0..24 {
        let case = Case::random(64_000 + seed);
        let (attn, what) = (case.options.attention(), format!("{case:?}"));
        count += match seed % 3 {
            0 => invalid(&attn, &case.inputs::<f32>(), &what),
            1 => invalid(&attn, &case.inputs::<f16>(), &what),
            _ => invalid(&attn, &case.inputs::<bf16>(), &what),
        };
    }
    assert_eq!(count, 0, "invalid operations on finite numbers");
}
