//! Tells the program how it is being built: figures mean nothing without compiler and flags, and only the build knows
//! them.

use std::env;
use std::process::Command;

fn main() {
    let of = |name: &str| env::var(name).unwrap_or_default();
    let version = Command::new(of("RUSTC")).arg("--version").output();
    let version = version.ok().and_then(|output| String::from_utf8(output.stdout).ok());
    println!("cargo::rustc-env=ATTN_BENCH_RUSTC={}", version.as_deref().map_or("rustc, unknown version", str::trim));
    // Cargo hands over the flags with a separator that no flag contains.
    let flags = of("CARGO_ENCODED_RUSTFLAGS").replace('\u{1f}', " ");
    let flags = if flags.is_empty() { "no RUSTFLAGS".into() } else { format!("RUSTFLAGS {flags}") };
    println!(
        "cargo::rustc-env=ATTN_BENCH_FLAGS={}, profile {}, opt-level {}, {flags}",
        of("TARGET"),
        of("PROFILE"),
        of("OPT_LEVEL"),
    );
    println!("cargo::rerun-if-changed=build.rs\ncargo::rerun-if-env-changed=CARGO_ENCODED_RUSTFLAGS");
}
