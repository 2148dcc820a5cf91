//! The folders that suites are read from.

use std::path::{Path, PathBuf};

use attn_testing::conformance::Suite;

use xtask::root::root;

/// What is run without arguments, where it exists.
pub(crate) const BESIDE: [&str; 2] = ["../shared/conformance", "../shared/conformance-new"];

/// What was found.
#[derive(Default)]
pub(super) struct Found {
    pub(super) suites: Vec<Suite>,
    /// Suites that cannot be read: they must not look like suites that passed.
    pub(super) unreadable: Vec<String>,
    /// Folders of the default that are not there: counted, so that a short run does not look like a whole one.
    pub(super) absent: Vec<PathBuf>,
}

/// Loads all suites of the folders, or those beside the workspace, or the selection that is committed.
pub(super) fn load(dirs: &[PathBuf]) -> Result<Found, String> {
    if !dirs.is_empty() {
        return of(dirs);
    }
    beside(&root(), &BESIDE)
}

/// Those of the default folders that are there, seen from the workspace's root.
fn beside(root: &Path, folders: &[&str]) -> Result<Found, String> {
    let (mut present, absent): (Vec<PathBuf>, Vec<PathBuf>) =
        folders.iter().map(|dir| root.join(dir)).partition(|dir| dir.is_dir());
    for dir in &absent {
        eprintln!("conformance: {} DOES NOT EXIST: ITS SUITES ARE NOT RUN", dir.display());
    }
    if present.is_empty() {
        let committed = root.join("attn-testing/vectors");
        eprintln!("conformance: ONLY THE COMMITTED SELECTION IS RUN: {}", committed.display());
        present.push(committed);
    }
    Ok(Found { absent, ..of(&present)? })
}

/// All suites of these folders. One whose name is taken is called by its folder too.
fn of(dirs: &[PathBuf]) -> Result<Found, String> {
    let mut found = Found::default();
    for dir in dirs {
        let files = Suite::files_in(dir)?;
        if files.is_empty() {
            return Err(format!("{} holds no suites", dir.display()));
        }
        for file in files {
            match Suite::load(&file) {
                Ok(mut suite) => {
                    if found.suites.iter().any(|other| other.name == suite.name) {
                        let folder = dir.file_name().unwrap_or(dir.as_os_str()).to_string_lossy();
                        suite.name = format!("{folder}/{}", suite.name);
                    }
                    found.suites.push(suite);
                }
                Err(message) => found.unreadable.push(message),
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_are_not_there_are_counted() {
        let root = root();
        let found = beside(&root, &["attn-testing/vectors", "no-such-folder"]).expect("the committed suites");
        assert_eq!(found.absent, [root.join("no-such-folder")]);
        assert!(found.suites.len() >= 10 && found.unreadable.is_empty());
        // Without any, the committed ones are run, and what is missing is counted all the same.
        let fallback = beside(&root, &["nowhere", "no-such-folder"]).expect("the committed suites");
        assert_eq!((fallback.suites.len(), fallback.absent.len()), (found.suites.len(), 2));
        // One that somebody names must be there.
        assert!(of(&[root.join("no-such-folder")]).is_err());
    }

    #[test]
    fn suites_of_the_same_name_are_told_apart() {
        let dir = root().join("attn-testing/vectors");
        let found = of(&[dir.clone(), dir]).expect("the committed suites");
        let names: std::collections::BTreeSet<&str> = found.suites.iter().map(|suite| suite.name.as_str()).collect();
        assert_eq!(names.len(), found.suites.len());
        assert!(names.contains("mutants") && names.contains("vectors/mutants"));
    }
}
