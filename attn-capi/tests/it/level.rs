//! The level that runs by default, and an `ATTN_LEVEL` that cannot run.

use attn::types::AttnStatus;
use attn_simd::{Level, LevelError};

use crate::c;

/// Set in the child of the test below.
const CHILD: &str = "ATTN_TEST_CHILD";

#[test]
#[cfg_attr(miri, ignore = "starts a process")]
fn a_default_level_that_cannot_run_is_an_error_of_its_own_function_only() {
    if std::env::var_os(CHILD).is_some() {
        assert_eq!(c::level(), (AttnStatus::Option, None));
        assert_eq!(c::last_error(), format!("ATTN_LEVEL: {}", LevelError::Unknown));
        // Calls run on.
        let (status, _) = c::explain(&c::options(), &c::sizes([1, 1, 10, 64], 10), 1, attn::types::ATTN_EXPLAIN_SIZE);
        assert_eq!(status, AttnStatus::Ok);
        return;
    }
    let this = std::env::current_exe().expect("its own name");
    let mut child = std::process::Command::new(this);
    child.args(["--exact", "level::a_default_level_that_cannot_run_is_an_error_of_its_own_function_only"]);
    let Ok(done) = child.env(CHILD, "1").env("ATTN_LEVEL", "sse9").output() else {
        return eprintln!("no process can be started here: nothing was tested");
    };
    let told = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && told.contains("1 passed"), "{told}");
    let lines = String::from_utf8_lossy(&done.stderr);
    assert_eq!(lines.lines().filter(|line| line.contains("ATTN_LEVEL=sse9 is ignored")).count(), 1, "{lines}");
}

#[test]
fn the_default_level_has_a_name() {
    if let Ok(level) = Level::try_detect() {
        assert_eq!(c::level(), (AttnStatus::Ok, Some(level.name().to_owned())));
    }
}
