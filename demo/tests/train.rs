//! `cargo xtask demo train` in a few steps: the loss falls, and a run that goes on gives the bits of one that did not
//! end.

use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::{Device, safetensors};

/// Trains in a folder; the losses and the weights of the first layer's queries.
fn train(out: &Path, steps: usize, more: &[&str]) -> (Vec<f32>, Vec<f32>) {
    let steps = steps.to_string();
    let fixed = ["train", "--steps", &steps, "--batch", "2", "--context", "32", "--out"];
    let output = Command::new(env!("CARGO_BIN_EXE_attn-demo")).args(fixed).arg(out).args(more).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(&format!("in {steps} steps")), "{text}");
    let tensors = safetensors::load(out.join("checkpoint.safetensors"), &Device::Cpu).unwrap();
    let numbers = |name: &str| tensors[name].flatten_all().unwrap().to_vec1().unwrap();
    (numbers("losses"), numbers("weight.0.q"))
}

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("attn-train-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    path
}

#[test]
fn a_run_that_goes_on_is_one_that_did_not_end() {
    let (whole, parts) = (folder("whole"), folder("parts"));
    let (losses, weights) = train(&whole, 12, &["--sample", "0"]);
    assert_eq!(losses.len(), 12);
    // A uniform guess among about a hundred letters costs 4.6 nats.
    assert!(losses[0] > 4.0 && losses[11] < losses[0] - 0.5, "{losses:?}");

    let (first, _) = train(&parts, 5, &["--sample", "0"]);
    assert_eq!(first, losses[..5]);
    assert_eq!(train(&parts, 12, &["--sample", "3"]), (losses.clone(), weights));
    let picture = std::fs::read_to_string(parts.join("loss.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("attn-candle") && picture.contains("<polyline"));

    // A run of other pieces is another training.
    let other = ["train", "--steps", "14", "--batch", "3", "--context", "32", "--sample", "0", "--out"];
    let output = Command::new(env!("CARGO_BIN_EXE_attn-demo")).args(other).arg(&parts).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("pieces of other sizes"), "{text}");

    // So is one of a text that differs in a letter.
    for (text, fresh) in [("abcd".repeat(20), true), ("abdc".repeat(20), false)] {
        let file = parts.join("text");
        std::fs::write(&file, text).unwrap();
        let same = ["train", "--steps", "1", "--batch", "2", "--context", "32", "--sample", "0", "--text"];
        let mut again = Command::new(env!("CARGO_BIN_EXE_attn-demo"));
        again.args(same).arg(&file).arg("--out").arg(&parts).args(fresh.then_some("--fresh"));
        let output = again.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() == fresh && text.contains("another text") != fresh, "{text}");
    }

    // Begun anew, it begins where the first one did.
    assert_eq!(train(&parts, 2, &["--sample", "0", "--fresh"]).0, losses[..2]);
    let _ = (std::fs::remove_dir_all(whole), std::fs::remove_dir_all(parts));
}
