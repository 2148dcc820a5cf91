//! The gate of long sums: `eta` of an output stays within `2u(2 + S)` whatever the number of keys.
//!
//! Values of one sign are what tells: every rounding of a running sum is then a share of the output itself, and a
//! constant rounds the same way at each step. Both kernels are asked, at every level; what is allowed here is the bound
//! as promised, with nothing added to it. Inputs chosen to err have a bound of their own.

use attn_core::{Attention, AttnShape, Dtype, Layout, Outputs, ViewMut};
use attn_simd::{Level, Workspace};
use attn_testing::cases::{Inputs, Memory, Tensor4, shape};
use attn_testing::exact::Exact;
use attn_testing::paint::Paint;
use attn_testing::tolerance::ETA_CHOSEN;

/// Keys: within a tile, around it, a few chunks of the decode kernel, and what long contexts have.
const KEYS: [usize; 9] = [32, 37, 64, 100, 512, 2048, 16_384, 65_536, 131_072];
/// The model of AMX is slow.
const KEYS_ON_MODEL: [usize; 6] = [32, 37, 64, 100, 512, 2048];
/// More than are decoded, and one.
const QUERIES: [usize; 2] = [20, 1];

/// What the numbers are.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Data {
    /// Scores of 0; each channel of v is one number: 0.1, 1/3, 0.7, π/2, the float below 2, and 64 of [1, 2).
    Constants,
    /// The same values; scores rise by 2 in all, a little with each key, so that no tile has the maximum of the one
    /// before.
    RisingScores,
    /// v uniform in [1, 2], scores small.
    Uniform,
    /// v normal + 1.
    NormalPlusOne,
    /// v normal.
    Normal,
    /// Scores of 0; values of half a unit to two in the last place of one that stands at the first key, or at every
    /// 48th.
    Chosen,
}

const ALL: [Data; 6] =
    [Data::Constants, Data::RisingScores, Data::Uniform, Data::NormalPlusOne, Data::Normal, Data::Chosen];

/// The constants, a channel each.
fn constants() -> Vec<f64> {
    let mut paint = Paint::new(17);
    let named = [0.1, 1.0 / 3.0, 0.7, core::f64::consts::FRAC_PI_2, f64::from(2.0f32.next_down())];
    named.into_iter().chain((0..64).map(|_| 1.0 + paint.uniform())).collect()
}

/// Channels of [`Data::Chosen`], and one of their values: 32 sizes of the small ones, each beside both kinds of large.
const CHOSEN: usize = 64;
fn chosen(key: usize, channel: usize) -> f64 {
    let large = if channel.is_multiple_of(2) { 1.0 } else { 1.01 };
    let is_large = if channel < CHOSEN / 2 { key == 0 } else { key.is_multiple_of(48) };
    large * if is_large { 1.0 } else { (0.5 + 0.05 * (channel % 32) as f64) * 2f64.powi(-24) }
}

/// Numbers of a kind, drawn in the order of memory.
fn tensor(sizes: [usize; 4], seed: u64, mut draw: impl FnMut(&mut Paint) -> f64) -> Tensor4<f32> {
    let mut paint = Paint::new(seed);
    let mut tensor = Tensor4::new(sizes, Memory::Bhsd, |_| 0.0);
    tensor.data.fill_with(|| draw(&mut paint) as f32);
    tensor
}

fn inputs(data: Data, q_len: usize, kv_len: usize) -> Inputs<f32> {
    let constants = constants();
    let (head_dim, value_dim) = match data {
        Data::Constants | Data::RisingScores => (8, constants.len()),
        Data::Chosen => (8, CHOSEN),
        _ => (16, 16),
    };
    let dims = (1, 1, 1, q_len, kv_len, head_dim, value_dim);
    let shape: AttnShape = shape(dims);
    let [to_q, to_k, to_v] = attn_testing::cases::sizes(&shape);
    let seed = kv_len as u64;
    let (q, k) = match data {
        Data::Constants | Data::Chosen => (tensor(to_q, seed, |_| 0.0), tensor(to_k, seed + 1, Paint::normal)),
        // The score is √8·q·k of one channel: from −1 to 1.
        Data::RisingScores => (
            Tensor4::new(to_q, Memory::Bhsd, |place| if place[3] == 0 { 8f64.sqrt() } else { 0.0 }),
            Tensor4::new(to_k, Memory::Bhsd, |place| 2.0 * place[2] as f64 / kv_len as f64 - 1.0),
        ),
        _ => (tensor(to_q, seed, |paint| 0.5 * paint.normal()), tensor(to_k, seed + 1, Paint::normal)),
    };
    let v = match data {
        Data::Constants | Data::RisingScores => Tensor4::new(to_v, Memory::Bhsd, |place| constants[place[3]]),
        Data::Uniform => tensor(to_v, seed + 2, |paint| 1.0 + paint.uniform()),
        Data::NormalPlusOne => tensor(to_v, seed + 2, |paint| 1.0 + paint.normal()),
        Data::Normal => tensor(to_v, seed + 2, Paint::normal),
        Data::Chosen => Tensor4::new(to_v, Memory::Bhsd, |place| chosen(place[2], place[3])),
    };
    Inputs { shape, q, k, v }
}

/// The worst shares of the bounds on an output and on the lse that one call takes at each level.
fn shares(levels: &[Level], data: Data, q_len: usize, kv_len: usize) -> Vec<[f64; 2]> {
    let inputs = inputs(data, q_len, kv_len);
    let (shape, attn) = (inputs.shape, Attention::new());
    let mut exact = Exact::new(&attn, &inputs).unwrap();
    // Rows of first, middle and last lanes are enough where a row is long.
    let rows: Vec<usize> = if kv_len > 2048 && q_len > 3 { vec![0, 8, q_len - 1] } else { (0..q_len).collect() };
    let rows: Vec<_> = rows.into_iter().map(|query| (query, exact.row([0, 0, query]))).collect();
    let mut all = Vec::new();
    for &level in levels {
        let (mut out, mut lse) = (vec![f32::NAN; q_len * shape.value_dim], vec![f32::NAN; q_len]);
        let to = ViewMut::new(&mut out, Layout::Bhsd, shape.output()).unwrap();
        let (q, k, v) = (inputs.q.view(), inputs.k.view(), inputs.v.view());
        let outputs = Outputs::new(to).lse(&mut lse);
        attn_simd::forward_at(level, &attn, q, k, v, outputs, &mut Workspace::new()).unwrap();
        let mut worst = [0.0f64; 2];
        for (query, row) in &rows {
            let chosen = ETA_CHOSEN.bound(Dtype::F32, row.score_bound);
            let bound = if data == Data::Chosen { chosen } else { row.eta_bound() };
            for (c, got) in out[query * shape.value_dim..][..shape.value_dim].iter().enumerate() {
                let eta = (f64::from(*got) - row.out[c]).abs() / row.magnitude[c];
                assert!(!eta.is_nan(), "{level:?} {data:?} {q_len}×{kv_len}: row {query}, channel {c} is {got}");
                worst[0] = worst[0].max(eta / bound);
            }
            worst[1] = worst[1].max((f64::from(lse[*query]) - row.lse).abs() / row.allowed_lse());
        }
        all.push(worst);
    }
    all
}

fn stays_within(levels: &[Level], keys: &[usize]) {
    let mut beyond = Vec::new();
    for q_len in QUERIES {
        for data in ALL {
            for &kv_len in keys {
                for (level, [out, lse]) in levels.iter().zip(shares(levels, data, q_len, kv_len)) {
                    let line = format!("{:9} {q_len:2} × {kv_len:6} {data:13?} {out:6.3} lse {lse:6.3}", level.name());
                    println!("{line}");
                    if out.max(lse) > 1.0 {
                        beyond.push(line);
                    }
                }
            }
        }
    }
    assert!(beyond.is_empty(), "beyond the bound, as shares of it:\n{}", beyond.join("\n"));
}

#[test]
fn error_does_not_grow_with_the_number_of_keys() {
    let keys = if attn_testing::is_emulated() { &KEYS[..7] } else { &KEYS };
    stays_within(&Level::available().collect::<Vec<_>>(), keys);
}

#[test]
fn nor_does_it_in_the_amx_kernel() {
    stays_within(&attn_testing::levels(Level::model_names(), Level::by_name), &KEYS_ON_MODEL);
}
