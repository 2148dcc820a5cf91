//! Attention in parts: however a call is cut, the bits are those of one call, and a foreign cursor is refused.

use attn_core::int8::{self, Int8Attention, IntState};
use attn_core::resume::{Cursor, Progress};
use attn_core::score::default_scale;
use attn_core::softmax::RowState;
use attn_core::{Align, Attention, AttnError, Layout, Mask, Outputs, ViewMut, streaming};
use attn_testing::cases::{Inputs, Memory, kinds, shape};

use crate::int8::Int8Inputs;

const BUDGETS: [usize; 6] = [1, 2, 3, 7, 20, usize::MAX];

#[test]
fn streaming_in_parts_is_streaming_at_once() {
    let dims = shape((2, 4, 2, 5, 9, 4, 3));
    let inputs = Inputs::<f32>::plain(dims, 1);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let sinks = [0.5, -1.0, 2.0, 0.0];
    for term in kinds(&dims, 3) {
        let attn = Attention::new().mask(term.mask()).softcap(5.0).sinks(&sinks);
        let (mut want, mut want_lse) = (vec![0.0f32; dims.rows() * 3], vec![0.0f32; dims.rows()]);
        let outputs = Outputs::new(ViewMut::new(&mut want, Layout::Bhsd, dims.output()).unwrap()).lse(&mut want_lse);
        streaming::forward(&attn, q, k, v, outputs, &mut [0.0; 3]).unwrap();
        for budget in BUDGETS {
            let (mut out, mut lse) = (vec![9.0f32; dims.rows() * 3], vec![9.0f32; dims.rows()]);
            let (mut scratch, mut cursor, mut calls) = ([7.0f32; 3], Cursor::new(), 0);
            loop {
                let to = ViewMut::new(&mut out, Layout::Bhsd, dims.output()).unwrap();
                let outputs = Outputs::new(to).lse(&mut lse);
                calls += 1;
                match streaming::resume(&attn, q, k, v, outputs, &mut scratch, cursor.budget(budget)).unwrap() {
                    Progress::Done => break,
                    Progress::Pending => assert!(budget < usize::MAX && calls < 1000, "{term:?}: does not end"),
                }
            }
            assert_eq!((&out, &lse), (&want, &want_lse), "{term:?}, {budget} keys at a time");
            // At least the endings of the rows are counted.
            assert!(calls >= dims.rows() / budget, "{calls} calls of {budget}");
        }
    }
}

#[test]
fn int8_in_parts_is_int8_at_once() {
    let dims = shape((1, 4, 2, 5, 30, 8, 3));
    let inputs = Int8Inputs::new(&dims, Memory::Bshd, 5, 4.0);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    for term in kinds(&dims, 4) {
        let attn = Int8Attention::new(inputs.quants, default_scale(8)).unwrap().mask(term.mask());
        let mut want = vec![0i16; dims.rows() * 3];
        let to = ViewMut::new(&mut want, Layout::Bhsd, dims.output()).unwrap();
        int8::forward(&attn, q, k, v, to, &mut [0; 3]).unwrap();
        for budget in BUDGETS {
            let (mut out, mut scratch, mut cursor) = (vec![9i16; dims.rows() * 3], [7; 3], Cursor::new());
            loop {
                let to = ViewMut::new(&mut out, Layout::Bhsd, dims.output()).unwrap();
                let done = int8::resume(&attn, q, k, v, to, &mut scratch, cursor.budget(budget)).unwrap();
                if done == Progress::Done {
                    break;
                }
            }
            assert_eq!(out, want, "{term:?}, {budget} keys at a time");
        }
    }
}

/// The row's state can be seen between two parts: after some keys it is that of a call over those alone.
#[test]
fn the_state_between_parts_is_the_softmax_so_far() {
    let dims = shape((1, 1, 1, 1, 9, 4, 3));
    let inputs = Inputs::<f32>::plain(dims, 1);
    let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
    let attn = Attention::new();
    let (mut out, mut lse) = ([0.0f32; 3], [0.0f32]);
    let mut cursor: Cursor<RowState<f32>> = Cursor::new();
    let part =
        streaming::resume(&attn, q, k, v, ViewMut::matrix(&mut out, 1, 3).unwrap(), &mut [0.0; 3], cursor.budget(4));
    assert_eq!((part, cursor.row(), out), (Ok(Progress::Pending), [0, 0, 0], [0.0; 3]));
    let lens = [4];
    let outputs = Outputs::new(ViewMut::matrix(&mut out, 1, 3).unwrap()).lse(&mut lse);
    streaming::forward(&attn.mask(Mask::kv_lens(&lens)), q, k, v, outputs, &mut [0.0; 3]).unwrap();
    assert_eq!(cursor.state().lse(), lse[0]);
}

#[test]
fn a_cursor_of_another_call_is_refused_and_a_finished_one_does_nothing() {
    let dims = shape((1, 2, 1, 4, 3, 2, 2));
    let inputs = Inputs::<f32>::plain(dims, 1);
    let attn = Attention::new().mask(Mask::causal(Align::TopLeft));
    let mut cursor = Cursor::new();
    let step = |inputs: &Inputs<f32>, cursor: &mut Cursor<_>, keys| {
        let mut out = [9.0f32; 16];
        let [batch, heads, len, _] = inputs.q.sizes;
        let to = ViewMut::new(&mut out, Layout::Bhsd, [batch, heads, len, 2]).unwrap();
        let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
        let progress = streaming::resume(&attn, q, k, v, to, &mut [0.0; 2], cursor.budget(keys));
        (progress, out)
    };
    // Three rows and the fourth's keys: 2 + 3 + 4 + 3.
    assert_eq!(step(&inputs, &mut cursor, 12).0, Ok(Progress::Pending));
    assert_eq!(cursor.row(), [0, 0, 3]);
    let shorter = Inputs::<f32>::plain(shape((1, 2, 1, 3, 3, 2, 2)), 1);
    let before = cursor;
    let (error, out) = step(&shorter, &mut cursor, 12);
    assert!(matches!(error, Err(AttnError::Index { value: 3, limit: 3, .. })), "{error:?}");
    assert_eq!((cursor, out), (before, [9.0; 16]));
    assert_eq!(step(&inputs, &mut cursor, usize::MAX).0, Ok(Progress::Done));
    assert_eq!(step(&inputs, &mut cursor, usize::MAX), (Ok(Progress::Done), [9.0; 16]));
    // No rows: done at once.
    let none = Inputs::<f32>::plain(shape((1, 2, 1, 0, 3, 2, 2)), 1);
    assert_eq!(step(&none, &mut Cursor::new(), 0).0, Ok(Progress::Done));
    let _: Cursor<IntState> = Cursor::new();
}
