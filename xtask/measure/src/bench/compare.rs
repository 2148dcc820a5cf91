//! `--compare OLD.json`: a run beside an earlier one.

use std::path::Path;

use attn_bench::compare::{Comparison, LEGEND, Run};
use attn_bench::filter::Filter;
use attn_bench::report::document::comparison_table;

use super::args::{Args, Failure};

/// Reads a run that `--json` wrote.
pub(super) fn read(path: &Path) -> Result<Run, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| Failure::File(path.to_path_buf(), error))?;
    Run::read(&text).map_err(|error| Failure::Other(format!("{}: {error}", path.display())))
}

/// The earlier run, if one was named: read before anything is measured, so that a wrong name costs nothing.
pub(super) fn old(args: &Args) -> Result<Option<Run>, Failure> {
    if !(args.threshold.is_finite() && args.threshold >= 0.0) {
        return Err(Failure::Argument(format!("--threshold must be 0 or more, not {}", args.threshold)));
    }
    args.compare.as_deref().map(read).transpose()
}

/// The share that `--threshold` names.
fn threshold(args: &Args) -> f64 {
    args.threshold / 100.0
}

/// How often the slower cases of a comparison are measured again.
const AGAIN: usize = 2;

/// Compares what was measured with the earlier run, if one was named, after the cases that seem slower were measured
/// again: a disturbance passes, a regression stays. `run` makes a run of what was measured; `again` measures the cases
/// of a filter once more, for the n-th time.
pub(super) fn confirmed<M>(
    args: &Args,
    old: Option<&Run>,
    measured: &mut M,
    run: impl Fn(&M) -> Run,
    mut again: impl FnMut(&mut M, &Filter, usize) -> Result<(), Failure>,
) -> Result<Option<Comparison>, Failure> {
    let Some(old) = old else { return Ok(None) };
    let look = |measured: &M| Comparison::new(old, &run(measured), threshold(args));
    let mut comparison = look(measured);
    for n in 0..AGAIN {
        let count = comparison.slower().count();
        if count == 0 {
            break;
        }
        println!("{count} cases seem slower: measuring them again");
        again(measured, &Filter::names(comparison.slower()), n)?;
        comparison = look(measured);
    }
    Ok(Some(comparison))
}

/// `--with NEW.json`: two files, nothing is measured.
pub(super) fn files(args: &Args) -> Result<(), Failure> {
    let (Some(old), Some(new)) = (old(args)?, args.with.as_deref()) else { return Ok(()) };
    let comparison = Comparison::new(&old, &read(new)?, threshold(args));
    println!("{}\n{}\n{LEGEND}", comparison_table(&comparison), comparison.summary());
    conclude(args, &old, &comparison)
}

/// Says what a comparison means; a failure if a case became slower.
pub(super) fn conclude(args: &Args, old: &Run, comparison: &Comparison) -> Result<(), Failure> {
    if comparison.rows.is_empty() {
        let theirs = old.cases.first().map_or("", |case| &case.name);
        return Err(Failure::Argument(format!(
            "the two runs have no case in common: the old one has {} such as {theirs}; --list shows those of this \
             command",
            old.cases.len()
        )));
    }
    println!("\nAgainst {}", args.compare.as_deref().unwrap_or(Path::new("")).display());
    for warning in &comparison.warnings {
        println!("{warning}");
    }
    for (names, what) in [(&comparison.gone, "only in the old run"), (&comparison.added, "only in this run")] {
        if let Some(first) = names.first() {
            println!("{} cases are {what}, such as {first}", names.len());
        }
    }
    let slower: Vec<&str> = comparison.slower().collect();
    if slower.is_empty() { Ok(()) } else { Err(Failure::Slower(format!("slower than before: {}", slower.join(", ")))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::args::command;
    use std::path::PathBuf;

    /// Two samples in each of two passes, so many seconds each, in the format of `--json`.
    fn written(name: &str, seconds: &[(&str, f64)]) -> PathBuf {
        let kernel = |name: &str| {
            serde_json::json!({"name": name, "what": "plain", "quick": true, "avx2": false, "case": {"batch": 1, "q_heads": 1,
                "kv_heads": 1, "q_len": 8, "kv_len": 8, "head_dim": 8, "causal": false}})
        };
        let result = |&(name, seconds): &(&str, f64)| {
            serde_json::json!({"kernel": kernel(name), "level": "avx2", "threads": 1, "seconds": seconds, "gflops": 1.0,
                "share_of_peak": 0.5, "samples": [seconds, seconds, seconds, seconds], "thread": [], "peers": [],
                "peaks": [1e9, 1e9, 1e9, 1e9], "passes": [0, 0, 1, 1]})
        };
        let mut report = attn_bench::kernels::KernelReport::new(attn_bench::machine::Machine::default());
        report.results = seconds.iter().map(|one| serde_json::from_value(result(one)).expect("a result")).collect();
        let path = std::env::temp_dir().join(format!("attn-xtask-{}-{name}.json", std::process::id()));
        std::fs::write(&path, serde_json::to_string(&report).unwrap()).unwrap();
        path
    }

    fn run(old: &Path, new: &Path, more: &[&str]) -> Result<(), Failure> {
        let (old, new) = (old.to_string_lossy(), new.to_string_lossy());
        files(&command(&[&["--compare", &old, "--with", &new], more].concat()))
    }

    #[test]
    fn only_a_slower_case_fails() {
        let old = written("old", &[("a", 1.0), ("b", 1.0)]);
        let same = written("same", &[("a", 1.04), ("b", 0.5)]);
        let slow = written("slow", &[("a", 1.0), ("b", 1.2)]);
        let none = written("none", &[("c", 1.0)]);
        assert!(run(&old, &old, &[]).is_ok() && run(&old, &same, &[]).is_ok());
        match run(&old, &slow, &[]) {
            Err(Failure::Slower(text)) => assert_eq!(text, "slower than before: kernels/b/avx2/t1"),
            other => panic!("{other:?}"),
        }
        assert!(run(&old, &slow, &["--threshold", "25"]).is_ok());
        assert!(matches!(run(&old, &same, &["--threshold", "1"]), Err(Failure::Slower(_))));
        assert!(matches!(run(&old, &old, &["--threshold=-1"]), Err(Failure::Argument(_))));
        let error = run(&old, &none, &[]).unwrap_err().to_string();
        assert!(error.contains("no case in common") && error.contains("kernels/a/avx2/t1"), "{error}");
        for path in [old, same, slow, none] {
            std::fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let missing = Path::new("no/such/file.json");
        let error = run(missing, missing, &[]).unwrap_err();
        assert!(matches!(&error, Failure::File(path, _) if path == missing), "{error}");
        let path = std::env::temp_dir().join(format!("attn-xtask-{}-corrupt.json", std::process::id()));
        for (text, why) in
            [("{\"format\": ", "not JSON"), ("{}", "not a report"), ("{\"format\": \"attn-bench/1\"}", "attn-bench/1")]
        {
            std::fs::write(&path, text).unwrap();
            let error = run(&path, &path, &[]).unwrap_err().to_string();
            assert!(error.contains("corrupt.json") && error.contains(why), "{error}");
        }
        std::fs::remove_file(path).unwrap();
    }
}
