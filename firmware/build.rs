//! Hands the linker the memory map of the target's board and the script of its start-up code.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo:rerun-if-changed=memory");
    let target = env::var("TARGET").expect("cargo sets TARGET");
    let map = match target.as_str() {
        "thumbv6m-none-eabi" => "microbit",
        "thumbv7m-none-eabi" | "thumbv7em-none-eabihf" => "mps2",
        "thumbv8m.main-none-eabihf" => "mps2-an505",
        "riscv32imac-unknown-none-elf" => "riscv-virt",
        _ => return, // a host
    };
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    fs::copy(format!("memory/{map}.x"), out.join("memory.x")).expect("the memory map can be copied");
    println!("cargo:rustc-link-search={}", out.display());
    if target.starts_with("riscv") {
        println!("cargo:rustc-link-arg=-Tmemory.x");
    }
    println!("cargo:rustc-link-arg=-Tlink.x");
}
