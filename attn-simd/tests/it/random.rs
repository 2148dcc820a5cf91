//! Random calls within the documented bound: constants, wide magnitudes, rising scores, at every level. `cargo xtask
//! random` draws as many more as are asked for.

use attn_simd::Level;
use attn_testing::random::{Call, Ready, Verdict};

use super::laws::Simd;

#[test]
fn random_calls_stay_within_the_bound() {
    let engines: Vec<Simd> = Level::available().map(Simd).collect();
    let model: Vec<Simd> = attn_testing::levels(Level::model_names(), Level::by_name).into_iter().map(Simd).collect();
    let calls = if attn_testing::is_emulated() { 100 } else { 400 };
    let mut failed = Vec::new();
    for n in 0..calls {
        let call = Call::draw(2, n);
        let ready = Ready::new(&call).unwrap_or_else(|error| panic!("{call:?}: {error}"));
        // The model of AMX is slow.
        let model = model.iter().filter(|_| n % 4 == 0 && call.work() < 300_000);
        for engine in engines.iter().chain(model) {
            let how = match ready.check(engine, &call) {
                Verdict::Compared(found) => found.beyond,
                Verdict::Broken(how) | Verdict::Skipped(how) => Some(how),
            };
            failed.extend(how.map(|how| format!("call {n} at {}: {how}; {call:?}", engine.0.name())));
        }
    }
    let first: String = failed.iter().take(8).map(|text| format!("\n{text}")).collect();
    assert!(failed.is_empty(), "{} calls, the first of them{first}", failed.len());
}
