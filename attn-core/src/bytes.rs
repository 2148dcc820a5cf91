//! Views of bytes, as files and messages hold tensors; with the feature `bytemuck`.

use bytemuck::Pod;

use crate::error::{AttnError, Result};
use crate::view::{Layout, View};

impl<'a, T: Copy + Pod> View<'a, T> {
    /// A contiguous tensor of native-endian bytes: a tensor of a mapped safetensors file, for instance. Nothing is
    /// copied.
    ///
    /// # Errors
    /// [`AttnError::Unsupported`] if the bytes are not aligned for `T` (copy them then) or end inside an element; as
    /// [`View::new`].
    ///
    /// ```
    /// use attn_core::{Layout, View};
    /// let (numbers, sizes) = ([0.5f32, 1.0, 1.5, 2.0], [1, 1, 2, 2]);
    /// let bytes: &[u8] = bytemuck::cast_slice(&numbers);
    /// assert_eq!(View::<f32>::from_bytes(bytes, Layout::Bhsd, sizes)?.at(0, 0, 1, 0), 1.5);
    /// assert!(View::<f32>::from_bytes(&bytes[1..], Layout::Bhsd, sizes).is_err());
    /// # Ok::<(), attn_core::AttnError>(())
    /// ```
    pub fn from_bytes(bytes: &'a [u8], layout: Layout, sizes: [usize; 4]) -> Result<Self> {
        let what = "bytes that are not aligned for the type, or that end inside an element";
        let data = bytemuck::try_cast_slice(bytes).map_err(|_| AttnError::Unsupported { what })?;
        Self::new(data, layout, sizes)
    }
}
