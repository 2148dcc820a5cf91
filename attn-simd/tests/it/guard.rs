//! Buffers between pages that may not be touched: reading or writing an element too many ends the program, in assembly
//! and tile loads too, where no sanitizer looks. And buffers that start anywhere: alignment changes no bit.

#![cfg(all(unix, not(miri)))]
#![allow(unsafe_code, reason = "memory that is laid out by the page has no safe door")]

use core::ffi::c_void;
use core::ptr;

use attn_core::formats::{Format, StoredView};
use attn_core::half::{bf16, f16};
use attn_core::kv_cache::CacheView;
use attn_core::{Align, Attention, Layout, Mask, Outputs, Precision, View, ViewMut};
use attn_simd::{KernelElement, Level, Line, Plan, Workspace};
use attn_testing::Number;
use attn_testing::cases::{Inputs, Memory, Tensor4, shape};
use attn_testing::stored::{ScaleOf, Stored};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

use crate::quantized::step;

/// What a fresh page may be read as: every pattern of bits is a value.
///
/// # Safety
/// It is.
unsafe trait Plain: Copy {}
// SAFETY: floats of 32 and 16 bits, and sixteen floats.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for f16 {}
// SAFETY: as above.
unsafe impl Plain for bf16 {}
// SAFETY: as above.
unsafe impl Plain for Line {}
// SAFETY: a byte.
unsafe impl Plain for u8 {}

/// Where a slice lies between two forbidden pages.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// So many bytes behind the first.
    After(usize),
    /// Directly before the second.
    Before,
}

/// Pages that may be touched, between two that may not.
struct Guarded {
    map: *mut c_void,
    /// Of the pages in between.
    bytes: usize,
}

impl Guarded {
    fn new(bytes: usize) -> Self {
        let page = rustix::param::page_size();
        let bytes = bytes.max(1).next_multiple_of(page);
        // SAFETY: a new mapping, at an address of the system's choice, and access to the part of it that lies inside.
        unsafe {
            let map = mmap_anonymous(ptr::null_mut(), bytes + 2 * page, ProtFlags::empty(), MapFlags::PRIVATE);
            let map = map.expect("address space");
            mprotect(map.byte_add(page), bytes, MprotectFlags::READ | MprotectFlags::WRITE).expect("pages of our own");
            Self { map, bytes }
        }
    }

    /// A slice of so many elements.
    fn slice<T: Plain>(&mut self, count: usize, place: Place) -> &mut [T] {
        let from = match place {
            Place::After(bytes) => bytes,
            Place::Before => self.bytes - count * size_of::<T>(),
        };
        assert!(from.is_multiple_of(align_of::<T>()) && from + count * size_of::<T>() <= self.bytes);
        // SAFETY: inside the pages that may be touched and aligned, as was just asserted (pages are aligned to more);
        // they were zeroed and hold nothing but plain numbers, and are borrowed through `self`.
        unsafe {
            let start = self.map.byte_add(rustix::param::page_size() + from);
            core::slice::from_raw_parts_mut(start.cast::<T>(), count)
        }
    }

    /// Room for so many elements anywhere, and 64 bytes.
    fn of<T>(count: usize) -> Self {
        Self::new(count * size_of::<T>() + 64)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, which nothing borrows any longer.
        let gone = unsafe { munmap(self.map, self.bytes + 2 * rustix::param::page_size()) };
        gone.expect("the mapping is ours");
    }
}

/// A copy of a tensor, without what lies behind its last element.
struct Copied<'t, T> {
    of: &'t Tensor4<T>,
    memory: Guarded,
    count: usize,
}

impl<'t, T: Number + Plain> Copied<'t, T> {
    fn new(of: &'t Tensor4<T>) -> Self {
        let [b, h, s, d] = of.sizes;
        let ends = [[0, 0, 0, 0], [b - 1, h - 1, s - 1, d - 1], [b - 1, h - 1, 0, d - 1]];
        let count = ends.into_iter().map(|place| of.index(place) + 1).max().unwrap_or(0);
        Self { of, memory: Guarded::of::<T>(count), count }
    }

    fn view(&mut self, place: Place) -> View<'_, T> {
        let data = self.memory.slice::<T>(self.count, place);
        data.copy_from_slice(&self.of.data[..self.count]);
        View::strided(data, self.of.sizes, self.of.strides, self.of.offset).expect("nothing behind the last is needed")
    }
}

/// Bits of output and lse with every buffer where `place` says, by its number; and of a call on ordinary memory.
fn bits<T: KernelElement + Number + Plain>(
    level: Level,
    attn: &Attention<'_>,
    inputs: &Inputs<T>,
    place: impl Fn(usize) -> Place,
) -> [(Vec<u64>, Vec<u32>); 2] {
    let (rows, shape) = (inputs.shape.rows(), inputs.shape);
    let count = rows * shape.value_dim;
    let all = |out: &[T], lse: &[f32]| {
        (out.iter().map(|x| x.bits()).collect::<Vec<_>>(), lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
    };
    let plan = Plan::new(attn, shape, level).expect("a plan");
    let guarded = {
        let [mut q, mut k, mut v] = [&inputs.q, &inputs.k, &inputs.v].map(Copied::new);
        let (mut out, mut lse) = (Guarded::of::<T>(count), Guarded::of::<f32>(rows));
        let (out, lse) = (out.slice::<T>(count, place(3)), lse.slice::<f32>(rows, place(4)));
        let mut lines = Guarded::of::<Line>(plan.workspace_lines());
        let outputs = Outputs::new(ViewMut::new(out, Layout::Bhsd, shape.output()).expect("output")).lse(lse);
        let lines = lines.slice(plan.workspace_lines(), Place::Before);
        plan.run(q.view(place(0)), k.view(place(1)), v.view(place(2)), outputs, lines).expect("accepted");
        all(out, lse)
    };
    let (mut out, mut lse) = (vec![T::from_f64(7.0); count], vec![7.0; rows]);
    let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, shape.output()).expect("output")).lse(&mut lse);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    plan.run(q, k, v, outputs, Workspace::new().lines(plan.workspace_lines())).expect("accepted");
    [guarded, all(&out, &lse)]
}

/// Lengths and dims that leave something over of every vector, tile and group: few queries (decoded) and many.
const SHAPES: [(usize, usize, usize, usize, usize, usize, usize); 8] = [
    (1, 2, 1, 1, 70, 40, 24),
    (1, 3, 1, 1, 70, 64, 32),
    (1, 6, 3, 1, 70, 64, 32),
    (2, 2, 2, 3, 33, 7, 5),
    (1, 2, 1, 37, 65, 33, 17),
    (1, 1, 1, 50, 131, 64, 80),
    (1, 2, 2, 17, 1, 1, 1),
    (1, 1, 1, 97, 600, 24, 20),
];

fn nothing_beyond_the_buffers<T: KernelElement + Number + Plain>() {
    for dims in SHAPES {
        let dims = shape(dims);
        let scores = Tensor4::<f32>::painted([1, 1, dims.q_len, dims.kv_len], Memory::Bhsd, 52, 1.0);
        for (n, memory) in Memory::ALL.into_iter().enumerate() {
            let inputs = Inputs::<T>::painted(dims, memory, 51, 1.0);
            for place in [Place::Before, Place::After(0)] {
                let mut bias = Copied::new(&scores);
                let bias = bias.view(place);
                let plain = Attention::new().precision(if n % 2 == 0 { Precision::Exact } else { Precision::Fast });
                let masked = plain.mask(Mask::causal(Align::BottomRight)).bias(bias);
                for (level, attn) in
                    super::levels_and_model().into_iter().flat_map(|level| [(level, plain), (level, masked)])
                {
                    let [guarded, ordinary] = bits(level, &attn, &inputs, |_| place);
                    assert!(guarded == ordinary, "{level:?} {:?} {dims:?} {memory:?} {place:?}", T::DTYPE);
                }
            }
        }
    }
}

/// Caches of bytes, whose rows are multiplied as integers where the level does: few rows and several, odd lengths.
#[test]
fn packed_caches_touch_nothing_beyond_their_bytes() {
    for (format, dim, wide) in [
        (Format::Q8_0, 32, 96),
        (Format::Q8_0, 128, 64),
        (Format::Int8, 8, 24),
        (Format::Int8, 40, 72),
        (Format::Int8, 48, 80),
        (Format::Int8, 128, 144),
        (Format::Q4_0, 64, 32),
    ] {
        for (group, tokens) in [(1, 1), (1, 70), (2, 35), (4, 97), (5, 33), (7, 64), (8, 66)] {
            let inputs = Inputs::<f32>::plain(shape((1, group, 1, 1, tokens, dim, wide)), 53);
            let stored = Stored::new(&inputs, [format; 2], ScaleOf::Token);
            let view = stored.view();
            let [k, v] = [view.bytes().k(), view.bytes().v()];
            for place in [Place::Before, Place::After(0), Place::After(1)] {
                let [mut k_bytes, mut v_bytes] = [k, v].map(|x| Guarded::of::<u8>(x.data().len()));
                let [k_bytes, v_bytes] = [(&mut k_bytes, k), (&mut v_bytes, v)].map(|(to, x)| {
                    let to = to.slice::<u8>(x.data().len(), place);
                    to.copy_from_slice(x.data());
                    View::new(to, Layout::Bhsd, x.sizes()).expect("bytes")
                });
                let cache = CacheView::of_tensors(k_bytes, v_bytes).expect("a cache");
                let guarded = StoredView::new(cache, view.keys(), view.values()).expect("fits");
                for (level, precision) in
                    Level::available().flat_map(|level| [(level, Precision::Exact), (level, Precision::Fast)])
                {
                    let attn = Attention::new().precision(precision);
                    let want = step(level, &attn, inputs.q.view(), view, wide).expect("accepted");
                    let got = step(level, &attn, inputs.q.view(), guarded, wide).expect("accepted");
                    assert_eq!(got, want, "{level:?} {format:?} {group} {tokens} {place:?}");
                }
            }
        }
    }
}

#[test]
fn f32_touches_nothing_beyond_its_buffers() {
    nothing_beyond_the_buffers::<f32>();
}

#[test]
fn f16_touches_nothing_beyond_its_buffers() {
    nothing_beyond_the_buffers::<f16>();
}

#[test]
fn bf16_touches_nothing_beyond_its_buffers() {
    nothing_beyond_the_buffers::<bf16>();
}

#[test]
fn every_start_from_0_to_63_bytes_gives_the_same_bits() {
    fn check<T: KernelElement + Number + Plain>() {
        for dims in [(1, 2, 1, 2, 40, 40, 24), (1, 2, 1, 35, 70, 40, 24)] {
            let inputs = Inputs::<T>::plain(shape(dims), 53);
            for level in super::levels_and_model() {
                for offset in (0..64).step_by(size_of::<T>()) {
                    // Each buffer somewhere else; lse is of f32.
                    let place = |n: usize| match n {
                        4 => Place::After(offset / 4 * 4),
                        _ => Place::After((offset + 10 * n * size_of::<T>()) % 64),
                    };
                    let [moved, ordinary] = bits(level, &Attention::new(), &inputs, place);
                    assert!(moved == ordinary, "{level:?} {:?} {dims:?} at {offset} bytes", T::DTYPE);
                }
            }
        }
    }
    check::<f32>();
    check::<f16>();
    check::<bf16>();
}
