//! Brings inputs into the form that the products read: queries transposed, keys and values as contiguous `f32` rows.
//! [`amx::pack`](crate::amx::pack) makes bf16 parts of these rows.

use attn_core::View;
use attn_core::half::bf16;
use attn_core::row::Row;

use crate::dtype::Input;
use crate::gemm::Panel;
use crate::isa::{Isa, MAX_LANES};

/// Reads the elements from `from` on of one row, widened, into `dst`.
#[inline(always)]
pub(crate) fn read_row<I: Isa>(
    isa: I,
    input: &Input<'_>,
    [batch, head, seq]: [usize; 3],
    from: usize,
    dst: &mut [f32],
) {
    let there = from..from + dst.len();
    match input {
        Input::F32(view) => {
            let row = view.row(batch, head, seq);
            match row.as_slice() {
                Some(slice) => dst.copy_from_slice(&slice[there]),
                None => gather(row, from, dst),
            }
        }
        Input::F16(view) => {
            let row = view.row(batch, head, seq);
            match row.as_slice() {
                Some(slice) => widen(isa, &slice[there], dst, I::load_f16),
                None => gather(row, from, dst),
            }
        }
        Input::Bf16(view) => {
            let row = view.row(batch, head, seq);
            match row.as_slice() {
                Some(slice) => widen(isa, &slice[there], dst, I::load_bf16),
                None => gather(row, from, dst),
            }
        }
    }
}

/// Reads elements that do not lie side by side.
fn gather<T: Copy + Default + Into<f32>>(row: Row<'_, T>, from: usize, dst: &mut [f32]) {
    dst.iter_mut().enumerate().for_each(|(n, d)| *d = row.get(from + n).into());
}

/// Widens halves that lie side by side.
#[inline(always)]
fn widen<I: Isa, T: Copy + Default>(isa: I, src: &[T], dst: &mut [f32], load: impl Fn(I, &[T]) -> I::F) {
    let (whole, tail) = src.as_chunks::<MAX_LANES>();
    let (to, rest) = dst.split_at_mut(whole.len() * MAX_LANES);
    for (src, dst) in whole.iter().zip(to.as_chunks_mut::<MAX_LANES>().0) {
        for lane in (0..MAX_LANES).step_by(I::LANES) {
            isa.store(load(isa, &src[lane..]), &mut dst[lane..]);
        }
    }
    if !tail.is_empty() {
        let (mut wide, mut narrow) = ([0.0f32; MAX_LANES], [T::default(); MAX_LANES]);
        narrow[..tail.len()].copy_from_slice(tail);
        for lane in (0..MAX_LANES).step_by(I::LANES) {
            isa.store(load(isa, &narrow[lane..]), &mut wide[lane..]);
        }
        rest.copy_from_slice(&wide[..tail.len()]);
    }
}

/// Packs `count` rows from `first` on of one head, transposed: `dst[channel][row]`, rows `width` apart, for `channels`
/// channels from `from` on. Lanes beyond `count` are zero or left over; so are channels beyond the last, or they are
/// the row's next ones.
#[inline(always)]
pub(crate) fn transposed<I: Isa>(
    isa: I,
    input: &Input<'_>,
    [batch, head, first]: [usize; 3],
    count: usize,
    channels: core::ops::Range<usize>,
    width: usize,
    dst: &mut [f32],
) {
    let (lanes, columns) = (I::LANES, input.columns());
    let mut stage = [0.0f32; MAX_LANES * MAX_LANES];
    for (group, row) in (0..count).step_by(lanes).enumerate() {
        let rows = (count - row).min(lanes);
        for (block, channel) in channels.clone().step_by(lanes).enumerate() {
            let there = (channels.end - channel).min(lanes);
            // The row's next channels may come along.
            let whole = channel + lanes <= columns;
            let dst = &mut dst[block * lanes * width + group * lanes..];
            if rows == lanes
                && whole
                && let Some((src, stride)) = square(input, [batch, head, first + row], channel)
            {
                isa.transpose(src, stride, dst, width);
                continue;
            }
            if !(whole && widened_square(isa, input, [batch, head, first + row], rows, channel, &mut stage)) {
                for r in 0..lanes {
                    let line = &mut stage[r * lanes..][..lanes];
                    line.fill(0.0);
                    if r < rows {
                        read_row(isa, input, [batch, head, first + row + r], channel, &mut line[..there]);
                    }
                }
            }
            isa.transpose(&stage, lanes, dst, width);
        }
    }
}

/// `to[column][row] = from[row][column]`, for whole vectors of rows and of columns.
#[inline(always)]
pub(crate) fn swapped<I: Isa>(isa: I, from: &[f32], (rows, columns): (usize, usize), to: &mut [f32]) {
    for row in (0..rows).step_by(I::LANES) {
        for column in (0..columns).step_by(I::LANES) {
            isa.transpose(&from[row * columns + column..], columns, &mut to[column * rows + row..], rows);
        }
    }
}

/// Widens `rows` rows of a square of halves; the rest is 0. Says whether it has: only halves with contiguous channels.
#[inline(always)]
fn widened_square<I: Isa>(
    isa: I,
    input: &Input<'_>,
    [batch, head, seq]: [usize; 3],
    rows: usize,
    channel: usize,
    stage: &mut [f32; MAX_LANES * MAX_LANES],
) -> bool {
    stage[rows * I::LANES..].fill(0.0);
    let stage = &mut stage[..rows * I::LANES];
    match input {
        Input::F32(_) => false,
        Input::F16(view) => widen_vectors(isa, view, [batch, head, seq], channel, stage, I::load_f16),
        Input::Bf16(view) => widen_vectors(isa, view, [batch, head, seq], channel, stage, I::load_bf16),
    }
}

/// Widens a vector of each row from `first` on, from a channel on, if channels are contiguous. Says whether they are.
#[inline(always)]
fn widen_vectors<I: Isa, T: Copy>(
    isa: I,
    view: &View<'_, T>,
    [batch, head, first]: [usize; 3],
    channel: usize,
    dst: &mut [f32],
    load: impl Fn(I, &[T]) -> I::F,
) -> bool {
    let [.., stride, unit] = view.strides();
    if unit != 1 {
        return false;
    }
    let (data, mut start) = (view.data(), element(view, batch, head, first) + channel);
    for row in dst.chunks_exact_mut(I::LANES) {
        isa.store(load(isa, &data[start..start + I::LANES]), row);
        start = start.wrapping_add_signed(stride);
    }
    true
}

/// Address of the first element of a row of `f32` that can be read in place, and elements to the next row. Not checked,
/// for prefetching alone.
#[inline(always)]
pub(crate) fn start(input: &Input<'_>, [batch, head, seq]: [usize; 3]) -> Option<(*const f32, isize)> {
    let Input::F32(view) = input else { return None };
    is_direct(input).then(|| (view.data().as_ptr().wrapping_add(element(view, batch, head, seq)), view.strides()[2]))
}

/// Address of the first byte of a row whose channels lie side by side, bytes to the next row, and bytes of a row. Not
/// checked, for prefetching alone.
pub(crate) fn place(input: &Input<'_>, row: [usize; 3]) -> Option<(*const u8, isize, usize)> {
    fn of<T: Copy>(view: &View<'_, T>, [batch, head, seq]: [usize; 3]) -> Option<(*const u8, isize, usize)> {
        let ([.., stride, unit], [.., columns]) = (view.strides(), view.sizes());
        let start = view.data().as_ptr().wrapping_add(element(view, batch, head, seq)).cast();
        let bytes = size_of::<T>();
        (unit == 1).then(|| (start, stride.wrapping_mul(bytes as isize), columns.wrapping_mul(bytes)))
    }
    match input {
        Input::F32(view) => of(view, row),
        Input::F16(view) => of(view, row),
        Input::Bf16(view) => of(view, row),
    }
}

/// A square of f32 in the caller's memory, and its stride; `None` if it has to be gathered.
#[inline(always)]
fn square<'a>(input: &Input<'a>, [batch, head, seq]: [usize; 3], channel: usize) -> Option<(&'a [f32], usize)> {
    let Input::F32(view) = input else { return None };
    let [.., row_stride, unit] = view.strides();
    let stride = usize::try_from(row_stride).ok()?;
    if unit != 1 {
        return None;
    }
    Some((view.data().get(element(view, batch, head, seq) + channel..)?, stride))
}

/// Index of the first element of a row.
#[inline(always)]
fn element<T: Copy>(view: &View<'_, T>, batch: usize, head: usize, seq: usize) -> usize {
    let [sb, sh, ss, _] = view.strides();
    // Rows without elements may have any strides; their index is not used.
    let step = |n: usize, stride: isize| (n as isize).wrapping_mul(stride);
    let steps = step(batch, sb).wrapping_add(step(head, sh)).wrapping_add(step(seq, ss));
    view.offset().wrapping_add_signed(steps)
}

/// Rows of bfloat16 from `first` on whose channels lie side by side: the data, where the first one starts, and elements
/// from one to the next. `None` for any other input.
#[inline(always)]
pub(crate) fn halves<'a>(input: &Input<'a>, [batch, head, first]: [usize; 3]) -> Option<(&'a [bf16], usize, isize)> {
    let Input::Bf16(view) = input else { return None };
    (view.strides()[3] == 1).then(|| (view.data(), element(view, batch, head, first), view.strides()[2]))
}

/// Whether rows of the input can be read in place.
pub(crate) fn is_direct(input: &Input<'_>) -> bool {
    match input {
        Input::F32(view) => view.strides()[3] == 1 || view.sizes()[3] <= 1,
        _ => false,
    }
}

/// The rows `first..first + count` of one head as a panel: in place, or widened into `scratch`, unless `there` says
/// that they are there already.
#[inline(always)]
pub(crate) fn panel<'a, I: Isa>(
    isa: I,
    input: &Input<'a>,
    [batch, head, first]: [usize; 3],
    count: usize,
    columns: usize,
    scratch: &'a mut [f32],
    there: &mut bool,
) -> Panel<'a> {
    if let Input::F32(view) = input
        && is_direct(input)
    {
        return Panel { data: view.data(), start: element(view, batch, head, first), row_stride: view.strides()[2] };
    }
    if core::mem::replace(there, true) {
        return Panel::packed(scratch, columns);
    }
    copied(isa, input, [batch, head, first], count, columns, scratch)
}

/// The rows `first..first + count` of one head, copied (and widened) into `scratch`.
#[inline(always)]
pub(crate) fn copied<'a, I: Isa>(
    isa: I,
    input: &Input<'_>,
    first: [usize; 3],
    count: usize,
    columns: usize,
    scratch: &'a mut [f32],
) -> Panel<'a> {
    if columns > 0 {
        read_rows(isa, input, first, columns, &mut scratch[..count * columns]);
    }
    Panel::packed(scratch, columns)
}

/// Reads rows of one head, widened, into `dst`. A function of its own, so that it is compiled once per instruction set.
#[inline(never)]
fn read_rows<I: Isa>(isa: I, input: &Input<'_>, first: [usize; 3], columns: usize, dst: &mut [f32]) {
    isa.vectorize(
        #[inline(always)]
        || read_rows_inlined(isa, input, first, columns, dst),
    );
}

#[inline(always)]
fn read_rows_inlined<I: Isa>(
    isa: I,
    input: &Input<'_>,
    [batch, head, first]: [usize; 3],
    columns: usize,
    dst: &mut [f32],
) {
    let there = match input {
        Input::F32(_) => false,
        Input::F16(view) => widen_rows(isa, view, [batch, head, first], columns, dst, I::load_f16),
        Input::Bf16(view) => widen_rows(isa, view, [batch, head, first], columns, dst, I::load_bf16),
    };
    if !there {
        for (n, row) in dst.chunks_exact_mut(columns).enumerate() {
            read_row(isa, input, [batch, head, first + n], 0, row);
        }
    }
}

/// Widens rows from `first` on if their channels are contiguous. Says whether they are.
#[inline(always)]
fn widen_rows<I: Isa, T: Copy + Default>(
    isa: I,
    view: &View<'_, T>,
    [batch, head, first]: [usize; 3],
    columns: usize,
    dst: &mut [f32],
    load: impl Fn(I, &[T]) -> I::F + Copy,
) -> bool {
    let [.., stride, unit] = view.strides();
    if unit != 1 {
        return false;
    }
    let (data, mut start) = (view.data(), element(view, batch, head, first));
    for row in dst.chunks_exact_mut(columns) {
        widen(isa, &data[start..start + columns], row, load);
        start = start.wrapping_add_signed(stride);
    }
    true
}
