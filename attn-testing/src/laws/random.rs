//! Random calls, shrunk to the smallest that fails.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::{attend, oracle};
use crate::cases::{Case, Memory, Options};
use crate::engine::Engine;
use crate::paint::Paint;
use crate::tolerance::ETA;
use attn_core::AttnShape;

/// Shapes of every axis by itself, so that a failure shrinks towards the smallest sizes.
fn cases() -> impl Strategy<Value = Case> {
    let heads = (1usize..4, 1usize..4);
    (
        (1usize..3, heads),
        (0usize..80, 0usize..140),
        (0usize..72, 0usize..72),
        0..Memory::ALL.len(),
        any::<u64>(),
        any::<bool>(),
    )
        .prop_map(|((batch, (kv_heads, group)), (q_len, kv_len), (head_dim, value_dim), memory, seed, options)| {
            let q_heads = kv_heads * group;
            let shape = AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim };
            let options = if options { Options::random(&shape, &mut Paint::new(seed)) } else { Options::default() };
            Case { shape, options, memory: Memory::ALL[memory], seed: seed >> 8, sigma: 1.0 }
        })
}

/// Shapes, masks, options and layouts at random against the reference. The generator starts the same each time;
/// `PROPTEST_CASES` sets another number.
pub fn random_calls_match_the_reference<E: Engine>(engine: &E) {
    let mut config = Config { failure_persistence: None, ..Config::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = if crate::is_emulated() { 16 } else { 96 };
    }
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let result = runner.run(&cases(), |case| {
        let (attn, inputs) = (case.options.attention(), case.inputs::<f32>());
        oracle(&attn, &inputs).check(ETA, &attend(engine, &attn, &inputs), &(engine.label(), &case));
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
