//! Comparison with stored activations: the worst difference of each kind of tensor, beside what it may be.

use super::{Failure, Result};

/// What has been compared so far.
#[derive(Default)]
pub(super) struct Checks {
    /// Worst difference and bound, in order of first appearance.
    compared: Vec<Compared>,
}

struct Compared {
    what: String,
    tensors: usize,
    worst: f64,
    bound: f64,
    failed: usize,
}

impl Checks {
    /// Compares a tensor: `bound` is absolute. Tensors of one name share a line.
    pub(super) fn compare(&mut self, what: &str, got: &[f32], want: &[f32], bound: f64) {
        // A NaN anywhere is as far off as can be; so is another length.
        let off = |got: f32, want: f32| f64::from((got - want).abs());
        let each = got.iter().zip(want).map(|(&got, &want)| Some(off(got, want)).filter(|off| !off.is_nan()));
        let worst = each.map(|off| off.unwrap_or(f64::INFINITY)).fold(0.0, f64::max);
        let worst = if got.len() == want.len() { worst } else { f64::INFINITY };
        self.add(what, worst, bound);
    }

    /// Compares what must be equal, such as token ids.
    pub(super) fn equal<T: PartialEq>(&mut self, what: &str, got: &[T], want: &[T]) {
        let differing = got.iter().zip(want).filter(|(got, want)| got != want).count() + got.len().abs_diff(want.len());
        self.add(what, differing as f64, 0.0);
    }

    fn add(&mut self, what: &str, worst: f64, bound: f64) {
        let at = self.compared.iter().position(|line| line.what == what).unwrap_or_else(|| {
            self.compared.push(Compared { what: what.to_owned(), tensors: 0, worst: 0.0, bound, failed: 0 });
            self.compared.len() - 1
        });
        let line = &mut self.compared[at];
        line.tensors += 1;
        line.failed += usize::from(worst > bound);
        line.worst = line.worst.max(worst);
    }

    /// A table of everything, and a failure if anything differs too much.
    pub(super) fn finish(self) -> Result<()> {
        let rows = self.compared.iter().map(|line| {
            let result = if line.failed == 0 { "ok".to_owned() } else { format!("{} DIFFER", line.failed) };
            let number = |x: f64| if x == 0.0 { "0".to_owned() } else { format!("{x:.1e}") };
            vec![line.what.clone(), line.tensors.to_string(), number(line.worst), number(line.bound), result]
        });
        let header = ["compared", "tensors", "largest difference", "allowed", "result"];
        println!("{}", attn_bench::report::table::table(&header, 1, rows));
        match self.compared.iter().map(|line| line.failed).sum() {
            0 if self.compared.is_empty() => Err(Failure::Text("nothing was compared".into())),
            0 => Ok(()),
            failed => Err(Failure::Differs(failed)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(compare: impl Fn(&mut Checks)) -> bool {
        let mut checks = Checks::default();
        compare(&mut checks);
        checks.finish().is_err()
    }

    #[test]
    fn what_differs_is_found() {
        assert!(!failed(|checks| checks.compare("a", &[1.0, 2.0], &[1.0, 2.5], 0.5)));
        assert!(failed(|checks| checks.compare("a", &[1.0, 2.0], &[1.0, 2.5], 0.4)));
        assert!(failed(|checks| checks.compare("a", &[f32::NAN, 2.0], &[1.0, 2.0], 0.4)));
        assert!(failed(|checks| checks.compare("a", &[1.0], &[1.0, 2.0], 9.0)));
        assert!(failed(|checks| checks.equal("ids", &[1, 2], &[1, 3])));
        assert!(failed(|checks| checks.equal("ids", &[1, 2], &[1])));
        assert!(!failed(|checks| checks.equal("ids", &[1, 2], &[1, 2])));
        assert!(failed(|_| {}));
    }

    #[test]
    fn one_bad_tensor_among_good_ones_is_found() {
        for bad in 0..3 {
            assert!(failed(|checks| (0..3).for_each(|n| {
                checks.compare("a", &[if n == bad { 2.0 } else { 0.0 }], &[0.0], 1.0);
            })));
        }
    }
}
