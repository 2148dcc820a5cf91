//! Scales and zero points of the int8 tensors.

/// Scales and zero points of all tensors, found by running the trained layer over many windows.
pub struct Scales {
    /// Features with position.
    pub h: (f32, i8),
    /// Queries.
    pub q: (f32, i8),
    /// Keys.
    pub k: (f32, i8),
    /// Values, and the heads' outputs: means of values fit where values do.
    pub v: (f32, i8),
    /// Features after the attention.
    pub r: (f32, i8),
    /// Hidden features; never below 0.
    pub u: (f32, i8),
    /// Features at the end.
    pub y: (f32, i8),
    /// Of the matrices, in their order: embed, query, key, value, join, up, down, class. Their zero points are 0.
    pub weights: [f32; 8],
}
