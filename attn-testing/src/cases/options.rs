//! Options with the tables they borrow.

use attn_core::dropout::Dropout;
use attn_core::position::alibi::Alibi;
use attn_core::{Align, Attention, AttnShape, Bias, Mask, View};

use super::Table;
use super::terms::{OwnedTerm, kinds};
use crate::paint::{Paint, bools, normals};

/// Dropout that owns its mask.
#[derive(Clone, Debug, Default)]
pub enum Drop {
    /// None.
    #[default]
    None,
    /// Drawn from a seed.
    Seeded(f32, u64),
    /// A keep mask of the scores' shape.
    Keep(f32, [usize; 4], Table<bool>),
}

/// Everything that [`Attention`] can be told, owned.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// As in [`Attention::scale`].
    pub scale: Option<f64>,
    /// As in [`Attention::softcap`].
    pub softcap: Option<f64>,
    /// As in [`Attention::temperature`].
    pub temperature: Option<f64>,
    /// The mask.
    pub terms: Vec<OwnedTerm>,
    /// An additive bias: its shape, which broadcasts, and its elements.
    pub bias: Option<([usize; 4], Table<f32>)>,
    /// ALiBi slopes and alignment.
    pub alibi: Option<(Vec<f32>, Align)>,
    /// Sink logits.
    pub sinks: Option<Vec<f32>>,
    /// Dropout.
    pub dropout: Drop,
}

impl Options {
    /// Only a mask.
    pub fn masked(terms: Vec<OwnedTerm>) -> Self {
        Self { terms, ..Self::default() }
    }

    /// Some of everything: each option in about one draw of four.
    pub fn random(shape: &AttnShape, paint: &mut Paint) -> Self {
        let scores = [shape.batch, shape.q_heads, shape.q_len, shape.kv_len];
        let all = kinds(shape, paint.next());
        let mut terms = Vec::new();
        for _ in 0..paint.pick(&[0, 0, 1, 1, 2, 3]) {
            terms.push(all[paint.below(all.len())].clone());
        }
        let mut options = Self { terms, ..Self::default() };
        if paint.chance(0.25) {
            options.scale = Some(paint.pick(&[0.5, 0.05, -0.25, 1.0]));
        }
        if paint.chance(0.25) {
            options.softcap = Some(paint.pick(&[1.0, 5.0, 30.0]));
        }
        if paint.chance(0.15) {
            options.temperature = Some(paint.pick(&[0.5, 2.0]));
        }
        if paint.chance(0.25) {
            let sizes = scores.map(|n| if paint.chance(0.4) { 1 } else { n });
            let mut bias: Vec<f32> = normals(paint.next(), sizes.iter().product(), 2.0);
            for x in &mut bias {
                if paint.chance(0.05) {
                    *x = f32::NEG_INFINITY;
                }
            }
            options.bias = Some((sizes, Table(bias)));
        }
        if paint.chance(0.2) {
            let align = paint.pick(&[Align::TopLeft, Align::BottomRight, Align::Offset(-2)]);
            let slopes = (0..shape.q_heads).map(|h| 0.5f32.powi(h as i32 + 1)).collect();
            options.alibi = Some((slopes, align));
        }
        if paint.chance(0.2) {
            options.sinks = Some(normals(paint.next(), shape.q_heads, 2.0));
        }
        if paint.chance(0.2) {
            let p = paint.pick(&[0.0, 0.1, 0.5, 0.9]);
            options.dropout = if paint.chance(0.5) {
                Drop::Seeded(p, paint.next())
            } else {
                Drop::Keep(p, scores, Table(bools(paint.next(), scores.iter().product(), 1.0 - f64::from(p))))
            };
        }
        options
    }

    /// The mask.
    pub fn mask(&self) -> Mask<'_> {
        self.terms.iter().fold(Mask::none(), |mask, term| mask.and(term.mask()))
    }

    /// What an engine takes.
    pub fn attention(&self) -> Attention<'_> {
        let mut attn = Attention::new().mask(self.mask());
        if let Some(scale) = self.scale {
            attn = attn.scale(scale);
        }
        if let Some(cap) = self.softcap {
            attn = attn.softcap(cap);
        }
        if let Some(t) = self.temperature {
            attn = attn.temperature(t);
        }
        if let Some((sizes, bias)) = &self.bias {
            attn = attn.bias(Bias::F32(View::broadcast(bias, sizes).expect("a bias of its own shape")));
        }
        if let Some((slopes, align)) = &self.alibi {
            attn = attn.alibi(Alibi { slopes, align: *align });
        }
        if let Some(sinks) = &self.sinks {
            attn = attn.sinks(sinks);
        }
        match &self.dropout {
            Drop::None => attn,
            Drop::Seeded(p, seed) => attn.dropout(Dropout::Seeded { p: *p, seed: *seed }),
            Drop::Keep(p, sizes, keep) => {
                let mask = View::broadcast(keep, sizes).expect("a keep mask of the scores' shape");
                attn.dropout(Dropout::Keep { mask, p: *p })
            }
        }
    }
}
