//! The leaf where a caller's pointers become slices and views.
//!
//! A C caller vouches for one thing: a pointer that is not null points to as many elements as the length beside it
//! says. This file checks all else before it makes a reference: null, alignment, the size of a struct, how far shape
//! and strides reach, that no output overlaps an input, that a boolean is 0 or 1. A slice covers the elements that a
//! tensor reaches and no more, so that tensors may be neighbours in one arena.

#![allow(unsafe_code, reason = "the leaf: makes slices from pointers that a C caller vouches for")]

mod cache;
mod options;

pub(crate) use cache::{append, decode, measured_cache};
pub(crate) use options::{Asked, Copies, Described, asked};

use core::ffi::c_char;
use core::ops::Range;

use attn_core::half::{bf16, f16};
use attn_core::{AttnError, View, ViewMut};
use attn_simd::Input;

use crate::args::{Backward, Call, Finish, Output, Part};
use crate::error::{Error, Result};
use crate::tensor::{Extents, Reach, dtype, reach};
use crate::types::{AttnCache, AttnDtype, AttnGradients, AttnOptions, AttnQueries, AttnShape, AttnTensor};

/// A struct of the header.
///
/// # Safety
/// `repr(C)`, begins with its size as a `usize`, and is valid for every pattern of its bytes; all zeros but the size
/// are its defaults.
pub(crate) unsafe trait Struct: Copy {
    /// Its name in texts.
    const NAME: &'static str;
}

// SAFETY: numbers and raw pointers only, behind a size.
unsafe impl Struct for AttnTensor {
    const NAME: &'static str = "AttnTensor";
}
// SAFETY: as above.
unsafe impl Struct for AttnShape {
    const NAME: &'static str = "AttnShape";
}
// SAFETY: as above; an optional function pointer is null or what the caller vouches for as a function.
unsafe impl Struct for AttnOptions {
    const NAME: &'static str = "AttnOptions";
}

// SAFETY: numbers and raw pointers only, behind a size.
unsafe impl Struct for AttnCache {
    const NAME: &'static str = "AttnCache";
}
// SAFETY: as above.
unsafe impl Struct for AttnQueries {
    const NAME: &'static str = "AttnQueries";
}
// SAFETY: as above.
unsafe impl Struct for AttnGradients {
    const NAME: &'static str = "AttnGradients";
}

/// No version of a struct is as large as this: a larger number was never a size.
const LARGEST: usize = 1 << 14;

/// The size of a struct, checked: it is possible, and all bytes that this version does not know are zero.
///
/// # Safety
/// `from` is null, or points to as many bytes as its first field says.
unsafe fn measure<T: Struct>(from: *const T) -> Result<usize> {
    address(T::NAME, from)?;
    // SAFETY: not null, aligned, and begins with its size.
    let found = unsafe { from.cast::<usize>().read() };
    let known = size_of::<T>();
    // A size that ends inside a field would make half a pointer of it: what compilers lay out ends at a multiple of the
    // alignment.
    if !(size_of::<usize>()..=LARGEST).contains(&found) || !found.is_multiple_of(align_of::<T>()) {
        return Err(Error::StructSize { what: T::NAME, found, known });
    }
    for at in known..found {
        // SAFETY: the caller vouches for `found` bytes.
        if unsafe { from.cast::<u8>().add(at).read() } != 0 {
            return Err(Error::StructTail { what: T::NAME, known });
        }
    }
    Ok(found)
}

/// Refuses impossible sizes of structs before any field is read.
/// Null is left to whoever needs the struct.
///
/// # Safety
/// As [`measure`] for each.
pub(crate) unsafe fn measured<T: Struct, const N: usize>(all: [*const T; N]) -> Result<()> {
    for from in all.into_iter().filter(|from| !from.is_null()) {
        // SAFETY: the caller's promise is the same.
        unsafe { measure(from)? };
    }
    Ok(())
}

/// Copies a struct, whatever version of the header its caller knew: what it does not have is zero, and what this
/// version does not know must be.
///
/// # Safety
/// As [`measure`].
pub(crate) unsafe fn copy<T: Struct>(from: *const T) -> Result<T> {
    // SAFETY: the caller's promise is the same.
    let found = unsafe { measure(from)? };
    let mut copy = core::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: the caller vouches for `found` bytes; the copy has room for all that are known.
    unsafe { from.cast::<u8>().copy_to_nonoverlapping(copy.as_mut_ptr().cast::<u8>(), found.min(size_of::<T>())) };
    // SAFETY: every byte is set, and a `Struct` is valid for every pattern.
    Ok(unsafe { copy.assume_init() })
}

/// Refuses null and addresses that do not fit the type.
fn address<T>(what: &'static str, pointer: *const T) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::Null(what));
    }
    if !pointer.is_aligned() {
        return Err(Error::Misaligned { what, align: align_of::<T>() });
    }
    Ok(())
}

/// The addresses of `len` elements, if they can be the addresses of a slice.
fn bytes<T>(what: &'static str, data: *const T, len: usize) -> Result<Range<usize>> {
    if len == 0 {
        return Ok(0..0);
    }
    address(what, data)?;
    let size = len.checked_mul(size_of::<T>()).filter(|&size| size <= isize::MAX as usize);
    let end = size.and_then(|size| data.addr().checked_add(size));
    Ok(data.addr()..end.ok_or(AttnError::Overflow { what })?)
}

/// A table of the caller's; `None` if there is none.
///
/// # Safety
/// `data` points to `len` elements if it is not null, which nobody writes during `'a`.
unsafe fn table<'a, T>(
    what: &'static str,
    data: *const T,
    len: usize,
    extents: &mut Extents,
) -> Result<Option<&'a [T]>> {
    if data.is_null() && len == 0 {
        return Ok(None);
    }
    address(what, data)?;
    extents.read(what, bytes(what, data, len)?);
    // SAFETY: not null, aligned, of a size that a slice can have; the caller vouches for the elements.
    Ok(Some(unsafe { core::slice::from_raw_parts(data, len) }))
}

/// The elements that a tensor reaches, and the index of its element `[0, 0, 0, 0]` among them.
///
/// # Safety
/// `data` points to `len` elements of type `T` if it is not null, which nobody writes during `'a`; `T` is valid for
/// every pattern of its bytes.
unsafe fn elements<'a, T>(what: &'static str, tensor: &AttnTensor, extents: &mut Extents) -> Result<(&'a [T], usize)> {
    let Reach { first, count, offset } = reach(what, tensor)?;
    if count == 0 {
        return Ok((&[], 0));
    }
    let data = tensor.data.cast::<T>().cast_const();
    bytes(what, data, tensor.len)?;
    // SAFETY: `reach` has checked that these elements are among the `len` that the caller vouches for.
    let data = unsafe { data.add(first) };
    extents.read(what, bytes(what, data, count)?);
    // SAFETY: as above; not null, aligned, of a size that a slice can have.
    Ok((unsafe { core::slice::from_raw_parts(data, count) }, offset))
}

/// A view of a tensor.
///
/// # Safety
/// As [`elements`].
unsafe fn view<'a, T: Copy>(what: &'static str, tensor: &AttnTensor, extents: &mut Extents) -> Result<View<'a, T>> {
    // SAFETY: the caller's promise is the same.
    let (data, offset) = unsafe { elements::<T>(what, tensor, extents)? };
    Ok(View::strided(data, tensor.shape, tensor.strides, offset)?)
}

/// An input of a kernel.
///
/// # Safety
/// As [`elements`], with the elements that `dtype` names.
pub(crate) unsafe fn input<'a>(
    what: &'static str,
    from: *const AttnTensor,
    extents: &mut Extents,
) -> Result<Input<'a>> {
    if from.is_null() {
        return Err(Error::Null(what));
    }
    // SAFETY: the caller vouches for the struct and for what it points to; all these types are valid for every pattern.
    unsafe {
        let tensor = copy(from)?;
        match dtype(what, tensor.dtype)? {
            AttnDtype::F32 => Ok(Input::F32(view::<f32>(what, &tensor, extents)?)),
            AttnDtype::F16 => Ok(Input::F16(view::<f16>(what, &tensor, extents)?)),
            AttnDtype::Bf16 => Ok(Input::Bf16(view::<bf16>(what, &tensor, extents)?)),
            _ => Err(Error::Dtype { what, wanted: "F32, F16 or BF16", value: tensor.dtype }),
        }
    }
}

/// Reads sizes.
///
/// # Safety
/// `from` is null, or points to a struct of the size that it begins with.
pub(crate) unsafe fn shape(from: *const AttnShape) -> Result<attn_core::AttnShape> {
    // SAFETY: the caller vouches for the struct.
    let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = unsafe { copy(from)? };
    let kv = [batch, kv_heads, kv_len];
    Ok(attn_core::AttnShape::new(
        [batch, q_heads, q_len, head_dim],
        [kv[0], kv[1], kv[2], head_dim],
        [kv[0], kv[1], kv[2], value_dim],
    )?)
}

/// Reads the tensors of a call. Everything else that it reads has been noted in `extents` before.
///
/// # Safety
/// As [`elements`] for all, and nobody else touches the outputs during `'a`.
pub(crate) unsafe fn call<'a>(
    [q, k, v]: [*const AttnTensor; 3],
    out: *const AttnTensor,
    lse: *mut f32,
    lse_len: usize,
    extents: &mut Extents,
) -> Result<Call<'a>> {
    // SAFETY: the caller's promise is the same for each.
    unsafe {
        let [q, k, v] = [input("q", q, extents)?, input("k", k, extents)?, input("v", v, extents)?];
        let (out, lse) = outputs(out, lse, lse_len, extents)?;
        Ok(Call { q, k, v, out, lse })
    }
}

/// Reads the tensors of a backward call: q, k, v, out and dout, and where the gradients go.
///
/// # Safety
/// As [`elements`] for all, and nobody else touches the gradients during `'a`.
pub(crate) unsafe fn backward<'a>(
    [q, k, v, out, dout]: [*const AttnTensor; 5],
    (lse, lse_len): (*const f32, usize),
    gradients: *const AttnGradients,
    extents: &mut Extents,
) -> Result<Backward<'a>> {
    // SAFETY: the caller's promise is the same for each.
    unsafe {
        let AttnGradients { dq, dk, dv, dsinks, dsinks_len, dbias, score_mod_derivative, .. } = copy(gradients)?;
        measured([dq, dk, dv, dbias])?;
        let [q, k, v] = [input("q", q, extents)?, input("k", k, extents)?, input("v", v, extents)?];
        let [out, dout] = [input("out", out, extents)?, input("dout", dout, extents)?];
        let no_rows = match &out {
            Input::F32(out) => out.sizes()[..3].contains(&0),
            Input::F16(out) => out.sizes()[..3].contains(&0),
            Input::Bf16(out) => out.sizes()[..3].contains(&0),
        };
        if lse_len > 0 || !no_rows {
            address("lse", lse)?;
        }
        let lse = table("lse", lse, lse_len, extents)?.unwrap_or_default();
        let [dq, dk, dv] = [output("dq", dq, extents)?, output("dk", dk, extents)?, output("dv", dv, extents)?];
        let dsinks = table_mut("dsinks", dsinks, dsinks_len, extents)?;
        let dbias = doubles("dbias", dbias, extents)?;
        let derivative = score_mod_derivative;
        Ok(Backward { q, k, v, out, lse, dout, dq, dk, dv, dsinks, dbias, derivative })
    }
}

/// Reads the arguments of a call on a part of the keys.
///
/// # Safety
/// As [`elements`] for all, and nobody else touches `states` during `'a`.
pub(crate) unsafe fn part<'a>(
    first: usize,
    [q, k, v]: [*const AttnTensor; 3],
    (states, states_len): (*mut f32, usize),
    extents: &mut Extents,
) -> Result<Part<'a>> {
    // SAFETY: the caller's promise is the same for each.
    unsafe {
        let [q, k, v] = [input("q", q, extents)?, input("k", k, extents)?, input("v", v, extents)?];
        Ok(Part { first, q, k, v, states: table_mut("states", states, states_len, extents)?.unwrap_or_default() })
    }
}

/// Reads the arguments of the end of a call on parts.
///
/// # Safety
/// As [`elements`] for all, and nobody else touches the outputs during `'a`.
pub(crate) unsafe fn finish<'a>(
    (states, states_len): (*const f32, usize),
    out: *const AttnTensor,
    (lse, lse_len): (*mut f32, usize),
    extents: &mut Extents,
) -> Result<Finish<'a>> {
    // SAFETY: the caller's promise is the same for each.
    unsafe {
        let states = table("states", states, states_len, extents)?.unwrap_or_default();
        let (out, lse) = outputs(out, lse, lse_len, extents)?;
        Ok(Finish { states, out, lse })
    }
}

/// Reads the states of two parts. The first are written too.
///
/// # Safety
/// Both point to `len` numbers if they are not null; nobody writes them, or touches the first, during `'a`.
pub(crate) unsafe fn states<'a>(
    states: *mut f32,
    others: *const f32,
    len: usize,
) -> Result<(&'a mut [f32], &'a [f32])> {
    let mut extents = Extents::new();
    // SAFETY: the caller's promise is the same for each.
    unsafe {
        let others = table("others", others, len, &mut extents)?.unwrap_or_default();
        Ok((table_mut("states", states, len, &mut extents)?.unwrap_or_default(), others))
    }
}

/// Two results to merge.
pub(crate) type Results<'a> = (ViewMut<'a, f32>, &'a mut [f32], View<'a, f32>, &'a [f32]);

/// Reads two results, each a tensor of floats and its lse.
///
/// # Safety
/// As [`elements`] for all, and nobody else touches the first ones during `'a`.
pub(crate) unsafe fn results<'a>(
    out: *const AttnTensor,
    lse: *mut f32,
    other: *const AttnTensor,
    other_lse: *const f32,
    lse_len: usize,
) -> Result<Results<'a>> {
    let mut extents = Extents::new();
    let floats = |what, value| Err(Error::Dtype { what, wanted: "F32", value });
    // SAFETY: the caller's promise is the same for each.
    unsafe {
        let other = match input("other", other, &mut extents)? {
            Input::F32(view) => view,
            Input::F16(_) => return floats("other", AttnDtype::F16 as u32),
            Input::Bf16(_) => return floats("other", AttnDtype::Bf16 as u32),
        };
        let other_lse = table("other_lse", other_lse, lse_len, &mut extents)?.unwrap_or_default();
        let (out, lse) = outputs(out, lse, lse_len, &mut extents)?;
        match out {
            Output::F32(out) => Ok((out, lse.unwrap_or_default(), other, other_lse)),
            Output::F16(_) => floats("out", AttnDtype::F16 as u32),
            Output::Bf16(_) => floats("out", AttnDtype::Bf16 as u32),
        }
    }
}

/// Writes a value of the caller's.
///
/// # Safety
/// `to` is null, or points to a `T` that nobody else touches.
pub(crate) unsafe fn store<T>(what: &'static str, to: *mut T, value: T) -> Result<()> {
    address(what, to.cast_const())?;
    // SAFETY: not null, aligned; the caller vouches for it.
    unsafe { to.write(value) };
    Ok(())
}

/// Gives an object away; [`destroy`] takes it back.
///
/// # Safety
/// As [`store`].
pub(crate) unsafe fn store_new<T>(what: &'static str, to: *mut *mut T, value: T) -> Result<()> {
    address(what, to.cast_const())?; // before the object is let go
    // SAFETY: the caller vouches for the pointer.
    unsafe { store(what, to, Box::into_raw(Box::new(value))) }
}

/// An object that was given away.
///
/// # Safety
/// `from` is null, or came from [`store_new`] and lives during `'a`.
pub(crate) unsafe fn handle<'a, T>(what: &'static str, from: *const T) -> Result<&'a T> {
    address(what, from)?;
    // SAFETY: not null, aligned; the caller vouches for it.
    Ok(unsafe { &*from })
}

/// Frees an object that was given away; null is ignored.
///
/// # Safety
/// `object` is null, or came from [`store_new`], and is not used any more.
pub(crate) unsafe fn destroy<T>(object: *mut T) -> Result<()> {
    if !object.is_null() {
        address("object", object.cast_const())?;
        // SAFETY: it came from a box, which the caller does not use any more.
        drop(unsafe { Box::from_raw(object) });
    }
    Ok(())
}

/// Writes a text with its closing zero. What does not fit is cut, and an error that names the size: its beginning is
/// still of use.
///
/// # Safety
/// `to` is null, or points to `size` bytes that nobody else touches.
pub(crate) unsafe fn write_text(to: *mut c_char, size: usize, text: &str) -> Result<()> {
    address("text", to.cast_const())?;
    let needed = text.len() + 1;
    let Some(room) = size.checked_sub(1) else {
        return Err(Error::Text { needed, found: 0 });
    };
    let take = text.len().min(room);
    // SAFETY: not null; `take + 1` bytes are at most the `size` that the caller vouches for.
    unsafe {
        text.as_ptr().copy_to_nonoverlapping(to.cast::<u8>(), take);
        to.add(take).write(0);
    }
    if needed <= size { Ok(()) } else { Err(Error::Text { needed, found: size }) }
}

/// Where a call writes. Everything that it reads has been noted in `extents` before.
///
/// # Safety
/// As [`elements`] for both, and nobody else reads or writes them during `'a`.
pub(crate) unsafe fn outputs<'a>(
    out: *const AttnTensor,
    lse: *mut f32,
    lse_len: usize,
    extents: &mut Extents,
) -> Result<(Output<'a>, Option<&'a mut [f32]>)> {
    // SAFETY: the caller's promise is the same for both.
    unsafe { Ok((output("out", out, extents)?, table_mut("lse", lse, lse_len, extents)?)) }
}

/// A tensor to write.
///
/// # Safety
/// As [`elements`], and nobody else reads or writes the elements during `'a`.
unsafe fn output<'a>(what: &'static str, from: *const AttnTensor, extents: &mut Extents) -> Result<Output<'a>> {
    if from.is_null() {
        return Err(Error::Null(what));
    }
    // SAFETY: the caller vouches for the struct and for what it points to; all these types are valid for every pattern.
    unsafe {
        let tensor = copy(from)?;
        match dtype(what, tensor.dtype)? {
            AttnDtype::F32 => Ok(Output::F32(view_mut::<f32>(what, &tensor, extents)?)),
            AttnDtype::F16 => Ok(Output::F16(view_mut::<f16>(what, &tensor, extents)?)),
            AttnDtype::Bf16 => Ok(Output::Bf16(view_mut::<bf16>(what, &tensor, extents)?)),
            _ => Err(Error::Dtype { what, wanted: "F32, F16 or BF16", value: tensor.dtype }),
        }
    }
}

/// A tensor of doubles to write; `None` if there is none.
///
/// # Safety
/// As [`output`], but null is allowed.
unsafe fn doubles<'a>(
    what: &'static str,
    from: *const AttnTensor,
    extents: &mut Extents,
) -> Result<Option<ViewMut<'a, f64>>> {
    if from.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller vouches for the struct and for what it points to; any pattern is a double.
    unsafe {
        let tensor = copy(from)?;
        match dtype(what, tensor.dtype)? {
            AttnDtype::F64 => Ok(Some(view_mut::<f64>(what, &tensor, extents)?)),
            _ => Err(Error::Dtype { what, wanted: "F64", value: tensor.dtype }),
        }
    }
}

/// A table to write; `None` if there is none.
///
/// # Safety
/// `data` is null, or points to `len` elements that nobody else reads or writes during `'a`.
unsafe fn table_mut<'a, T>(
    what: &'static str,
    data: *mut T,
    len: usize,
    extents: &mut Extents,
) -> Result<Option<&'a mut [T]>> {
    if data.is_null() && len == 0 {
        return Ok(None);
    }
    address(what, data.cast_const())?;
    extents.write(what, bytes(what, data.cast_const(), len)?)?;
    // SAFETY: not null, aligned, of a size that a slice can have, meets nothing else of this call; the caller vouches
    // for it.
    Ok(Some(unsafe { core::slice::from_raw_parts_mut(data, len) }))
}

/// A view to write through.
///
/// # Safety
/// As [`elements`], and nobody else reads or writes the elements during `'a`.
unsafe fn view_mut<'a, T: Copy>(
    what: &'static str,
    tensor: &AttnTensor,
    extents: &mut Extents,
) -> Result<ViewMut<'a, T>> {
    let Reach { first, count, offset } = reach(what, tensor)?;
    if count == 0 {
        return Ok(ViewMut::strided(&mut [], tensor.shape, tensor.strides, 0)?);
    }
    let data = tensor.data.cast::<T>();
    bytes(what, data.cast_const(), tensor.len)?;
    // SAFETY: `reach` has checked that these elements are among the `len` that the caller vouches for.
    let data = unsafe { data.add(first) };
    extents.write(what, bytes(what, data.cast_const(), count)?)?;
    // SAFETY: as above; not null, aligned, of a size that a slice can have, and meets nothing that this call reads.
    let data = unsafe { core::slice::from_raw_parts_mut(data, count) };
    Ok(ViewMut::strided(data, tensor.shape, tensor.strides, offset)?)
}
