//! The finished steps of a run, in a file, so that an interrupted run goes on at its next step.
//!
//! The file holds lines of JSON: first a key that identifies the run, then a line per finished step. A run with another
//! key (other options, another build, another machine) starts anew. A last line that was cut off counts as not written.
//! When a run ends, its file is deleted.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct Line {
    step: String,
    result: Box<RawValue>,
}

/// The steps of a run that are done.
#[derive(Debug, Default)]
pub struct Journal {
    file: Option<(PathBuf, File)>,
    done: HashMap<String, Box<RawValue>>,
}

impl Journal {
    /// Remembers nothing.
    pub fn none() -> Self {
        Self::default()
    }

    /// Opens the journal of the run that `key` names, with the steps that an interrupted one left; an empty one if
    /// there was none, or with `fresh`.
    ///
    /// # Errors
    /// Where the file cannot be read or written.
    pub fn open(path: &Path, key: &str, fresh: bool) -> io::Result<Self> {
        let mut done = HashMap::new();
        match std::fs::read_to_string(path) {
            Ok(text) if !fresh => {
                let mut lines = text.lines();
                if lines.next().and_then(|first| serde_json::from_str::<String>(first).ok()).as_deref() == Some(key) {
                    for line in lines.map_while(|line| serde_json::from_str::<Line>(line).ok()) {
                        done.insert(line.step, line.result);
                    }
                }
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        // Written again from the lines that parsed: a line that was cut off must not swallow the next one.
        let mut text = serde_json::to_string(key)? + "\n";
        for (step, result) in &done {
            text += &(serde_json::to_string(&Line { step: step.clone(), result: result.clone() })? + "\n");
        }
        let whole = path.with_extension("new");
        std::fs::write(&whole, text)?;
        std::fs::rename(&whole, path)?;
        let file = OpenOptions::new().append(true).open(path)?;
        Ok(Self { file: Some((path.to_path_buf(), file)), done })
    }

    /// Steps that an earlier run did.
    pub fn len(&self) -> usize {
        self.done.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.done.is_empty()
    }

    /// The result of a step, if it is done and reads as a `T`.
    pub fn get<T: DeserializeOwned>(&self, step: &str) -> Option<T> {
        serde_json::from_str(self.done.get(step)?.get()).ok()
    }

    /// Notes the result of a step.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub fn put<T: Serialize>(&mut self, step: &str, result: &T) -> io::Result<()> {
        let Some((_, file)) = &mut self.file else { return Ok(()) };
        let line = Line { step: step.to_string(), result: to_raw_value(result)? };
        writeln!(file, "{}", serde_json::to_string(&line)?)?;
        self.done.insert(line.step, line.result);
        file.flush()
    }

    /// The run is over: its file goes.
    ///
    /// # Errors
    /// Where the file cannot be removed.
    pub fn finish(self) -> io::Result<()> {
        self.file.map_or(Ok(()), |(path, _)| std::fs::remove_file(path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("attn-bench-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn an_interrupted_run_goes_on() {
        let folder = Folder::new("resume");
        let path = folder.0.join("sub/journal");
        let mut journal = Journal::open(&path, "a run", false).unwrap();
        journal.put("one", &vec![1.0 / 3.0, 2.0]).unwrap();
        journal.put("two", &"b").unwrap();
        drop(journal); // interrupted
        let mut journal = Journal::open(&path, "a run", false).unwrap();
        assert_eq!((journal.len(), journal.get::<Vec<f64>>("one")), (2, Some(vec![1.0 / 3.0, 2.0])));
        assert_eq!(journal.get::<Vec<f64>>("two"), None, "of another type");
        journal.put("three", &3).unwrap();
        drop(journal);
        assert_eq!(Journal::open(&path, "a run", false).unwrap().get::<u32>("three"), Some(3));
        let journal = Journal::open(&path, "a run", false).unwrap();
        journal.finish().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn another_run_and_a_fresh_one_start_anew() {
        let folder = Folder::new("key");
        let path = folder.0.join("journal");
        for (key, fresh) in [("another", false), ("a run", true)] {
            Journal::open(&path, "a run", true).unwrap().put("one", &1).unwrap();
            assert!(!Journal::open(&path, "a run", false).unwrap().is_empty());
            assert!(Journal::open(&path, key, fresh).unwrap().is_empty(), "{key}");
        }
    }

    #[test]
    fn a_line_that_was_cut_off_does_not_count() {
        let folder = Folder::new("cut");
        let path = folder.0.join("journal");
        let mut journal = Journal::open(&path, "a run", true).unwrap();
        journal.put("one", &1).unwrap();
        journal.put("two", &2).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 4]).unwrap();
        let mut journal = Journal::open(&path, "a run", false).unwrap();
        assert_eq!((journal.get::<u32>("one"), journal.get::<u32>("two")), (Some(1), None));
        journal.put("two", &22).unwrap();
        assert_eq!(Journal::open(&path, "a run", false).unwrap().get::<u32>("two"), Some(22));
        std::fs::write(&path, "not a journal").unwrap();
        assert!(Journal::open(&path, "a run", false).unwrap().is_empty());
    }
}
