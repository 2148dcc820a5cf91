//! What the random check lets pass, and what it refuses.

use attn_core::Dtype;
use attn_testing::random::{Call, Ready, Verdict};
use attn_testing::{Engine, Reference, Streaming, engine_calls};

use crate::sick::{Bug, Sick};

/// Calls of seed 3 that an engine fails; each is drawn twice, and must be the same.
fn failures<E: Engine>(engine: &E, calls: u64) -> Vec<String> {
    let one = |n| {
        let call = Call::draw(3, n);
        assert_eq!(format!("{call:?}"), format!("{:?}", Call::draw(3, n)));
        let ready = Ready::new(&call).unwrap_or_else(|error| panic!("{call:?}: {error}"));
        match ready.check(engine, &call) {
            Verdict::Compared(found) => found.beyond,
            Verdict::Broken(how) => Some(how),
            Verdict::Skipped(_) => None,
        }
        .map(|how| format!("call {n}: {how}; {call:?}"))
    };
    (0..calls).filter_map(one).collect()
}

#[test]
fn a_result_that_is_rounded_once_passes() {
    let failed = failures(&Reference, 400);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// What the check is for: an error that grows with the number of keys.
#[test]
fn keys_added_one_after_the_other_are_refused() {
    let failed = failures(&Streaming, 300);
    assert!(failed.len() > 5, "only {}", failed.len());
}

#[test]
fn bugs_are_refused() {
    let usual = failures(&Sick(Bug::None), 60).len();
    for bug in [Bug::IgnoresTerms, Bug::BiasIgnored, Bug::SinksIgnored, Bug::DropoutIgnored, Bug::LastKeyLost] {
        let failed = failures(&Sick(bug), 60).len();
        assert!(failed > usual, "{bug:?}: {failed} of 60, and {usual} without");
    }
}

/// The reference with a relative error of 15u in each output, where `6u(2 + S)` is 12u at the least.
struct ALittleOff;

impl Engine for ALittleOff {
    fn name(&self) -> &'static str {
        "a little off"
    }
    fn supports_dtype(&self, dtype: Dtype) -> bool {
        dtype == Dtype::F32
    }
    engine_calls!(f32, f16, bf16; |_this, call| {
        let mut outputs = call.outputs;
        let mut scratch = vec![0.0; call.k.sizes()[2]];
        let mut again = attn_core::Outputs::new(outputs.out.reborrow());
        again.lse = outputs.lse.as_deref_mut();
        attn_core::reference::forward(call.attn, call.q, call.k, call.v, again, &mut scratch)?;
        let ([batch, heads, len, width], scale) = (outputs.out.sizes(), 1.0 + 15.0 / f64::from(1u32 << 24));
        let places = (0..batch * heads * len * width).map(|n| (n / width, n % width));
        for (row, channel) in places {
            let (head, query) = (row / len, row % len);
            let x = outputs.out.as_view().at(head / heads, head % heads, query, channel);
            let off = attn_core::Element::from_f64(attn_core::Element::to_f64(x) * scale);
            outputs.out.set(head / heads, head % heads, query, channel, off);
        }
        Ok(())
    });
}

#[test]
fn the_bound_is_no_wider_than_its_text() {
    let failed = failures(&ALittleOff, 200).len();
    assert!(failed > 5, "only {failed}");
}
