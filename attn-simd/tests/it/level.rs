//! Which level runs is the one that a run expects: emulated processors say so, or a silent fallback would look like a pass.

use attn_simd::Level;

#[test]
fn the_level_found_is_the_one_expected() {
    let best = Level::available().last().expect("at least the portable level");
    let wanted = std::env::var("ATTN_EXPECT_LEVEL").or_else(|_| std::env::var("ATTN_LEVEL"));
    let wanted = wanted.unwrap_or_else(|_| best.name().to_owned());
    assert_eq!(Level::detect().name(), wanted);
}
