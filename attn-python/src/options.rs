//! The options that every function shares, read from keywords, and [`Attention`] made of them. `numbers` reads values.

use std::sync::atomic::AtomicBool;

use attn_core::dropout::Dropout;
use attn_core::mask::{BlockSparse, Documents, Term, Window};
use attn_core::position::alibi::{self, Alibi};
use attn_core::{Align, Attention, AttnError, Bias, Mask, Precision, View};
use attn_parallel::Runner;
use attn_simd::Level;
use pyo3::exceptions::{PyMemoryError, PyNotImplementedError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::fold::Fold;
use crate::numbers::{
    Blocks, Slopes, align, bad, blocks, flag, floats, integer, lengths, number, seed, slopes, text, window,
};
use crate::pool::Work;

/// The error of Python for one of ours.
pub(crate) fn raised(error: AttnError) -> PyErr {
    let text = error.to_string();
    match error {
        AttnError::Memory { .. } => PyMemoryError::new_err(text),
        AttnError::Unsupported { .. } => PyNotImplementedError::new_err(text),
        _ => PyValueError::new_err(text),
    }
}

/// Tensors that hide keys or change scores, of one call.
#[derive(Clone, Copy, Default)]
pub(crate) struct Masks<'a> {
    pub(crate) keep: Option<View<'a, bool>>,
    pub(crate) bias: Option<Bias<'a>>,
    pub(crate) blocks: Option<BlockSparse<'a>>,
}

/// Options without tensors.
#[derive(Default)]
pub(crate) struct Options {
    scale: Option<f64>,
    softcap: Option<f64>,
    temperature: Option<f64>,
    causal: Option<Align>,
    window: Option<(Option<usize>, Option<usize>)>,
    kv_lens: Option<Vec<usize>>,
    kv_starts: Option<Vec<usize>>,
    block_mask: Option<Blocks>,
    q_lens: Option<Vec<usize>>,
    cu_q: Option<Vec<usize>>,
    cu_k: Option<Vec<usize>>,
    sinks: Option<Vec<f32>>,
    alibi: Option<Slopes>,
    slopes: Vec<f32>,
    dropout_p: f32,
    seed: Option<u64>,
    fast: bool,
    reproducible: bool,
    threads: Option<usize>,
    level: Option<Level>,
}

impl Options {
    /// Reads torch's arguments and the keywords. `own` takes those of one function, and says whether it did.
    pub(crate) fn read<'py>(
        function: &str,
        dropout_p: f64,
        is_causal: bool,
        scale: Option<&Bound<'py, PyAny>>,
        keywords: Option<&Bound<'py, PyDict>>,
        mut own: impl FnMut(&str, &Bound<'py, PyAny>) -> PyResult<bool>,
    ) -> PyResult<Self> {
        let scale = scale.map(|scale| number("scale", scale)).transpose()?;
        let mut this = Self { scale, dropout_p: dropout_p as f32, ..Self::default() };
        if is_causal {
            this.causal = Some(Align::TopLeft);
        }
        for (key, value) in keywords.into_iter().flatten() {
            let key = key.cast_into::<PyString>()?;
            let key = key.to_cow()?;
            if own(&key, &value)? || value.is_none() && KEYWORDS.contains(&&*key) {
                continue;
            }
            this.keyword(function, &key, &value, is_causal)?;
        }
        this.finish()?;
        Ok(this)
    }

    fn keyword(&mut self, function: &str, key: &str, value: &Bound<'_, PyAny>, is_causal: bool) -> PyResult<()> {
        match key {
            "causal" if is_causal => return Err(bad("is_causal and causal are both given; is_causal is \"top_left\"")),
            "causal" => self.causal = Some(align(value)?),
            "window" => self.window = Some(window(value)?),
            "softcap" => self.softcap = Some(number(key, value)?),
            "temperature" => self.temperature = Some(number(key, value)?),
            "sinks" => self.sinks = Some(floats("sinks", value)?),
            "alibi" => self.alibi = slopes(value)?,
            "kv_lens" => self.kv_lens = Some(lengths("kv_lens", value)?),
            "kv_starts" => self.kv_starts = Some(lengths("kv_starts", value)?),
            "block_mask" => self.block_mask = Some(blocks(value)?),
            "q_lens" => self.q_lens = Some(lengths("q_lens", value)?),
            "cu_seqlens_q" => self.cu_q = Some(lengths("cu_seqlens_q", value)?),
            "cu_seqlens_k" => self.cu_k = Some(lengths("cu_seqlens_k", value)?),
            "seed" => self.seed = Some(seed(value)?),
            "reproducible" => self.reproducible = flag(key, value)?,
            "precision" => {
                self.fast = match &*text(key, value)? {
                    "exact" => false,
                    "fast" => true,
                    other => return Err(bad(format!("precision is {other:?}; \"exact\" and \"fast\" are allowed"))),
                }
            }
            "threads" => match integer(key, value)? {
                threads @ 1.. => self.threads = Some(threads.unsigned_abs()),
                threads => return Err(bad(format!("threads is {threads}, at least 1 is allowed"))),
            },
            "level" => {
                let name = text(key, value)?;
                self.level = Some(Level::by_name(&name).map_err(|error| bad(error.to_string()))?);
            }
            _ => return Err(PyTypeError::new_err(format!("{function}() got an unexpected keyword argument '{key}'"))),
        }
        Ok(())
    }

    /// What options mean only together.
    fn finish(&mut self) -> PyResult<()> {
        if self.cu_q.is_some() != self.cu_k.is_some() {
            return Err(bad("cu_seqlens_q and cu_seqlens_k are given together or not at all"));
        }
        let p = self.dropout_p;
        if !(0.0..1.0).contains(&p) {
            return Err(bad(format!("dropout_p is {p}, at least 0 and below 1 is allowed")));
        }
        if p == 0.0 {
            self.seed = None; // a training hands its seed to the evaluation, too
        } else if self.seed.is_none() {
            return Err(bad("dropout_p is given without seed: the same seed drops the same weights"));
        }
        Ok(())
    }

    /// Fills in what depends on the sizes: published slopes, and that tables of lengths fit the folded batch.
    pub(crate) fn fit(&mut self, q_heads: usize, batch: usize) -> PyResult<()> {
        match self.alibi.take() {
            Some(Slopes::Published) => {
                self.slopes = vec![0.0; q_heads];
                alibi::slopes(&mut self.slopes);
                self.alibi = Some(Slopes::Published);
            }
            Some(Slopes::Given(slopes)) => {
                AttnError::check_size("alibi slopes against q_heads", q_heads, slopes.len()).map_err(raised)?;
                self.slopes = slopes;
                self.alibi = Some(Slopes::Published);
            }
            None => {}
        }
        for (what, lens) in [("kv_lens", &self.kv_lens), ("kv_starts", &self.kv_starts), ("q_lens", &self.q_lens)] {
            if let Some(lens) = lens {
                AttnError::check_size(what, batch, lens.len()).map_err(raised)?;
            }
        }
        Ok(())
    }

    pub(crate) fn block_mask(&self) -> Option<&Blocks> {
        self.block_mask.as_ref()
    }

    pub(crate) fn set_scale(&mut self, scale: Option<f64>) {
        self.scale = scale;
    }

    pub(crate) fn has_sinks(&self) -> bool {
        self.sinks.is_some()
    }

    pub(crate) fn level(&self) -> Level {
        self.level.unwrap_or_else(Level::detect)
    }

    /// How a call runs that has so much to do, until the flag is set, if there is one.
    pub(crate) fn runner<'s>(&self, work: Work, stop: Option<&'s AtomicBool>) -> Runner<'s> {
        let runner = Runner::new().threads(self.threads.unwrap_or(work.threads())).level(self.level());
        match stop {
            Some(stop) => runner.stop_when(stop),
            None => runner,
        }
    }

    /// Refuses dropout in several calls, which would drop the same weights in each.
    pub(crate) fn check_fold(&self, fold: Fold) -> PyResult<()> {
        if fold.calls > 1 && self.has_dropout() {
            let what = "not supported: dropout over leading axes whose strides do not make one";
            return Err(PyNotImplementedError::new_err(what));
        }
        Ok(())
    }

    /// Probability and seed of the dropout, which is off then.
    pub(crate) fn take_dropout(&mut self) -> Option<(f32, u64)> {
        self.seed.take().map(|seed| (self.dropout_p, seed))
    }

    pub(crate) fn has_dropout(&self) -> bool {
        self.seed.is_some()
    }

    /// The options of one call, whose batch begins at this sequence of the folded batch.
    pub(crate) fn attention<'a>(&'a self, first: usize, batch: usize, masks: Masks<'a>) -> Attention<'a> {
        let align = self.causal.unwrap_or(Align::BottomRight);
        let of = |lens: &'a Option<Vec<usize>>| lens.as_ref().and_then(|lens| lens.get(first..first + batch));
        let mut mask = Mask::none();
        if let (Some(cu_q), Some(cu_k)) = (&self.cu_q, &self.cu_k) {
            let mut documents = Documents::new(cu_q, cu_k);
            if let Some(causal) = self.causal {
                documents = documents.causal(causal);
            }
            if let Some((left, right)) = self.window {
                documents = documents.window(Window { left, right, align });
            }
            mask = Mask::documents(documents);
        } else {
            if let Some(causal) = self.causal {
                mask = Mask::causal(causal);
            }
            if let Some((left, right)) = self.window {
                mask = mask.and(Mask::term(Term::Window(Window { left, right, align })));
            }
        }
        if let Some(lens) = of(&self.kv_lens) {
            mask = mask.and(Mask::kv_lens(lens));
        }
        if let Some(lens) = of(&self.q_lens) {
            mask = mask.and(Mask::q_lens(lens));
        }
        if let Some(lens) = of(&self.kv_starts) {
            mask = mask.and(Mask::kv_starts(lens));
        }
        if let Some(keep) = masks.keep {
            mask = mask.and(Mask::keep(keep));
        }
        if let Some(blocks) = masks.blocks {
            mask = mask.and(Mask::block_sparse(blocks));
        }
        let mut attn = Attention::new().mask(mask);
        if self.fast {
            attn = attn.precision(Precision::Fast);
        }
        if self.reproducible {
            attn = attn.reproducible();
        }
        if let Some(scale) = self.scale {
            attn = attn.scale(scale);
        }
        if let Some(cap) = self.softcap {
            attn = attn.softcap(cap);
        }
        if let Some(t) = self.temperature {
            attn = attn.temperature(t);
        }
        if let Some(bias) = masks.bias {
            attn = attn.bias(bias);
        }
        if self.alibi.is_some() {
            attn = attn.alibi(Alibi { slopes: &self.slopes, align });
        }
        if let Some(sinks) = &self.sinks {
            attn = attn.sinks(sinks);
        }
        if let Some(seed) = self.seed {
            attn = attn.dropout(Dropout::Seeded { p: self.dropout_p, seed });
        }
        attn
    }
}

/// The keywords of all functions, for which None is the default.
const KEYWORDS: &[&str] = &[
    "causal",
    "window",
    "softcap",
    "temperature",
    "sinks",
    "alibi",
    "kv_lens",
    "kv_starts",
    "block_mask",
    "q_lens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seed",
    "threads",
    "level",
];
