//! From a dot product to a finished score, and one call's checked facts.
//!
//! [`Problem`] is what every engine starts from: shape and options checked against each other once, before anything is
//! written. It holds the only implementation of the order of a score, which reference, streaming and backward share.

use core::ops::Range;

use crate::element::{Element, Real};
use crate::error::Result;
use crate::modifier::Modifier;
use crate::options::Attention;
use crate::shape::AttnShape;

/// A position in the score tensor `[batch, q_heads, q_len, kv_len]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct At {
    /// Index of the sequence in the batch.
    pub batch: usize,
    /// Query head.
    pub head: usize,
    /// Query.
    pub query: usize,
    /// Key.
    pub key: usize,
}

/// One attention call whose shape and options have been checked against each other.
#[derive(Clone, Copy, Debug)]
pub struct Problem<'p, 'a, M = ()> {
    shape: AttnShape,
    attn: &'p Attention<'a, M>,
    scale: f64,
}

impl<'p, 'a, M: Modifier> Problem<'p, 'a, M> {
    /// Checks the sizes of q, k and v (each `[batch, heads, seq, dim]`) and every option.
    ///
    /// # Errors
    /// Whatever does not fit; see [`AttnError`](crate::AttnError).
    pub fn new(attn: &'p Attention<'a, M>, q: [usize; 4], k: [usize; 4], v: [usize; 4]) -> Result<Self> {
        Self::of_shape(attn, AttnShape::new(q, k, v)?)
    }

    /// Checks every option against a shape.
    ///
    /// # Errors
    /// Whatever does not fit; see [`AttnError`](crate::AttnError).
    pub fn of_shape(attn: &'p Attention<'a, M>, shape: AttnShape) -> Result<Self> {
        attn.check(&shape)?;
        let scale = attn.scale.unwrap_or_else(|| default_scale(shape.head_dim));
        Ok(Self { shape, attn, scale })
    }

    /// The sizes.
    pub fn shape(&self) -> &AttnShape {
        &self.shape
    }

    /// The options.
    pub fn attn(&self) -> &'p Attention<'a, M> {
        self.attn
    }

    /// The scale in force: the option's, or `1/√head_dim`.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// The finished score of a dot product `q·k`.
    #[inline]
    pub fn score<R: Real>(&self, dot: R, at: At) -> R {
        let mut s = self.before_modifier(dot, at);
        let attn = self.attn;
        if M::SCORE {
            s = R::saturating(attn.modifier.score(s.to_f64(), at));
        }
        if let Some(t) = attn.temperature {
            s *= R::saturating(1.0 / t);
        }
        s
    }

    /// The score that the caller's closures are given: scaled, capped, biased.
    #[inline]
    pub(crate) fn before_modifier<R: Real>(&self, dot: R, at: At) -> R {
        let mut s = self.capped(dot);
        if let Some(bias) = &self.attn.bias {
            s += R::saturating(bias.at(at));
        }
        if let Some(alibi) = &self.attn.alibi {
            s += R::saturating(alibi.at(&self.shape, at));
        }
        s
    }

    /// `scale·dot`, and the soft-cap.
    #[inline]
    pub(crate) fn capped<R: Real>(&self, dot: R) -> R {
        let s = dot * R::saturating(self.scale);
        match self.attn.softcap {
            Some(cap) => {
                let cap = R::saturating(cap);
                // A cap too small for the type: every score is as good as 0.
                if cap == R::ZERO { R::ZERO } else { cap * (s / cap).tanh() }
            }
            None => s,
        }
    }

    /// Whether one key is visible to one query: by the mask, a bias that is not −∞, and the caller's closure.
    #[inline]
    pub fn visible(&self, at: At) -> bool {
        self.attn.mask.visible(&self.shape, at) && self.shown_by_bias(at) && self.shown_by_modifier(at)
    }

    #[inline]
    fn shown_by_bias(&self, at: At) -> bool {
        self.attn.bias.as_ref().is_none_or(|bias| bias.at(at) != f64::NEG_INFINITY)
    }

    #[inline]
    fn shown_by_modifier(&self, at: At) -> bool {
        !M::VISIBLE || self.attn.modifier.visible(at)
    }

    /// A range of keys outside of which the row sees nothing.
    pub fn row_range(&self, batch: usize, head: usize, query: usize) -> Range<usize> {
        self.attn.mask.row_range(&self.shape, batch, head, query)
    }

    /// Calls `f` with each key that a row sees, in order.
    #[inline]
    pub fn for_each_visible(&self, batch: usize, head: usize, query: usize, mut f: impl FnMut(At)) {
        // Where a row's keys are its range, the mask need not be asked again for each.
        let ranges = self.attn.mask.is_ranges();
        for key in self.row_range(batch, head, query) {
            let at = At { batch, head, query, key };
            let shown = ranges || self.attn.mask.visible(&self.shape, at);
            if shown && self.shown_by_bias(at) && self.shown_by_modifier(at) {
                f(at);
            }
        }
    }

    /// The sink logit of a head, if there are sinks.
    pub fn sink(&self, head: usize) -> Option<f32> {
        self.attn.sinks.and_then(|sinks| sinks.get(head).copied())
    }

    /// What the weight of one visible key is multiplied by after the softmax: 1 without dropout, else 0 or `1/(1 − p)`.
    #[inline]
    pub fn dropout_factor(&self, at: At) -> f64 {
        if self.attn.dropout.keeps(at) { self.attn.dropout.factor() } else { 0.0 }
    }
}

/// `1/√head_dim`; 1 for an empty head. Scores of unit-variance vectors then have unit variance (arXiv 1706.03762, §3.2.1).
pub fn default_scale(head_dim: usize) -> f64 {
    if head_dim == 0 { 1.0 } else { 1.0 / libm::sqrt(head_dim as f64) }
}

/// `q·k`, accumulated in `R`, in four interleaved chains: an error that grows with a quarter of the length costs nothing.
#[inline]
pub(crate) fn dot<R: Real, T: Element<Compute = R>>(q: crate::view::Row<'_, T>, k: crate::view::Row<'_, T>) -> R {
    let mut sums = [R::ZERO; 4];
    if let (Some(q), Some(k)) = (q.as_slice(), k.as_slice()) {
        let ((q4, q_rest), (k4, k_rest)) = (q.as_chunks::<4>(), k.as_chunks::<4>());
        for (q, k) in q4.iter().zip(k4) {
            for ((sum, q), k) in sums.iter_mut().zip(q).zip(k) {
                *sum += q.widen() * k.widen();
            }
        }
        for ((sum, q), k) in sums.iter_mut().zip(q_rest).zip(k_rest) {
            *sum += q.widen() * k.widen();
        }
    } else {
        for (i, (q, k)) in q.iter().zip(k.iter()).enumerate() {
            if let Some(sum) = sums.get_mut(i % 4) {
                *sum += q.widen() * k.widen();
            }
        }
    }
    let [a, b, c, d] = sums;
    (a + b) + (c + d)
}
