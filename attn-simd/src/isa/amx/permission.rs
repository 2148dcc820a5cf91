//! Why this process cannot use AMX: the CPU, the system, or the permission of Linux.

#![allow(unsafe_code, reason = "the leaf: CPUID, XCR0 and one system call")]

use core::arch::asm;

use crate::isa::LevelError;

/// Decides from the CPU, from whether the system saves AMX's registers, and from its answer to the request for
/// permission: 0, or a negative error. The request comes last, because it binds the process.
pub(super) fn verdict(cpu: bool, system: bool, permission: impl FnOnce() -> i64) -> Option<LevelError> {
    match (cpu, system) {
        (false, _) => Some(LevelError::Missing),
        (_, false) => Some(LevelError::Disabled),
        _ => (permission() != 0).then_some(LevelError::Refused),
    }
}

/// What CPUID and XCR0 tell: whether the CPU has AMX, and whether the system saves its registers.
#[allow(unused_unsafe, reason = "CPUID is a safe function in newer compilers than the oldest that is promised")]
pub(super) fn cpu_and_system() -> (bool, bool) {
    use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    const OSXSAVE: u32 = 1 << 27;
    const AMX_BF16_AND_TILE: u32 = 1 << 22 | 1 << 24;
    const TILE_CONFIG_AND_DATA: u64 = 0b11 << 17;
    #[target_feature(enable = "xsave")]
    fn xcr0() -> u64 {
        // SAFETY: register 0 always exists where XGETBV does.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: every x86-64 CPU has CPUID, and no leaf above the highest is read. XGETBV runs only if OSXSAVE says that
    // the system has turned it on.
    unsafe {
        if __cpuid(0).eax < 0x1d || __cpuid_count(7, 0).edx & AMX_BF16_AND_TILE != AMX_BF16_AND_TILE {
            return (false, false);
        }
        let palette = __cpuid_count(0x1d, 1);
        let (row_bytes, registers, rows) = (palette.ebx & 0xffff, palette.ebx >> 16, palette.ecx & 0xffff);
        let cpu = __cpuid_count(0x1d, 0).eax >= 1 && (row_bytes, registers, rows) == (64, 8, 16);
        (cpu, __cpuid(1).ecx & OSXSAVE != 0 && xcr0() & TILE_CONFIG_AND_DATA == TILE_CONFIG_AND_DATA)
    }
}

/// Requests permission from Linux to use AMX's registers: Linux then saves them for every thread that uses them. It is
/// refused if an alternate signal stack of a thread could not hold them, by a filter of system calls, or by a kernel
/// older than 5.16. Returns 0, or a negative error number.
pub(super) fn permission() -> i64 {
    const SYS_ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XFEATURE_XTILEDATA: u64 = 18;
    let answer: i64;
    // SAFETY: a system call that takes two numbers and touches no memory of this program; the kernel clobbers RCX and
    // R11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") SYS_ARCH_PRCTL => answer,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::super::tests::amx;
    use super::*;
    use crate::level::Level;

    #[test]
    fn what_is_missing_is_said_and_permission_is_asked_last() {
        let never = || -> i64 { panic!("asked for what cannot be used") };
        assert_eq!(verdict(false, false, never), Some(LevelError::Missing));
        assert_eq!(verdict(false, true, never), Some(LevelError::Missing));
        assert_eq!(verdict(true, false, never), Some(LevelError::Disabled));
        assert_eq!(verdict(true, true, || -1), Some(LevelError::Refused));
        assert_eq!(verdict(true, true, || 0), None);
    }

    /// A filter of system calls on a thread of its own refuses `arch_prctl`: no crash, but an answer, and the level
    /// falls back.
    #[test]
    fn a_refused_permission_is_an_answer() {
        /// One instruction of a filter: BPF's code, the jumps, a constant.
        #[repr(C)]
        struct Instruction(u16, u8, u8, u32);
        #[repr(C)]
        struct Filter(u16, *const Instruction);
        fn system_call(number: i64, [a, b, c, d]: [usize; 4], program: &Filter) -> i64 {
            let _alive = program;
            let answer;
            // SAFETY: `prctl`, which reads at most the filter that is borrowed here; the kernel clobbers RCX and R11.
            unsafe {
                asm!("syscall", inlateout("rax") number => answer, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
                    in("r8") 0, lateout("rcx") _, lateout("r11") _, options(nostack));
            }
            answer
        }
        let thread = std::thread::spawn(|| {
            const PRCTL: i64 = 157;
            let program = [
                Instruction(0x20, 0, 0, 0),               // load the number of the call
                Instruction(0x15, 0, 1, 158),             // arch_prctl?
                Instruction(0x06, 0, 0, 0x0005_0000 | 1), // refuse: EPERM
                Instruction(0x06, 0, 0, 0x7fff_0000),     // allow
            ];
            let filter = Filter(4, program.as_ptr());
            let no_new_privileges = system_call(PRCTL, [38, 1, 0, 0], &filter);
            let installed = system_call(PRCTL, [22, 2, (&raw const filter).addr(), 0], &filter);
            if (no_new_privileges, installed) != (0, 0) {
                assert!(!attn_testing::is_demanded("amx"), "no filter of system calls: {installed}");
                std::eprintln!("no filter of system calls here ({installed}): nothing was refused");
                return;
            }
            assert_eq!(permission(), -1);
            assert_eq!(verdict(true, true, permission), Some(LevelError::Refused));
        });
        thread.join().expect("no assertion failed");
    }

    /// Gives this thread a signal stack of some bytes, or removes it. Returns 0, or a negative error number.
    fn signal_stack(bytes: Option<usize>) -> i64 {
        const SIGALTSTACK: i64 = 131;
        const DISABLE: usize = 2;
        static STACK: [u64; 2048] = [0; 2048];
        assert!(bytes.is_none_or(|bytes| bytes <= size_of_val(&STACK)));
        let stack = [(&raw const STACK).addr(), if bytes.is_some() { 0 } else { DISABLE }, bytes.unwrap_or(0)];
        let answer;
        // SAFETY: `sigaltstack` reads three words, which live here: an address, flags, a size. No handler writes to the
        // stack while it is set: the test raises no signal. The kernel clobbers RCX and R11.
        unsafe {
            asm!("syscall", inlateout("rax") SIGALTSTACK => answer, in("rdi") &raw const stack, in("rsi") 0_usize,
                lateout("rcx") _, lateout("r11") _, options(nostack));
        }
        answer
    }

    /// As `Level` says: while a small signal stack exists, the permission is refused; after the permission, small
    /// signal stacks are refused for good.
    #[test]
    fn small_signal_stacks_and_the_permission_exclude_each_other() {
        const CHILD: &str = "ATTN_TEST_SMALL_STACK";
        const NO_MEMORY: i64 = -12;
        if std::env::var_os(CHILD).is_some() {
            // Nothing in this process has asked yet.
            assert_eq!(signal_stack(Some(2048)), 0);
            let refused = [Level::by_name("amx"), Level::by_name("amx")];
            assert_eq!(signal_stack(None), 0);
            assert_eq!([refused[0], refused[1], Level::by_name("amx")], [Err(LevelError::Refused); 3]);
            assert!(Level::available().all(|level| level.name() != "amx"));
            return;
        }
        if amx().is_none() {
            return;
        }
        let thread = std::thread::spawn(|| [2048, 8192, 11_264, 16_384].map(|bytes| signal_stack(Some(bytes))));
        let answers = thread.join().expect("no assertion failed");
        assert_eq!(answers, [NO_MEMORY, NO_MEMORY, NO_MEMORY, 0]);
        let name = "isa::amx::permission::tests::small_signal_stacks_and_the_permission_exclude_each_other";
        let mut child = std::process::Command::new(std::env::current_exe().expect("a program"));
        let child = child.env_remove("ATTN_LEVEL").env_remove("ATTN_TEST_LEVELS").env(CHILD, "1");
        let done = child.args(["--exact", name, "--nocapture"]).output().expect("a process");
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        assert!(done.status.success() && text.contains("1 passed"), "{text}");
    }
}
