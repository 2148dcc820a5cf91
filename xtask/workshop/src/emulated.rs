//! `cargo xtask emulated`: the tests of the amx kernel on an emulated processor that has the real instructions, and
//! some of all kernels on its AVX-512, which not every machine has.
//!
//! `../shared/amx-emulator` holds the emulator: Bochs with AMX mended, which runs Debian's kernel. It is built once,
//! into `target/ci/amx-emulator`. The tests of `attn-simd` are [those of `cargo test --workspace`](mod@programs). They
//! are taken along with the libraries that they load, and run there with `ATTN_TEST_LEVELS=amx`, say: the level must be
//! there, and the exact model of the instructions is left out, because it is far too slow there. With `--cpu` QEMU runs
//! them, on a processor without AMX ([`user_mode`]).
//!
//! The kernel is told that the time-stamp counter is reliable. Else it doubts the counter during long runs and changes
//! its own code, of which the emulator keeps the old form: it then takes the same interrupt for ever.
//!
//! A test that nobody ran proves nothing. The same program says on this machine which tests each filter chooses, and
//! as many have to pass there.

mod user_mode;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::dist::succeed;
use crate::install;
use crate::need::Need;
use crate::process;
use crate::programs::{self, Tests};
use xtask::root::root;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// First install missing tools (rustup; apt-get, as root), and build the emulator of AMX.
    #[arg(long)]
    install: bool,
    /// Run tests of all kernels under QEMU instead, on this processor, which lacks levels that others have.
    #[arg(long, value_name = "NAME")]
    cpu: Option<user_mode::Cpu>,
}

/// What the command cannot run without.
pub(crate) const NEEDS: &[Need] =
    &[Need::Linux, Need::Arch("x86_64"), Need::Folder("../shared/amx-emulator"), Need::AmxEmulator];

/// What it cannot run without where a processor is named.
pub(crate) const QEMU: &[Need] =
    &[Need::Linux, Need::Arch("x86_64"), Need::Program("qemu-x86_64-static", "qemu-user-static")];

/// How long a start may take.
const LIMIT: Duration = Duration::from_secs(600);

/// How long one start of the emulated machine may take, in seconds: four times what the longest takes alone.
const BOOT_SECONDS: u64 = 450;

/// One start of the emulated machine: what runs there.
struct Boot {
    name: &'static str,
    tests: Tests,
    /// The levels that the tests run on.
    levels: &'static str,
    /// Parts of the names of the tests that run. Each has to choose some.
    filters: &'static [&'static str],
    /// Options that leave some of them out.
    but: &'static [&'static str],
    /// Tests by name that have to be among them.
    among: &'static [&'static str],
}

/// The longest first: two run at a time.
const BOOTS: &[Boot] = &[
    Boot {
        name: "amx",
        tests: Tests::Integration,
        levels: "amx",
        filters: &["amx_kernel::", "level::the_level_found"],
        // The laws run on the model alone; the rest is in the next one.
        but: &["--skip=laws::", "--skip=amx_kernel::bits::", "--skip=amx_kernel::fast_keeps"],
        among: &["amx_kernel::f32_is_as_exact_as_on_vectors", "level::the_level_found_is_the_one_expected"],
    },
    Boot {
        name: "amx-bits",
        tests: Tests::Integration,
        levels: "amx",
        filters: &[
            "amx_kernel::bits::",
            "amx_kernel::fast_keeps",
            "backward::halves",
            "backward::hidden",
            "backward::amx_loses",
        ],
        but: &[],
        among: &[
            "amx_kernel::bits::a_row_has_the_same_bits_whatever_stands_beside_it",
            "backward::hidden_nan_changes_no_bit",
        ],
    },
    Boot {
        name: "avx512",
        tests: Tests::Integration,
        levels: "avx512,avx512bf16",
        filters: &[
            "strips::blocks_that",
            "strips::a_row",
            "strips::a_dense",
            "edges::keys_that",
            "decode::decoding_and",
            "backward::strides",
            "backward::tables",
            "beside::heads_in",
            "quantized::rows_that",
        ],
        but: &[],
        among: &[
            "beside::heads_in_bytes_and_in_pages",
            "strips::blocks_that_see_different_keys",
            "decode::decoding_and_prefilling_give_the_same_bits",
            "backward::tables_of_masks",
        ],
    },
    Boot {
        name: "guard",
        tests: Tests::Integration,
        levels: "amx",
        filters: &["guard::"],
        but: &[],
        among: &[
            "guard::f32_touches_nothing_beyond_its_buffers",
            "guard::f16_touches_nothing_beyond_its_buffers",
            "guard::bf16_touches_nothing_beyond_its_buffers",
            "guard::every_start_from_0_to_63_bytes_gives_the_same_bits",
        ],
    },
    Boot {
        name: "mxcsr",
        tests: Tests::Integration,
        levels: "amx",
        filters: &["mxcsr::"],
        but: &[],
        among: &["mxcsr::the_control_register_is_as_before"],
    },
    Boot {
        name: "isa",
        tests: Tests::Unit,
        levels: "amx",
        filters: &["isa::", "gemv::packed::"],
        but: &[],
        among: &[
            "gemv::packed::tests::numbers_are_those_of_the_core_at_every_level",
            "isa::amx::tests::the_processor_computes_what_the_model_says",
            "isa::amx::permission::tests::a_refused_permission_is_an_answer",
            "isa::amx::permission::tests::small_signal_stacks_and_the_permission_exclude_each_other",
        ],
    },
];

pub(crate) fn run(args: Args) -> ExitCode {
    process::end_group_on_interrupt();
    match all(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("emulated: {message}");
            ExitCode::FAILURE
        }
    }
}

fn all(args: &Args) -> Result<(), String> {
    let missing = install::missing(if args.cpu.is_some() { QEMU } else { NEEDS }, args.install);
    if !missing.is_empty() {
        return Err(format!("{} (or: cargo xtask emulated --install)", missing.join("; ")));
    }
    args.cpu.map_or_else(boots, user_mode::run)
}

/// Starts the machine for each of [`BOOTS`].
fn boots() -> Result<(), String> {
    fs::create_dir_all(folder()).map_err(|error| format!("{}: {error}", folder().display()))?;
    let start = Instant::now();
    let (script, programs) = (script()?, programs()?);
    println!("built in {:.0} s", start.elapsed().as_secs_f64());
    let (next, failures) = (Mutex::new(BOOTS.iter()), Mutex::new(Vec::new()));
    let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while let Some(boot) = take() {
                    let begin = Instant::now();
                    let result = on_emulator(boot, &script, &programs[boot.tests as usize]);
                    let seconds = begin.elapsed().as_secs_f64();
                    match result {
                        Ok(text) => println!("{text}{}: ok in {seconds:.0} s", boot.name),
                        Err(message) => {
                            println!("{}: FAILED after {seconds:.0} s", boot.name);
                            failures.lock().unwrap_or_else(PoisonError::into_inner).push(message);
                        }
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
    if failures.is_empty() { Ok(()) } else { Err(failures.join("\n")) }
}

/// Where the emulator is, and what this command writes.
fn folder() -> PathBuf {
    root().join("target/ci/amx-emulator")
}

/// Runs a command; returns what it wrote, and whether it ended well.
fn logged(command: Command, name: &str) -> Result<(String, bool), String> {
    let path = folder().join(format!("{name}.log"));
    let log = File::create(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let end = process::run(command, &log, LIMIT);
    let bytes = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok((String::from_utf8_lossy(&bytes).into_owned(), end.is_success()))
}

/// Writes the script that starts the emulator, changed; returns where it is.
fn script() -> Result<PathBuf, String> {
    let (from, to) = (root().join("../shared/amx-emulator"), folder().join("run.sh"));
    let file = from.join("run.sh");
    let text = fs::read_to_string(&file).map_err(|error| format!("{}: {error}", file.display()))?;
    let text = changed(&text, &from).ok_or_else(|| format!("{}: no APPEND, here= or cp of busybox", file.display()))?;
    fs::write(&to, text).map_err(|error| format!("{}: {error}", to.display()))?;
    Ok(to)
}

/// Copies the libraries that a program loads, and its loader, to the same places of the emulated machine's disk.
const LIBRARIES: &str = r#"for f in $(ldd "$program" | grep -o '/[^ ]*'); do install -D "$f" "$work/root$f"; done"#;

/// The text of the emulator's script with a clock that its kernel trusts and a program's libraries, to be run from
/// another folder than its own.
fn changed(text: &str, folder: &Path) -> Option<String> {
    let (mut clock, mut here, mut libraries) = (false, false, false);
    let mut change = |line: &str| match line {
        _ if line.trim_start().starts_with("APPEND ") => {
            clock = true;
            format!("{line} tsc=reliable\n")
        }
        _ if line.starts_with("here=") => {
            here = true;
            format!("here='{}'\n", folder.display())
        }
        _ if line.starts_with("cp ") && line.contains("\"$program\"") => {
            libraries = true;
            format!("{line}\n{LIBRARIES}\n")
        }
        _ => format!("{line}\n"),
    };
    let text = text.lines().map(&mut change).collect();
    (clock && here && libraries).then_some(text)
}

/// The test programs, in the order of [`Tests`], without what only debuggers read: the emulated disk is memory.
fn programs() -> Result<[PathBuf; 2], String> {
    let [unit, integration] = programs::of_simd()?;
    let stripped = |program: PathBuf, name: &str| {
        let to = folder().join(name);
        succeed(Command::new("strip").arg("-o").arg(&to).arg(program))?;
        Ok::<_, String>(to)
    };
    Ok([stripped(unit, "unit")?, stripped(integration, "integration")?])
}

/// The names of the tests that a filter chooses, as the program says on this machine; ignored ones do not count.
fn chosen(program: &Path, filter: &str, but: &[&str]) -> Result<Vec<String>, String> {
    let list = |ignored: &[&str]| {
        let output = Command::new(program).args([filter, "--list"]).args(but).args(ignored).output();
        let output = output.map_err(|error| format!("{}: {error}", program.display()))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Ok::<_, String>(text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
    };
    let (all, ignored): (Vec<_>, Vec<_>) = (list(&[])?, list(&["--ignored"])?);
    Ok(all.into_iter().filter(|name| !ignored.contains(name)).collect())
}

/// Runs tests on the emulated machine: the lines that say what became of them, or why this is no pass.
fn on_emulator(boot: &Boot, script: &Path, program: &Path) -> Result<String, String> {
    let mut expected = Vec::new();
    for filter in boot.filters {
        let names = chosen(program, filter, boot.but)?;
        if names.is_empty() {
            return Err(format!("{}: no test is called {filter}…", boot.name));
        }
        expected.extend(names);
    }
    if let Some(name) = boot.among.iter().find(|name| expected.iter().all(|other| other != *name)) {
        return Err(format!("{}: there is no test {name}", boot.name));
    }
    let start = || {
        let mut command = Command::new("bash");
        command.arg(script).env("EMULATOR_DIR", folder()).current_dir(root());
        command.args(["-e", &format!("ATTN_TEST_LEVELS={}", boot.levels), "-e", "ATTN_EXPECT_LEVEL=amx"]);
        // Tests of many kernels go through every level that is there.
        command.args(if boot.levels == "amx" { &[][..] } else { &["-e", "ATTN_EMULATED=1"] });
        command.args(["-t", &BOOT_SECONDS.to_string()]);
        command.arg(program).arg("--test-threads=1").args(boot.filters).args(boot.but);
        logged(command, boot.name)
    };
    let (mut text, mut ended_well) = start()?;
    if !text.contains("test result: ") {
        eprintln!("{}: the tests did not come to an end. The machine is started once more.\n{text}", boot.name);
        (text, ended_well) = start()?;
    }
    let passed = passed(&text);
    if !ended_well || passed != Some(expected.len()) {
        let passed = passed.map_or("no result".to_owned(), |passed| format!("{passed} passed"));
        return Err(format!("{}: {passed}, not {} tests:\n{text}", boot.name, expected.len()));
    }
    Ok(text.lines().filter(|line| line.starts_with("test ")).map(|line| format!("{line}\n")).collect())
}

/// How many tests passed, if the program ran to its end and none failed.
fn passed(text: &str) -> Option<usize> {
    let (_, result) = text.split_once("test result: ok. ")?;
    let (passed, rest) = result.split_once(" passed; ")?;
    rest.starts_with("0 failed; ").then(|| passed.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_run_without_failures_counts() {
        let ok =
            "[ 1.0] kernel\ntest a ... ok\ntest result: ok. 14 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out";
        assert_eq!(passed(ok), Some(14));
        assert_eq!(passed("test result: FAILED. 13 passed; 1 failed; 0 ignored"), None);
        assert_eq!(passed("test a ... ok\n[ 9.0] reboot: Power down"), None);
        assert_eq!(passed(""), None);
    }

    #[test]
    fn the_script_changes_in_three_lines() {
        let text = "#!/bin/bash\nhere=$(pwd)\ncp b \"$program\" r\n  APPEND console=ttyS0 quiet\nexit\n";
        let new = changed(text, Path::new("/e")).expect("it has all of them");
        let libraries = LIBRARIES;
        assert_eq!(
            new,
            format!(
                "#!/bin/bash\nhere='/e'\ncp b \"$program\" r\n{libraries}\n  APPEND console=ttyS0 quiet tsc=reliable\nexit\n"
            )
        );
        for line in text.lines().filter(|line| !["#!/bin/bash", "exit"].contains(line)) {
            assert_eq!(changed(&text.replace(line, ""), Path::new("/e")), None, "without {line}");
        }
    }
}
