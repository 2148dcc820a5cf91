//! The most heap that a call holds beyond the heap held before it.
//!
//! The program's global allocator counts. A library must not choose one, so the program hands over three functions. The
//! count is that of the process: it includes the buffers of worker threads, but neither stacks nor the memory that the
//! allocator keeps for itself. The pages that the system provides in the end are the resident set ([`resident`]).

/// A counting allocator, as three functions.
#[derive(Clone, Copy, Debug)]
pub struct Heap {
    /// Bytes allocated now.
    pub current: fn() -> usize,
    /// The most bytes allocated at once since the last reset.
    pub peak: fn() -> usize,
    /// Sets the peak to the current allocation.
    pub reset_peak: fn(),
}

impl Heap {
    /// For programs that do not count: everything seems to need 0 bytes.
    pub const NOT_COUNTED: Self = Self { current: || 0, peak: || 0, reset_peak: || () };

    /// Runs `call` and says how many bytes more than before were allocated at the worst moment.
    pub fn extra<R>(&self, call: impl FnOnce() -> R) -> (R, usize) {
        let before = (self.current)();
        (self.reset_peak)();
        let result = call();
        (result, (self.peak)().saturating_sub(before))
    }
}

/// The same numbers in huge pages, if the system gives some on request: NumPy's arrays, which other libraries read, lie
/// in such pages too.
pub fn in_huge_pages<T: Copy>(numbers: &[T]) -> Vec<T> {
    let mut vec = Vec::with_capacity(numbers.len());
    attn_simd::advise_huge_pages(vec.spare_capacity_mut());
    vec.extend_from_slice(numbers);
    vec
}

/// Runs `call` and says by how many bytes the resident set of the process grew at its worst moment; `None` if the
/// system does not tell. Pages that an earlier call left with the allocator do not count again.
pub fn resident<R>(call: impl FnOnce() -> R) -> (R, Option<usize>) {
    let status = || std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let before = kib(&status(), "VmRSS:");
    // 5: the high-water mark is set to what is resident now (proc(5)).
    let reset = std::fs::write("/proc/self/clear_refs", "5").is_ok();
    let result = call();
    let peak = kib(&status(), "VmHWM:").filter(|_| reset);
    (result, peak.zip(before).map(|(peak, before)| peak.saturating_sub(before) << 10))
}

/// A field of `/proc/self/status`.
fn kib(status: &str, field: &str) -> Option<usize> {
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Bytes in the unit that reads best: `"1.50 MiB"`.
pub fn human(bytes: usize) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ if value < 10.0 => format!("{value:.2} {}", units[unit]),
        _ if value < 100.0 => format!("{value:.1} {}", units[unit]),
        _ => format!("{value:.0} {}", units[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    static NOW: AtomicUsize = AtomicUsize::new(100);
    static PEAK: AtomicUsize = AtomicUsize::new(900);

    #[test]
    fn extra_is_the_peak_above_what_was_there() {
        let heap = Heap {
            current: || NOW.load(Relaxed),
            peak: || PEAK.load(Relaxed),
            reset_peak: || PEAK.store(NOW.load(Relaxed), Relaxed),
        };
        let ((), extra) = heap.extra(|| PEAK.store(164, Relaxed));
        assert_eq!(extra, 64);
        let ((), extra) = heap.extra(|| ());
        assert_eq!(extra, 0, "an earlier peak does not count");
    }

    #[test]
    fn pages_that_are_touched_become_resident() {
        assert_eq!(kib("VmPeak: 9 kB\nVmHWM:\t 1234 kB\n", "VmHWM:"), Some(1234));
        assert_eq!(kib("VmHWM: much", "VmHWM:"), None);
        let (buffer, grown) = resident(|| std::hint::black_box(vec![1u8; 64 << 20]));
        if let Some(grown) = grown {
            assert!(grown >= buffer.len() / 2, "{grown}");
        }
    }

    #[test]
    fn units() {
        assert_eq!(
            [0, 1023, 1024, 15_000, 200_000, 4 << 20, 3 << 30].map(human),
            ["0 B", "1023 B", "1.00 KiB", "14.6 KiB", "195 KiB", "4.00 MiB", "3.00 GiB"]
        );
    }
}
