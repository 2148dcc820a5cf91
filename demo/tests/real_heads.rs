//! Attention as real models use it: heads of all-MiniLM-L6-v2 and SmolLM2, whose activations were computed in f64,
//! through every engine, through candle and over the cache. The file's own remarks say where they are from.

use std::collections::HashMap;

use attn_core::kv_cache::{AppendCache, Queries};
use attn_core::position::Positions;
use attn_core::position::rope::{Pairing, Rope};
use attn_core::weights::{self, RowAt};
use attn_core::{Align, Attention, Layout, Mask, Outputs, View, ViewMut};
use attn_layers::module::{Engine, Reference, Streaming};
use attn_parallel::Kernels;
use candle_core::{DType, Device};

/// Absolute, and relative to the stored value: what the files ask of f32; a plain f32 version is within 2.7e-6.
const BOUND: f32 = 1e-5;

/// A tensor, row-major.
struct Tensor {
    shape: Vec<usize>,
    data: Vec<f32>,
}

/// The tensors of the file.
struct Stored(HashMap<String, candle_core::Tensor>);

impl Stored {
    fn read() -> Self {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/real_heads.safetensors");
        Self(candle_core::safetensors::load(path, &Device::Cpu).expect("the committed file"))
    }

    fn get(&self, name: &str) -> Tensor {
        let tensor = &self.0[name];
        let data = tensor.to_dtype(DType::F32).and_then(|x| x.flatten_all()?.to_vec1());
        Tensor { shape: tensor.dims().to_vec(), data: data.expect("numbers") }
    }
}

fn view(tensor: &Tensor) -> View<'_, f32> {
    let sizes = tensor.shape.as_slice().try_into().expect("four sizes");
    View::new(&tensor.data, Layout::Bhsd, sizes).expect("a whole tensor")
}

fn close(what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= BOUND + BOUND * want.abs(), "{what}, element {i}: {got}, not {want}");
    }
}

/// Output and lse of an engine against the stored ones.
fn attend<E>(engine: &mut E, name: &str, attn: &Attention<'_>, stored: &Stored)
where
    E: Engine<f32>,
{
    let part = |part: &str| stored.get(&format!("{name}.{part}"));
    let widened =
        ["q", "k", "v"].map(|x| part(x).data.iter().map(|&x| attn_core::element::Real::of(f64::from(x))).collect());
    let [q, k, v]: [Vec<E::Mid>; 3] = widened;
    let sizes = |x: &str| part(x).shape.as_slice().try_into().expect("four sizes");
    let q = View::new(&q, Layout::Bhsd, sizes("q")).expect("q");
    let k = View::new(&k, Layout::Bhsd, sizes("k")).expect("k");
    let v = View::new(&v, Layout::Bhsd, sizes("v")).expect("v");
    let shape = attn_core::AttnShape::new(q.sizes(), k.sizes(), v.sizes()).expect("shapes that fit");
    let zero: E::Mid = attn_core::element::Real::of(0.0);
    let (mut out, mut lse) = (vec![zero; part("attn_out").data.len()], vec![zero; part("lse").data.len()]);
    let mut scratch = vec![zero; engine.scratch_len(&shape).expect("a length")];
    let to = ViewMut::new(&mut out, Layout::Bhsd, sizes("attn_out")).expect("out");
    engine.attend(attn, [q, k, v], Outputs::new(to).lse(&mut lse), &mut scratch).expect("a call that fits");
    let narrow = |x: &[E::Mid]| x.iter().map(|&x| attn_core::Element::to_f64(x) as f32).collect::<Vec<_>>();
    close(&format!("{name}, {}", std::any::type_name::<E>()), &narrow(&out), &part("attn_out").data);
    close(&format!("{name} lse"), &narrow(&lse), &part("lse").data);
}

fn every_engine(name: &str, attn: &Attention<'_>, stored: &Stored) {
    attend(&mut Reference, name, attn, stored);
    attend(&mut Streaming, name, attn, stored);
    attend(&mut Kernels::default(), name, attn, stored);
    through_candle(name, attn, stored);
}

/// The same as candle's operation.
fn through_candle(name: &str, attn: &Attention<'_>, stored: &Stored) {
    let part = |part: &str| stored.0[&format!("{name}.{part}")].to_dtype(DType::F32).expect("numbers");
    let (out, lse) = attn_candle::attention_lse(attn, &part("q"), &part("k"), &part("v")).expect("a call that fits");
    let numbers = |x: &candle_core::Tensor| x.flatten_all().and_then(|x| x.to_vec1::<f32>()).expect("numbers");
    close(&format!("{name}, candle"), &numbers(&out), &numbers(&part("attn_out")));
    close(&format!("{name} lse, candle"), &numbers(&lse), &numbers(&part("lse")));
}

#[test]
fn padded_sentences_of_an_encoder() {
    let stored = Stored::read();
    let mask = stored.get("encoder.mask");
    let lens: Vec<usize> = mask.data.chunks(mask.shape[1]).map(|row| row.iter().sum::<f32>() as usize).collect();
    assert!(lens.iter().any(|&len| len < mask.shape[1]), "something is padded: {lens:?}");
    every_engine("encoder", &Attention::new().mask(Mask::kv_lens(&lens)), &stored);
}

#[test]
fn grouped_heads_of_a_decoder() {
    let stored = Stored::read();
    let attn = Attention::new().mask(Mask::causal(Align::TopLeft));
    every_engine("decoder", &attn, &stored);
    // The weights of its first head, from the stored lse.
    let get = |name: &str| stored.get(name);
    let (q, k) = (get("decoder.q"), get("decoder.k"));
    let mut probs = vec![0.0; 70 * 70];
    weights::head(&attn, view(&q), view(&k), RowAt::default(), &get("decoder.lse").data, &mut probs).unwrap();
    close("weights", &probs, &get("decoder.probs").data);
}

#[test]
fn rotary_positions_of_a_decoder() {
    let stored = Stored::read();
    let rope = Rope::new(Pairing::Interleaved).base(100_000.0);
    for name in ["q", "k"] {
        let before = stored.get(&format!("decoder.{name}_prerope"));
        let mut x = before.data.clone();
        let sizes = view(&before).sizes();
        rope.apply_in_place(&mut ViewMut::new(&mut x, Layout::Bhsd, sizes).unwrap(), Positions::Offset(0)).unwrap();
        close(name, &x, &stored.get(&format!("decoder.{name}")).data);
    }
}

#[test]
fn tokens_of_a_decoder_one_by_one_over_the_cache() {
    let stored = Stored::read();
    let get = |name: &str| stored.get(&format!("decoder.{name}"));
    let tensors = ["q", "k", "v", "attn_out"].map(get);
    let [q, k, v, want] = tensors.each_ref().map(view);
    let [_, heads, tokens, dim] = q.sizes();
    let (mut keys, mut values, mut lens) = (vec![f32::NAN; 80 * dim], vec![f32::NAN; 80 * dim], [0]);
    let memory = |x| ViewMut::new(x, Layout::Bhsd, [1, 1, 80, dim]).unwrap();
    let mut cache = AppendCache::new(memory(&mut keys), memory(&mut values), &mut lens).unwrap();
    for token in 0..tokens {
        let one = |x: View<'_, f32>| -> Vec<f32> {
            let [_, heads, ..] = x.sizes();
            (0..heads).flat_map(|head| x.row(0, head, token).iter().collect::<Vec<_>>()).collect()
        };
        let (q, k, v, want) = (one(q), one(k), one(v), one(want));
        let new = |x| View::new(x, Layout::Bhsd, [1, 1, 1, dim]).unwrap();
        cache.append(new(&k), new(&v)).unwrap();
        let q = View::new(&q, Layout::Bhsd, [1, heads, 1, dim]).unwrap();
        let mut out = vec![0.0f32; heads * dim];
        let to = ViewMut::new(&mut out, Layout::Bhsd, [1, heads, 1, dim]).unwrap();
        attn_parallel::attend_cache(&Attention::new(), q, Queries::All, cache.view(), to).unwrap();
        close(&format!("token {token}"), &out, &want);
    }
}
