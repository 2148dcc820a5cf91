//! Checked construction: sizes, strides, shapes and masks from arbitrary numbers.

use attn_core::mask::Window;
use attn_core::{Align, Attention, AttnShape, Layout, Mask, Result, View, ViewMut};

#[unsafe(no_mangle)]
pub fn attn_entry_views(data: &mut [f32], sizes: [usize; 4], strides: [isize; 4], offset: usize, part: usize) -> f32 {
    let sum = |view: Result<View<'_, f32>>| view.map_or(0.0, |view| view.at(part, offset, 0, part));
    let mut total = 0.0;
    for layout in [Layout::Bhsd, Layout::Bshd, Layout::Sbhd] {
        total += sum(View::new(data, layout, sizes));
    }
    total += sum(View::strided(data, sizes, strides, offset));
    total += sum(View::packed(data, sizes, offset, part));
    total += sum(View::broadcast(data, &sizes));
    total += View::strided(data, sizes, strides, offset).map_or(0.0, |view| view.at_broadcast(part, part, part, part));
    if let Ok(mut view) = ViewMut::strided(data, sizes, strides, offset) {
        view.set(part, part, part, part, total);
    }
    total
}

#[unsafe(no_mangle)]
pub fn attn_entry_shape(q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> usize {
    AttnShape::new(q, k, v).map_or(0, |shape| {
        shape.group()
            ^ shape.kv_head(q[1])
            ^ shape.rows()
            ^ shape.row(q[0], q[1], q[2])
            ^ shape.weights_len().unwrap_or(0)
    })
}

/// Builds what the options' builders build from arbitrary parts.
#[unsafe(no_mangle)]
pub fn attn_entry_options<'a>(
    masks: &[Mask<'a>; 3],
    align: Align,
    window: &Window,
    numbers: &[f64; 3],
    out: &mut Attention<'a>,
) {
    let [a, b, c] = *masks;
    let [scale, cap, t] = *numbers;
    let window = Mask::window(window.left.unwrap_or(0), window.right.unwrap_or(0), align);
    *out = Attention::new()
        .mask(a.and(b).and(c).and(Mask::causal(align)).and(window))
        .scale(scale)
        .softcap(cap)
        .temperature(t);
}
