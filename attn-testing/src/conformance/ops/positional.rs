//! `rope`, `onnx_rotary_embedding`, `alibi`, `sinusoidal`.

use attn_core::position::rope::{Pairing, Rope, RopeTables};
use attn_core::position::scaling::Scaling;
use attn_core::position::scaling::{Llama3, LongRope, Yarn};
use attn_core::position::{Positions, alibi};
use attn_core::{Align, Layout, View, ViewMut};
use attn_layers::position::sinusoidal::Sinusoidal;
use serde_json::{Map, Value};

use crate::conformance::loaded::{Loaded, Produced, by_dtype};
use crate::conformance::stop::Stop;
use crate::conformance::tensor::Stored;
use crate::engine::Number;

/// `half` or `interleaved`.
pub(crate) fn pairing(style: Option<&str>) -> Result<Pairing, Stop> {
    match style {
        Some("half") => Ok(Pairing::Half),
        Some("interleaved") => Ok(Pairing::Interleaved),
        other => Err(Stop::Fail(format!("rotation style {other:?} is not understood"))),
    }
}

/// Lists that a scaling borrows.
#[derive(Default)]
struct Factors {
    short: Vec<f64>,
    long: Vec<f64>,
}

fn scaling<'f>(object: Option<&Map<String, Value>>, factors: &'f mut Factors) -> Result<Scaling<'f>, Stop> {
    let Some(object) = object else {
        return Ok(Scaling::None);
    };
    let maybe = |key: &str| object.get(key).and_then(Value::as_f64);
    let number = |key: &str| maybe(key).ok_or_else(|| Stop::Fail(format!("scaling without {key}")));
    let length = |key: &str| number(key).map(|x| x as usize);
    let list = |key: &str| -> Vec<f64> {
        object.get(key).and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_f64).collect()
    };
    Ok(match object.get("type").and_then(Value::as_str).unwrap_or_default() {
        "linear" => Scaling::Linear { factor: number("factor")? },
        "ntk" => Scaling::Ntk { factor: number("factor")? },
        "dynamic" => Scaling::Dynamic { factor: number("factor")?, max_position: length("max_position")? },
        "yarn" => {
            let plain = Yarn::new(number("factor")?, length("original_max_position")?);
            Scaling::Yarn(Yarn {
                beta_fast: maybe("beta_fast").unwrap_or(plain.beta_fast),
                beta_slow: maybe("beta_slow").unwrap_or(plain.beta_slow),
                truncate: object.get("truncate").and_then(Value::as_bool).unwrap_or(true),
                attention_factor: maybe("attention_factor"),
                mscale: maybe("mscale"),
                mscale_all_dim: maybe("mscale_all_dim"),
                ..plain
            })
        }
        "llama3" => Scaling::Llama3(Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_position: length("original_max_position")?,
        }),
        "longrope" => {
            *factors = Factors { short: list("short_factor"), long: list("long_factor") };
            Scaling::LongRope(LongRope {
                factor: maybe("factor").unwrap_or(1.0),
                original_max_position: length("original_max_position")?,
                short_factor: &factors.short,
                long_factor: &factors.long,
                attention_factor: maybe("attention_factor"),
            })
        }
        other => return Err(Stop::Skip(format!("no rope scaling {other}"))),
    })
}

fn places(loaded: Loaded<'_>, role: &str) -> Result<Vec<isize>, Stop> {
    Ok(loaded.input(role)?.integers()?.iter().map(|&n| n as isize).collect())
}

pub(super) fn rope(loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<T: Number + Stored>(loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let (case, x) = (loaded.case, loaded.input("x")?.view::<T>()?);
        let [batch, heads, seq, head_dim] = x.sizes();
        let positions = places(loaded, "positions")?;
        let mut factors = Factors::default();
        let mut rope =
            Rope::new(pairing(case.word("style")?)?).scaling(scaling(case.object("scaling")?, &mut factors)?);
        if let Some(base) = case.number("base")? {
            rope = rope.base(base);
        }
        if let Some(dim) = case.size("rotary_dim")? {
            rope = rope.rotary_dim(dim);
        }
        let seq_len = case.size("seq_len")?;
        if let Some(len) = seq_len {
            rope = rope.seq_len(len);
        }
        let pairs = rope.dims(head_dim)? / 2;
        let mut produced = Produced::default();

        let mut y = vec![T::default(); batch * heads * seq * head_dim];
        let mut view = ViewMut::new(&mut y, Layout::Bhsd, [batch, heads, seq, head_dim])?;
        rope.apply(x, &mut view, Positions::Each(&positions))?;
        produced.put("y", &[batch, heads, seq, head_dim], &y);

        let (mut cos, mut sin) =
            (vec![T::Compute::default(); batch * seq * pairs], vec![T::Compute::default(); batch * seq * pairs]);
        let sizes = [batch, 1, seq, pairs];
        let (mut cos_view, mut sin_view) =
            (ViewMut::new(&mut cos, Layout::Bhsd, sizes)?, ViewMut::new(&mut sin, Layout::Bhsd, sizes)?);
        rope.tables(head_dim, Positions::Each(&positions), &mut cos_view, &mut sin_view)?;
        produced.put("cos", &[batch, seq, pairs], &cos);
        produced.put("sin", &[batch, seq, pairs], &sin);

        let longest = positions.iter().map(|&p| p.max(-1).unsigned_abs() + 1).max().unwrap_or(0);
        let mut inv_freq = vec![T::Compute::default(); pairs];
        rope.inv_freq(head_dim, seq_len.unwrap_or(longest), &mut inv_freq)?;
        produced.put("inv_freq", &[pairs], &inv_freq);
        produced.put("attention_factor", &[1], &[rope.attention_factor()]);
        Ok(produced)
    }
    by_dtype!(loaded.case.dtype()?, T => run::<T>(loaded))
}

pub(super) fn onnx_rotary(loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<T>(loaded: Loaded<'_>) -> Result<Produced, Stop>
    where
        T: Number + Stored,
    {
        let (case, tensor) = (loaded.case, loaded.input("X")?);
        let (layout, sizes) = match *tensor.shape.as_slice() {
            [batch, seq, width] => {
                let heads = case.required_size("num_heads")?;
                (Layout::Bshd, [batch, heads, seq, width.checked_div(heads).unwrap_or(0)])
            }
            _ => (Layout::Bhsd, tensor.sizes()?),
        };
        let x = View::new(tensor.values::<T>()?, layout, sizes)?;
        let pairing = if case.flag("interleaved")? { Pairing::Interleaved } else { Pairing::Half };
        let (cos, sin) = (loaded.input("cos_cache")?, loaded.input("sin_cache")?);
        let rows = match loaded.optional("position_ids")? {
            Some(_) => Some(places(loaded, "position_ids")?),
            None => None,
        };
        // [maxpos, r/2] where positions pick the rows, [batch, seq, r/2] where each token has its own.
        let table_sizes = match *cos.shape.as_slice() {
            [rows, pairs] => [1, 1, rows, pairs],
            [batch, rows, pairs] => [batch, 1, rows, pairs],
            _ => return Err(Stop::Fail(format!("cos_cache of shape {:?}", cos.shape))),
        };
        let rotary = case.size("rotary_embedding_dim")?.filter(|&r| r != 0).unwrap_or(sizes[3]);
        if 2 * table_sizes[3] != rotary {
            return Err(Stop::Fail(format!("a cache of {} pairs for {rotary} rotary dims", table_sizes[3])));
        }
        let table = |data| View::new(data, Layout::Bhsd, table_sizes);
        let tables = RopeTables::new(pairing, table(cos.values::<T>()?)?, table(sin.values::<T>()?)?)?;
        let mut y = vec![T::default(); tensor.len()];
        let positions = rows.as_deref().map_or(Positions::Offset(0), Positions::Each);
        tables.apply(x, &mut ViewMut::new(&mut y, layout, sizes)?, positions)?;
        let mut produced = Produced::default();
        produced.put("Y", &tensor.shape, &y);
        Ok(produced)
    }
    by_dtype!(loaded.case.dtype()?, T => run::<T>(loaded))
}

pub(super) fn alibi(loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<T: Number>(loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let case = loaded.case;
        let heads = case.required_size("num_heads")?;
        let mut slopes = vec![T::Compute::default(); heads];
        alibi::slopes(&mut slopes);
        let mut produced = Produced::default();
        produced.put("slopes", &[heads], &slopes);
        if let Some(q_len) = case.size("q_len")? {
            let kv_len = case.required_size("kv_len")?;
            let mut bias = vec![T::Compute::default(); heads * q_len * kv_len];
            let mut view = ViewMut::new(&mut bias, Layout::Bhsd, [1, heads, q_len, kv_len])?;
            alibi::bias(&slopes, Align::BottomRight, case.flag("causal")?, &mut view)?;
            produced.put("bias", &[heads, q_len, kv_len], &bias);
        }
        Ok(produced)
    }
    by_dtype!(loaded.case.dtype()?, T => run::<T>(loaded))
}

pub(super) fn sinusoidal(loaded: Loaded<'_>) -> Result<Produced, Stop> {
    fn run<T: Number>(loaded: Loaded<'_>) -> Result<Produced, Stop> {
        let case = loaded.case;
        let (rows, d_model) = (case.required_size("n_positions")?, case.required_size("d_model")?);
        let mut pe = vec![T::default(); rows * d_model];
        let table = match case.number("base")? {
            Some(base) => Sinusoidal { base },
            None => Sinusoidal::new(),
        };
        let offset = case.integer("offset")?.unwrap_or(0) as isize;
        table.fill(&mut ViewMut::matrix(&mut pe, rows, d_model)?, Positions::Offset(offset))?;
        let mut produced = Produced::default();
        produced.put("pe", &[rows, d_model], &pe);
        Ok(produced)
    }
    by_dtype!(loaded.case.dtype()?, T => run::<T>(loaded))
}
