//! Classifies windows of an accelerometer, in f32 and in int8 side by side.
#![cfg_attr(target_os = "none", no_std, no_main)]

use attn_firmware::board::{self, mark, measure};
use attn_firmware::gesture::weights::{REALS, WINDOWS};
use attn_firmware::gesture::{best, integer, real};
use attn_firmware::say;

attn_firmware::program!(run);

fn run() -> bool {
    say!("clock {} {}", board::CALIBRATION, board::calibrate());
    let (mut right, mut passed) = ([0, 0], true);
    for (n, (window, class)) in WINDOWS.iter().enumerate() {
        let (mut reals, mut integers) = (Ok(Default::default()), Ok(Default::default()));
        let in_f32 = measure(&mut || {
            mark();
            reals = real::classify(&REALS, window);
        });
        let in_int8 = measure(&mut || {
            mark();
            integers = integer::classify(window);
        });
        let (Ok(reals), Ok(integers)) = (reals, integers) else {
            say!("a size does not fit");
            return false;
        };
        say!("case gesture.{n} {:?} {integers:?} {class}", reals.map(f32::to_bits));
        let found = [best(&reals), best(&integers)];
        for (right, found) in right.iter_mut().zip(found) {
            *right += usize::from(found == *class);
        }
        if n == 0 {
            say!("cost f32 gesture-f32 1 {} {}", in_f32.stack, in_f32.ticks);
            say!("cost int8 gesture-int8 1 {} {}", in_int8.stack, in_int8.ticks);
        }
    }
    let [f32s, int8s] = right;
    say!("{} windows: f32 has {f32s} right, int8 {int8s}", WINDOWS.len());
    passed &= f32s * 10 >= WINDOWS.len() * 9 && int8s * 10 >= WINDOWS.len() * 9;
    #[cfg(not(target_os = "none"))]
    many();
    passed
}

/// On a host there is room for more windows than a board is given.
#[cfg(not(target_os = "none"))]
fn many() {
    use attn_firmware::gesture::data::draw;
    let mut paint = attn_firmware::paint::Paint::new(0x7e57);
    let (mut right, mut same) = ([0, 0], 0);
    for _ in 0..4000 {
        let (window, class) = draw(&mut paint);
        let reals = real::classify(&REALS, &window).expect("sizes fit");
        let found = [best(&reals), best(&integer::classify(&window).expect("sizes fit"))];
        (0..2).for_each(|n| right[n] += usize::from(found[n] == class));
        same += usize::from(found[0] == found[1]);
    }
    let percent = |n: usize| n as f64 / 40.0;
    say!(
        "4000 other windows: f32 has {:.1} % right, int8 {:.1} %; they agree on {:.1} %",
        percent(right[0]),
        percent(right[1]),
        percent(same)
    );
}
