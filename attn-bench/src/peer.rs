//! Other libraries in a process of their own, driven over pipes: the same inputs, one thread count per process.
//!
//! The process stays alive for a whole run, so that a measurement of ours and one of theirs are milliseconds apart. It
//! is Python, which offers the libraries that it can import, or a program that speaks the same protocol;
//! `python/torch_peer.py` describes it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::case::Case;

/// The program that runs in Python.
const SCRIPT: &str = include_str!("../python/torch_peer.py");

/// Why a peer cannot be measured.
#[derive(Debug)]
#[non_exhaustive]
pub enum PeerError {
    /// The program does not start.
    Start {
        /// Its name.
        program: String,
        /// What the system says.
        error: std::io::Error,
    },
    /// The process ended, or its pipe broke.
    Gone(String),
    /// It answered something else than agreed.
    Protocol(String),
    /// It refused the request.
    Refused(String),
}

impl fmt::Display for PeerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start { program, error } => write!(f, "cannot start `{program}`: {error}"),
            Self::Gone(why) => write!(f, "the peers' process ended: {why} (a Python needs numpy)"),
            Self::Protocol(what) => write!(f, "unexpected answer of the peers' process: {what}"),
            Self::Refused(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for PeerError {}

/// What a process has: libraries and their versions, `None` for those that it lacks.
pub type About = BTreeMap<String, Option<String>>;

/// How long a call took.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct Took {
    /// Seconds by the wall's clock.
    #[serde(rename = "seconds")]
    pub wall: f64,
    /// Seconds that the process ran, all of its threads together.
    pub processor: f64,
}

/// A call that a peer is to run.
#[derive(Clone, Copy, Debug)]
pub struct Request<'t> {
    /// Its sizes.
    pub case: Case,
    /// The type that the numbers are rounded to: `f32`, `f16`, `bf16`.
    pub number: &'t str,
    /// What is done to the scores, as the table of shapes names it, or `decode`.
    pub what: &'t str,
    /// The number that goes with `what`.
    pub value: f64,
    /// q, k, v and whatever else `what` needs (a bias, a mask as numbers, slopes).
    pub tensors: [&'t [f32]; 4],
}

/// A running process.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    about: About,
    suffix: String,
    /// Whether it knows number types besides f32.
    halves: bool,
}

impl Peer {
    /// Starts `python` with `threads` threads, its libraries held to AVX2 if `avx2`.
    ///
    /// # Errors
    /// [`PeerError`]; a Python without numpy ends at once.
    pub fn start(python: &str, threads: usize, avx2: bool) -> Result<Self, PeerError> {
        let mut command = Command::new(python);
        command.args(["-c", SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped());
        for variable in ["PEER_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"] {
            command.env(variable, threads.to_string());
        }
        if crate::engine::own_cores(threads) {
            command.env("OMP_PROC_BIND", "true"); // as our own pool's threads; onnxruntime does so by itself
        }
        if avx2 {
            command.env("ATEN_CPU_CAPABILITY", "avx2").env("ONEDNN_MAX_CPU_ISA", "AVX2");
            command.env("MKL_ENABLE_INSTRUCTIONS", "AVX2");
        }
        let mut peer = Self::over(command, "")?;
        peer.halves = true;
        Ok(peer)
    }

    /// Starts a program that speaks the protocol, with `threads` threads. Names of its libraries get `suffix`.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn program(path: &OsStr, threads: usize, suffix: &str) -> Result<Self, PeerError> {
        let mut command = Command::new(path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).env("RAYON_NUM_THREADS", threads.to_string());
        command.env("CANDLE_NUM_THREADS", threads.to_string());
        Self::over(command, suffix)
    }

    fn over(mut command: Command, suffix: &str) -> Result<Self, PeerError> {
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command.spawn().map_err(|error| PeerError::Start { program, error })?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(PeerError::Protocol("no pipes".into()));
        };
        let mut peer = Self {
            child,
            stdin,
            stdout: BufReader::new(stdout),
            about: About::new(),
            suffix: suffix.into(),
            halves: false,
        };
        let hello = peer.answer()?;
        peer.about = serde_json::from_value(hello).map_err(|error| PeerError::Protocol(error.to_string()))?;
        Ok(peer)
    }

    /// What it has.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// The name of one of its libraries, for reports.
    pub fn full_name(&self, peer: &str) -> String {
        format!("{peer}{}", self.suffix)
    }

    /// By how many bytes its resident set grew at the worst moment of one call; `None` if its system does not tell.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn memory(&mut self, peer: &str) -> Result<Option<usize>, PeerError> {
        self.send(&json!({"op": "memory", "peer": peer}), &[])?;
        let answer = self.answer()?;
        Ok(answer["bytes"].as_u64().and_then(|bytes| usize::try_from(bytes).ok()))
    }

    /// Hands over a call's inputs. Returns the peers that can run it.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn load(&mut self, request: &Request<'_>) -> Result<Vec<String>, PeerError> {
        if request.number != "f32" && !self.halves {
            return Ok(Vec::new());
        }
        let Request { case, number, what, value, tensors } = request;
        let floats = tensors.map(<[f32]>::len);
        let head =
            json!({"op": "load", "case": case, "number": number, "what": what, "value": value, "floats": floats});
        self.send(&head, tensors)?;
        let answer = self.answer()?;
        let peers = answer["peers"].as_array().ok_or_else(|| PeerError::Protocol(answer.to_string()))?;
        Ok(peers.iter().filter_map(Value::as_str).map(str::to_string).collect())
    }

    /// Seconds per call over `calls` calls of one of the peers that [`load`](Self::load) named.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn time(&mut self, peer: &str, calls: u32) -> Result<Took, PeerError> {
        self.timed(&json!({"op": "time", "peer": peer, "calls": calls}))
    }

    /// As [`time`](Self::time), one call, before which the process reads so many bytes of something else.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn time_cold(&mut self, peer: &str, sweep: usize) -> Result<Took, PeerError> {
        self.timed(&json!({"op": "time", "peer": peer, "calls": 1, "sweep": sweep}))
    }

    fn timed(&mut self, request: &Value) -> Result<Took, PeerError> {
        self.send(request, &[])?;
        let answer = self.answer()?;
        serde_json::from_value(answer).map_err(|error| PeerError::Protocol(error.to_string()))
    }

    /// The output of one call, `[batch, heads, q_len, dim]`.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn out(&mut self, peer: &str) -> Result<Vec<f32>, PeerError> {
        self.send(&json!({"op": "out", "peer": peer}), &[])?;
        let answer = self.answer()?;
        let floats = answer["floats"].as_u64().ok_or_else(|| PeerError::Protocol(answer.to_string()))?;
        let mut bytes = Vec::new();
        let wanted = floats.saturating_mul(4);
        self.stdout.by_ref().take(wanted).read_to_end(&mut bytes).map_err(|e| PeerError::Gone(e.to_string()))?;
        if bytes.len() as u64 != wanted {
            return Err(PeerError::Protocol(format!("{} bytes of output instead of {wanted}", bytes.len())));
        }
        Ok(bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect())
    }

    fn send(&mut self, request: &Value, tensors: &[&[f32]]) -> Result<(), PeerError> {
        let mut write = || {
            writeln!(self.stdin, "{request}")?;
            for tensor in tensors {
                let bytes: Vec<u8> = tensor.iter().flat_map(|x| x.to_le_bytes()).collect();
                self.stdin.write_all(&bytes)?;
            }
            self.stdin.flush()
        };
        write().map_err(|error| PeerError::Gone(error.to_string()))
    }

    fn answer(&mut self) -> Result<Value, PeerError> {
        let mut line = String::new();
        match self.stdout.read_line(&mut line) {
            Ok(0) => return Err(PeerError::Gone("no answer".into())),
            Ok(_) => {}
            Err(error) => return Err(PeerError::Gone(error.to_string())),
        }
        let value: Value = serde_json::from_str(&line).map_err(|_| PeerError::Protocol(line.trim().to_string()))?;
        match value["error"].as_str() {
            Some(text) => Err(PeerError::Refused(text.to_string())),
            None => Ok(value),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It ends by itself when its input does; this is for one that hangs. Nothing is left to do if that fails.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_interpreter_is_named() {
        let error = Peer::start("/no/such/python", 1, false).unwrap_err();
        assert!(matches!(&error, PeerError::Start { .. }) && error.to_string().contains("/no/such/python"));
    }

    #[cfg(unix)]
    #[test]
    fn answers_are_checked() {
        let shell = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
            Peer::over(command, " (sh)")
        };
        assert!(matches!(shell("exit 3"), Err(PeerError::Gone(_))));
        assert!(matches!(shell("echo hello"), Err(PeerError::Protocol(_))));
        assert!(matches!(shell("echo '{\"error\": \"no\"}'"), Err(PeerError::Refused(_))));
        let script = "echo '{\"torch\": \"2\", \"onnxruntime\": null}'; read a; echo '{\"seconds\": 0.5, \"processor\": 0.25}'; \
                      read b; echo '{\"floats\": 1}'; printf '\\0\\0\\200\\077'; read c; echo '{\"bytes\": 4096}'; read d; echo '{}'";
        let mut peer = shell(script).unwrap();
        assert_eq!((peer.about()["torch"].as_deref(), &peer.about()["onnxruntime"]), (Some("2"), &None));
        assert_eq!(peer.full_name("torch"), "torch (sh)");
        assert_eq!(peer.time("torch", 3).unwrap(), Took { wall: 0.5, processor: 0.25 });
        assert_eq!(peer.out("torch").unwrap(), [1.0]);
        assert_eq!(peer.memory("torch").unwrap(), Some(4096));
        assert!(matches!(peer.time("torch", 3), Err(PeerError::Protocol(_))));
        assert!(matches!(peer.time("torch", 3), Err(PeerError::Gone(_))));
    }
}
