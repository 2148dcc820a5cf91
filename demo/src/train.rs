//! `cargo xtask demo train`: a small decoder learns the project's own texts, letter by letter, on candle with attn's
//! gradients.
//!
//! ```text
//! text        letters as numbers, and the pieces of text of each step
//! model       the decoder: RMSNorm, rotary positions, grouped causal attention, a gated feed-forward block
//! optimiser   AdamW, whose state can be kept
//! checkpoint  weights, state of the optimiser and losses so far, as safetensors
//! torch       the same training by torch, from the same weights on the same pieces
//! plot        both losses, as SVG
//! sample      text by the trained model
//! ```
//!
//! A run writes its checkpoint every hundred steps; the next run with the same folder goes on from there, with the
//! same bits as if it had never ended.

mod checkpoint;
mod model;
mod optimiser;
mod plot;
mod sample;
mod text;
mod torch;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use candle_nn::loss::cross_entropy;
use indicatif::{ProgressBar, ProgressStyle};

use checkpoint::{Checkpoint, Lessons};
use model::Gpt;
use optimiser::AdamW;
use text::Text;

/// Arguments of the command.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Steps in all, those of earlier runs included.
    #[arg(long, value_name = "N", default_value_t = 500)]
    steps: usize,
    /// Pieces of text in a step.
    #[arg(long, value_name = "N", default_value_t = 8)]
    batch: usize,
    /// Letters in a piece.
    #[arg(long, value_name = "N", default_value_t = 128)]
    context: usize,
    /// Where checkpoint and picture are.
    #[arg(long, value_name = "DIR", default_value = "target/train")]
    out: PathBuf,
    /// Begin anew, although there is a checkpoint.
    #[arg(long)]
    fresh: bool,
    /// Learn this text instead of the project's own.
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Letters to write at the end.
    #[arg(long, value_name = "N", default_value_t = 400)]
    sample: usize,
    /// A Python with torch, numpy and safetensors: trains the same model for as many steps, and draws its loss too.
    #[arg(long, value_name = "PYTHON")]
    torch: Option<PathBuf>,
}

/// How far the losses of the first hundred steps may differ from torch's by rounding.
const LARGEST_DIFFERENCE: f32 = 1e-3;

/// Steps between checkpoints.
const KEPT_EVERY: usize = 100;

pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.batch > 0 && args.context > 0, "a step needs a piece of at least one letter");
    let text = Text::read(args.text.as_deref())?;
    ensure!(text.len() > args.context, "the text has {} letters; a piece has {}", text.len(), args.context);
    std::fs::create_dir_all(&args.out).with_context(|| args.out.display().to_string())?;
    let path = args.out.join("checkpoint.safetensors");
    let gpt = Gpt::new(text.letters().len(), args.context)?;
    let mut optimiser = AdamW::new(gpt.variables())?;
    let mut done = Checkpoint::default();
    let lessons = Lessons { text: &text, pieces: [args.batch, args.context] };
    if args.fresh || !path.exists() {
        torch::write(&args.out, &gpt, &text, [args.steps, args.batch, args.context])?;
    } else {
        done = Checkpoint::read(&path, &gpt, &mut optimiser, lessons)?;
        println!("goes on after step {} of {}", done.losses.len(), path.display());
    }

    println!(
        "{} letters, {} different; {} weights; {} pieces of {} a step",
        text.len(),
        text.letters().len(),
        gpt.count(),
        args.batch,
        args.context
    );
    let bar = ProgressBar::new(args.steps as u64).with_position(done.losses.len() as u64);
    bar.set_style(ProgressStyle::with_template("{elapsed_precise} {bar:40} {pos}/{len} {msg}")?);
    for step in done.losses.len()..args.steps {
        let begin = Instant::now();
        let (input, target) = text.pieces(step, args.batch, args.context)?;
        let loss = loss(&gpt, &input, &target)?;
        optimiser.step(&loss.backward()?)?;
        done.losses.push(loss.to_scalar()?);
        done.times.push(begin.elapsed().as_secs_f32());
        bar.set_message(format!("loss {:.4}", done.losses[step]));
        bar.inc(1);
        if (step + 1) % KEPT_EVERY == 0 {
            done.write(&path, &gpt, &optimiser, lessons)?;
        }
    }
    bar.finish_and_clear();
    done.write(&path, &gpt, &optimiser, lessons)?;
    report(args, &done)?;
    if args.sample > 0 {
        println!("\n{}", sample::text(&gpt, &text, args.sample)?);
    }
    Ok(())
}

/// The mean cross entropy of the next letters, in nats.
fn loss(gpt: &Gpt, input: &Tensor, target: &Tensor) -> Result<Tensor> {
    let logits = gpt.logits(input)?;
    Ok(cross_entropy(&logits.flatten_to(1)?, &target.flatten_all()?)?)
}

/// Prints and draws the losses, beside torch's if they are wanted.
fn report(args: &Args, done: &Checkpoint) -> Result<()> {
    let ours = plot::Curve { name: "attn-candle", losses: &done.losses };
    let middle = |times: &[f32]| {
        let mut times = times.to_vec();
        times.sort_by(f32::total_cmp);
        times.get(times.len() / 2).map_or(0.0, |seconds| 1e3 * seconds)
    };
    let (Some(first), Some(last)) = (done.losses.first(), done.losses.last()) else { return Ok(()) };
    println!("loss {first:.4} → {last:.4} in {} steps; {:.0} ms a step", done.losses.len(), middle(&done.times));
    let picture = args.out.join("loss.svg");
    let Some(python) = &args.torch else {
        plot::draw(&picture, &[ours])?;
        println!("picture: {}", picture.display());
        return Ok(());
    };
    let theirs = torch::train(python, &args.out, args.steps)?;
    let both = done.losses.len().min(theirs.losses.len());
    let apart = |steps: usize| {
        let pairs = done.losses.iter().zip(&theirs.losses).take(steps);
        let apart = pairs.map(|(a, b)| (a - b).abs());
        apart.fold(0.0, |worst: f32, off| if off.is_nan() { f32::INFINITY } else { worst.max(off) })
    };
    println!(
        "torch: loss {:.4}; {:.0} ms a step; largest difference {:.1e} in the first 100 steps, {:.1e} in all {both}",
        theirs.losses.last().copied().unwrap_or(f32::NAN),
        middle(&theirs.times),
        apart(100),
        apart(both)
    );
    plot::draw(&picture, &[plot::Curve { name: "torch", losses: &theirs.losses }, ours])?;
    println!("picture: {}", picture.display());
    ensure!(
        apart(100) <= LARGEST_DIFFERENCE,
        "attn's loss and torch's differ by {:.1e} within 100 steps; {LARGEST_DIFFERENCE:.0e} would be rounding",
        apart(100)
    );
    Ok(())
}
