//! Huge pages for memory that is read over and over: caches of keys and values, scratch.
//!
//! A step of decoding reads the whole cache once. In pages of 4 KiB the processor's prefetchers stop at each page's
//! end, and addresses are translated 512 times as often. Linux gives huge pages to memory that requests them
//! (`/sys/kernel/mm/transparent_hugepage/enabled` says `madvise` on most systems), at the first write to it. On other
//! systems nothing happens here.

#![allow(unsafe_code, reason = "one system call, which changes no memory")]

/// Memory below this size has no use for huge pages: two of the usual size.
const AT_LEAST: usize = 4 << 20;

/// Asks the system for huge pages under some memory, and says whether it agreed. It has an effect on what has not been
/// written yet, so call it between allocating a cache and filling it: `vec![0; n]` writes nothing. Less than 4 MiB is
/// left as it is. No number changes.
///
/// ```
/// let mut keys = vec![0.0f32; 4096 * 8 * 128];
/// attn_simd::advise_huge_pages(&mut keys);
/// assert!(keys.iter().all(|&x| x == 0.0));
/// ```
pub fn advise_huge_pages<T>(memory: &mut [T]) -> bool {
    let (start, len) = (memory.as_mut_ptr().cast::<u8>(), size_of_val(memory));
    len >= AT_LEAST && advise(start, len)
}

/// Whole small pages of the memory, of which the system takes whole large ones.
#[cfg(all(target_os = "linux", feature = "std", not(miri)))]
fn advise(start: *mut u8, len: usize) -> bool {
    const PAGE: usize = 64 << 10; // the largest of small ones, on some Arm systems
    let skipped = start.align_offset(PAGE);
    let Some(len) = len.checked_sub(skipped).map(|len| len / PAGE * PAGE).filter(|&len| len > 0) else { return false };
    // SAFETY: the pages lie inside of memory that the caller borrows exclusively; this advice changes no content.
    unsafe { libc::madvise(start.wrapping_add(skipped).cast(), len, libc::MADV_HUGEPAGE) == 0 }
}

#[cfg(not(all(target_os = "linux", feature = "std", not(miri))))]
const fn advise(_: *mut u8, _: usize) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stay_and_small_memory_is_left_alone() {
        let mut small = [1u8; 1000];
        assert!(!advise_huge_pages(&mut small));
        if cfg!(miri) {
            return; // megabytes, number by number
        }
        for offset in [0, 1, 4095] {
            let mut bytes = vec![7u8; AT_LEAST + 9000];
            advise_huge_pages(&mut bytes[offset..]);
            bytes[AT_LEAST] = 8;
            assert_eq!(bytes.iter().map(|&x| u64::from(x)).sum::<u64>(), 7 * bytes.len() as u64 + 1);
        }
        assert!(!advise_huge_pages::<u8>(&mut []));
    }

    /// If the system gives huge pages on request, memory that requested them is marked.
    #[test]
    #[cfg(all(target_os = "linux", feature = "std", not(miri)))]
    fn the_system_knows_of_it() {
        let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
        if !enabled.contains("[madvise]") {
            return; // nothing to see
        }
        let mut floats = vec![0.0f32; AT_LEAST];
        assert!(advise_huge_pages(&mut floats));
        let marked = || {
            let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            maps.lines().filter(|line| line.starts_with("VmFlags:") && line.contains(" hg")).count()
        };
        assert!(marked() > 0);
        assert!(floats.iter().all(|&x| x == 0.0));
    }
}
