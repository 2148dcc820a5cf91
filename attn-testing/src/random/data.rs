//! Kinds of numbers that find errors which ordinary data hide.

use attn_core::{Dtype, Element};

use super::Call;
use crate::cases::{Inputs, Tensor4, sizes};
use crate::paint::Paint;

/// The kind of q and k, and so of scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scores {
    /// q is 0: every weight the same.
    Zero,
    /// Both about `2⁻⁷⁰`, or the type's smallest.
    Tiny,
    /// Both normal, times this.
    Normal(f64),
    /// Exponents of q against those of k, channel by channel.
    Wide,
    /// One key has a score larger by this than all others, which are equal.
    OneLarger(f64),
    /// Each key has one of two scores, this far apart.
    TwoValued(f64),
    /// Rising by this in all, a little with each key.
    Rising(f64),
    /// Falling by this in all.
    Falling(f64),
    /// Rising by this in all, at a few places.
    Stairs(f64),
}

/// What the values are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names say it, and `Filler::value` how")]
pub enum Values {
    Normal,
    NormalPlusOne,
    Uniform,
    Constant,
    ConstantPerChannel,
    ConstantWithOutliers,
    TwoValued,
    Wide,
    WidePerKey,
    WidePerChannel,
    Subnormal,
    TinyBesideOne,
    Alternating,
    Zeros,
}

impl Scores {
    pub(super) fn draw(paint: &mut Paint) -> Self {
        let total = 0.01 * 5000f64.powf(paint.uniform());
        let sign = paint.pick(&[1.0, -1.0]);
        match paint.below(16) {
            0 | 1 => Self::Zero,
            2 => Self::Tiny,
            3..6 => Self::Normal(paint.pick(&[0.1, 0.3, 1.0, 1.0, 3.0])),
            6 => Self::Wide,
            7 => Self::OneLarger(30.0 + 70.0 * paint.uniform()),
            8 => Self::OneLarger(sign * total),
            9 => Self::TwoValued(total),
            10..13 => Self::Rising(total),
            13 => Self::Falling(total),
            _ => Self::Stairs(total),
        }
    }

    /// Without the number, for tables.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Zero => "Zero",
            Self::Tiny => "Tiny",
            Self::Normal(_) => "Normal",
            Self::Wide => "Wide",
            Self::OneLarger(_) => "OneLarger",
            Self::TwoValued(_) => "TwoValued",
            Self::Rising(_) => "Rising",
            Self::Falling(_) => "Falling",
            Self::Stairs(_) => "Stairs",
        }
    }
}

impl Values {
    const ALL: [Self; 14] = [
        Self::Normal,
        Self::NormalPlusOne,
        Self::Uniform,
        Self::Constant,
        Self::ConstantPerChannel,
        Self::ConstantWithOutliers,
        Self::TwoValued,
        Self::Wide,
        Self::WidePerKey,
        Self::WidePerChannel,
        Self::Subnormal,
        Self::TinyBesideOne,
        Self::Alternating,
        Self::Zeros,
    ];

    pub(super) fn draw(paint: &mut Paint) -> Self {
        if paint.chance(0.25) {
            return paint.pick(&[Self::Constant, Self::ConstantPerChannel]);
        }
        paint.pick(&Self::ALL)
    }

    /// For tables.
    pub fn name(&self) -> String {
        format!("{self:?}")
    }
}

/// A number near normal, at the price of one draw: the sum of four uniforms.
fn bell(paint: &mut Paint) -> f64 {
    let bits = paint.next();
    let sum: u64 = (0..4).map(|n| bits >> (16 * n) & 0xffff).sum();
    (sum as f64 / 65_536.0 - 2.0) * 3f64.sqrt()
}

/// What numbers of a type may be.
struct Reach {
    /// Largest exponent that is drawn, and its opposite.
    exponent: usize,
    /// The smallest number above 0.
    least: f64,
    /// What none exceeds.
    most: f64,
}

impl Reach {
    fn of(dtype: Dtype) -> Self {
        match dtype {
            Dtype::F16 => Self { exponent: 10, least: 2f64.powi(-24), most: 65_504.0 },
            Dtype::Bf16 => Self { exponent: 40, least: 2f64.powi(-133), most: 2f64.powi(64) },
            _ => Self { exponent: 40, least: 2f64.powi(-149), most: 2f64.powi(64) },
        }
    }

    fn power(&self, paint: &mut Paint) -> f64 {
        2f64.powi(paint.below(2 * self.exponent + 1) as i32 - self.exponent as i32)
    }
}

/// A constant: one that is known to round badly, one of [1, 2), or of any size.
fn constant(reach: &Reach, paint: &mut Paint) -> f64 {
    let named = [0.1, 1.0 / 3.0, 0.7, core::f64::consts::FRAC_PI_2, f64::from(2f32.next_down())];
    match paint.below(4) {
        0 => paint.pick(&named),
        1 => bell(paint) * reach.power(paint),
        _ => 1.0 + paint.uniform(),
    }
}

/// q, k and v of a call.
pub(super) fn inputs<T: Element>(call: &Call) -> Inputs<T> {
    let (shape, mut paint, reach) = (call.shape, Paint::new(call.seed), Reach::of(T::DTYPE));
    let [mut q, mut k, mut v] = [0, 1, 2].map(|n| Tensor4::new(sizes(&shape)[n], call.memory[n], |_| 0.0));
    let one = paint.below(shape.kv_len);
    let channel = paint.below(shape.head_dim);
    let number = |x: f64| T::from_f64(x.clamp(-reach.most, reach.most));
    match call.scores {
        Scores::Zero => k.each(|_, x| *x = number(bell(&mut paint))),
        Scores::Tiny => {
            let size = (reach.least * 16.0).max(2f64.powi(-70));
            q.each(|_, x| *x = number(size * bell(&mut paint)));
            k.each(|_, x| *x = number(size * bell(&mut paint)));
        }
        Scores::Normal(sigma) => {
            q.each(|_, x| *x = number(sigma * bell(&mut paint)));
            k.each(|_, x| *x = number(sigma * bell(&mut paint)));
        }
        Scores::Wide => {
            let powers: Vec<f64> = (0..shape.head_dim).map(|_| reach.power(&mut paint)).collect();
            q.each(|place, x| *x = number(powers[place[3]] * bell(&mut paint)));
            k.each(|place, x| *x = number(bell(&mut paint) / powers[place[3]]));
        }
        // One channel gives the scores, the others of q are 0.
        _ => {
            let scores = profile(call.scores, shape.kv_len, one, &mut paint);
            let scale = call.options.scale.unwrap_or(attn_core::score::default_scale(shape.head_dim));
            let factor = paint.pick(&[1.0, 1.0, 0.75, 3.0]);
            q.each(|place, x| *x = number(if place[3] == channel { factor } else { 0.0 }));
            k.each(|[_, _, key, at], x| {
                *x = number(if at == channel { scores[key] / (factor * scale) } else { bell(&mut paint) });
            });
        }
    }
    let mut fill = Filler::new(call, &reach, &mut paint);
    v.each(|[_, _, key, channel], x| *x = number(fill.value(key, channel, &mut paint)));
    Inputs { shape, q, k, v }
}

/// Scores by key, from 0, from the end down to 0, or about it.
fn profile(scores: Scores, keys: usize, one: usize, paint: &mut Paint) -> Vec<f64> {
    let at = |key: usize| (key + 1) as f64 / keys as f64;
    let mut all: Vec<f64> = match scores {
        Scores::OneLarger(by) => (0..keys).map(|key| if key == one { by } else { 0.0 }).collect(),
        Scores::TwoValued(by) => (0..keys).map(|_| if paint.chance(0.5) { by } else { 0.0 }).collect(),
        Scores::Rising(by) => (0..keys).map(|key| by * at(key)).collect(),
        Scores::Falling(by) => (0..keys).map(|key| -by * at(key)).collect(),
        Scores::Stairs(by) => {
            let steps: Vec<usize> = (0..1 + paint.below(9)).map(|_| paint.below(keys)).collect();
            let height = |key: usize| steps.iter().filter(|&&step| step <= key).count() as f64;
            (0..keys).map(|key| by * height(key) / steps.len() as f64).collect()
        }
        _ => vec![0.0; keys],
    };
    let (low, high) = all.iter().fold((f64::MAX, f64::MIN), |(low, high), &x| (low.min(x), high.max(x)));
    let shift = paint.pick(&[0.0, low, high, 0.5 * (low + high)]);
    all.iter_mut().for_each(|x| *x -= shift);
    all
}

/// Numbers of a kind, for v.
struct Filler {
    kind: Values,
    reach: Reach,
    constants: Vec<f64>,
    powers: Vec<f64>,
    one: usize,
}

impl Filler {
    fn new(call: &Call, reach: &Reach, paint: &mut Paint) -> Self {
        let &Call { shape, values: kind, .. } = call;
        let powers = match kind {
            Values::WidePerKey => shape.kv_len,
            Values::WidePerChannel => shape.value_dim,
            _ => 0,
        };
        Self {
            kind,
            reach: Reach { ..*reach },
            constants: (0..shape.value_dim.max(2)).map(|_| constant(reach, paint)).collect(),
            powers: (0..powers).map(|_| reach.power(paint)).collect(),
            one: paint.below(shape.kv_len),
        }
    }

    fn value(&mut self, key: usize, channel: usize, paint: &mut Paint) -> f64 {
        let constant = self.constants[0];
        match self.kind {
            Values::Normal => bell(paint),
            Values::NormalPlusOne => 1.0 + bell(paint),
            Values::Uniform => 1.0 + paint.uniform(),
            Values::Constant => constant,
            Values::ConstantPerChannel => self.constants[channel],
            Values::ConstantWithOutliers => constant * if paint.chance(0.02) { 100.0 * bell(paint) } else { 1.0 },
            Values::TwoValued => self.constants[paint.below(2)],
            Values::Wide => bell(paint) * self.reach.power(paint),
            Values::WidePerKey => bell(paint) * self.powers[key],
            Values::WidePerChannel => bell(paint) * self.powers[channel],
            Values::Subnormal => self.reach.least * (1.0 + 500.0 * bell(paint).abs()),
            // About 1e-39 in f32.
            Values::TinyBesideOne if key == self.one => 1.0 + paint.uniform(),
            Values::TinyBesideOne => bell(paint) * self.reach.least * 2f64.powi(19).min(self.tiny()),
            Values::Alternating => constant * if key.is_multiple_of(2) { 1.0 } else { -1.0 },
            Values::Zeros => paint.pick(&[0.0, -0.0]),
        }
    }

    /// How many times the smallest number still is tiny.
    fn tiny(&self) -> f64 {
        if self.reach.exponent == 10 { 64.0 } else { f64::MAX }
    }
}
