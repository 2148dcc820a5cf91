//! Arrays of `ndarray` as views: every element stands where the array has it.

use attn_core::{AttnError, View, ViewMut};
use ndarray::{Array4, ArrayView4, Axis, s};

fn counted() -> Array4<f32> {
    let mut n = 0.0;
    Array4::from_shape_simple_fn((2, 3, 4, 5), || {
        n += 1.0;
        n
    })
}

fn same(view: View<'_, f32>, array: ArrayView4<'_, f32>) {
    assert_eq!(view.sizes().as_slice(), array.shape());
    for ((b, h, s, d), &want) in array.indexed_iter() {
        assert_eq!(view.at(b, h, s, d), want);
    }
}

#[test]
fn any_order_and_direction_of_axes() {
    let array = counted();
    for axes in [[0, 1, 2, 3], [0, 2, 1, 3], [3, 1, 0, 2]] {
        for inverted in 0..4 {
            let mut view = array.view().permuted_axes(axes);
            same(view.try_into().unwrap(), view);
            view.invert_axis(Axis(inverted));
            same(view.try_into().unwrap(), view);
        }
    }
}

#[test]
fn parts_of_an_array() {
    let array = counted();
    let all = array.as_slice_memory_order().unwrap();
    let part = array.slice(s![1.., ..;2, 1..3, ..;-1]);
    assert!(matches!(View::try_from(part), Err(AttnError::Unsupported { .. })));
    same(View::of_part(all, part).unwrap(), part);
    let broadcast = array.slice(s![..1, .., .., ..]);
    let broadcast = broadcast.broadcast((7, 3, 4, 5)).unwrap();
    same(View::of_part(all, broadcast).unwrap(), broadcast);
    same(View::of_part(all, array.slice(s![..0, .., .., ..])).unwrap(), array.slice(s![..0, .., .., ..]));
    assert!(View::of_part(&all[60..], array.slice(s![..1, .., .., ..])).is_err());
    assert!(View::of_part(&all[..60], array.slice(s![1.., .., .., ..])).is_err());
}

#[test]
fn outputs() {
    let mut array = Array4::<f32>::zeros((1, 2, 3, 4));
    let mut view = array.view_mut();
    view.invert_axis(Axis(2));
    let mut out = ViewMut::try_from(view).unwrap();
    out.set(0, 1, 0, 3, 9.0);
    assert_eq!(array[[0, 1, 2, 3]], 9.0);
    assert!(ViewMut::try_from(array.slice_mut(s![.., .., ..2, ..])).is_err());
}
