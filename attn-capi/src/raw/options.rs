//! The options of a call, and everything that they point to: tables, tensors, functions, a level's name.

#![allow(unsafe_code, reason = "the leaf: makes slices from pointers that a C caller vouches for")]

use core::cell::OnceCell;
use core::ffi::{CStr, c_char};

use attn_core::half::{bf16, f16};
use attn_core::{AttnError, Bias, Layout, View};
use attn_simd::{Level, LevelError};

use super::{copy, elements, table, view};
use crate::args::Callbacks;
use crate::error::{Error, Result};
use crate::options::{Masks, Tables};
use crate::tensor::{Extents, dtype};
use crate::types::{AttnDtype, AttnOptions, AttnTensor};

/// Copies of boolean tensors that have other bytes between their elements. No other tensor is copied.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    keep: OnceCell<Box<[bool]>>,
    drop: OnceCell<Box<[bool]>>,
    blocks: OnceCell<Box<[bool]>>,
    dropout_keep: OnceCell<Box<[bool]>>,
}

/// A boolean tensor; `None` if there is none.
///
/// # Safety
/// As [`elements`], with bytes.
unsafe fn bools<'a>(
    what: &'static str,
    tensor: Option<&AttnTensor>,
    extents: &mut Extents,
    copy: &'a OnceCell<Box<[bool]>>,
) -> Result<Option<View<'a, bool>>> {
    let Some(tensor) = tensor else {
        return Ok(None);
    };
    if tensor.dtype != AttnDtype::Bool as u32 {
        return Err(Error::Dtype { what, wanted: "BOOL", value: tensor.dtype });
    }
    // SAFETY: the caller vouches for the elements, and every pattern is a byte.
    let (data, offset) = unsafe { elements::<u8>(what, tensor, extents)? };
    // A whole pass without a branch, which a compiler turns into lanes.
    if data.iter().fold(0, |all, &byte| all | byte) > 1 {
        // Perhaps only between the elements; a bool may not be made of such a byte, even if nobody reads it.
        let bytes = View::strided(data, tensor.shape, tensor.strides, offset)?;
        return copied_bools(what, bytes, copy).map(Some);
    }
    // SAFETY: a bool is one byte of value 0 or 1, which all of these are.
    let data = unsafe { core::slice::from_raw_parts(data.as_ptr().cast::<bool>(), data.len()) };
    Ok(Some(View::strided(data, tensor.shape, tensor.strides, offset)?))
}

/// A copy of the elements alone, each checked. An axis of stride 0 stays one.
fn copied_bools<'a>(what: &'static str, from: View<'_, u8>, copy: &'a OnceCell<Box<[bool]>>) -> Result<View<'a, bool>> {
    let (mut sizes, strides) = (from.sizes(), from.strides());
    sizes.iter_mut().zip(strides).filter(|(_, stride)| *stride == 0).for_each(|(size, _)| *size = 1);
    let [batch, heads, rows, columns] = sizes;
    let count = batch * heads * rows * columns; // at most the tensor's, whose product fits
    let mut bools = Vec::new();
    if bools.try_reserve_exact(count).is_err() {
        return Err(AttnError::Memory { what, bytes: count }.into());
    }
    for at in 0..count {
        let (row, column) = (at / columns, at % columns);
        let index = [row / rows / heads, row / rows % heads, row % rows, column];
        let value = from.at(index[0], index[1], index[2], index[3]);
        if value > 1 {
            let way: isize = index.into_iter().zip(strides).map(|(i, stride)| i as isize * stride).sum();
            return Err(Error::NotBool { what, at: from.offset().wrapping_add_signed(way), value });
        }
        bools.push(value == 1);
    }
    let mut packed = Layout::Bhsd.strides(sizes)?;
    packed.iter_mut().zip(strides).filter(|(_, stride)| *stride == 0).for_each(|(packed, _)| *packed = 0);
    Ok(View::strided(copy.get_or_init(|| bools.into()), from.sizes(), packed, 0)?)
}

/// An additive bias; `None` if there is none.
///
/// # Safety
/// As [`elements`], with the elements that `dtype` names.
unsafe fn bias<'a>(what: &'static str, tensor: Option<&AttnTensor>, extents: &mut Extents) -> Result<Option<Bias<'a>>> {
    let Some(tensor) = tensor else {
        return Ok(None);
    };
    // SAFETY: the caller vouches for the elements; all these types are valid for every pattern.
    unsafe {
        Ok(Some(match dtype(what, tensor.dtype)? {
            AttnDtype::F32 => Bias::F32(view::<f32>(what, tensor, extents)?),
            AttnDtype::F16 => Bias::F16(view::<f16>(what, tensor, extents)?),
            AttnDtype::Bf16 => Bias::Bf16(view::<bf16>(what, tensor, extents)?),
            AttnDtype::F64 => Bias::F64(view::<f64>(what, tensor, extents)?),
            _ => {
                return Err(Error::Dtype { what, wanted: "F32, F16, BF16 or F64", value: tensor.dtype });
            }
        }))
    }
}

/// The tables of some options.
///
/// # Safety
/// Each pointer points to as many elements as the length beside it says, which nobody writes during `'a`.
unsafe fn tables<'a>(options: &AttnOptions, extents: &mut Extents) -> Result<Tables<'a>> {
    // SAFETY: the caller's promise is the same for each.
    unsafe {
        Ok(Tables {
            prefix: table("prefix_lens", options.prefix_lens, options.prefix_lens_len, extents)?,
            kv_lens: table("kv_lens", options.kv_lens, options.kv_lens_len, extents)?,
            kv_starts: table("kv_starts", options.kv_starts, options.kv_starts_len, extents)?,
            q_lens: table("q_lens", options.q_lens, options.q_lens_len, extents)?,
            cu_q: table("cu_q", options.cu_q, options.cu_q_len, extents)?,
            cu_k: table("cu_k", options.cu_k, options.cu_k_len, extents)?,
            parents: table("tree_parents", options.tree_parents, options.tree_len, extents)?,
            slopes: table("alibi_slopes", options.alibi_slopes, options.alibi_slopes_len, extents)?,
            sinks: table("sinks", options.sinks, options.sinks_len, extents)?,
        })
    }
}

/// What options say about their tensors: sizes and addresses, which a plan keeps.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Described {
    keep: Option<AttnTensor>,
    drop: Option<AttnTensor>,
    blocks: Option<AttnTensor>,
    dropout_keep: Option<AttnTensor>,
    bias: Option<AttnTensor>,
}

impl Described {
    /// Copies the structs that options point to.
    ///
    /// # Safety
    /// Each pointer is null, or points to a struct of the size that it begins with.
    unsafe fn of(options: &AttnOptions) -> Result<Self> {
        // SAFETY: the caller's promise is the same for each.
        let tensor = |from: *const AttnTensor| unsafe { if from.is_null() { Ok(None) } else { copy(from).map(Some) } };
        Ok(Self {
            keep: tensor(options.keep)?,
            drop: tensor(options.drop)?,
            blocks: tensor(options.blocks)?,
            dropout_keep: tensor(options.dropout_keep)?,
            bias: tensor(options.bias)?,
        })
    }

    /// The tensors themselves.
    ///
    /// # Safety
    /// The caller vouches for the elements of each, and nobody writes them during `'a`.
    pub(crate) unsafe fn masks<'a>(&self, extents: &mut Extents, copies: &'a Copies) -> Result<Masks<'a>> {
        // SAFETY: the caller's promise is the same for each.
        unsafe {
            Ok(Masks {
                keep: bools("keep", self.keep.as_ref(), extents, &copies.keep)?,
                drop: bools("drop", self.drop.as_ref(), extents, &copies.drop)?,
                blocks: bools("blocks", self.blocks.as_ref(), extents, &copies.blocks)?,
                dropout_keep: bools("dropout_keep", self.dropout_keep.as_ref(), extents, &copies.dropout_keep)?,
                bias: bias("bias", self.bias.as_ref(), extents)?,
            })
        }
    }
}

/// The level of a name; the best one for null.
///
/// # Safety
/// `name` is null or a string that ends with 0.
unsafe fn level(name: *const c_char) -> Result<Level> {
    if name.is_null() {
        return Ok(Level::detect());
    }
    // SAFETY: the caller vouches for the string.
    let name = unsafe { CStr::from_ptr(name) };
    let refused = |error| Error::Level { what: "AttnOptions.level", error };
    Level::by_name(name.to_str().map_err(|_| refused(LevelError::Unknown))?).map_err(refused)
}

/// Options and everything that they point to.
#[derive(Debug)]
pub(crate) struct Asked<'a> {
    pub(crate) options: AttnOptions,
    pub(crate) tables: Tables<'a>,
    pub(crate) described: Described,
    pub(crate) masks: Masks<'a>,
    pub(crate) callbacks: Option<Callbacks>,
    pub(crate) level: Level,
}

/// Reads options; null means the defaults.
///
/// # Safety
/// `options` is null, or all that it points to is as the header says, and nobody writes it during `'a`.
pub(crate) unsafe fn asked<'a>(
    options: *const AttnOptions,
    extents: &mut Extents,
    copies: &'a Copies,
) -> Result<Asked<'a>> {
    // SAFETY: the caller vouches for everything; all zeros are the defaults of a `Struct`.
    unsafe {
        let options = if options.is_null() { core::mem::zeroed() } else { copy(options)? };
        let described = Described::of(&options)?;
        Ok(Asked {
            options,
            tables: tables(&options, extents)?,
            described,
            masks: described.masks(extents, copies)?,
            callbacks: Callbacks::of(&options),
            level: level(options.level)?,
        })
    }
}

// SAFETY: the header says that both functions are called from several threads at once, with the pointer that the caller
// gave for them.
unsafe impl Sync for Callbacks {}
