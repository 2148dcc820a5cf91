//! Windows to train and test with, drawn at random from a seed.

use super::{AXES, CLASSES, STEP, STEPS, Window};
use crate::paint::Paint;

/// A window and its class.
pub fn draw(paint: &mut Paint) -> (Window, usize) {
    let class = paint.bits() as usize % CLASSES.len();
    let mut uniform = |low: f32, high: f32| low + (high - low) * (paint.bits() >> 8) as f32 / 16_777_216.0;
    let gravity: [f32; AXES] = core::array::from_fn(|_| uniform(-0.7, 0.7));
    let (size, phase, cycles) = (uniform(0.5, 1.5), uniform(0.0, 6.28), uniform(0.0, 1.0));
    let (noise, tap) = (uniform(0.05, 0.25), uniform(1.0, 13.0) as usize);
    // A shake goes to and fro along x or y, a circle lies in their plane, a tap comes from above.
    let axis = if class == 3 { 2 } else { uniform(0.0, 1.999) as usize };
    let mut window = [[0; AXES]; STEPS];
    for (step, sample) in window.iter_mut().enumerate() {
        let turn = 6.283 * step as f32 / STEPS as f32;
        for (n, value) in sample.iter_mut().enumerate() {
            let (first, second) = (n == axis, n == 1 - axis.min(1));
            let motion = match class {
                1 if first => size * ((2.5 + 2.0 * cycles) * turn + phase).sin(),
                2 if first => size * ((1.0 + cycles) * turn + phase).sin(),
                2 if second => size * ((1.0 + cycles) * turn + phase).cos(),
                3 if first => size * [1.5, -0.9, 0.4].get(step.wrapping_sub(tap)).copied().unwrap_or(0.0),
                _ => 0.0,
            };
            // Much like a normal distribution: the sum of four uniforms.
            let shake = noise * (0..4).map(|_| uniform(-0.87, 0.87)).sum::<f32>();
            *value = ((gravity[n] + motion + shake) / STEP).round() as i8;
        }
    }
    (window, class)
}
