//! Which law refuses which bug.

use std::panic::{AssertUnwindSafe, catch_unwind};

use attn_testing::laws::all;

use crate::sick::{Bug, Sick};

fn breaks(bug: Bug, law: fn(&Sick)) -> bool {
    catch_unwind(AssertUnwindSafe(|| law(&Sick(bug)))).is_err()
}

/// For each bug, laws that refuse it: all that a bug was planted for, not all that notice it.
const CAUGHT: [(Bug, &[&str]); 38] = [
    (Bug::ForgetsToRescale, &["accuracy::large_scores_and_late_maxima", "peers::key_counts_around_blocks"]),
    (
        Bug::SeesOneKeyAhead,
        &["determinism::future_tokens_never_change_past_rows", "masks::every_term_hides_what_it_says"],
    ),
    (Bug::IgnoresMask, &["nan::fully_masked_rows_are_zero", "properties::a_causal_row_equals_a_shorter_run"]),
    (Bug::IgnoresTerms, &["masks::every_pair_of_terms_is_a_conjunction"]),
    (
        Bug::DeadRowsAreNan,
        &[
            "peers::fully_masked_rows_at_any_place",
            "peers::masked_rows_leading_a_tile",
            "properties::values_of_ones_give_ones",
        ],
    ),
    (Bug::DeadRowsAreMeans, &["peers::fully_masked_rows_at_any_place", "nan::fully_masked_rows_are_zero"]),
    (Bug::HiddenValuesTimesZero, &["nan::hidden_nan_changes_no_bit", "peers::softcap_comes_before_the_mask"]),
    (
        Bug::TailFilledWithZeros,
        &["peers::a_tail_of_keys_is_not_filled_with_zeros", "peers::one_query_against_odd_key_counts"],
    ),
    (
        Bug::KeysCutToQueries,
        &[
            "peers::keys_are_not_cut_to_the_query_count",
            "peers::a_block_of_keys_fully_masked_anywhere",
            "properties::permuted_keys_change_nothing",
        ],
    ),
    (Bug::HeadsInterleaved, &["properties::grouped_heads_are_repeated_heads"]),
    (Bug::CapIgnored, &["accuracy::halves_in_singles_out", "peers::softcap_comes_before_the_mask"]),
    (Bug::CapAfterBias, &["peers::softcap_comes_before_the_mask"]),
    (Bug::BiasIgnored, &["properties::a_constant_on_all_scores_changes_nothing"]),
    (Bug::ModIgnored, &["masks::mods_hide_and_change_scores"]),
    (Bug::SinksIgnored, &["properties::a_sink_is_a_key_without_value"]),
    (Bug::DropoutIgnored, &["properties::weights_of_dropped_keys_vanish"]),
    (Bug::DropoutNotScaled, &["properties::weights_of_dropped_keys_vanish"]),
    (
        Bug::NanBecomesZero,
        &[
            "nan::a_visible_nan_marks_its_rows_only",
            "nan::an_infinite_score_is_nan",
            "nan::nan_in_a_query_marks_its_row_only",
        ],
    ),
    (Bug::RowsTakenAsContiguous, &["layouts::inputs_may_lie_anyhow"]),
    (Bug::OutputTakenAsContiguous, &["layouts::outputs_may_lie_anyhow"]),
    (
        Bug::WritesBeforeChecks,
        &["errors::sizes_that_disagree", "errors::tables_that_do_not_fit", "errors::outputs_that_do_not_fit"],
    ),
    (Bug::WritesBehindRows, &["peers::nothing_is_written_beyond_the_output"]),
    (
        Bug::OrderByBatch,
        &["determinism::a_row_does_not_depend_on_its_batch", "properties::permuted_queries_permute_rows"],
    ),
    (Bug::MaximumOfRowBefore, &["determinism::a_row_does_not_depend_on_the_other_queries"]),
    (
        Bug::OrderByCall,
        &[
            "determinism::running_again_gives_the_same_bits",
            "layouts::broadcast_inputs_are_repeated_ones",
            "layouts::packed_qkv_is_read_in_place",
        ],
    ),
    (Bug::WeightsInHalf, &["accuracy::f32_stays_within_the_gate", "accuracy::f64_stays_within_its_gate"]),
    (Bug::LseInBitsOfTwo, &["properties::split_and_merge_equals_one_sweep", "vectors::committed_vectors_pass"]),
    (Bug::AcceptsAnyOption, &["errors::options_without_meaning"]),
    (Bug::RefusesEmpty, &["errors::empty_sizes_are_valid"]),
    (Bug::ClampsScores, &["nan::an_infinite_score_is_nan"]),
    (
        Bug::SentinelForInfinity,
        &[
            "peers::all_logits_far_from_zero",
            "peers::lowest_finite_bias_is_not_a_mask",
            "errors::options_at_their_limits",
        ],
    ),
    (
        Bug::ClampsValues,
        &["properties::doubled_values_double_the_output", "properties::outputs_stay_in_the_hull_of_values"],
    ),
    (
        Bug::DivisorPlusEpsilon,
        &["properties::values_of_ones_give_ones", "properties::identity_values_give_the_weights"],
    ),
    (Bug::LastKeyLost, &["peers::infinite_and_huge_values", "random::random_calls_match_the_reference"]),
    (Bug::TopLeftAlways, &["peers::causal_alignment_when_lengths_differ"]),
    (Bug::OutputRoundedTwice, &["accuracy::halves_are_rounded_once"]),
    (Bug::OverflowIgnored, &["errors::products_that_overflow"]),
    (Bug::LongHeadsCut, &["peers::every_head_dim"]),
];

#[test]
fn every_bug_is_refused() {
    let laws = all::<Sick>();
    for (bug, names) in CAUGHT {
        for name in names {
            let (_, law) = laws.iter().find(|(law, _)| law == name).unwrap_or_else(|| panic!("no law {name}"));
            assert!(breaks(bug, *law), "{name} accepts an engine with the bug {bug:?}");
        }
    }
}

#[test]
fn every_bug_and_every_law_has_a_counterpart() {
    for bug in Bug::ALL {
        assert!(CAUGHT.iter().any(|(b, names)| *b == bug && !names.is_empty()), "nothing refuses {bug:?}");
    }
    for (law, _) in all::<Sick>() {
        // Views are checked when they are made: no engine can get that wrong.
        let of_views = law == "errors::views_that_cannot_be";
        assert!(of_views || CAUGHT.iter().any(|(_, names)| names.contains(&law)), "no bug shows that {law} can fail");
    }
}

/// Prints the whole table: run with `--ignored --nocapture`.
#[test]
#[ignore = "a table for the reader, minutes long"]
fn table() {
    std::panic::set_hook(Box::new(|_| {}));
    for bug in Bug::ALL {
        let caught: Vec<&str> =
            all::<Sick>().into_iter().filter(|(_, law)| breaks(bug, *law)).map(|(n, _)| n).collect();
        eprintln!("TABLE {bug:?}: {}", caught.join(" "));
    }
}

#[test]
fn without_a_bug_every_law_holds() {
    for (name, law) in all::<Sick>() {
        assert!(!breaks(Bug::None, law), "{name} refuses a healthy engine");
    }
}
