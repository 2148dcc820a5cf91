//! `cargo xtask bench`: measures what attention costs.
//!
//! Without an option it measures the cost curve (time and memory against sequence length) and writes the report page;
//! `--input` runs on the tensors of a file instead, `--kernels` on a table of shapes beside the machine's peak and
//! other libraries, `--backward` on gradients, `--decode` on long caches beside a plain read, `--ranks` on ranks of an
//! MPI job beside threads. `--compare` sets a run beside an earlier one. `attn-bench` measures; here are the arguments,
//! the progress and the paths of results.

mod args;
mod compare;
mod curve;
mod decode;
mod input;
mod kernels;
mod output;
mod progress;
mod ranks;

use std::process::ExitCode;

use args::Failure;

pub(crate) use args::Args;

pub(crate) fn run(mut args: Args) -> ExitCode {
    if args.peers && args.python.is_none() && crate::peers::python().exists() {
        args.python = Some(crate::peers::python().to_string_lossy().into_owned());
    }
    if let Some(ignored) = args.level.is_none().then(crate::levels::ignored).flatten() {
        eprintln!("bench: {ignored}");
    }
    let checked = args.only_of_the_curve().and_then(|()| args.json.as_deref().map_or(Ok(()), output::writable));
    let result = checked.and_then(|()| match &args.input {
        _ if args.with.is_some() => compare::files(&args),
        Some(path) => input::run(&args, path),
        None if args.decode => decode::run(&args),
        None if args.ranks => ranks::run(&args),
        None if args.kernels || args.peers || args.backward => kernels::run(&args),
        None if args.python.is_some() || !args.shapes.is_empty() || args.types => Err(Failure::Argument(
            "--python, --shapes and --types go with --kernels, --backward or --peers, --python with --decode too"
                .into(),
        )),
        None => curve::run(&args),
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("bench: {failure}");
            if let Failure::Slower(_) = failure { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}
