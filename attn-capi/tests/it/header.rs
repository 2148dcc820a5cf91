//! The committed header is the one that the sources give.

use std::fs;
use std::path::Path;

#[test]
#[cfg_attr(miri, ignore = "reads the sources")]
fn the_header_is_what_cbindgen_writes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).expect("cbindgen.toml");
    let files = ["types.rs", "plan.rs", "abi.rs"].map(|name| folder.join("src").join(name));
    let builder =
        files.iter().fold(cbindgen::Builder::new().with_config(config), |builder, file| builder.with_src(file));
    let mut written = Vec::new();
    builder.generate().expect("the sources parse").write(&mut written);
    // The heading that clippy wants, in words that a C programmer reads.
    let written = String::from_utf8(written).expect("text").replace("# Safety", "The caller vouches for this:");
    let written = c90(&written);
    let path = folder.join("include/attn.h");
    if std::env::var_os("ATTN_WRITE_HEADER").is_some() {
        fs::write(&path, &written).expect("include/attn.h can be written");
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == written, "attn.h differs: ATTN_WRITE_HEADER=1 cargo test -p attn-capi --test it header");
}

/// What a C90 compiler takes: comments on one line where they were one, and no comma behind the last enumerator.
fn c90(header: &str) -> String {
    let header = ["__cplusplus", "extern \"C\""]
        .iter()
        .fold(header.to_owned(), |header, words| header.replace(&format!("// {words}"), &format!("/* {words} */")));
    let (mut out, mut lines) = (String::new(), header.lines().peekable());
    while let Some(line) = lines.next() {
        let indent = &line[..line.len() - line.trim_start().len()];
        let mut text = Vec::new();
        if line.trim() == "/*" {
            for line in lines.by_ref() {
                match line.trim() {
                    "*/" => break,
                    line => text.push(line.trim_start_matches('*').trim_start().to_owned()),
                }
            }
            out += &format!("{indent}/* {} */\n", text.join(&format!("\n{indent} * ")).replace("* \n", "*\n"));
        } else {
            let last = lines.peek().is_some_and(|next| next.trim_start().starts_with('}'));
            out += if last { line.trim_end_matches(',') } else { line };
            out += "\n";
        }
    }
    out
}

#[test]
fn the_header_is_c90() {
    let header = include_str!("../../include/attn.h");
    assert!(!header.contains("//"));
    let structs = header.matches("  size_t struct_size;").count();
    assert_eq!(header.lines().filter(|line| line.contains("_INIT ATTN_INIT_(Attn")).count(), structs);
}

#[test]
fn the_header_states_the_version_of_the_library() {
    let config = include_str!("../../cbindgen.toml");
    let [major, minor, patch] = ["MAJOR", "MINOR", "PATCH"].map(|part| format!("ATTN_VERSION_{part} {}", env(part)));
    for line in [major, minor, patch, format!("ATTN_VERSION \"{}\\\"", env!("CARGO_PKG_VERSION"))] {
        assert!(config.contains(&line), "{line}");
    }
}

fn env(part: &str) -> &'static str {
    match part {
        "MAJOR" => env!("CARGO_PKG_VERSION_MAJOR"),
        "MINOR" => env!("CARGO_PKG_VERSION_MINOR"),
        _ => env!("CARGO_PKG_VERSION_PATCH"),
    }
}

/// What comments tell a reader to use is there for the compiler: cbindgen leaves out what it cannot evaluate.
#[test]
fn every_name_of_the_header_is_defined() {
    let header = include_str!("../../include/attn.h");
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let names = header.split(|c| !is_part(c)).filter(|word| word.starts_with("ATTN_") && !word.ends_with('_'));
    let environment = ["ATTN_LEVEL", "ATTN_WRITE_HEADER"];
    for name in names.filter(|name| !environment.contains(name)) {
        let defined = [format!("#define {name}"), format!("  {name} = "), format!("#ifndef {name}")];
        assert!(defined.iter().any(|text| header.contains(text)), "{name}");
    }
}
