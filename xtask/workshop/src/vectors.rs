//! `cargo xtask vectors`: picks the conformance cases that are committed, so that a clean checkout can test itself.
//!
//! The full suites are too large for the repository. From each suite this takes, smallest first, every case that shows
//! something new (a parameter value, an input, an output, a kind of name) and then fills up to a budget with the
//! smallest of the others. Cases that the reference engine skips are left out: what is committed is run. Tensors and
//! cases are copied, never changed, but for equal inputs of a suite: they are written once, and all cases name the
//! first. The choice depends on the suites and on what is built, so that running it again gives the same files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use attn_testing::Reference;
use attn_testing::conformance::{Case, Outcome, Runner, Suite};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::Value;

use crate::conformance::BESIDE;

/// Bytes of tensors taken from a suite.
fn budget(suite: &str) -> usize {
    match suite {
        "torch_sdpa" => 320 << 10, // the widest: every option of the plain call
        "mutants" => 520 << 10,    // wrong expectations guard the runner itself
        "positional" => 80 << 10,  // many alike
        // Options that others have too, in new places.
        "torch_sdpa_backward_wide" | "selected_keys" => 96 << 10,
        "ring" => 64 << 10,
        _ => 160 << 10,
    }
}

/// No file may be larger.
const MAX_FILE: usize = 1 << 20;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folders with suites; if several have a suite, the last one wins.
    #[arg(default_values = BESIDE)]
    from: Vec<PathBuf>,
    /// The folder for the selection; a README in it is not changed.
    #[arg(long, default_value = "attn-testing/vectors")]
    to: PathBuf,
}

pub(crate) fn run(args: Args) -> ExitCode {
    match select_all(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("vectors: {message}");
            ExitCode::FAILURE
        }
    }
}

fn select_all(args: &Args) -> Result<(), String> {
    std::fs::create_dir_all(&args.to).map_err(|e| format!("{}: {e}", args.to.display()))?;
    let mut total = 0;
    let mut suites = BTreeMap::new();
    for dir in &args.from {
        for json in Suite::files_in(dir)? {
            suites.insert(json.file_stem().unwrap_or_default().to_string_lossy().into_owned(), json);
        }
    }
    for (name, json) in suites {
        let (of, cases, bytes) = select(&json, &args.to, budget(&name))?;
        println!("{name:24} {cases:3} of {of:3} cases, {bytes:7} bytes");
        total += bytes;
    }
    println!("{total} bytes in all");
    Ok(())
}

/// The names of the cases that the reference engine runs.
fn runnable(json: &Path) -> Result<BTreeSet<String>, String> {
    let suite = Suite::load(json)?;
    let run = |case: &&Case| !matches!(Reference.run(&suite, case), Outcome::Skipped(_));
    Ok(suite.cases.iter().filter(run).map(|case| case.name.clone()).collect())
}

/// Writes the selection from one suite, nothing if none of its cases is run; cases in the suite, cases taken, bytes
/// written.
fn select(json: &Path, to: &Path, budget: usize) -> Result<(usize, usize, usize), String> {
    let at = |path: &Path, e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let text = std::fs::read_to_string(json).map_err(|e| at(json, &e))?;
    let cases: Vec<Value> = serde_json::from_str(&text).map_err(|e| at(json, &e))?;
    let data = json.with_extension("safetensors");
    let bytes = std::fs::read(&data).map_err(|e| at(&data, &e))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| at(&data, &e))?;

    let size = |case: &Value| -> usize {
        tensor_names(case).iter().filter_map(|name| file.tensor(name).ok()).map(|t| t.data().len()).sum()
    };
    let runnable = runnable(json)?;
    let runs = |case: &Value| case["name"].as_str().is_some_and(|name| runnable.contains(name));
    let mut order: Vec<usize> = (0..cases.len()).filter(|&n| runs(&cases[n])).collect();
    if order.is_empty() {
        return Ok((cases.len(), 0, 0));
    }
    order.sort_by_key(|&n| size(&cases[n]));
    let (mut taken, mut seen, mut spent) = (BTreeSet::new(), BTreeSet::new(), 0);
    for only_new in [true, false] {
        for &n in &order {
            let features = features(&cases[n]);
            let new = features.iter().any(|f| !seen.contains(f));
            if !taken.contains(&n) && (new || !only_new) && spent + size(&cases[n]) <= budget {
                spent += size(&cases[n]);
                seen.extend(features);
                taken.insert(n);
            }
        }
    }

    let mut chosen: Vec<Value> = taken.iter().map(|&n| cases[n].clone()).collect();
    let mut tensors: Vec<(String, TensorView<'_>)> = Vec::new();
    for name in chosen.iter_mut().flat_map(|case| names_mut(case, "inputs")) {
        let view = file.tensor(name).map_err(|e| at(&data, &e))?;
        match tensors.iter().find(|(_, other)| *other == view) {
            Some((first, _)) => name.clone_from(first),
            None => tensors.push((name.clone(), view)),
        }
    }
    // A test that changes an output must not change an input.
    for name in chosen.iter_mut().flat_map(|case| names_mut(case, "outputs")) {
        tensors.push((name.clone(), file.tensor(name).map_err(|e| at(&data, &e))?));
    }
    let packed = safetensors::serialize(tensors, None).map_err(|e| at(&data, &e))?;
    let listed = serde_json::to_string(&chosen).map_err(|e| at(json, &e))?.replace("},{\"inputs\"", "},\n{\"inputs\"");
    for (path, content) in [(json, listed.into_bytes()), (&*data, packed)].map(|(path, c)| (path.file_name(), c)) {
        let path = to.join(path.unwrap_or_default());
        if content.len() > MAX_FILE {
            return Err(format!("{} would be {} bytes", path.display(), content.len()));
        }
        std::fs::write(&path, content).map_err(|e| at(&path, &e))?;
    }
    Ok((cases.len(), chosen.len(), spent))
}

/// The tensors that a case names.
fn tensor_names(case: &Value) -> Vec<String> {
    ["inputs", "outputs"]
        .iter()
        .filter_map(|key| case[key].as_object())
        .flat_map(|roles| roles.values().filter_map(|name| name.as_str().map(str::to_owned)))
        .collect()
}

/// The tensors that a case names as inputs, or as outputs, to be changed.
fn names_mut<'c>(case: &'c mut Value, key: &str) -> impl Iterator<Item = &'c mut String> {
    let roles = case.get_mut(key).and_then(Value::as_object_mut).into_iter().flat_map(|roles| roles.values_mut());
    roles.filter_map(|name| if let Value::String(name) = name { Some(name) } else { None })
}

/// What a case shows: each parameter's value, each role, and what its name begins with.
fn features(case: &Value) -> Vec<String> {
    let op = case["op"].as_str().unwrap_or_default();
    let mut features = Vec::new();
    for (key, value) in case["params"].as_object().into_iter().flatten() {
        features.push(format!("{op} {key} {value}"));
    }
    for key in ["inputs", "outputs"] {
        features.extend(case[key].as_object().into_iter().flatten().map(|(role, _)| format!("{op} {key} {role}")));
    }
    let name = case["name"].as_str().unwrap_or_default();
    let first_word = name.trim_start_matches("test_").split('_').next().unwrap_or_default();
    features.push(format!("{op} named {first_word}"));
    features
}
