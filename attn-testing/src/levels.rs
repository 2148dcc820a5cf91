//! Which levels the tests of kernels run on: all that a machine has, or those that `ATTN_TEST_LEVELS` names: names with
//! commas between them; unset or empty, it names all.
//!
//! On an emulated processor the exact model of AMX would take hours: `ATTN_TEST_LEVELS=amx` leaves out
//! everything but the level `amx`. What the variable names has to be there: a test that would run on nothing fails.
//! Emulators of other processors set `ATTN_EMULATED`: the longest tests are shorter there.

use core::fmt::Debug;

/// The variable.
const VARIABLE: &str = "ATTN_TEST_LEVELS";

/// Of the levels `of`, in their order, those that this machine has and that `ATTN_TEST_LEVELS` names.
///
/// # Panics
/// Where it names a level that is unknown or not on this machine.
pub fn levels<'n, L, E: Debug>(
    of: impl IntoIterator<Item = &'n str>,
    by_name: impl Fn(&str) -> Result<L, E>,
) -> Vec<L> {
    chosen(std::env::var(VARIABLE).ok().as_deref(), of, by_name)
}

/// Whether `ATTN_TEST_LEVELS` names this level, so that a test may not pass where it is missing.
pub fn is_demanded(name: &str) -> bool {
    named(std::env::var(VARIABLE).ok().as_deref()).any(|demanded| demanded == name)
}

/// Whether an emulated processor runs this (`ATTN_EMULATED` is set), some thirty times as slow as a real one, and
/// unable to start itself again.
pub fn is_emulated() -> bool {
    std::env::var_os("ATTN_EMULATED").is_some()
}

fn named(variable: Option<&str>) -> impl Iterator<Item = &str> {
    variable.unwrap_or("").split(',').map(str::trim).filter(|name| !name.is_empty())
}

fn chosen<'n, L, E: Debug>(
    variable: Option<&str>,
    of: impl IntoIterator<Item = &'n str>,
    by_name: impl Fn(&str) -> Result<L, E>,
) -> Vec<L> {
    for name in named(variable) {
        if let Err(error) = by_name(name) {
            panic!("{VARIABLE} names {name}, which is not here: {error:?}");
        }
    }
    let is_chosen = |name: &&str| named(variable).next().is_none() || named(variable).any(|other| other == *name);
    of.into_iter().filter(is_chosen).filter_map(|name| by_name(name).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_name(name: &str) -> Result<String, &'static str> {
        if name == "amx" || name.len() > 4 { Err("missing") } else { Ok(name.to_owned()) }
    }

    #[test]
    fn all_that_are_there_or_those_that_are_named() {
        let of = ["a", "bb", "amx", "ccc"];
        assert_eq!(chosen(None, of, by_name), ["a", "bb", "ccc"]);
        assert_eq!(chosen(Some(""), of, by_name), ["a", "bb", "ccc"]);
        assert_eq!(chosen(Some("ccc, a"), of, by_name), ["a", "ccc"]);
        assert_eq!(chosen(Some("dddd"), of, by_name), [""; 0]);
    }

    #[test]
    #[should_panic(expected = "ATTN_TEST_LEVELS names amx, which is not here")]
    fn a_level_that_is_named_has_to_be_there() {
        let _ = chosen(Some("amx"), ["a"], by_name);
    }
}
