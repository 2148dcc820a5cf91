//! `linear_attention`, `mla`, `differential_attention`.

use attn_core::position::rope::Rope;
use attn_core::{Align, Attention, AttnShape, Layout, Mask, View, ViewMut};
use attn_layers::variants::differential;
use attn_layers::variants::differential::{Differential, HeadNorm};
use attn_layers::variants::linear::{LinearAttention, LinearState};
use attn_layers::variants::mla::{Mla, MlaForm, MlaQuery};

use super::attention::causal;
use super::positional::pairing;
use crate::conformance::loaded::{Loaded, Produced, by_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::engine::Number;

pub(super) fn linear(loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<T: Number + Stored>(loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let (q, k, v) =
            (loaded.input("q")?.view::<T>()?, loaded.input("k")?.view::<T>()?, loaded.input("v")?.view::<T>()?);
        match loaded.case.word("feature_map")? {
            None | Some("elu_plus_one") => {}
            Some(other) => return Err(Stop::Skip(format!("no feature map {other}"))),
        }
        let mut linear = LinearAttention::new();
        if loaded.case.flag("causal")? {
            linear = linear.causal(Align::TopLeft);
        }
        if let Some(eps) = loaded.case.number("eps")? {
            linear = linear.eps(eps);
        }
        let shape = AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
        let (s_len, z_len) = LinearAttention::state_len(&shape)?;
        let (mut s, mut z) = (vec![T::Compute::default(); s_len], vec![T::Compute::default(); z_len]);
        let mut y = vec![T::default(); shape.output().iter().product()];
        let mut view = ViewMut::new(&mut y, Layout::Bhsd, shape.output())?;
        let mut scratch = vec![T::Compute::default(); LinearAttention::scratch_len(&shape)];
        linear.forward(q, k, v, &mut view, LinearState { s: &mut s, z: &mut z }, &mut scratch)?;
        let AttnShape { batch, kv_heads, head_dim, value_dim, .. } = shape;
        let mut produced = Produced::default();
        produced.put("y", &shape.output(), &y);
        produced.put("state", &[batch, kv_heads, head_dim, value_dim], &s);
        produced.put("z", &[batch, kv_heads, head_dim], &z);
        Ok(produced)
    }
    by_dtype!(loaded.case.dtype()?, T => run::<T>(loaded))
}

pub(super) fn mla(loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<T: Number + Stored>(loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let case = loaded.case;
        let matrix = |role: &str| -> Result<View<'_, T>, Stop> {
            let tensor = loaded.input(role)?;
            let [rows, columns] = tensor.sizes()?;
            Ok(View::matrix(tensor.values()?, rows, columns)?)
        };
        let per_head = |role: &str| -> Result<View<'_, T>, Stop> {
            let tensor = loaded.input(role)?;
            let [heads, rows, columns] = tensor.sizes()?;
            Ok(View::new(tensor.values()?, Layout::Bhsd, [1, heads, rows, columns])?)
        };
        let normed = case.flag("latent_norm")?;
        let norm = |role: &str| -> Result<Option<&[T]>, Stop> {
            if normed { Ok(Some(loaded.input(role)?.values()?)) } else { Ok(None) }
        };
        let query = match case.size("q_lora_rank")? {
            None => MlaQuery::Full(matrix("w_q")?),
            Some(_) => MlaQuery::LowRank { w_dq: matrix("w_dq")?, norm: norm("q_norm")?, w_uq: matrix("w_uq")? },
        };
        let mut rope = Rope::new(pairing(case.word("rope_style")?.or(Some("interleaved")))?);
        if let Some(base) = case.number("rope_base")? {
            rope = rope.base(base);
        }
        let mla = Mla {
            query,
            w_dkv: matrix("w_dkv")?,
            kv_norm: norm("kv_norm")?,
            w_kr: matrix("w_kr")?,
            w_uk: per_head("w_uk")?,
            w_uv: per_head("w_uv")?,
            w_o: matrix("w_o")?,
            norm_eps: case.number("norm_eps")?.unwrap_or(0.0),
            rope,
            scale: case.number("scale")?,
        };
        let x = loaded.input("x")?;
        let [batch, seq, d_model] = x.sizes()?;
        let x = View::new(x.values::<T>()?, Layout::Bhsd, [batch, 1, seq, d_model])?;
        let past = case.size("past_len")?.unwrap_or(0);
        let (r, dr, d_out) = (mla.w_dkv.sizes()[3], mla.w_kr.sizes()[3], mla.w_o.sizes()[3]);
        let sizes = [batch, 1, past + seq, r + dr];
        let mut produced = Produced::default();
        for (role, form) in [("y", MlaForm::Expanded), ("y_absorbed", MlaForm::Absorbed)] {
            let mut latents = vec![T::Compute::default(); sizes.iter().product()];
            if past > 0 {
                let (c_kv, k_rope) = (loaded.input("past_c_kv")?, loaded.input("past_k_rope")?);
                for (b, rows) in latents.chunks_mut((past + seq) * (r + dr)).enumerate() {
                    for (s, row) in rows.chunks_mut(r + dr).take(past).enumerate() {
                        let (c, k) = (
                            &c_kv.values::<T>()?[(b * past + s) * r..][..r],
                            &k_rope.values::<T>()?[(b * past + s) * dr..][..dr],
                        );
                        for (slot, x) in row.iter_mut().zip(c.iter().chain(k)) {
                            *slot = x.widen();
                        }
                    }
                }
            }
            let mut out = vec![T::Compute::default(); batch * seq * d_out];
            let mut scratch = vec![T::Compute::default(); mla.scratch_len(form, seq, past)?];
            let mut cache = ViewMut::new(&mut latents, Layout::Bhsd, sizes)?;
            let mut view = ViewMut::new(&mut out, Layout::Bhsd, [batch, 1, seq, d_out])?;
            mla.forward(form, x, &mut cache, past, &mut view, &mut scratch)?;
            produced.put(role, &[batch, seq, d_out], &out);
            let new = |from: usize, to: usize| -> Vec<T::Compute> {
                latents
                    .chunks((past + seq) * (r + dr))
                    .flat_map(|rows| rows.chunks(r + dr).skip(past).flat_map(move |row| row[from..to].iter().copied()))
                    .collect()
            };
            produced.put("c_kv", &[batch, seq, r], &new(0, r));
            produced.put("k_rope", &[batch, seq, dr], &new(r, r + dr));
        }
        Ok(produced)
    }
    by_dtype!(loaded.case.dtype()?, T => run::<T>(loaded))
}

pub(super) fn differential(loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<T: Number + Stored>(loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let case = loaded.case;
        let view = |role: &str| loaded.input(role).and_then(|t| t.view::<T>());
        let (q, k, v) = ([view("q1")?, view("q2")?], [view("k1")?, view("k2")?], view("v")?);
        let mut attn = Attention::new();
        if let Some(scale) = case.number("scale")? {
            attn = attn.scale(scale);
        }
        if let Some(align) = causal(case)? {
            attn = attn.mask(Mask::causal(align));
        }
        let mut produced = Produced::default();
        let init = case.number("lambda_init")?;
        let lambda = match loaded.optional("lambda")? {
            Some(given) => given.to_f64(),
            None => {
                let vector = |role: &str| loaded.input(role).map(|t| t.to_f64());
                let (q1, q2) = (vector("lambda_q1")?, vector("lambda_q2")?);
                let (k1, k2) = (vector("lambda_k1")?, vector("lambda_k2")?);
                let lambda = differential::lambda([&q1, &q2], [&k1, &k2], init.unwrap_or(0.0))?;
                produced.put("lambda_full", &[1], &[lambda]);
                vec![lambda]
            }
        };
        let shape = AttnShape::new(q[0].sizes(), k[0].sizes(), v.sizes())?;
        let plain = Differential::new(&lambda);
        let norm = case.number("norm_eps")?.map(|eps| HeadNorm { eps, lambda_init: init.unwrap_or(0.0), weight: None });
        for (role, layer) in [("y", Some(plain)), ("y_normed", norm.map(|norm| plain.norm(norm)))] {
            let Some(layer) = layer else { continue };
            let mut y = vec![T::default(); shape.output().iter().product()];
            let mut out = ViewMut::new(&mut y, Layout::Bhsd, shape.output())?;
            let mut scratch = vec![T::Compute::default(); Differential::scratch_len(&shape)];
            layer.forward(&attn, q, k, v, &mut out, &mut scratch)?;
            produced.put(role, &shape.output(), &y);
        }
        Ok(produced)
    }
    by_dtype!(loaded.case.dtype()?, T => run::<T>(loaded))
}
