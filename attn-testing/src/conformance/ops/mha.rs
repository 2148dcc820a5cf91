//! `mha`, `mha_backward`: torch's `nn.MultiheadAttention`.

use attn_core::{Attention, Bias, Layout, Mask, View, ViewMut};
use attn_layers::module::{self, InputGradients, LayerOutputs, ModuleGradients, MultiHeadAttention, Sources};
use attn_layers::{Linear, LinearGradients};

use super::modules::On;
use crate::conformance::loaded::{Loaded, Produced, by_dtype, check_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::conformance::{Data, Tensor};
use crate::engine::{Engine, Number};

pub(super) fn attention<E: Engine>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop> {
    by_dtype!(check_dtype(engine, loaded.case)?, T => run::<E, T>(engine, loaded))
}

/// The layout of a case's tensors: batch first, sequence first, or without a batch.
#[derive(Clone, Copy)]
struct Order {
    batched: bool,
    layout: Layout,
}

impl Order {
    fn of(loaded: Loaded<'_>) -> Result<Self, Stop> {
        let first = loaded.case.flag("batch_first")?;
        Ok(Self {
            batched: loaded.case.params.get("batched").is_none_or(|b| b.as_bool() != Some(false)),
            layout: if first { Layout::Bhsd } else { Layout::Sbhd },
        })
    }

    /// `[batch, 1, seq, features]` of a shape.
    fn sizes(self, shape: &[usize]) -> Result<[usize; 4], Stop> {
        match (shape, self.batched, self.layout) {
            (&[seq, features], false, _) => Ok([1, 1, seq, features]),
            (&[batch, seq, features], true, Layout::Bhsd) => Ok([batch, 1, seq, features]),
            (&[seq, batch, features], true, _) => Ok([batch, 1, seq, features]),
            _ => Err(Stop::Fail(format!("shape {shape:?} of an input"))),
        }
    }

    fn view<'t, T: Stored>(self, tensor: &'t Tensor) -> Result<View<'t, T>, Stop> {
        Ok(View::new(tensor.values()?, self.layout, self.sizes(&tensor.shape)?)?)
    }

    /// The shape of a tensor that is batched or not.
    fn shape(self, batched: &[usize]) -> Vec<usize> {
        if self.batched { batched.to_vec() } else { batched.get(1..).unwrap_or_default().to_vec() }
    }
}

/// `x·Wᵀ + b`.
fn linear<'t, T: Number + Stored>(weight: &'t Tensor, bias: Option<&'t [T]>) -> Result<Linear<'t, T>, Stop> {
    let [d_out, d_in] = weight.sizes()?;
    let layer = Linear::transposed(weight.values()?, d_in, d_out)?;
    Ok(match bias {
        Some(bias) => layer.bias(bias)?,
        None => layer,
    })
}

fn layer<'t, T: Number + Stored>(loaded: Loaded<'t>) -> Result<MultiHeadAttention<'t, T>, Stop> {
    let (embed, heads) = (loaded.case.required_size("embed_dim")?, loaded.case.required_size("num_heads")?);
    let in_bias = loaded.optional("in_proj_bias")?.map(|t| t.values::<T>()).transpose()?;
    let mut layer = match loaded.optional("in_proj_weight")? {
        Some(packed) => MultiHeadAttention::packed(embed, heads, packed.values()?, in_bias)?,
        None => {
            let part = |n: usize| in_bias.map(|bias| &bias[n * embed..(n + 1) * embed]);
            MultiHeadAttention::new(
                heads,
                heads,
                linear(loaded.input("q_proj_weight")?, part(0))?,
                linear(loaded.input("k_proj_weight")?, part(1))?,
                linear(loaded.input("v_proj_weight")?, part(2))?,
            )?
        }
    };
    let out_bias = loaded.optional("out_proj_bias")?.map(|t| t.values::<T>()).transpose()?;
    layer = layer.output(linear(loaded.input("out_proj_weight")?, out_bias)?)?;
    if let (Some(k), Some(v)) = (loaded.optional("bias_k")?, loaded.optional("bias_v")?) {
        layer = layer.bias_kv(k.values()?, v.values()?)?;
    }
    Ok(if loaded.case.flag("add_zero_attn")? { layer.zero_attn() } else { layer })
}

/// The masks, in which `true` means blocked.
fn options<'t>(loaded: Loaded<'t>, [batch, heads]: [usize; 2]) -> Result<Attention<'t>, Stop> {
    let (mut attn, mut mask) = (Attention::new(), Mask::none());
    if let Some(padding) = loaded.optional("key_padding_mask")? {
        let keys = padding.shape.last().copied().unwrap_or(0);
        mask = mask.and(Mask::drop(View::new(padding.values()?, Layout::Bhsd, [batch, 1, 1, keys])?));
    }
    if let Some(tensor) = loaded.optional("attn_mask")? {
        let sizes = match *tensor.shape.as_slice() {
            [l, s] => [1, 1, l, s],
            [_, l, s] => [batch, heads, l, s],
            _ => return Err(Stop::Fail(format!("attn_mask of shape {:?}", tensor.shape))),
        };
        match &tensor.data {
            Data::Bool(blocked) => mask = mask.and(Mask::drop(View::new(blocked, Layout::Bhsd, sizes)?)),
            Data::F64(x) => attn = attn.bias(Bias::F64(View::new(x, Layout::Bhsd, sizes)?)),
            Data::F32(x) => attn = attn.bias(Bias::F32(View::new(x, Layout::Bhsd, sizes)?)),
            Data::F16(x) => attn = attn.bias(Bias::F16(View::new(x, Layout::Bhsd, sizes)?)),
            Data::Bf16(x) => attn = attn.bias(Bias::Bf16(View::new(x, Layout::Bhsd, sizes)?)),
            _ => return Err(Stop::Fail("a mask of integers".to_owned())),
        }
    }
    Ok(attn.mask(mask))
}

fn run<E: Engine, T>(engine: &E, loaded: Loaded<'_>) -> Result<Produced, Stop>
where
    T: Number + Stored,
    T::Compute: Number,
{
    let order = Order::of(loaded)?;
    let query_tensor = loaded.input("query")?;
    let query = order.view::<T>(query_tensor)?;
    let key = loaded.optional("key")?.map_or(Ok(query), |t| order.view(t))?;
    let value = loaded.optional("value")?.map_or(Ok(key), |t| order.view(t))?;
    let inputs = Sources::new(query, key, value);
    let layer = layer::<T>(loaded)?;
    let ([batch, _, q_len, _], kv_len) = (query.sizes(), key.sizes()[2]);
    let heads = layer.q_heads();
    let attn = options(loaded, [batch, heads])?;

    let mut y = vec![T::default(); batch * q_len * layer.d_out()];
    let mut outputs = LayerOutputs::new(ViewMut::new(&mut y, order.layout, [batch, 1, q_len, layer.d_out()])?);
    let total = kv_len + layer.appended();
    let average = loaded.case.flag("average_attn_weights")?;
    let wants_weights = loaded.case.wants("attn_weights");
    let copies = if average { 1 } else { heads };
    let mut weights = vec![T::Compute::default(); if wants_weights { batch * copies * q_len * total } else { 0 }];
    if wants_weights {
        outputs = if average { outputs.average_weights(&mut weights) } else { outputs.weights(&mut weights) };
    }
    if engine.is_exact() {
        let mut scratch = vec![0.0; layer.scratch_len(&module::Reference, batch, q_len, kv_len)?];
        layer.forward(&mut module::Reference, &attn, inputs, outputs, &mut scratch)?;
    } else {
        let mut scratch = vec![T::Compute::default(); layer.scratch_len(&On(engine), batch, q_len, kv_len)?];
        layer.forward(&mut On(engine), &attn, inputs, outputs, &mut scratch)?;
    }
    let mut produced = Produced::default();
    let mut shape = query_tensor.shape.clone();
    if let Some(features) = shape.last_mut() {
        *features = layer.d_out();
    }
    produced.put("y", &shape, &y);
    let weights_shape = if average { vec![batch, q_len, total] } else { vec![batch, heads, q_len, total] };
    produced.put("attn_weights", &order.shape(&weights_shape), &weights);
    if loaded.case.op == "mha_backward" {
        gradients(&mut produced, loaded, order, &layer, &attn, inputs)?;
    }
    Ok(produced)
}

/// `d_<input>` of every input and weight.
fn gradients<T: Number + Stored>(
    produced: &mut Produced,
    loaded: Loaded<'_>,
    order: Order,
    layer: &MultiHeadAttention<'_, T>,
    attn: &Attention<'_>,
    inputs: Sources<'_, T>,
) -> Result<(), Stop> {
    let dy = order.view::<T>(loaded.input("dy")?)?;
    let ([batch, _, q_len, d_query], [_, _, kv_len, d_key]) = (inputs.query.sizes(), inputs.key.sizes());
    let d_value = inputs.value.sizes()[3];
    let embed = layer.q_heads() * layer.head_dim();
    let buffer = |view: View<'_, T>| vec![0.0f64; view.sizes().iter().product()];
    let (mut dq, mut dk, mut dv) = (buffer(inputs.query), buffer(inputs.key), buffer(inputs.value));
    let (mut wq, mut wk, mut wv) =
        (vec![0.0f64; embed * d_query], vec![0.0f64; embed * d_key], vec![0.0f64; embed * d_value]);
    let d_out = layer.d_out();
    let (mut wo, mut bo) = (vec![0.0f64; d_out * embed], vec![0.0f64; d_out]);
    let mut b_in = vec![0.0f64; 3 * embed];
    let (mut bias_k, mut bias_v) = (vec![0.0f64; embed], vec![0.0f64; embed]);

    let same = loaded.optional("key")?.is_none();
    let view = |data, of: View<'_, T>| ViewMut::new(data, order.layout, of.sizes());
    let d_inputs = if same {
        InputGradients::Same(view(&mut dq, inputs.query)?)
    } else {
        let (query, key) = (view(&mut dq, inputs.query)?, view(&mut dk, inputs.key)?);
        InputGradients::Separate { query, key, value: view(&mut dv, inputs.value)? }
    };
    let (bq, rest) = b_in.split_at_mut(embed);
    let (bk, bv) = rest.split_at_mut(embed);
    let mut wanted = ModuleGradients::new()
        .inputs(d_inputs)
        .q(LinearGradients::transposed(&mut wq, d_query, embed)?.bias(bq))
        .k(LinearGradients::transposed(&mut wk, d_key, embed)?.bias(bk))
        .v(LinearGradients::transposed(&mut wv, d_value, embed)?.bias(bv))
        .out(LinearGradients::transposed(&mut wo, embed, d_out)?.bias(&mut bo));
    if loaded.optional("bias_k")?.is_some() {
        wanted = wanted.bias_kv(&mut bias_k, &mut bias_v);
    }
    let mut scratch = vec![0.0; layer.backward_scratch_len(&module::Reference, batch, q_len, kv_len)?];
    layer.backward(&mut module::Reference, attn, inputs, dy, wanted, &mut scratch)?;

    for (role, values) in [("query", &dq), ("key", &dk), ("value", &dv)] {
        if let Some(input) = loaded.optional(role)? {
            produced.put(&format!("d_{role}"), &input.shape, values);
        }
    }
    produced.put("d_q_proj_weight", &[embed, d_query], &wq);
    produced.put("d_k_proj_weight", &[embed, d_key], &wk);
    produced.put("d_v_proj_weight", &[embed, d_value], &wv);
    if d_query == d_key && d_key == d_value {
        produced.put("d_in_proj_weight", &[3 * embed, d_query], &[wq, wk, wv].concat());
    }
    produced.put("d_in_proj_bias", &[3 * embed], &b_in);
    produced.put("d_out_proj_weight", &[d_out, embed], &wo);
    produced.put("d_out_proj_bias", &[d_out], &bo);
    produced.put("d_bias_k", &[1, 1, embed], &bias_k);
    produced.put("d_bias_v", &[1, 1, embed], &bias_v);
    Ok(())
}
