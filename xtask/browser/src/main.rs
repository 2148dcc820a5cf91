//! Opens the heat map's pages in the installed Chromium and uses them: `attn-browser FOLDER`.
//!
//! `cargo xtask heatmap --check` writes the pages (`xtask/measure/src/heatmap/check.rs`) and starts this program.
//! [`checks`] clicks, types and compares; [`page`] is a page of the browser, which headless_chrome drives. Pictures are
//! left beside the pages.

mod checks;
mod page;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(folder) = std::env::args_os().nth(1) else {
        eprintln!("browser: the folder of the pages is missing");
        return ExitCode::FAILURE;
    };
    match checks::run(Path::new(&folder)) {
        Ok(done) => {
            println!("browser: {done} checks passed; pictures in {}", Path::new(&folder).display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("browser: {error:#}");
            ExitCode::FAILURE
        }
    }
}
