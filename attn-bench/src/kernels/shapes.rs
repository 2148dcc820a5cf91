//! The shapes on which single kernels are measured: a table in the repository, `shapes.txt`.
//!
//! The rows of the table are f32; [`types`] adds rows in other number types and precisions.

use attn_core::{Align, Mask};
use attn_layers::cost;
use serde::{Deserialize, Serialize};

use crate::case::{Case, Number};

/// The table of shapes.
pub const SHAPES: &str = include_str!("../../shapes.txt");

/// What is done to the scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum What {
    /// Nothing but the scale.
    Plain,
    /// Only the last so many keys before a query are visible (and itself).
    Window(usize),
    /// The published distance penalty per head.
    Alibi,
    /// A dense additive tensor `[q_len, kv_len]`.
    Bias,
    /// A dense boolean mask `[q_len, kv_len]` that hides one key in ten.
    Keep,
    /// `c·tanh(s/c)`.
    Softcap(f64),
    /// Weights dropped with this probability.
    Dropout(f64),
    /// Queries multiplied by this: most weights become tiny, and those below f32's normal range must slow nothing down.
    Spread(f64),
    /// Nothing; the measured call is the backward call: gradients of q, k and v.
    Backward,
}

impl What {
    /// Name and value, as the table writes them.
    pub fn parts(&self) -> (&'static str, f64) {
        match *self {
            Self::Plain => ("plain", 0.0),
            Self::Window(left) => ("window", left as f64),
            Self::Alibi => ("alibi", 0.0),
            Self::Bias => ("bias", 0.0),
            Self::Keep => ("keep", 0.0),
            Self::Softcap(cap) => ("softcap", cap),
            Self::Dropout(p) => ("dropout", p),
            Self::Spread(factor) => ("spread", factor),
            Self::Backward => ("backward", 0.0),
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let (name, value) = text.split_once(':').map_or((text, None), |(name, value)| (name, Some(value)));
        let number = |ok: fn(f64) -> bool| value.and_then(|v| v.parse::<f64>().ok()).filter(|&x| ok(x));
        match name {
            "window" => value.and_then(|v| v.parse().ok()).map(Self::Window),
            "softcap" => number(|c| c.is_finite() && c > 0.0).map(Self::Softcap),
            "dropout" => number(|p| (0.0..1.0).contains(&p)).map(Self::Dropout),
            "spread" => number(|f| f.is_finite() && f > 0.0).map(Self::Spread),
            _ if value.is_some() => None,
            "plain" => Some(Self::Plain),
            "alibi" => Some(Self::Alibi),
            "bias" => Some(Self::Bias),
            "keep" => Some(Self::Keep),
            "backward" => Some(Self::Backward),
            _ => None,
        }
    }
}

/// One row of the table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    /// Its name.
    pub name: String,
    /// Its sizes.
    pub case: Case,
    /// What is done to the scores.
    pub what: What,
    /// Whether it takes part in a quick run.
    pub quick: bool,
    /// Whether it is also held against torch on AVX2.
    pub avx2: bool,
    /// Whether it is of interest in other number types: see [`types`].
    #[serde(default)]
    pub types: bool,
    /// Whether it is of interest there only.
    #[serde(default)]
    pub types_only: bool,
    /// The type of its numbers.
    #[serde(default)]
    pub number: Number,
    /// Whether it runs with `Precision::Fast`.
    #[serde(default)]
    pub fast: bool,
}

/// The rows that are of interest in other number types and precisions, in each of them: `NAME-bf16`, `NAME-f32-fast`
/// and so on. `Precision::Fast` is another kernel on AMX and AVX512_BF16 only, and for gradients only those of bf16.
///
/// ```
/// use attn_bench::kernels::{SHAPES, parse, types};
/// let rows = types(&parse(SHAPES).unwrap());
/// assert!(rows.iter().any(|kernel| kernel.name == "pf2048d64-bf16-fast" && kernel.fast));
/// assert!(rows.iter().any(|kernel| kernel.name == "bwd2048d64-bf16-fast"));
/// assert!(!rows.iter().any(|kernel| kernel.name == "bwd2048d64-f32-fast"));
/// ```
pub fn types(rows: &[Kernel]) -> Vec<Kernel> {
    let ways = [
        (Number::F32, false),
        (Number::F32, true),
        (Number::F16, false),
        (Number::F16, true),
        (Number::Bf16, false),
        (Number::Bf16, true),
    ];
    let all = rows.iter().filter(|row| row.types).flat_map(|row| ways.map(|way| (row, way)));
    let all = all.filter(|(row, (number, fast))| !fast || row.what != What::Backward || *number == Number::Bf16);
    all.map(|(row, (number, fast))| Kernel {
        name: format!("{}-{number}{}", row.name, if fast { "-fast" } else { "" }),
        number,
        fast,
        ..row.clone()
    })
    .collect()
}

/// A row that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowError {
    /// Its line, from 1.
    pub line: usize,
    /// What is wrong.
    pub why: String,
}

impl std::fmt::Display for RowError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "shapes, line {}: {}", self.line, self.why)
    }
}

impl std::error::Error for RowError {}

/// Reads a table of shapes.
///
/// # Errors
/// The first row that makes no sense.
///
/// ```
/// use attn_bench::kernels::{SHAPES, parse};
/// assert!(parse(SHAPES).unwrap().iter().any(|kernel| kernel.name == "pf2048d64"));
/// assert!(parse("short 1 8").is_err());
/// ```
pub fn parse(text: &str) -> Result<Vec<Kernel>, RowError> {
    let rows = text.lines().enumerate().map(|(i, row)| (i + 1, row.trim()));
    rows.filter(|(_, row)| !row.is_empty() && !row.starts_with('#')).map(|(line, row)| parse_row(line, row)).collect()
}

fn parse_row(line: usize, row: &str) -> Result<Kernel, RowError> {
    let fail = |why: String| Err(RowError { line, why });
    let fields: Vec<&str> = row.split_whitespace().collect();
    let [name, sizes @ .., causal, what, tags] = fields.as_slice() else {
        return fail("expected name B H Hkv Sq Skv D causal what tags".into());
    };
    let sizes: Vec<usize> = match sizes.iter().map(|s| s.parse()).collect() {
        Ok(sizes) => sizes,
        Err(error) => return fail(format!("a size is not a number: {error}")),
    };
    let &[batch, q_heads, kv_heads, q_len, kv_len, head_dim] = sizes.as_slice() else {
        return fail(format!("{} sizes instead of six (B H Hkv Sq Skv D)", sizes.len()));
    };
    let causal = match *causal {
        "0" => false,
        // Peers put the diagonal elsewhere if the lengths differ: not one measurement, but two different results.
        "1" if q_len == kv_len => true,
        "1" => return fail("causal needs Sq = Skv".into()),
        other => return fail(format!("causal is 0 or 1, not {other}")),
    };
    let Some(parsed) = What::parse(what) else { return fail(format!("unknown `{what}`")) };
    let case = Case { batch, q_heads, kv_heads, q_len, kv_len, head_dim, causal };
    if let Err(error) = case.shape() {
        return fail(error.to_string());
    }
    let tags: Vec<&str> = tags.split(',').filter(|tag| *tag != "-").collect();
    if let Some(tag) = tags.iter().find(|tag| !["quick", "avx2", "types", "types-only"].contains(tag)) {
        return fail(format!("unknown tag {tag}"));
    }
    let has = |tag| tags.contains(&tag);
    Ok(Kernel {
        quick: has("quick"),
        avx2: has("avx2"),
        types: has("types") || has("types-only"),
        types_only: has("types-only"),
        ..Kernel::plain(name, case, parsed)
    })
}

impl Kernel {
    /// A row of f32 without tags.
    pub fn plain(name: &str, case: Case, what: What) -> Self {
        let (quick, avx2, types, types_only, fast) = (false, false, false, false, false);
        Self { name: name.into(), case, what, quick, avx2, types, types_only, number: Number::F32, fast }
    }

    /// FLOPs of a call. A window counts the visible pairs; dense masks hide keys, but nobody can skip them. A backward
    /// call has five products where a forward call has two.
    pub fn flops(&self) -> f64 {
        match (self.what, self.case.shape()) {
            (What::Window(left), Ok(shape)) => {
                cost::forward_flops(&shape, cost::visible_pairs(&window(self.case, left), &shape)) as f64
            }
            (What::Backward, _) => 2.5 * self.case.flops(),
            _ => self.case.flops(),
        }
    }
}

/// The last `left` keys before a query, and for causal cases none after it.
pub(super) fn window(case: Case, left: usize) -> Mask<'static> {
    let right = if case.causal { 0 } else { case.kv_len };
    case.mask().and(Mask::window(left, right, Align::BottomRight))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_table_is_read() {
        let kernels = parse(SHAPES).unwrap();
        let names: std::collections::HashSet<&str> = kernels.iter().map(|k| k.name.as_str()).collect();
        assert_eq!(names.len(), kernels.len(), "two rows have one name");
        assert!(kernels.iter().filter(|k| k.quick).count() >= 5 && kernels.iter().filter(|k| k.avx2).count() == 7);
        let gqa = kernels.iter().find(|k| k.name == "gqa1024d128c").unwrap();
        let case = Case { q_heads: 32, kv_heads: 8, causal: true, ..Case::square(1024, 128) };
        assert_eq!((gqa.case, gqa.what), (case, What::Plain));
        let special = [What::Window(256), What::Softcap(30.0), What::Dropout(0.1), What::Spread(60.0)];
        for what in special.into_iter().chain([What::Alibi, What::Bias, What::Keep, What::Backward]) {
            assert!(kernels.iter().any(|k| k.what == what), "{what:?}");
        }
    }

    #[test]
    fn rows_without_sense_are_named() {
        for (row, why) in [
            ("a 1 1 1 4 4 8 0 plain", "six"),
            ("a 1 1 1 4 4 x 0 plain -", "number"),
            ("a 1 1 1 4 5 8 1 plain -", "Sq = Skv"),
            ("a 1 1 1 4 4 8 2 plain -", "0 or 1"),
            ("a 1 1 1 4 4 8 0 fancy -", "fancy"),
            ("a 1 1 1 4 4 8 0 softcap:-1 -", "softcap"),
            ("a 1 1 1 4 4 8 0 dropout:1 -", "dropout"),
            ("a 1 1 1 4 4 8 0 spread:0 -", "spread"),
            ("a 1 1 1 4 4 8 0 plain:3 -", "plain:3"),
            ("a 1 4 3 4 4 8 0 plain -", "q_heads is 4"),
            ("a 1 1 1 4 4 8 0 plain slow", "slow"),
            ("a", "expected"),
        ] {
            let error = parse(&format!("# comment\n\n{row}")).unwrap_err();
            assert!(error.line == 3 && error.why.contains(why), "{row}: {error}");
        }
    }

    #[test]
    fn a_window_counts_the_pairs_it_shows() {
        let kernel = |row: &str| parse(row).unwrap().remove(0);
        assert_eq!(kernel("a 1 1 1 4 4 1 1 window:1 -").flops(), 4.0 * 7.0); // 1 + 2 + 2 + 2
        assert_eq!(kernel("a 1 1 1 4 4 1 0 window:1 -").flops(), 4.0 * 13.0); // 4 + 4 + 3 + 2
        assert_eq!(kernel("a 2 3 3 4 4 5 1 plain -").flops(), 4.0 * 2.0 * 3.0 * 8.0 * 5.0);
    }
}
