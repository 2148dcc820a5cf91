//! Runs the attention of candle-nn (flash, and composed of products) and burn-flex for `cargo xtask bench --peers`,
//! driven over stdin and stdout by the protocol that `attn-bench/python/torch_peer.py` describes. f32, nothing but
//! scale and causality.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, Read, StdinLock, Write, stdin, stdout};
use std::time::Instant;

use burn_backend::TensorData;
use burn_backend::ops::AttentionModuleOptions;
use burn_flex::FlexTensor;
use candle_core::{D, Device, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use cpu_time::ProcessTime;
use serde::Deserialize;
use serde_json::{Value, json};

type Fallible<T> = Result<T, Box<dyn Error>>;

/// The sizes of a call, as the measuring side sends them.
#[derive(Clone, Copy, Deserialize)]
struct Case {
    batch: usize,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    head_dim: usize,
    causal: bool,
}

/// What arrives, line by line.
#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
enum Request {
    Load { case: Case, what: String, floats: [usize; 4] },
    Time { peer: String, calls: u32 },
    Out { peer: String },
    Memory { peer: String },
}

/// A library with its inputs: runs once and, if asked, hands over the output as `[batch, heads, seq, dim]`.
type Run = Box<dyn FnMut(bool) -> Fallible<Vec<f32>>>;

fn main() -> Fallible<()> {
    let mut input = stdin().lock();
    // Versions are those that the committed lock file pins.
    answer(&json!({"candle-nn": "0.11", "burn-flex": "0.22"}))?;
    let mut peers: BTreeMap<&'static str, Run> = BTreeMap::new();
    let mut line = String::new();
    while input.read_line(&mut line)? > 0 {
        let done =
            serde_json::from_str(&line).map_err(Into::into).and_then(|request| serve(request, &mut input, &mut peers));
        if let Err(error) = done {
            answer(&json!({"error": error.to_string().lines().next().unwrap_or("unknown")}))?;
        }
        line.clear();
    }
    Ok(())
}

fn answer(value: &Value) -> Fallible<()> {
    let mut out = stdout().lock();
    writeln!(out, "{value}")?;
    Ok(out.flush()?)
}

fn serve(request: Request, input: &mut StdinLock<'_>, peers: &mut BTreeMap<&'static str, Run>) -> Fallible<()> {
    match request {
        Request::Load { case, what, floats } => {
            peers.clear(); // before the next: two sets of inputs need not be held at once
            let mut tensors = Vec::new();
            for len in floats {
                let mut bytes = vec![0; 4 * len];
                input.read_exact(&mut bytes)?;
                let numbers = bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect::<Vec<_>>();
                tensors.push(numbers);
            }
            let mut refused = BTreeMap::new();
            if what == "plain" {
                let [q, k, v, _] = &tensors[..] else { return Err("four tensors".into()) };
                for (name, made) in [
                    ("candle-flash", candle_flash(case, q, k, v)),
                    ("candle-naive", candle_naive(case, q, k, v)),
                    ("burn-flex", burn(case, q, k, v)),
                ] {
                    // One call shows whether it can.
                    match made.and_then(|mut run| run(false).map(|_| run)) {
                        Ok(run) => drop(peers.insert(name, run)),
                        Err(error) => drop(refused.insert(name, error.to_string())),
                    }
                }
            }
            answer(&json!({"peers": peers.keys().collect::<Vec<_>>(), "refused": refused}))
        }
        Request::Time { peer, calls } => {
            let run = peers.get_mut(peer.as_str()).ok_or("no such peer")?;
            let (start, ran) = (Instant::now(), ProcessTime::now());
            for _ in 0..calls {
                run(false)?;
            }
            let per_call = |seconds: f64| seconds / f64::from(calls.max(1));
            let (wall, processor) = (start.elapsed().as_secs_f64(), ran.elapsed().as_secs_f64());
            answer(&json!({"seconds": per_call(wall), "processor": per_call(processor)}))
        }
        Request::Out { peer } => {
            let out = peers.get_mut(peer.as_str()).ok_or("no such peer")?(true)?;
            answer(&json!({"floats": out.len()}))?;
            let mut to = stdout().lock();
            out.iter().try_for_each(|x| to.write_all(&x.to_le_bytes()))?;
            Ok(to.flush()?)
        }
        Request::Memory { peer } => {
            let run = peers.get_mut(peer.as_str()).ok_or("no such peer")?;
            let before = kib("VmRSS:")?;
            std::fs::write("/proc/self/clear_refs", "5")?; // the high-water mark starts again
            run(false)?;
            answer(&json!({"bytes": kib("VmHWM:")?.saturating_sub(before) << 10}))
        }
    }
}

/// A field of `/proc/self/status`.
fn kib(field: &str) -> Fallible<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(field)).ok_or("no such field")?;
    Ok(line.split_whitespace().next().ok_or("no value")?.parse()?)
}

fn scale(case: Case) -> f32 {
    (case.head_dim as f32).sqrt().recip()
}

/// A tensor of candle, `[batch, heads, seq, dim]`.
fn candle(numbers: &[f32], case: Case, heads: usize, len: usize) -> Fallible<Tensor> {
    Ok(Tensor::from_slice(numbers, (case.batch, heads, len, case.head_dim), &Device::Cpu)?)
}

fn floats(tensor: &Tensor) -> Fallible<Vec<f32>> {
    Ok(tensor.contiguous()?.flatten_all()?.to_vec1()?)
}

/// `candle_nn::attention::flash_attn`, which takes `[batch, seq, heads, dim]` and gets it contiguous.
fn candle_flash(case: Case, q: &[f32], k: &[f32], v: &[f32]) -> Fallible<Run> {
    let turned = |x: Tensor| x.transpose(1, 2).and_then(|x| x.contiguous());
    let q = turned(candle(q, case, case.q_heads, case.q_len)?)?;
    let k = turned(candle(k, case, case.kv_heads, case.kv_len)?)?;
    let v = turned(candle(v, case, case.kv_heads, case.kv_len)?)?;
    Ok(Box::new(move |wanted| {
        let mask = if case.causal { AttnMask::causal() } else { AttnMask::None };
        let out = flash_attn::<f32>(&q, &k, &v, scale(case), mask, None, None)?;
        if wanted { floats(&out) } else { Ok(Vec::new()) }
    }))
}

/// Two products and a softmax, with keys and values repeated for grouped heads, as model code writes it.
fn candle_naive(case: Case, q: &[f32], k: &[f32], v: &[f32]) -> Fallible<Run> {
    let q = candle(q, case, case.q_heads, case.q_len)?;
    let k = candle(k, case, case.kv_heads, case.kv_len)?;
    let v = candle(v, case, case.kv_heads, case.kv_len)?;
    let group = case.q_heads / case.kv_heads.max(1);
    let mask = if case.causal {
        let hidden = |at: usize| if at % case.kv_len > at / case.kv_len { f32::NEG_INFINITY } else { 0.0 };
        let mask: Vec<f32> = (0..case.q_len * case.kv_len).map(hidden).collect();
        Some(Tensor::from_vec(mask, (case.q_len, case.kv_len), &Device::Cpu)?)
    } else {
        None
    };
    let repeated = move |x: &Tensor| -> candle_core::Result<Tensor> {
        if group == 1 {
            return Ok(x.clone());
        }
        let (batch, heads, len, dim) = x.dims4()?;
        x.unsqueeze(2)?.broadcast_as((batch, heads, group, len, dim))?.reshape((batch, heads * group, len, dim))
    };
    Ok(Box::new(move |wanted| {
        let mut scores = (q.matmul(&repeated(&k)?.transpose(D::Minus1, D::Minus2)?)? * f64::from(scale(case)))?;
        if let Some(mask) = &mask {
            scores = scores.broadcast_add(mask)?;
        }
        let out = candle_nn::ops::softmax_last_dim(&scores)?.matmul(&repeated(&v)?)?;
        if wanted { floats(&out) } else { Ok(Vec::new()) }
    }))
}

/// `burn_flex::ops::attention::attention`, which chooses between its flash and its composed form.
fn burn(case: Case, q: &[f32], k: &[f32], v: &[f32]) -> Fallible<Run> {
    let tensor = |numbers: &[f32], heads: usize, len: usize| {
        FlexTensor::from_data(TensorData::new(numbers.to_vec(), [case.batch, heads, len, case.head_dim]))
    };
    if case.q_heads != case.kv_heads {
        return Err("burn-flex has no grouped heads".into());
    }
    let q = tensor(q, case.q_heads, case.q_len);
    let k = tensor(k, case.kv_heads, case.kv_len);
    let v = tensor(v, case.kv_heads, case.kv_len);
    Ok(Box::new(move |wanted| {
        let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: case.causal };
        let out = burn_flex::ops::attention::attention(q.clone(), k.clone(), v.clone(), None, None, options);
        if !wanted {
            return Ok(Vec::new());
        }
        out.into_data().try_to_vec::<f32>().map_err(|error| format!("{error:?}").into())
    }))
}
