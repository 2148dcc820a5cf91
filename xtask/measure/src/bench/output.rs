//! The part that all tables of `cargo xtask bench` share: a run is shown, named and written.

use std::path::Path;

use attn_bench::memory::Heap;
use attn_bench::report::document::Document;
use attn_bench::report::{markdown, terminal};
use peak_alloc::PeakAlloc;

use super::args::{Args, Failure};

/// Counts what the engines allocate. It costs two atomic additions per allocation, and engines allocate nothing per
/// tile.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The counter as the library takes it.
pub(super) const COUNTED: Heap =
    Heap { current: || HEAP.current_usage(), peak: || HEAP.peak_usage(), reset_peak: || HEAP.reset_peak_usage() };

/// An error if a filter leaves nothing. It names some of the cases.
pub(super) fn some_case(args: &Args, names: &[String], all: &[String]) -> Result<(), Failure> {
    if !names.is_empty() {
        return Ok(());
    }
    let filter = args.filter.as_deref().unwrap_or_default();
    let examples: Vec<&str> = all.iter().step_by(all.len().div_ceil(4).max(1)).map(String::as_str).collect();
    Err(Failure::Argument(format!(
        "no case matches `{filter}`; there are {}, such as {} (--list shows them)",
        all.len(),
        examples.join(", ")
    )))
}

/// Shows a run on the terminal, and writes the files of `--markdown` and `--json`.
pub(super) fn show(
    args: &Args,
    kind: &str,
    document: &Document,
    report: &impl serde::Serialize,
) -> Result<(), Failure> {
    println!("{}", terminal::text(document, args.tables));
    if let Some(path) = &args.markdown {
        let file = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::from("# Figures"),
            read => read.map_err(|error| Failure::File(path.clone(), error))?,
        };
        write(path, &markdown::put(&file, kind, document))?;
        println!("Markdown: {}", path.display());
    }
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(report)
            .map_err(|error| Failure::Other(format!("cannot write JSON: {error}")))?;
        write(path, &json)?;
        println!("Samples: {}", path.display());
    }
    Ok(())
}

/// `1 thread`, `2 threads`.
pub(super) fn threads_text(threads: usize) -> String {
    format!("{threads} thread{}", if threads == 1 { "" } else { "s" })
}

/// A file as a link that terminals open.
pub(super) fn url(path: &Path) -> String {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    format!("file://{}", whole.display().to_string().replace(' ', "%20"))
}

/// What was typed, for reports. Of absolute paths only the last name: where things lie on a machine is nobody's
/// business.
pub(super) fn command_line() -> String {
    let quote = |arg: std::ffi::OsString| {
        let path = Path::new(&arg);
        let shown = if path.is_absolute() { path.file_name().unwrap_or(&arg) } else { &arg };
        let arg = shown.to_string_lossy().into_owned();
        if arg.contains(' ') { format!("'{arg}'") } else { arg }
    };
    std::iter::once("cargo xtask".to_string())
        .chain(std::env::args_os().skip(1).map(quote))
        .collect::<Vec<_>>()
        .join(" ")
}

/// Complains of a file that cannot be written before anything has been measured for it. Leaves nothing behind.
pub(super) fn writable(path: &Path) -> Result<(), Failure> {
    let there = path.exists();
    write_with(path, |path| std::fs::OpenOptions::new().append(true).create(true).open(path).map(drop))?;
    if !there {
        std::fs::remove_file(path).map_err(|error| Failure::File(path.to_path_buf(), error))?;
    }
    Ok(())
}

/// Writes a file; makes its folder if it is missing.
pub(super) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    write_with(path, |path| std::fs::write(path, text))
}

fn write_with(path: &Path, write: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<(), Failure> {
    let failed = |error| Failure::File(path.to_path_buf(), error);
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    write(path).map_err(failed)
}
