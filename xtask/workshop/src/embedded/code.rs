//! Reads the disassembly of an image: floating-point instructions, and the deepest stack below a function.
//!
//! The stack bound adds up, along the deepest way through the calls, what each function takes by `push`, `sub sp` and
//! their like. It is a bound on every run, where painting the stack sees only those that are run. There is none where a
//! function calls through a pointer, calls itself, or takes stack in a way that is not understood here.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::process::Command;

use super::boards;

/// One function.
#[derive(Debug, Default)]
struct Function {
    name: String,
    /// Bytes that it takes; `None` if that is not understood.
    frame: Option<u64>,
    /// Addresses of what it calls or jumps to outside of itself, and whether it is by a call.
    calls: Vec<(u64, bool)>,
    /// Whether it calls through a register.
    indirect: bool,
}

/// A disassembled image.
pub(super) struct Code {
    functions: BTreeMap<u64, Function>,
    float: Option<String>,
}

impl Code {
    /// Has the toolchain's disassembler read a file.
    pub(super) fn disassemble(path: &Path) -> Result<Self, String> {
        let objdump = boards::objdump().ok_or("there is no toolchain")?;
        let output = Command::new(&objdump)
            .args(["--disassemble", "--demangle", "--no-show-raw-insn", "--no-print-imm-hex"])
            .arg(path)
            .output()
            .map_err(|error| format!("{}: {error}", objdump.display()))?;
        if !output.status.success() {
            return Err(format!("{}: {}", objdump.display(), String::from_utf8_lossy(&output.stderr)));
        }
        Ok(Self::parse(&String::from_utf8_lossy(&output.stdout)))
    }

    fn parse(text: &str) -> Self {
        let mut code = Self { functions: BTreeMap::new(), float: None };
        let mut at = None;
        for line in text.lines() {
            if let Some((address, name)) = header(line) {
                code.functions
                    .insert(address, Function { name: name.to_owned(), frame: Some(0), ..Function::default() });
                at = Some(address);
            } else if let (Some(at), Some((_, instruction))) =
                (at, line.split_once(":\t").or_else(|| line.split_once(": ")))
            {
                if is_float(instruction.trim()) && code.float.is_none() {
                    code.float = Some(line.trim().to_owned());
                }
                if let Some(function) = code.functions.get_mut(&at) {
                    function.take(instruction.trim());
                }
            }
        }
        // A jump inside of a function is no call: neither to its middle nor, but by a call, to its start.
        let starts: Vec<u64> = code.functions.keys().copied().collect();
        for (at, function) in &mut code.functions {
            function.calls.retain(|(to, is_call)| starts.binary_search(to).is_ok() && (to != at || *is_call));
        }
        code
    }

    /// The first floating-point instruction.
    pub(super) fn float_instruction(&self) -> Option<&str> {
        self.float.as_deref()
    }

    /// Bytes of stack below a function's caller, by the start of its name.
    pub(super) fn deepest(&self, name: &str) -> Option<u64> {
        let named = |function: &Function| function.name == name || function.name.starts_with(&format!("{name}::h"));
        let (start, _) = self.functions.iter().find(|(_, function)| named(function))?;
        self.depth(*start, &mut HashMap::new())
    }

    fn depth(&self, at: u64, known: &mut HashMap<u64, Option<u64>>) -> Option<u64> {
        if let Some(depth) = known.get(&at) {
            return *depth; // `None` while it is being looked at: it calls itself
        }
        known.insert(at, None);
        let function = self.functions.get(&at)?;
        let mut below = Some(0);
        for (call, _) in &function.calls {
            below = match (below, self.depth(*call, known)) {
                (Some(below), Some(depth)) => Some(below.max(depth)),
                _ => None,
            };
        }
        let depth =
            if function.indirect { None } else { below.zip(function.frame).map(|(below, frame)| below + frame) };
        known.insert(at, depth);
        depth
    }
}

/// The start of a function: `00000470 <name>:`.
fn header(line: &str) -> Option<(u64, &str)> {
    let (address, rest) = line.split_once(" <")?;
    let name = rest.strip_suffix(">:")?;
    Some((u64::from_str_radix(address, 16).ok()?, name))
}

impl Function {
    /// Takes one instruction: `push {r4, lr}`, `bl 0x470 <name>`.
    fn take(&mut self, instruction: &str) {
        let (name, operands) = instruction.split_once(char::is_whitespace).unwrap_or((instruction, ""));
        let name = name.trim_end_matches(".w").trim_end_matches(".n");
        let operands = operands.split('@').next().unwrap_or_default().split('#').collect::<String>();
        let operands = operands.trim();
        let taken = match name {
            "push" => Some(4 * registers(operands)),
            "vpush" => Some(if operands.contains('d') { 8 } else { 4 } * registers(operands)),
            "stmdb" if operands.starts_with("sp!") => Some(4 * registers(operands)),
            "sub" | "subw" if operands.starts_with("sp,") => last_number(operands).and_then(|n| u64::try_from(n).ok()),
            "str" if operands.contains("[sp, -") && operands.ends_with('!') => Some(8),
            "strd" if operands.contains("[sp, -") && operands.ends_with('!') => Some(16),
            // RISC-V, and what gives the stack back.
            "addi" | "add" | "addw" if operands.starts_with("sp,") => {
                last_number(operands).map(|n| u64::try_from(-n).unwrap_or(0))
            }
            "mov" if operands.starts_with("sp,") => None,
            _ => Some(0),
        };
        self.frame = self.frame.zip(taken).map(|(frame, taken)| frame + taken);
        self.indirect |= matches!(name, "blx" | "jalr" | "jr") && !operands.contains("0x") && operands != "ra";
        self.indirect |= name == "bx" && operands != "lr";
        let is_jump = name.starts_with('b') || matches!(name, "cbz" | "cbnz" | "j" | "jal") || name.starts_with("jal");
        if is_jump
            && let Some(target) = operands.split([' ', ',', '\t']).rev().find_map(|word| word.strip_prefix("0x"))
            && let Ok(target) = u64::from_str_radix(target, 16)
        {
            self.calls.push((target, name.starts_with("bl") || name.starts_with("jal")));
        }
    }
}

/// How many registers stand in braces: `{r4, r5, lr}`, `{d8-d15}`.
fn registers(operands: &str) -> u64 {
    let inside = operands.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or("", |(inside, _)| inside);
    let number = |name: &str| name.trim().trim_start_matches(char::is_alphabetic).parse::<u64>().ok();
    inside
        .split(',')
        .map(|part| match part.split_once('-').map(|(a, b)| (number(a), number(b))) {
            Some((Some(first), Some(last))) => last.saturating_sub(first) + 1,
            _ => 1,
        })
        .sum()
}

/// The number that an instruction ends with.
fn last_number(operands: &str) -> Option<i64> {
    let word = operands.rsplit([',', ' ']).next()?.trim();
    match word.strip_prefix('-') {
        Some(word) => last_number(word).map(|n| -n),
        None => match word.strip_prefix("0x") {
            Some(hex) => i64::from_str_radix(hex, 16).ok(),
            None => word.parse().ok(),
        },
    }
}

/// Whether an instruction is one of a floating-point unit: Arm's begin with `v`, RISC-V's with `f` (but for `fence`).
fn is_float(instruction: &str) -> bool {
    let name = instruction.split(|c: char| c.is_whitespace()).next().unwrap_or_default();
    let arm = name.starts_with('v') && name.len() > 2;
    let riscv = name.starts_with('f')
        && (name.contains(".s") || name.contains(".d") || matches!(name, "flw" | "fsw" | "fld" | "fsd"));
    arm || riscv
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
00000400 <entries::streaming::h0123>:
     400:\tpush\t{r4, r5, r7, lr}
     402:\tvpush\t{d8, d9}
     404:\tsub.w\tsp, sp, #560
     408:\tbne\t0x400 <entries::streaming::h0123>
     40a:\tbl\t0x500 <leaf>           @ imm = #252
     40e:\tb.w\t0x610 <pointer+0x10>
00000500 <leaf>:
     500:\tsub\tsp, #0x10
     502:\tvadd.f32\ts0, s1, s2
     506:\tbx\tlr
00000600 <pointer>:
     600:\tblx\tr3
00000700 <loops>:
     700:\tbl\t0x700 <loops>
00000800 <riscv>:
     800:\taddi\tsp, sp, -48
     802:\tjal\t0x500 <leaf>
     804:\taddi\tsp, sp, 48
     806:\tret
00000900 <odd>:
     900:\tadd\tsp, r4
";

    #[test]
    fn frames_add_up_along_the_deepest_way() {
        let code = Code::parse(TEXT);
        assert_eq!(code.deepest("leaf"), Some(16));
        assert_eq!(code.deepest("riscv"), Some(48 + 16));
        assert_eq!(code.deepest("pointer"), None);
        assert_eq!(code.deepest("loops"), None);
        assert_eq!(code.deepest("odd"), None);
        assert_eq!(code.deepest("nothing"), None);
    }

    #[test]
    fn a_jump_to_itself_is_no_call() {
        // Its own start as the target of a loop would make it call itself.
        let code = Code::parse(TEXT);
        assert_eq!(code.deepest("entries::streaming"), Some(16 + 16 + 560 + 16));
    }

    #[test]
    fn instructions_of_a_floating_point_unit_are_found() {
        assert!(Code::parse(TEXT).float_instruction().is_some_and(|line| line.contains("vpush")));
        for (text, float) in [
            ("vldr\ts0, [r0]", true),
            ("fadd.s\tfa0, fa1", true),
            ("flw\tfa0, 0(a0)", true),
            ("fence\trw, rw", false),
            ("bfi\tr0, r1", false),
        ] {
            assert_eq!(is_float(text), float, "{text}");
        }
    }

    #[test]
    fn register_lists_are_counted() {
        assert_eq!([registers("{r4, r5, r6, r7, lr}"), registers("{d8-d15}"), registers("sp!, {r8}")], [5, 8, 1]);
        assert_eq!(
            [last_number("sp, sp, -48"), last_number("sp, 0x10"), last_number("sp, r4")],
            [Some(-48), Some(16), None]
        );
    }
}
