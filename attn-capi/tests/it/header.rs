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
    let path = folder.join("include/attn.h");
    if std::env::var_os("ATTN_WRITE_HEADER").is_some() {
        fs::write(&path, &written).expect("include/attn.h can be written");
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == written, "attn.h differs: ATTN_WRITE_HEADER=1 cargo test -p attn-capi --test it header");
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
