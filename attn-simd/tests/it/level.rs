//! Which level runs is the one that a run expects: emulated processors say so, or a silent fallback would look like a
//! pass.

use attn_simd::{Level, LevelError};

#[test]
fn the_level_found_is_the_one_expected() {
    let best = Level::available().last().expect("at least the portable level");
    let wanted = std::env::var("ATTN_EXPECT_LEVEL").or_else(|_| std::env::var("ATTN_LEVEL"));
    let wanted = wanted.unwrap_or_else(|_| best.name().to_owned());
    assert_eq!(Level::detect().name(), wanted);
}

/// Set in the child of the test below.
const CHILD: &str = "ATTN_TEST_CHILD";

/// What a process with this `ATTN_LEVEL` writes to the standard error, and which level it finds, twice on each of four
/// threads; nothing where this machine cannot start itself again (emulators).
fn process_with(asked: Option<&std::ffi::OsStr>) -> Option<(String, String)> {
    let mut child = std::process::Command::new(std::env::current_exe().ok()?);
    child.args(["--exact", "level::a_level_that_cannot_run_is_told_once", "--nocapture"]).env(CHILD, "1");
    match asked {
        Some(name) => child.env("ATTN_LEVEL", name),
        None => child.env_remove("ATTN_LEVEL"),
    };
    let done = child.output().ok()?;
    let told = String::from_utf8_lossy(&done.stdout);
    let found = told.lines().find_map(|line| Some(line.split_once("found: ")?.1.to_owned()));
    Some((String::from_utf8_lossy(&done.stderr).into_owned(), found.unwrap_or_else(|| panic!("{told}"))))
}

#[test]
#[cfg_attr(miri, ignore = "starts processes")]
fn a_level_that_cannot_run_is_told_once() {
    if std::env::var_os(CHILD).is_some() {
        let first = Level::try_detect(); // before anything is printed
        let detected = || (Level::detect(), Level::detect());
        let all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(detected)).collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
        });
        assert!(all.iter().all(|&pair| pair == (Level::detect(), Level::detect())));
        assert_eq!(Level::try_detect(), first);
        println!("\nfound: {first:?} {:?}", Level::detect());
        return;
    }
    let best = Level::available().last().expect("at least the portable level");
    let lines = |text: &str| text.lines().filter(|line| line.contains("ATTN_LEVEL")).count();
    // An emulator's child would run on the real processor.
    let Some((silence, found)) = process_with(None).filter(|_| !attn_testing::is_emulated()) else {
        return eprintln!("no process can be started here: nothing was tested");
    };
    assert_eq!((lines(&silence), found), (0, format!("Ok({best:?}) {best:?}")), "{silence}");
    for (name, wanted) in [("", best), ("portable", Level::portable())] {
        let (silence, found) = process_with(Some(name.as_ref())).expect("as before");
        assert_eq!((lines(&silence), found), (0, format!("Ok({wanted:?}) {wanted:?}")), "{name}: {silence}");
    }
    let (line, found) = process_with(Some("sse9".as_ref())).expect("as before");
    assert_eq!(found, format!("Err({:?}) {best:?}", LevelError::Unknown));
    let want = format!("attn: ATTN_LEVEL=sse9 is ignored ({}); {best:?} runs", LevelError::Unknown);
    assert_eq!(line.lines().filter(|line| *line == want).count(), 1, "{line}");
    assert_eq!(lines(&line), 1, "{line}");
    #[cfg(unix)]
    {
        let (line, found) = process_with(Some(std::os::unix::ffi::OsStrExt::from_bytes(b"\xff"))).expect("as before");
        assert_eq!((lines(&line), found), (1, format!("Err({:?}) {best:?}", LevelError::Unknown)), "{line}");
    }
    // A name of a level that this machine lacks is another error.
    if let Some((name, error)) = Level::names().find_map(|name| Some((name, Level::by_name(name).err()?))) {
        let (line, found) = process_with(Some(name.as_ref())).expect("as before");
        assert_eq!((lines(&line), found), (1, format!("Err({error:?}) {best:?}")), "{line}");
    }
}
