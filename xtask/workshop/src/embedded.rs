//! `cargo xtask embedded`: attn-core on emulated boards, against the host, with what it costs.
//!
//! `firmware` holds the programs. [`boards`] are the processors, [`build`] compiles for them, [`image`]
//! weighs an image and looks for what must not be in it, [`code`] reads its disassembly, [`emulate`] runs a program,
//! [`report`] prints the tables and holds figures to their limits. What is shown:
//!
//! - the project that users copy, `firmware/skeleton`, builds as it is and runs in QEMU;
//! - an image of each entry point links although its panic handler is defined nowhere, and one that can panic does not;
//! - no allocator, no formatting, and in the images of int8 no floating-point instruction or routine;
//! - every board prints the host's bits, for every case;
//! - flash, static RAM, the deepest stack and instruction counts. Instructions are no measure of time.

mod boards;
mod build;
mod code;
mod emulate;
mod image;
mod report;

use std::process::ExitCode;

use crate::install;
use crate::process;
use boards::BOARDS;
pub(crate) use boards::NEEDS;
use image::{ENTRIES, Image};
use report::Seen;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// First install missing tools (rustup; apt-get, as root).
    #[arg(long)]
    install: bool,
    /// Run only these boards.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    only: Vec<String>,
}

pub(crate) fn run(args: Args) -> ExitCode {
    process::end_group_on_interrupt();
    match all(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(message) => {
            eprintln!("embedded: {message}");
            ExitCode::FAILURE
        }
    }
}

fn all(args: &Args) -> Result<bool, String> {
    if let Some(name) = args.only.iter().find(|name| BOARDS.iter().all(|board| board.name != name.as_str())) {
        let names: Vec<_> = BOARDS.iter().map(|board| board.name).collect();
        return Err(format!("no board is called {name}; there are: {}", names.join(", ")));
    }
    let missing = install::missing(NEEDS, args.install);
    if !missing.is_empty() {
        return Err(format!("{} (or: cargo xtask embedded --install)", missing.join("; ")));
    }
    let host = build::host(&["vectors", "gesture"])?;
    let [vectors, gesture] = host.each_ref().map(|program| emulate::on_host(program));
    let (vectors, gesture) = (vectors?, gesture?);
    println!("host: {} lines of results", vectors.cases.len() + gesture.cases.len());

    let mut seen = Vec::new();
    for board in BOARDS.iter().filter(|board| args.only.is_empty() || args.only.iter().any(|name| name == board.name)) {
        let programs = build::board(board)?;
        let images = ENTRIES.iter().map(|entry| Image::read(board, entry, &programs)).collect::<Result<Vec<_>, _>>()?;
        let here = Seen {
            board,
            images,
            vectors: emulate::run(board, &programs.path("vectors"))?,
            gesture: emulate::run(board, &programs.path("examples/gesture"))?,
        };
        for (of_host, here) in [(&vectors, &here.vectors), (&gesture, &here.gesture)] {
            of_host.same_cases(here).map_err(|message| format!("{}: {message}", board.name))?;
        }
        println!("{}: {} runs the host's bits", board.name, board.core);
        seen.push(here);
    }
    build::control_does_not_link()?;
    println!("an image that can panic does not link");
    build::skeleton_runs()?;
    println!("firmware/skeleton builds and runs");
    Ok(report::print(&seen, &gesture))
}
