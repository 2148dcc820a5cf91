//! Memory of other libraries: a DLPack capsule becomes a [`Tensor`], and a tensor becomes a slice. The only file here
//! with `unsafe`.
//!
//! A producer promises that a capsule's tensor stays in memory as long as the capsule, which a [`Tensor`] holds. We
//! check all else that can be checked: device, type, sizes, strides, alignment, that booleans are 0 or 1, and that an
//! output overlaps no other tensor of the call. As with every extension that releases the interpreter's lock, other
//! threads must not write to the tensors during a call, nor resize them.
#![allow(unsafe_code, reason = "capsules hold pointers")]

use std::borrow::Cow;
use std::ffi::{CStr, c_int, c_void};
use std::ops::Range;
use std::slice;

use attn_core::half::{bf16, f16};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::kind::Kind;

/// Most axes of a tensor.
pub(crate) const AXES: usize = 5;

/// A number type of the kernels and masks.
///
/// # Safety
/// Every pattern of bits is a value of the type, which has the size and alignment of its [`Kind`].
pub(crate) unsafe trait Plain: Copy + Send + Sync {
    const KIND: Kind;
}

// SAFETY: a float of 64 bits.
unsafe impl Plain for f64 {
    const KIND: Kind = Kind::F64;
}
// SAFETY: a float of 32 bits.
unsafe impl Plain for f32 {
    const KIND: Kind = Kind::F32;
}
// SAFETY: 16 bits, of which each pattern is a number.
unsafe impl Plain for f16 {
    const KIND: Kind = Kind::F16;
}
// SAFETY: 16 bits, of which each pattern is a number.
unsafe impl Plain for bf16 {
    const KIND: Kind = Kind::Bf16;
}

/// The structs of DLPack's header, as far as a reader needs them.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
struct DlVersioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: *const c_void,
    flags: u64,
    tensor: DlTensor,
}

const PLAIN: &CStr = c"dltensor";
const VERSIONED: &CStr = c"dltensor_versioned";
const READ_ONLY: u64 = 1;
/// The CPU, and host memory that CUDA or ROCm pinned.
const HOST: [i32; 3] = [1, 3, 11];

/// The functions that a library exports beside its arrays, DLPack's exchange API: an array is read without a capsule.
pub(crate) struct Exchange(FromObject);

/// Fills the struct of an array, which borrows from it; or raises an error and gives another number than 0.
type FromObject = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// The table of functions, as far as we need it.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const c_void,
    others: [*const c_void; 3],
    from_object: Option<FromObject>,
}

const EXCHANGE: &CStr = c"dlpack_exchange_api";

impl Exchange {
    /// The functions of a class of arrays, if it has them in a version that we know.
    pub(crate) fn of(class: &Bound<'_, PyAny>) -> Option<Self> {
        let capsule = class.getattr("__dlpack_c_exchange_api__").ok()?;
        // SAFETY: the name is a C string, and IsValid accepts any object.
        if unsafe { ffi::PyCapsule_IsValid(capsule.as_ptr(), EXCHANGE.as_ptr()) } != 1 {
            return None;
        }
        // SAFETY: the capsule has this name, and so points to the table, which stays as long as the process.
        let api = unsafe { &*ffi::PyCapsule_GetPointer(capsule.as_ptr(), EXCHANGE.as_ptr()).cast::<ExchangeApi>() };
        // The rest of the struct is that of version 1 if the first field says so.
        if api.major == 1 { api.from_object.map(Self) } else { None }
    }

    /// Reads an array of that class.
    pub(crate) fn read<'py>(&self, name: &'static str, array: &Bound<'py, PyAny>) -> PyResult<Tensor<'py>> {
        let mut tensor = DlTensor {
            data: std::ptr::null_mut(),
            device_type: 0,
            device_id: 0,
            ndim: 0,
            code: 0,
            bits: 0,
            lanes: 0,
            shape: std::ptr::null(),
            strides: std::ptr::null(),
            byte_offset: 0,
        };
        // SAFETY: the function is that of the array's class, and the interpreter's lock is held.
        if unsafe { (self.0)(array.as_ptr().cast(), &raw mut tensor) } != 0 {
            return Err(PyErr::fetch(array.py()));
        }
        // SAFETY: the function has filled the struct; shape and strides borrow from the array, which is not changed
        // before they are copied, and its memory stays while we hold the array and nobody resizes it.
        unsafe { Tensor::of_struct(name, &tensor, true, false, array.clone()) }
    }
}

/// A tensor of another library, where it lies: at most [`AXES`] axes, missing ones in front with size 1.
pub(crate) struct Tensor<'py> {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    /// Axes as the caller has them.
    pub(crate) axes: usize,
    pub(crate) sizes: [usize; AXES],
    /// In elements; 0 where the size is 0 or 1.
    pub(crate) strides: [isize; AXES],
    /// Index of the first element, from the lowest one that the strides reach.
    pub(crate) offset: usize,
    writable: bool,
    /// The lowest element, aligned for `kind`; dangling if `count` is 0.
    start: *const u8,
    /// Elements from there to the highest one.
    count: usize,
    /// What keeps the memory: a capsule, or the array itself.
    _owner: Bound<'py, PyAny>,
}

impl<'py> Tensor<'py> {
    /// Reads a capsule. `as_bf16` says that 16-bit integers in it are the bits of bfloat16.
    pub(crate) fn of_capsule(name: &'static str, capsule: Bound<'py, PyAny>, as_bf16: bool) -> PyResult<Self> {
        let object = capsule.as_ptr();
        // SAFETY: `object` is a live object and both names are C strings; IsValid accepts any object.
        let (plain, versioned) = unsafe {
            (
                ffi::PyCapsule_IsValid(object, PLAIN.as_ptr()) == 1,
                ffi::PyCapsule_IsValid(object, VERSIONED.as_ptr()) == 1,
            )
        };
        let (tensor, writable) = if plain {
            // SAFETY: the capsule has this name, and so points to a DLManagedTensor, which begins with its tensor.
            (unsafe { &*ffi::PyCapsule_GetPointer(object, PLAIN.as_ptr()).cast::<DlTensor>() }, true)
        } else if versioned {
            // SAFETY: the capsule has this name, and so points to the struct; `major` is its first field for ever.
            let managed = unsafe { ffi::PyCapsule_GetPointer(object, VERSIONED.as_ptr()).cast::<DlVersioned>() };
            // SAFETY: as above.
            let major = unsafe { (*managed).major };
            if major != 1 {
                return Err(PyValueError::new_err(format!("{name}: DLPack {major} is not known, DLPack 1 is")));
            }
            // SAFETY: the layout of version 1.
            unsafe { (&(*managed).tensor, (*managed).flags & READ_ONLY == 0) }
        } else {
            return Err(PyTypeError::new_err(format!("{name}: __dlpack__ gave no capsule of DLPack")));
        };
        // SAFETY: a producer fills the struct as the header of DLPack says.
        unsafe { Self::of_struct(name, tensor, writable, as_bf16, capsule.clone()) }
    }

    /// Reads the struct of DLPack.
    ///
    /// # Safety
    /// Shape and strides have `ndim` entries (strides may be null), and `data` lies in memory as long as `owner` lives.
    unsafe fn of_struct(
        name: &'static str,
        tensor: &DlTensor,
        writable: bool,
        as_bf16: bool,
        owner: Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        if !HOST.contains(&tensor.device_type) {
            let device = tensor.device_type;
            return Err(PyValueError::new_err(format!("{name} is on device type {device}; the CPU is wanted")));
        }
        let kind = Kind::of_dlpack(name, (tensor.code, tensor.bits, tensor.lanes), as_bf16)?;
        let axes = usize::try_from(tensor.ndim).unwrap_or(usize::MAX);
        if axes > AXES {
            return Err(PyValueError::new_err(format!("{name} has {axes} axes, at most {AXES} are allowed")));
        }
        let (mut sizes, mut strides) = ([1usize; AXES], [0isize; AXES]);
        let mut dense = 1i64;
        for axis in (0..axes).rev() {
            let to = AXES - axes + axis;
            // SAFETY: the caller vouches for `ndim` entries; without strides it is row-major.
            let (size, stride) = unsafe {
                (*tensor.shape.add(axis), if tensor.strides.is_null() { dense } else { *tensor.strides.add(axis) })
            };
            sizes[to] = usize::try_from(size)
                .map_err(|_| PyValueError::new_err(format!("{name}: axis {axis} has the size {size}")))?;
            strides[to] = if size > 1 { stride as isize } else { 0 };
            dense = dense.saturating_mul(size.max(1));
        }
        let mut this = Self {
            name,
            kind,
            axes,
            sizes,
            strides,
            offset: 0,
            writable,
            start: std::ptr::dangling(),
            count: 0,
            _owner: owner,
        };
        this.reach(tensor)?;
        Ok(this)
    }

    /// Finds the lowest and the highest element.
    fn reach(&mut self, tensor: &DlTensor) -> PyResult<()> {
        if self.sizes.contains(&0) {
            self.start = std::ptr::without_provenance(8); // aligned for each type, never read
            return Ok(());
        }
        let overflow = || PyValueError::new_err(format!("{}: the size overflows", self.name));
        let (mut low, mut high) = (0i128, 0i128);
        for (size, stride) in self.sizes.into_iter().zip(self.strides) {
            let way = (size as i128 - 1) * stride as i128; // below 2¹²⁷
            let end = if way < 0 { &mut low } else { &mut high };
            *end = end.saturating_add(way);
        }
        let bytes = self.kind.bytes();
        let count = usize::try_from(high.saturating_sub(low).saturating_add(1)).map_err(|_| overflow())?;
        count.checked_mul(bytes).filter(|&all| isize::try_from(all).is_ok()).ok_or_else(overflow)?;
        if self.sizes.into_iter().try_fold(1usize, usize::checked_mul).is_none() {
            return Err(overflow());
        }
        let back = usize::try_from(low.saturating_neg()).map_err(|_| overflow())?;
        let first = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        let start = first.wrapping_sub(back * bytes);
        if first.is_null() {
            return Err(PyValueError::new_err(format!("{} has no memory", self.name)));
        }
        if !start.addr().is_multiple_of(bytes) {
            return Err(PyValueError::new_err(format!("{} is not aligned to {bytes} bytes", self.name)));
        }
        (self.start, self.count, self.offset) = (start, count, back);
        Ok(())
    }

    /// The elements from the lowest to the highest, if they are of this type.
    pub(crate) fn slice<T: Plain>(&self) -> Option<&[T]> {
        if T::KIND != self.kind {
            return None;
        }
        // SAFETY: `reach` proved length and alignment; the producer keeps the memory while the capsule lives, which
        // the borrow of `self` outlasts not; each pattern of bits is a `T`.
        Some(unsafe { slice::from_raw_parts(self.start.cast::<T>(), self.count) })
    }

    /// As [`slice`](Self::slice) of booleans. Bytes other than 0 and 1, which NumPy can hold, count as true, in a copy.
    pub(crate) fn bools(&self) -> Option<Cow<'_, [bool]>> {
        if self.kind != Kind::Bool {
            return None;
        }
        // SAFETY: as in `slice`; bytes of any value are bytes.
        let bytes = unsafe { slice::from_raw_parts(self.start, self.count) };
        if bytes.iter().fold(0, |all, byte| all | byte) <= 1 {
            // SAFETY: each byte is 0 or 1.
            return Some(Cow::Borrowed(unsafe { slice::from_raw_parts(self.start.cast::<bool>(), self.count) }));
        }
        Some(Cow::Owned(bytes.iter().map(|&byte| byte != 0).collect()))
    }

    /// Whether its numbers lie side by side, in order.
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut dense = 1isize;
        self.sizes.into_iter().zip(self.strides).rev().all(|(size, stride)| {
            let fits = size <= 1 || stride == dense;
            dense = dense.saturating_mul(size.max(1) as isize);
            fits
        })
    }

    /// Whether two tensors may share memory: whether their extents do.
    pub(crate) fn meets(&self, other: &Self) -> bool {
        let (a, b) = (self.bytes(), other.bytes());
        a.start < b.end && b.start < a.end && !a.is_empty() && !b.is_empty()
    }

    fn bytes(&self) -> Range<usize> {
        let start = self.start.addr();
        start..start + self.count * self.kind.bytes()
    }
}

/// A tensor that a call writes: writable, and apart from every other tensor of the call.
pub(crate) struct Out<'py>(Tensor<'py>);

impl<'py> Out<'py> {
    /// Checks a tensor against the others of its call, of which it may meet none.
    pub(crate) fn new(tensor: Tensor<'py>, others: &[&Tensor<'py>]) -> PyResult<Self> {
        let name = tensor.name;
        if !tensor.writable {
            return Err(PyValueError::new_err(format!("{name} is read-only")));
        }
        for other in others {
            if tensor.meets(other) {
                return Err(PyValueError::new_err(format!("{name} shares memory with {}", other.name)));
            }
        }
        Ok(Self(tensor))
    }

    /// The tensor, to look at.
    pub(crate) fn tensor(&self) -> &Tensor<'py> {
        &self.0
    }

    /// The elements from the lowest to the highest, if they are of this type.
    pub(crate) fn slice_mut<T: Plain>(&mut self) -> Option<&mut [T]> {
        if T::KIND != self.0.kind {
            return None;
        }
        // SAFETY: as in `Tensor::slice`. The memory may be written, and `new` proved that no other tensor of the call
        // shares it; `self` is borrowed for as long as the slice.
        Some(unsafe { slice::from_raw_parts_mut(self.0.start.cast_mut().cast::<T>(), self.0.count) })
    }
}
