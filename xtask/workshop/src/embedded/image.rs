//! The size of an image, and the symbols that it must not contain.

use std::fs;

use object::{Object, ObjectSection, ObjectSymbol};

use super::boards::Board;
use super::build::Programs;
use super::code::Code;

/// One entry point of `attn_firmware::entries`.
pub(super) struct Entry {
    /// Its name, which its image `image-NAME` and the costs of the cases carry.
    pub(super) name: &'static str,
    /// The case whose instructions per token are shown.
    pub(super) case: &'static str,
    /// Whether it computes in integers only.
    pub(super) integer: bool,
}

/// All of them.
pub(super) const ENTRIES: &[Entry] = &[
    Entry { name: "streaming", case: "streaming/causal", integer: false },
    Entry { name: "fixed", case: "fixed/causal", integer: false },
    Entry { name: "resume", case: "resume/causal", integer: false },
    Entry { name: "ring", case: "ring/decode", integer: false },
    Entry { name: "int8", case: "int8/causal", integer: true },
    Entry { name: "int8-ring", case: "int8-ring/decode", integer: true },
    Entry { name: "quantized-ring", case: "quantized-ring/decode", integer: false },
];

/// An image of one entry point: start-up code, vectors, the entry and all that it reaches.
pub(super) struct Image {
    /// Instructions and the vector table.
    pub(super) text: u64,
    /// Constants.
    pub(super) rodata: u64,
    /// Statics.
    pub(super) ram: u64,
    /// Stack that the entry and what it calls can take at most, by the disassembly; `None` if it cannot be told.
    pub(super) stack: Option<u64>,
}

impl Image {
    /// Everything that is programmed into flash.
    pub(super) fn flash(&self) -> u64 {
        self.text + self.rodata
    }

    /// Weighs an image, and refuses one that holds what it must not.
    pub(super) fn read(board: &Board, entry: &Entry, programs: &Programs) -> Result<Self, String> {
        let path = programs.path(&format!("image-{}", entry.name));
        let wrong = |what: String| format!("{}, image-{}: {what}", board.name, entry.name);
        let bytes = fs::read(&path).map_err(|error| wrong(error.to_string()))?;
        let file = object::File::parse(&*bytes).map_err(|error| wrong(error.to_string()))?;
        let (mut text, mut rodata, mut ram) = (0, 0, 0);
        for section in file.sections() {
            match section.name().unwrap_or_default() {
                name if name.starts_with(".text") || name.starts_with(".init") || name.starts_with(".trap") => {
                    text += section.size()
                }
                ".vector_table" => text += section.size(),
                name if name.starts_with(".rodata") => rodata += section.size(),
                name if name.starts_with(".data") => (ram, rodata) = (ram + section.size(), rodata + section.size()),
                name if name.starts_with(".bss") || name.starts_with(".uninit") => ram += section.size(),
                _ => {}
            }
        }
        let names: Vec<_> = file.symbols().filter_map(|symbol| symbol.name().ok()).collect();
        if let Some(name) = names.iter().find(|name| is_forbidden(name)) {
            return Err(wrong(format!("holds {}", rustc_demangle::demangle(name))));
        }
        let code = Code::disassemble(&path).map_err(wrong)?;
        let routine = names.iter().find(|name| is_soft_float(name));
        match (entry.integer, routine, code.float_instruction()) {
            (true, Some(name), _) => return Err(wrong(format!("computes in integers, and holds the routine {name}"))),
            (true, _, Some(line)) => return Err(wrong(format!("computes in integers, and holds {line}"))),
            // The others must be found out, or the search would prove nothing.
            (false, None, None) => return Err(wrong("computes in f32, and no trace of that was found".to_owned())),
            _ => {}
        }
        let stack = code.deepest(&format!("attn_firmware::entries::{}", entry.name.replace('-', "_")));
        Ok(Self { text, rodata, ram, stack })
    }
}

/// Parts of names that no image may hold: panics and their text, allocation, formatting, of floats above all.
fn is_forbidden(name: &str) -> bool {
    let parts = ["panicking", "__rust_alloc", "__rg_alloc", "4core3fmt", "core::fmt", "flt2dec", "fmt5float"];
    parts.iter().any(|part| name.contains(part))
}

/// Whether a routine of the compiler's library computes in floating point.
fn is_soft_float(name: &str) -> bool {
    let arm = [
        "__aeabi_f",
        "__aeabi_d",
        "__aeabi_cf",
        "__aeabi_cd",
        "__aeabi_i2",
        "__aeabi_ui2",
        "__aeabi_l2",
        "__aeabi_ul2",
    ];
    // `__addsf3`, `__muldf3`, `__fixsfsi`, `__floatsisf`, `__extendsfdf2`, `__ltdf2` …
    let generic = name.starts_with("__") && (name.contains("sf") || name.contains("df"));
    // Rust's own names of the same, and of what libm has.
    let rust = name.contains("compiler_builtins") && name.contains("float")
        || name.contains("4libm4math")
        || name.contains("libm::");
    arm.iter().any(|start| name.starts_with(start)) || generic || rust
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routines_of_floating_point_are_told_from_others() {
        for name in [
            "__aeabi_fadd",
            "__aeabi_dmul",
            "__aeabi_i2f",
            "__aeabi_ul2d",
            "__addsf3",
            "__muldf3",
            "__fixunssfsi",
            "__floatsisf",
        ] {
            assert!(is_soft_float(name), "{name}");
        }
        for name in [
            "__aeabi_uidivmod",
            "__aeabi_lmul",
            "__aeabi_lasr",
            "__clzsi2",
            "__muldi3",
            "memcpy",
            "main",
            "__sidata",
            "__sbss",
        ] {
            assert!(!is_soft_float(name), "{name}");
        }
    }

    #[test]
    fn what_no_image_may_hold() {
        assert!(is_forbidden("_ZN4core9panicking9panic_fmt17h0E") && is_forbidden("_ZN4core3fmt5Write9write_fmt17h0E"));
        assert!(!is_forbidden("_ZN9attn_core4view7Strided3new17h0E"));
    }
}
