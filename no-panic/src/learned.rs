//! Projections, modules and positions.

use attn_core::position::rope::{Rope, RopeTables};
use attn_core::position::{Positions, alibi};
use attn_core::{Attention, View, ViewMut};
use attn_layers::Linear;
use attn_layers::module::{
    ConcatHeads, LayerOutputs, ModuleGradients, MultiHeadAttention, Reference, SelfAttention, Sources, Streaming,
};
use attn_layers::position::{learned, sinusoidal::Sinusoidal};

#[unsafe(no_mangle)]
pub fn attn_entry_linear(
    w: &[f32],
    d_in: usize,
    d_out: usize,
    bias: &[f32],
    x: View<'_, f32>,
    y: &mut ViewMut<'_, f32>,
) -> bool {
    let layer = Linear::new(w, d_in, d_out).and_then(|layer| layer.bias(bias));
    let other = Linear::transposed(w, d_in, d_out);
    layer.and_then(|layer| layer.forward(x, y)).is_ok()
        && other.and_then(|layer| layer.forward_in::<f32, _, _>(x, y)).is_ok()
}

#[unsafe(no_mangle)]
pub fn attn_entry_multi_head<'o>(
    layer: &MultiHeadAttention<'_, f32>,
    attn: &Attention<'_>,
    inputs: Sources<'o, f32>,
    outputs: LayerOutputs<'o, f32>,
    scratch: &mut [f32],
) -> bool {
    layer.forward(&mut Streaming, attn, inputs, outputs, scratch).is_ok()
}

#[unsafe(no_mangle)]
pub fn attn_entry_self_attention<'o>(
    layer: &SelfAttention<'_, f32>,
    attn: &Attention<'_>,
    x: View<'o, f32>,
    outputs: LayerOutputs<'o, f32>,
    scratch: &mut [f64],
) -> bool {
    layer.forward(&mut Reference, attn, x, outputs, scratch).is_ok()
}

#[unsafe(no_mangle)]
pub fn attn_entry_rope(rope: &Rope<'_>, x: &mut ViewMut<'_, f32>, positions: Positions<'_>) -> bool {
    rope.apply_in_place(x, positions).is_ok()
}

#[unsafe(no_mangle)]
pub fn attn_entry_rope_tables(
    rope: &Rope<'_>,
    head_dim: usize,
    positions: Positions<'_>,
    cos: &mut ViewMut<'_, f32>,
    sin: &mut ViewMut<'_, f32>,
    x: &mut ViewMut<'_, f32>,
) -> bool {
    rope.tables(head_dim, positions, cos, sin).is_ok()
        && RopeTables::new(rope.pairing(), cos.as_view(), sin.as_view())
            .and_then(|tables| tables.apply_in_place(x, positions))
            .is_ok()
}

#[unsafe(no_mangle)]
pub fn attn_entry_positions(
    waves: &Sinusoidal,
    table: View<'_, f32>,
    x: &mut ViewMut<'_, f32>,
    at: Positions<'_>,
    slopes: &mut [f32],
) -> bool {
    alibi::slopes(slopes);
    waves.add(x, at).is_ok() && learned::add(table, x, at).is_ok()
}

#[unsafe(no_mangle)]
pub fn attn_entry_multi_head_backward(
    layer: &MultiHeadAttention<'_, f32>,
    attn: &Attention<'_>,
    inputs: Sources<'_, f32>,
    dy: View<'_, f32>,
    gradients: ModuleGradients<'_, f32>,
    scratch: &mut [f64],
) -> bool {
    layer.backward(&mut Reference, attn, inputs, dy, gradients, scratch).is_ok()
}

#[unsafe(no_mangle)]
pub fn attn_entry_concat_heads<'o>(
    heads: &ConcatHeads<'_, f32>,
    attn: &Attention<'_>,
    x: View<'o, f32>,
    outputs: LayerOutputs<'o, f32>,
    scratch: &mut [f32],
) -> bool {
    heads.forward(&mut Streaming, attn, x, outputs, scratch).is_ok()
}
