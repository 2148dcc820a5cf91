//! Tells the linker where `memory.x` is: beside this file, from whatever folder cargo was started.

fn main() {
    println!("cargo:rustc-link-search={}", std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    println!("cargo:rustc-link-arg=-Tlink.x"); // the linker script of cortex-m-rt, which includes memory.x
    println!("cargo:rerun-if-changed=memory.x");
}
