//! The number types of an int8 call's result.

use super::options::HeadScales;
use super::rescale::Rescale;
use super::row::IntState;

mod sealed {
    pub trait Sealed {}
    impl Sealed for i8 {}
    impl Sealed for i16 {}
    impl Sealed for i32 {}
    impl Sealed for f32 {}
}

/// A number type that int8 attention can write. Sealed: `i8`, `i16`, `i32` and `f32`.
///
/// The integers hold `real/s_out + z_out`, rounded to nearest and saturated: with a small `s_out`, `i32` is a
/// fixed-point number of the whole precision. `f32` holds the real number itself, whatever the output's scale.
pub trait Int8Output: Copy + sealed::Sealed {
    /// What a mean of values is multiplied by.
    #[doc(hidden)]
    type Factor: Copy;
    /// The factor of one finished row.
    #[doc(hidden)]
    fn factor(scales: &HeadScales, state: &IntState) -> Self::Factor;
    /// A sum of weighted values, times the factor.
    #[doc(hidden)]
    fn of(sum: i32, factor: Self::Factor, zero_point: i8) -> Self;
}

macro_rules! stored {
    ($($t:ident),*) => {$(
        impl Int8Output for $t {
            type Factor = Rescale;
            #[inline]
            fn factor(scales: &HeadScales, state: &IntState) -> Rescale {
                state.finish(scales.output)
            }
            #[inline]
            fn of(sum: i32, factor: Rescale, zero_point: i8) -> Self {
                let x = factor.apply(sum).saturating_add(i32::from(zero_point));
                x.clamp(i32::from(Self::MIN), i32::from(Self::MAX)) as Self
            }
        }
    )*};
}

stored!(i8, i16, i32);

impl Int8Output for f32 {
    type Factor = f32;
    #[inline]
    fn factor(scales: &HeadScales, state: &IntState) -> f32 {
        if state.sum() == 0 { 0.0 } else { scales.value / state.sum() as f32 }
    }
    #[inline]
    fn of(sum: i32, factor: f32, _: i8) -> f32 {
        sum as f32 * factor
    }
}
