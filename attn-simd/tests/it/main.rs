//! Integration tests of `attn-simd`, one program with a module per subject.

mod amx_kernel;
mod backward;
mod backward_eta;
mod backward_long;
mod backward_random;
mod beside;
mod boxed;
mod caches;
mod decode;
mod edges;
mod gate;
mod guard;
mod laws;
mod level;
mod long_sums;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod mxcsr;
mod pairs;
mod positions;
mod prefix;
mod quantized;
mod random;
mod small;
mod stored;
mod strips;

/// The levels of this machine (`ATTN_TEST_LEVELS` may name some of them), and the model of AMX.
fn levels_and_model() -> Vec<attn_simd::Level> {
    attn_testing::levels(attn_simd::Level::names().chain(attn_simd::Level::model_names()), attn_simd::Level::by_name)
}
