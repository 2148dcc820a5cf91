//! Which cases to measure: a regular expression over their names.
//!
//! Every measured case has a name of parts between slashes, from the general to the special:
//! `curve/d64/f32/simd/t1/n4096`, `kernels/pf2048d64/avx512/t1`. Reports, comparisons and JSON use the same names.

use regex_lite::Regex;

/// Accepts the names that its expression matches somewhere; without one, all.
///
/// ```
/// use attn_bench::filter::Filter;
/// let filter = Filter::new("simd.*n(64|128)$").unwrap();
/// assert!(filter.accepts("curve/d64/f32/simd/t1/n128") && !filter.accepts("curve/d64/f32/simd/t1/n1280"));
/// ```
#[derive(Clone, Debug, Default)]
pub struct Filter(Option<Regex>);

impl Filter {
    /// Every case.
    pub const ALL: Self = Self(None);

    /// The cases whose names match.
    ///
    /// # Errors
    /// A message if the expression makes no sense.
    pub fn new(expression: &str) -> Result<Self, String> {
        Regex::new(expression).map(|regex| Self(Some(regex))).map_err(|error| format!("--filter: {error}"))
    }

    /// Exactly these names.
    pub fn names<'n>(names: impl IntoIterator<Item = &'n str>) -> Self {
        let any = names.into_iter().map(regex_lite::escape).collect::<Vec<_>>().join("|");
        // Escaped names cannot fail to compile; no name at all accepts nothing.
        Self(Regex::new(&format!("^(?:{any})$")).ok())
    }

    /// Whether to measure this case.
    pub fn accepts(&self, name: &str) -> bool {
        self.0.as_ref().is_none_or(|regex| regex.is_match(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_and_lists() {
        assert!(Filter::ALL.accepts("anything"));
        assert!(Filter::new("n(").unwrap_err().contains("--filter"));
        let list = Filter::names(["a/n64", "b+/n8"]);
        assert!(list.accepts("a/n64") && list.accepts("b+/n8"));
        assert!(!list.accepts("a/n640") && !list.accepts("xa/n64") && !list.accepts("bb/n8"));
        let none = Filter::names([]);
        assert!(!none.accepts("a"));
    }
}
