//! The house rules, each a function from a file to what is wrong with it.

use super::code::{code_only, words};

/// Where `unsafe` may stand; a name that ends with `/` is a folder. ARCHITECTURE.md says why each of them needs it.
pub(super) const UNSAFE_LEAVES: &[&str] = &[
    "attn-simd/src/isa.rs",
    "attn-simd/src/isa/",
    "attn-simd/src/gemm.rs",
    "attn-simd/src/gemm/",
    "attn-simd/src/gemv.rs",
    "attn-simd/src/gemv/",
    "attn-simd/src/pages.rs",
    "attn-simd/src/workspace.rs",
    "attn-simd/src/queue.rs",
    "attn-simd/src/queue/",
    "no-panic/src/",
    "firmware/src/",
    "attn-capi/src/abi.rs",
    "attn-capi/src/raw.rs",
    "attn-capi/src/raw/",
    "attn-capi/tests/it/c.rs",
    "attn-python/src/raw.rs",
    "attn-simd/tests/it/guard.rs",
    "attn-simd/tests/it/mxcsr.rs",
];

/// Hosts that texts may point to. Everything else is a typing error, or a mirror that only one machine knows.
const HOSTS: &[&str] = &[
    "arxiv.org",
    "blog.rust-lang.org",
    "doc.rust-lang.org",
    "docs.rs",
    "doi.org",
    "github.com",
    "keepachangelog.com",
    "onnx.ai",
    "pytorch.org",
    "semver.org",
    "www.apache.org",
    "www.intel.com",
    "www.w3.org",
];

/// Beginnings of paths that exist on one machine only. Written in two parts, so that this file passes its own rule.
const MACHINE_PATHS: &[&str] = &[
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
    concat!("/wo", "rk/"),
    concat!("/Us", "ers/"),
    concat!("C:\\Us", "ers"),
];

/// Lines of a Rust file from which on it is told to split, and above which it must.
const LINES: (usize, usize) = (400, 600);
/// Columns of a line: rustfmt wraps code there, but neither comments nor strings.
const COLUMNS: usize = 120;
/// Bytes of one file, and of all together: a checkout stays small, whatever data the tests would like.
const FILE_BYTES: usize = 1 << 20;
pub(super) const TOTAL_BYTES: usize = 8 << 20;

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// The file, relative to the workspace.
    pub(super) path: String,
    /// Its line, from 1; 0 for the file as a whole.
    pub(super) line: usize,
    /// What is wrong.
    pub(super) message: String,
    /// Whether it only deserves a word.
    pub(super) warning: bool,
}

/// One file, as read.
pub(super) struct Source<'f> {
    /// Relative to the workspace, with `/`.
    pub(super) path: &'f str,
    /// What it holds.
    pub(super) bytes: &'f [u8],
}

impl Source<'_> {
    fn finding(&self, line: usize, message: impl Into<String>) -> Finding {
        Finding { path: self.path.to_owned(), line, message: message.into(), warning: false }
    }

    fn warning(&self, line: usize, message: impl Into<String>) -> Finding {
        Finding { warning: true, ..self.finding(line, message) }
    }
}

/// All rules on one file.
pub(super) fn check(source: &Source<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    if source.bytes.len() > FILE_BYTES {
        found.push(
            source.finding(0, format!("{} bytes; at most {FILE_BYTES} are kept in the repository", source.bytes.len())),
        );
    }
    let Ok(text) = std::str::from_utf8(source.bytes) else {
        return found; // data
    };
    found.extend(places(source, text));
    if source.path.ends_with(".md") {
        found.extend(prose(source, text));
    }
    if source.path.ends_with(".rs") {
        let code = code_only(text);
        found.extend(header(source, text));
        found.extend(length(source, text, &code));
        found.extend(unsafe_code(source, text, &code));
        found.extend(leftovers(source, &code));
    }
    found
}

/// A Rust file opens with what it holds.
fn header(source: &Source<'_>, text: &str) -> Option<Finding> {
    let first = text.lines().next().unwrap_or_default();
    let opens = first.strip_prefix("//!").is_some_and(|rest| !rest.trim().is_empty());
    (!opens).then(|| source.finding(1, "does not open with `//!` and what the file holds"))
}

/// Files stay short enough to read, lines short enough to see.
fn length(source: &Source<'_>, text: &str, code: &str) -> Vec<Finding> {
    let lines = text.lines().count();
    let mut found = Vec::new();
    if lines > LINES.1 {
        found.push(source.finding(0, format!("{lines} lines; split it, {} is the limit", LINES.1)));
    } else if lines > LINES.0 {
        found.push(source.warning(0, format!("{lines} lines; about {} is the aim", LINES.0)));
    }
    for (i, (line, code)) in text.lines().zip(code.lines()).enumerate() {
        let columns = line.chars().count();
        if columns > COLUMNS && is_prose(line, code) {
            found.push(source.finding(i + 1, format!("a comment of {columns} columns; {COLUMNS} are the limit")));
        }
    }
    found
}

/// Prose is as narrow as comments. Rows of tables cannot be broken, nor what is too long by itself.
fn prose(source: &Source<'_>, text: &str) -> Vec<Finding> {
    let wide = |line: &str| line.chars().count() > COLUMNS && line.trim().contains(' ') && !line.starts_with('|');
    let lines = text.lines().enumerate().filter(|(_, line)| wide(line));
    lines
        .map(|(i, line)| source.finding(i + 1, format!("{} columns; {COLUMNS} are the limit", line.chars().count())))
        .collect()
}

/// Whether a line ends with a comment that could be broken: rows of tables, code in documentation and strings cannot.
fn is_prose(line: &str, code: &str) -> bool {
    let from = code.trim_end().chars().count();
    let rest: String = line.chars().skip(from).collect();
    rest.trim_start().starts_with("//") && !rest.trim_start().trim_start_matches(['/', '!', ' ']).starts_with('|')
}

/// `unsafe` stands in the leaf modules only, and a `SAFETY:` line above each block and implementation.
fn unsafe_code(source: &Source<'_>, text: &str, code: &str) -> Vec<Finding> {
    let leaf =
        UNSAFE_LEAVES.iter().any(|&leaf| source.path == leaf || leaf.ends_with('/') && source.path.starts_with(leaf));
    let lines: Vec<_> = text.lines().collect();
    let mut found = Vec::new();
    for (i, line) in code.lines().enumerate() {
        for at in words(line, "unsafe") {
            let rest = line[at + "unsafe".len()..].trim_start();
            let next = code.lines().nth(i + 1).unwrap_or_default().trim_start();
            let needs_proof =
                rest.starts_with('{') || rest.starts_with("impl") || rest.is_empty() && next.starts_with('{');
            if !leaf {
                found.push(source.finding(i + 1, "`unsafe` outside of the leaf modules that ARCHITECTURE.md names"));
            } else if needs_proof && !has_safety_line(&lines, i) {
                found.push(source.finding(i + 1, "`unsafe` without a `SAFETY:` line above it"));
            }
        }
    }
    found
}

/// Whether a `SAFETY:` comment stands on the line, or above it with only comments, attributes and the head of the same
/// statement between.
fn has_safety_line(lines: &[&str], line: usize) -> bool {
    let says = |i: usize| lines.get(i).is_some_and(|text| text.contains("SAFETY:"));
    if says(line) {
        return true;
    }
    for i in (0..line).rev() {
        let text = lines.get(i).map_or("", |text| text.trim());
        if text.starts_with("//") || text.starts_with("#[") {
            if says(i) {
                return true;
            }
        } else if text.is_empty() || text.ends_with(['{', '}', ';', ',']) {
            return false;
        }
    }
    false
}

/// Nothing is left over from trying things out.
fn leftovers(source: &Source<'_>, code: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for (i, line) in code.lines().enumerate() {
        for name in ["todo", "dbg", "unimplemented"] {
            if words(line, name).any(|at| line[at + name.len()..].starts_with('!')) {
                found.push(source.finding(i + 1, format!("`{name}!` is not finished code")));
            }
        }
    }
    found
}

/// No path of one machine, and no host that readers cannot reach.
fn places(source: &Source<'_>, text: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    // The lock file names the registry by the address that cargo itself writes for everybody.
    let lock = source.path.ends_with("Cargo.lock");
    for (i, line) in text.lines().enumerate() {
        for path in MACHINE_PATHS {
            let absolute = |(at, _): (usize, &str)| {
                !line[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || "._-~})".contains(c))
            };
            if line.match_indices(path).any(absolute) {
                found.push(source.finding(i + 1, format!("{path}… is a path of one machine")));
            }
        }
        for (at, separator) in line.match_indices("://") {
            let scheme_is_web = line[..at].ends_with("http") || line[..at].ends_with("https");
            let host: String = line[at + separator.len()..]
                .chars()
                .take_while(|c| c.is_alphanumeric() || ".-:@".contains(*c))
                .collect();
            let known = HOSTS.contains(&host.as_str()) || host.is_empty() || host.starts_with("localhost");
            if scheme_is_web && !known && !lock {
                found.push(
                    source.finding(i + 1, format!("host {host} is not on the list of places that texts point to")),
                );
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rules that a file breaks, warnings left out.
    fn broken(path: &str, text: &str) -> Vec<String> {
        let found = check(&Source { path, bytes: text.as_bytes() });
        found.into_iter().filter(|finding| !finding.warning).map(|f| format!("{}: {}", f.line, f.message)).collect()
    }

    fn one(path: &str, text: &str, wanted: &str) {
        let found = broken(path, text);
        assert!(matches!(found.as_slice(), [only] if only.contains(wanted)), "{path}: {found:?}, wanted {wanted}");
    }

    #[test]
    fn a_clean_file_passes() {
        let text = "//! What it holds.\n#![forbid(unsafe_code)]\n// unsafe todo!() in prose\n\
                    fn f() -> &'static str { \"unsafe dbg!(1)\" }\n";
        assert_eq!(broken("a/src/lib.rs", text), Vec::<String>::new());
    }

    #[test]
    fn files_open_with_what_they_hold() {
        one("a/src/x.rs", "fn f() {}\n", "does not open");
        one("a/src/x.rs", "//!\nfn f() {}\n", "does not open");
        one("a/src/x.rs", "", "does not open");
    }

    #[test]
    fn comments_are_as_narrow_as_code() {
        let long = "word ".repeat(30);
        one("a/src/x.rs", &format!("//! x\n/// {long}\nfn f() {{}}\n"), "2: a comment of 154 columns");
        one("a/src/x.rs", &format!("//! x\nlet y = \"//\"; // {long}\n"), "2: a comment of");
        for fine in [format!("//! | {long} |\n"), format!("//! x\nlet y = \"// {long}\";\n")] {
            assert_eq!(broken("a/src/x.rs", &fine), Vec::<String>::new());
        }
        one("README.md", &format!("# x\n\n{long}\n"), "3: 150 columns");
        assert_eq!(broken("README.md", &format!("| {long} |\n")), Vec::<String>::new());
    }

    #[test]
    fn unsafe_stands_in_leaves_and_with_its_proof() {
        let proved = "//! x\n// SAFETY: the token\nlet y = unsafe { x() };\n";
        assert_eq!(broken("attn-simd/src/isa/avx2.rs", proved), Vec::<String>::new());
        one("attn-simd/src/sweep.rs", proved, "outside of the leaf");
        one("attn-simd/src/level.rs", proved, "outside of the leaf");
        let bare = "//! x\n// SAFETY: another one\nf();\nlet y = unsafe { x() };\n";
        one("attn-simd/src/workspace.rs", bare, "4: `unsafe` without");
        one("attn-simd/src/queue.rs", "//! x\nunsafe impl Send for X {}\n", "2: `unsafe` without");
        let head = "//! x\n// SAFETY: the token\nlet y = f(\n    1 +\n    unsafe { x() },\n);\n";
        assert_eq!(broken("attn-simd/src/isa/avx2.rs", head), Vec::<String>::new());
        assert_eq!(broken("attn-simd/src/isa/avx2.rs", "//! x\nunsafe fn f() {}\n"), Vec::<String>::new());
    }

    #[test]
    fn long_files_are_refused() {
        let text = |lines: usize| format!("//! x\n{}", "// y\n".repeat(lines - 1));
        assert_eq!(broken("a.rs", &text(600)), Vec::<String>::new());
        one("a.rs", &text(601), "601 lines");
        let warned = check(&Source { path: "a.rs", bytes: text(401).as_bytes() });
        assert!(matches!(warned.as_slice(), [only] if only.warning));
    }

    #[test]
    fn large_files_are_refused() {
        let bytes = vec![0xff; FILE_BYTES + 1];
        assert_eq!(check(&Source { path: "x.safetensors", bytes: &bytes }).len(), 1);
        assert_eq!(check(&Source { path: "x.safetensors", bytes: &bytes[1..] }).len(), 0);
    }

    #[test]
    fn leftovers_are_refused() {
        for macro_name in ["todo", "dbg", "unimplemented"] {
            one("a.rs", &format!("//! x\nfn f() {{ {macro_name}!() }}\n"), "not finished");
        }
    }

    #[test]
    fn machine_paths_and_unknown_hosts_are_refused_in_any_text() {
        for path in MACHINE_PATHS {
            one("notes.md", &format!("see {path}x\n"), "path of one machine");
        }
        assert_eq!(broken("notes.md", "target/work/x and $HOME/root/x and ../shared/x\n"), Vec::<String>::new());
        assert_eq!(broken("notes.md", "https://arxiv.org/abs/1706.03762\n"), Vec::<String>::new());
        let url = format!("http{}mirror.example/x", "s://");
        one("notes.md", &url, "mirror.example");
        assert_eq!(broken("Cargo.lock", &url), Vec::<String>::new());
    }
}
