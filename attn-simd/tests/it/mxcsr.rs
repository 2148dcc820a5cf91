//! The caller's floating-point control register is as it was, whatever it says, and no flag is raised that is
//! not due.
#![allow(unsafe_code, reason = "reads and writes the register")]

use core::arch::asm;
use core::hint::black_box;
use std::io::Write;

use attn_core::backward::Gradients;
use attn_core::dropout::Dropout;
use attn_core::half::{bf16, f16};
use attn_core::mask::Documents;
use attn_core::{Align, Attention, AttnShape, Layout, Mask, Outputs, Precision, View, ViewMut};
use attn_testing::Number;
use attn_testing::cases::{Case, Inputs, shape};

use attn_simd::{KernelElement, Level, Line, Workspace, backward, forward_at};

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

/// Leaves signalling NaN in the stack below: what a call reads of it before it writes there shows.
#[inline(never)]
fn fill_stack() {
    black_box(&[f32::from_bits(0x7fa0_7fa0); 1 << 17]);
}

/// Runs a call with the register as told; returns its result and what the register says then.
fn under<R>(control: u32, call: impl FnOnce() -> R) -> (R, u32) {
    fill_stack();
    write(control);
    let result = call();
    let after = read();
    write(DEFAULT);
    (result, after)
}

/// The result of a call, which changes no control bit and raises no invalid operation. Where one is told, the call is
/// made again with the exception unmasked.
///
/// What our code raises ends the process then, by a signal, after a line that names the call. Under AddressSanitizer a
/// virtual machine told flags, for half a second, that no run of the same calls raised before or since: a flag that
/// was left there by others ends nothing, and does not count.
fn none_raised<R>(control: u32, what: &str, mut call: impl FnMut() -> R) -> R {
    let (result, after) = under(control, &mut call);
    assert_eq!(after & !0x3f, control, "{what}: control bits");
    if after & INVALID != 0 {
        // Not by a macro: what the test prints would be lost with the process.
        let line = format!("{what}: an invalid operation; the next one ends the tests\n");
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        (0..3).for_each(|_| _ = under(control & !(INVALID << 7), &mut call));
    }
    result
}

/// The output of a forward call in new scratch.
fn forward<T: KernelElement, O: KernelElement>(
    control: u32,
    level: Level,
    attn: &Attention<'_>,
    inputs: &Inputs<T>,
    what: &str,
) -> Vec<O> {
    let what = format!("{level:?}, {:?} to {:?}, {what}", T::DTYPE, O::DTYPE);
    let mut out = vec![O::from_f64(7.0); inputs.shape.rows() * inputs.shape.value_dim];
    let mut lse = vec![7.0; inputs.shape.rows()];
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let result = none_raised(control, &what, || {
        let to = ViewMut::new(&mut out, Layout::Bhsd, inputs.shape.output()).unwrap();
        forward_at(level, attn, q, k, v, Outputs::new(to).lse(&mut lse), &mut Workspace::new())
    });
    result.unwrap();
    out
}

#[test]
fn the_control_register_is_as_before() {
    // A few keys and many, few queries (decoded) and many.
    for (level, q_len) in levels_and_model().into_iter().flat_map(|level| [(level, 5), (level, 70)]) {
        for mask in [Mask::none(), Mask::causal(Align::BottomRight), Mask::window(3, 0, Align::BottomRight)] {
            let inputs = Inputs::<f32>::plain(shape((1, 1, 1, q_len, 150, 24, 24)), 61);
            let attn = Attention::new().mask(mask);
            // Rounding to nearest, up, and with subnormals flushed.
            let results = [DEFAULT, DEFAULT | 2 << 13, DEFAULT | FLUSH]
                .map(|control| forward::<f32, f32>(control, level, &attn, &inputs, &format!("{mask:?}")));
            assert_eq!(
                results[0], results[2],
                "{level:?}: normal numbers do not depend on what is done to subnormal ones"
            );
        }
    }
}

/// The calls of a type raise no invalid operation: on each level, under both precisions, into each type.
fn none_invalid<T: KernelElement + Number>(attn: &Attention<'_>, inputs: &Inputs<T>, what: &str) {
    for level in levels_and_model() {
        for precision in [Precision::Exact, Precision::Fast] {
            let (attn, what) = (attn.precision(precision), format!("{precision:?}, {what}"));
            forward::<T, f32>(DEFAULT, level, &attn, inputs, &what);
            forward::<T, f16>(DEFAULT, level, &attn, inputs, &what);
            forward::<T, bf16>(DEFAULT, level, &attn, inputs, &what);
        }
    }
}

/// The same of every type.
fn none_invalid_in_any(attn: &Attention<'_>, shape: AttnShape, what: &str) {
    none_invalid(attn, &Inputs::<f32>::plain(shape, 62), what);
    none_invalid(attn, &Inputs::<f16>::plain(shape, 62), what);
    none_invalid(attn, &Inputs::<bf16>::plain(shape, 62), what);
}

/// Rows that see nothing of a tile, of the first ones, of all; decoded and not. Who traps invalid operations would be
/// ended by one.
#[test]
fn no_mask_raises_an_invalid_operation() {
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
            none_invalid_in_any(&Attention::new().mask(mask), shape, &what);
        }
        let attn = Attention::new().bias(hiding).softcap(5.0).sinks(&[0.25]);
        none_invalid_in_any(&attn, shape, &format!("{q_len} queries, {kv_len} keys, bias, cap, sink"));
        let attn = Attention::new().scale(0.0).mask(Mask::causal(Align::TopLeft));
        none_invalid_in_any(&attn, shape, &format!("{q_len} queries, {kv_len} keys, scale 0"));
    }
}

/// Lanes that stand for no row see as many tiles as the others; what they hold may not grow until it is infinite.
#[test]
fn lanes_without_rows_raise_none_over_many_tiles() {
    for q_len in [5, 33] {
        let (shape, what) = (shape((1, 1, 1, q_len, 330, 9, 7)), format!("{q_len} queries, 330 keys, scale 3"));
        none_invalid_in_any(&Attention::new().scale(3.0), shape, &what);
    }
}

/// Numbers at the ends of their types, which AMX leaves to vectors, and calls with any options.
#[test]
fn large_numbers_and_any_options_raise_none_either() {
    for place in 0..3 {
        for size in [1e15, 1e18] {
            let mut inputs = Inputs::<f32>::plain(shape((1, 1, 1, 40, 70, 9, 7)), 63);
            let tensor = [&mut inputs.q, &mut inputs.k, &mut inputs.v];
            let [q, k, v] = tensor;
            [q, k, v][place].each(|[_, _, row, _], x| *x *= if row % 7 == 3 { size } else { 1.0 });
            none_invalid(&Attention::new(), &inputs, &format!("{size:e} at {place}"));
        }
    }
    for seed in 0..24 {
        let case = Case::random(64_000 + seed);
        let (attn, what) = (case.options.attention(), format!("{case:?}"));
        match seed % 3 {
            0 => none_invalid(&attn, &case.inputs::<f32>(), &what),
            1 => none_invalid(&attn, &case.inputs::<f16>(), &what),
            _ => none_invalid(&attn, &case.inputs::<bf16>(), &what),
        }
    }
}

/// Keys outside of a band are not multiplied: what scratch holds for them must not be computed with. Before each call
/// it holds -inf, as hidden scores are.
fn gradients_in_used_scratch<T: KernelElement + Number>(
    level: Level,
    attn: &Attention<'_>,
    shape: AttnShape,
    what: &str,
) {
    let inputs = Inputs::<T>::plain(shape, 65);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let (mut out, mut lse) = (vec![T::from_f64(0.0); shape.rows() * shape.value_dim], vec![0f32; shape.rows()]);
    let to = ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap();
    let mut workspace = Workspace::new();
    forward_at(level, attn, q, k, v, Outputs::new(to).lse(&mut lse), &mut workspace).unwrap();
    let out = View::new(&out[..], Layout::Bhsd, shape.output()).unwrap();
    let inputs = backward::Inputs { q, k, v, out, lse: &lse, dy: out };
    let plan = backward::Plan::new(attn, shape, level).unwrap();
    let sizes = attn_testing::cases::sizes(&shape);
    let mut gradients = sizes.map(|sizes| vec![0f32; sizes.iter().product()]);
    let result = none_raised(DEFAULT, what, || {
        let [dq, dk, dv] = gradients.each_mut();
        let to = [(dq, sizes[0]), (dk, sizes[1]), (dv, sizes[2])];
        let [dq, dk, dv] = to.map(|(to, sizes)| ViewMut::new(to, Layout::Bhsd, sizes).unwrap());
        let scratch = workspace.try_lines(plan.workspace_lines())?;
        scratch.fill(Line([f32::NEG_INFINITY; 16]));
        plan.run(inputs, Gradients::new(dq, dk, dv), scratch)
    });
    result.unwrap();
}

#[test]
fn gradients_raise_none_in_used_scratch() {
    let masks = [
        Mask::none(),
        Mask::causal(Align::TopLeft),
        Mask::causal(Align::BottomRight),
        Mask::window(5, 0, Align::BottomRight),
        Mask::window(14, 0, Align::BottomRight),
        Mask::window(3, 2, Align::TopLeft),
        Mask::kv_lens(&[7]),
    ];
    for (q_len, kv_len, dim) in [(9, 54, 16), (14, 23, 48), (40, 40, 8), (65, 130, 24)] {
        let shape = shape((1, 1, 1, q_len, kv_len, dim, dim));
        let hiding: Vec<f32> = (0..q_len * kv_len).map(|n| if n % 7 == 3 { f32::NEG_INFINITY } else { 0.5 }).collect();
        let hiding = View::new(&hiding, Layout::Bhsd, [1, 1, q_len, kv_len]).unwrap();
        for (level, mask) in levels_and_model().into_iter().flat_map(|level| masks.map(|mask| (level, mask))) {
            let attn = Attention::new().mask(mask);
            for (options, attn) in [
                ("plain", attn),
                ("scale 0", attn.scale(0.0)),
                ("cap, dropout", attn.softcap(5.0).dropout(Dropout::Seeded { p: 0.3, seed: 66 })),
                ("bias", attn.bias(hiding)),
            ] {
                let what = format!("{level:?}, gradients, {q_len} queries, {kv_len} keys, {mask:?}, {options}");
                gradients_in_used_scratch::<f32>(level, &attn, shape, &what);
                gradients_in_used_scratch::<bf16>(level, &attn, shape, &what);
            }
        }
    }
}
