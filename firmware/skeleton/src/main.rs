//! The smallest firmware with attention: one head pair over the last 16 samples of a sensor. To be copied.

#![no_std]
#![no_main]

use attn_core::Align;
use attn_core::fixed::FixedAttention;
use cortex_m_rt::entry;

const HEADS: usize = 2; // query heads
const KV_HEADS: usize = 1; // both share one key/value head
const DIM: usize = 8; // numbers of a head
const TOKENS: usize = 16; // samples of a window

/// Each token sees itself and the tokens before it. Made when compiling: a number of heads that does not fit does not
/// compile.
const ATTN: FixedAttention<HEADS, KV_HEADS, DIM> = FixedAttention::new().causal(Align::BottomRight);

/// What projections give for a window of samples: `H` heads of `DIM` numbers for each token.
type Heads<const H: usize> = [[[f32; DIM]; H]; TOKENS];

#[entry]
fn main() -> ! {
    // All memory that attention takes. Here it is on the stack, 3 KiB of it; a `static` works too.
    let (mut q, mut k, mut v): (Heads<HEADS>, Heads<KV_HEADS>, Heads<KV_HEADS>);
    let mut out: Heads<HEADS> = [[[0.0; DIM]; HEADS]; TOKENS];
    loop {
        let window = read_sensor();
        q = window.map(|sample| project(sample, 0.3));
        k = window.map(|sample| project(sample, 0.7));
        v = window.map(|sample| project(sample, 1.0));
        ATTN.forward(&q, &k, &v, &mut out); // cannot fail: every size is part of a type
        use_result(&v, &out);
    }
}

/// In your firmware: the last samples of an accelerometer, a microphone, a current.
fn read_sensor() -> [f32; TOKENS] {
    core::array::from_fn(|n| n as f32 * 0.125 - 1.0)
}

/// In your firmware: a product with the weights of your model.
fn project<const H: usize>(sample: f32, weight: f32) -> [[f32; DIM]; H] {
    core::array::from_fn(|head| core::array::from_fn(|d| sample * weight + (head * DIM + d) as f32 * 0.0625))
}

/// In your firmware: the next layer. Under QEMU: prints two rows, and checks that the first token saw itself alone.
#[cfg(feature = "qemu")]
fn use_result(v: &Heads<KV_HEADS>, out: &Heads<HEADS>) {
    let ([[value], ..], [first, .., last]) = (v, out);
    semihosting::println!("first token: {:?}", first[0]);
    semihosting::println!("last token:  {:?}", last[0]);
    semihosting::process::exit(i32::from(first[0] != *value || first[1] != *value));
}

#[cfg(not(feature = "qemu"))]
fn use_result(_: &Heads<KV_HEADS>, out: &Heads<HEADS>) {
    core::hint::black_box(out);
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
