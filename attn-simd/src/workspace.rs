//! Scratch memory of a call, owned by the caller (interface).

use alloc::vec::Vec;

/// One cache line of scratch.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
pub struct Line(pub [f32; 16]);

/// Scratch that grows to what a call needs and is then reused.
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    values: Vec<f32>,
}

impl Workspace {
    /// An empty workspace.
    pub const fn new() -> Self {
        Self { values: Vec::new() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.values.capacity() * 4
    }

    pub(crate) fn scratch(&mut self, len: usize) -> &mut [f32] {
        self.values.resize(len, 0.0);
        &mut self.values
    }
}
