//! How a program starts on each board, what it prints with, and how it counts instructions and stack.
//!
//! Instructions are counted by a clock that QEMU's `-icount` drives by them: SysTick on Arm, `mcycle` on RISC-V. How
//! many instructions a tick is, the host finds from a loop of known length. They say nothing about time.

/// Prints a line: by semihosting on a board.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => {{
        #[cfg(target_os = "none")]
        $crate::board::semihosting::println!($($text)*);
        #[cfg(not(target_os = "none"))]
        std::println!($($text)*);
    }};
}

/// A program: runs a function and ends, with an error if it says `false` or panics.
#[macro_export]
macro_rules! program {
    ($run:path) => {
        #[cfg(target_os = "none")]
        #[$crate::board::entry]
        fn main() -> ! {
            let code = if $run() { 0 } else { 1 };
            $crate::board::semihosting::process::exit(code)
        }

        #[cfg(target_os = "none")]
        #[panic_handler]
        fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
            $crate::say!("{info}");
            $crate::board::semihosting::process::exit(101)
        }

        #[cfg(not(target_os = "none"))]
        fn main() -> std::process::ExitCode {
            if $run() { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
        }
    };
}

/// An image of one function, which is never called: what start-up code and the function weigh. It links only if no way
/// leads to a panic.
#[macro_export]
macro_rules! image {
    ($function:path) => {
        #[cfg(target_os = "none")]
        #[$crate::board::entry]
        fn main() -> ! {
            // The address escapes, so that the compiler knows nothing about the arguments.
            core::hint::black_box($function as *const ());
            loop {
                core::hint::spin_loop();
            }
        }

        #[cfg(target_os = "none")]
        #[panic_handler]
        fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
            unsafe extern "C" {
                safe fn attn_a_panic_can_be_reached() -> !; // defined nowhere
            }
            attn_a_panic_can_be_reached()
        }

        #[cfg(not(target_os = "none"))]
        fn main() {}
    };
}

#[cfg(all(target_os = "none", target_arch = "arm"))]
pub use cortex_m_rt::entry;
#[cfg(all(target_os = "none", target_arch = "riscv32"))]
pub use riscv_rt::entry;
#[cfg(target_os = "none")]
pub use semihosting;

/// To be called right before what is measured, in the same function: its stack is counted from here.
#[inline(always)]
pub fn mark() {
    #[cfg(target_os = "none")]
    bare::mark();
}

/// What a call cost.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Bytes of stack below the frame that called [`mark`].
    pub stack: usize,
    /// Ticks of the board's clock.
    pub ticks: u32,
}

/// Instructions of [`calibrate`]'s loop.
pub const CALIBRATION: u32 = 400_000;

/// Runs `f` and says what it cost; on a host nothing is known.
#[cfg(not(target_os = "none"))]
pub fn measure(f: &mut dyn FnMut()) -> Cost {
    f();
    Cost::default()
}

/// Ticks of a loop of [`CALIBRATION`] instructions.
#[cfg(not(target_os = "none"))]
pub fn calibrate() -> u32 {
    0
}

#[cfg(target_os = "none")]
pub use bare::{calibrate, measure};

#[cfg(target_os = "none")]
mod bare {
    use super::{CALIBRATION, Cost};
    use core::arch::asm;
    use core::sync::atomic::{AtomicUsize, Ordering};

    unsafe extern "C" {
        /// Where the statics end and the stack may begin.
        #[link_name = "__sheap"]
        static mut RAM_FREE: u32;
    }

    /// What unused stack holds.
    const PAINT: u32 = 0x5ace_ba5e;

    /// The stack pointer where [`mark`] was called.
    static MARK: AtomicUsize = AtomicUsize::new(0);

    #[inline(always)]
    pub(super) fn mark() {
        MARK.store(stack_pointer(), Ordering::Relaxed);
    }

    #[inline(always)]
    fn stack_pointer() -> usize {
        let sp: usize;
        // SAFETY: reads a register.
        unsafe {
            #[cfg(target_arch = "arm")]
            asm!("mov {}, sp", out(reg) sp, options(nomem, nostack, preserves_flags));
            #[cfg(target_arch = "riscv32")]
            asm!("mv {}, sp", out(reg) sp, options(nomem, nostack, preserves_flags));
        }
        sp
    }

    /// Paints the free stack, runs `f` and looks how far it came.
    #[inline(never)]
    pub fn measure(f: &mut dyn FnMut()) -> Cost {
        let bottom = (&raw mut RAM_FREE) as usize;
        let top = (stack_pointer() & !3) - 16;
        let words = || (bottom..top).step_by(4).map(|at| at as *mut u32);
        for at in words() {
            // SAFETY: between the statics and the stack pointer less a margin, where nothing lives: interrupts are off.
            unsafe { at.write_volatile(PAINT) };
        }
        let before = ticks();
        f();
        let ticks = ticks_between(before, ticks());
        // SAFETY: as above.
        let untouched = words().take_while(|at| unsafe { at.read_volatile() } == PAINT).count();
        Cost { stack: MARK.load(Ordering::Relaxed).saturating_sub(bottom + 4 * untouched), ticks }
    }

    /// Ticks of a loop of known length.
    #[inline(never)]
    pub fn calibrate() -> u32 {
        start_clock();
        let before = ticks();
        // SAFETY: counts a register down.
        unsafe {
            #[cfg(target_arch = "arm")]
            asm!("2:", "subs {n}, {n}, #1", "bne 2b", n = inout(reg) CALIBRATION / 2 => _, options(nomem, nostack));
            #[cfg(target_arch = "riscv32")]
            asm!("2:", "addi {n}, {n}, -1", "bnez {n}, 2b", n = inout(reg) CALIBRATION / 2 => _, options(nomem, nostack));
        }
        ticks_between(before, ticks())
    }

    /// SysTick's registers: control, reload, current.
    #[cfg(target_arch = "arm")]
    const SYSTICK: [*mut u32; 3] = [0xe000_e010usize as _, 0xe000_e014usize as _, 0xe000_e018usize as _];

    #[cfg(target_arch = "arm")]
    fn start_clock() {
        let [control, reload, current] = SYSTICK;
        // SAFETY: registers that every Cortex-M here has; no interrupt is asked for.
        unsafe {
            reload.write_volatile(0x00ff_ffff);
            current.write_volatile(0);
            control.write_volatile(0b101);
        }
    }

    #[cfg(target_arch = "arm")]
    fn ticks() -> u32 {
        // SAFETY: reading the current value has no effect.
        unsafe { SYSTICK[2].read_volatile() }
    }

    /// SysTick counts down, in 24 bits.
    #[cfg(target_arch = "arm")]
    fn ticks_between(before: u32, after: u32) -> u32 {
        before.wrapping_sub(after) & 0x00ff_ffff
    }

    #[cfg(target_arch = "riscv32")]
    fn start_clock() {}

    #[cfg(target_arch = "riscv32")]
    fn ticks() -> u32 {
        let n: u32;
        // SAFETY: reads a counter.
        unsafe { asm!("csrr {}, mcycle", out(reg) n, options(nomem, nostack)) };
        n
    }

    #[cfg(target_arch = "riscv32")]
    fn ticks_between(before: u32, after: u32) -> u32 {
        after.wrapping_sub(before)
    }
}
