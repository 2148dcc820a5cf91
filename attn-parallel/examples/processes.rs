//! One attention shared by separate processes: each holds a quarter of the keys and values, and sends its states over a
//! pipe.
//!
//! ```sh
//! cargo run --release -p attn-parallel --example processes
//! ```
//!
//! Machines would do the same over a network: 2 + value_dim numbers per query row and process, however long the
//! sequence.

use std::error::Error;
use std::io::{Read, Write};
use std::process::{Command, Stdio};

use attn_core::{Attention, AttnShape, Layout, View, ViewMut, state};
use attn_simd::{Level, Line, Plan};

const PROCESSES: usize = 4;
const KEYS: usize = 8192;
const PART: usize = KEYS / PROCESSES;
const DIM: usize = 64;
const HEADS: usize = 8;
const KV_HEADS: usize = 2;

/// Numbers that every process can make for itself: those of the keys or values from `first` on,
/// `[kv_heads, keys, dim]`.
fn numbers(seed: f32, first: usize, keys: usize) -> Vec<f32> {
    let of = |head: usize, key: usize, d: usize| (seed + (head * 31 + key * 7 + d) as f32 * 0.37).sin();
    (0..KV_HEADS).flat_map(|h| (first..first + keys).flat_map(move |j| (0..DIM).map(move |d| of(h, j, d)))).collect()
}

fn main() -> Result<(), Box<dyn Error>> {
    let shape = AttnShape::new([1, HEADS, 1, DIM], [1, KV_HEADS, KEYS, DIM], [1, KV_HEADS, KEYS, DIM])?;
    let attn = Attention::new();
    // Of the whole call: masks and positions mean what they mean there.
    let plan = Plan::new(&attn, shape, Level::detect())?;
    let q: Vec<f32> = (0..HEADS * DIM).map(|n| (n as f32 * 0.11).cos()).collect();
    let q = View::new(&q, Layout::Bhsd, [1, HEADS, 1, DIM])?;

    if let Some(part) = std::env::args().nth(1) {
        // A worker: its keys, one row of numbers per query row, written to the pipe as they are.
        let first = part.parse::<usize>()? * PART;
        let (k, v) = (numbers(0.1, first, PART), numbers(0.2, first, PART));
        let sizes = [1, KV_HEADS, PART, DIM];
        let (k, v) = (View::new(&k, Layout::Bhsd, sizes)?, View::new(&v, Layout::Bhsd, sizes)?);
        let (mut rows, mut lines) = (vec![0.0f32; state::len(&shape)?], vec![Line::ZERO; plan.states_lines()]);
        plan.states(first, q, k, v, &mut rows, &mut lines)?;
        let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
        return Ok(std::io::stdout().write_all(&bytes)?);
    }

    // The parent: starts the workers, collects their rows, and merges them two by two.
    let program = std::env::current_exe()?;
    let workers: Vec<_> = (0..PROCESSES)
        .map(|part| Command::new(&program).arg(part.to_string()).stdout(Stdio::piped()).spawn())
        .collect::<Result<_, _>>()?;
    let mut parts = Vec::new();
    for mut worker in workers {
        let mut bytes = Vec::new();
        worker.stdout.take().ok_or("a worker without a pipe")?.read_to_end(&mut bytes)?;
        if !worker.wait()?.success() {
            return Err("a worker failed".into());
        }
        let rows: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        parts.push(rows);
    }
    let sent = parts[0].len() * 4;
    while parts.len() > 1 {
        for pair in parts.chunks_exact_mut(2) {
            let (left, right) = pair.split_at_mut(1);
            state::merge_states(&mut left[0], &right[0], DIM)?;
        }
        parts = parts.into_iter().step_by(2).collect();
    }
    let mut out = vec![0.0f32; HEADS * DIM];
    plan.finish(&parts[0], ViewMut::new(&mut out, Layout::Bhsd, shape.output())?)?;

    // The same in one process. Parts of whole chunks, merged in the same tree, give the same bits.
    let (k, v) = (numbers(0.1, 0, KEYS), numbers(0.2, 0, KEYS));
    let sizes = [1, KV_HEADS, KEYS, DIM];
    let (k, v) = (View::new(&k, Layout::Bhsd, sizes)?, View::new(&v, Layout::Bhsd, sizes)?);
    let mut whole = vec![0.0f32; HEADS * DIM];
    attn_parallel::forward(&attn, q, k, v, ViewMut::new(&mut whole, Layout::Bhsd, shape.output())?)?;
    assert!(out.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits()), "the processes agree with one");
    println!("{PROCESSES} processes, {KEYS} keys: {sent} bytes from each, the same bits as in one process");
    Ok(())
}
