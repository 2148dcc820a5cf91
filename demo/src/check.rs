//! Comparison with stored activations: the worst difference of each kind of tensor, beside what it may be.

use anyhow::{Result, bail};
use candle_core::{DType, Tensor};

use crate::table::table;

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
    pub(super) fn compare(&mut self, what: &str, got: &Tensor, want: &Tensor, bound: f64) -> Result<()> {
        let numbers = |x: &Tensor| x.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let (got, want) = (numbers(got)?, numbers(want)?);
        // A NaN anywhere is as far off as can be; so is another length.
        let off = |got: f32, want: f32| Some(f64::from((got - want).abs())).filter(|off| !off.is_nan());
        let each = got.iter().zip(&want).map(|(&got, &want)| off(got, want).unwrap_or(f64::INFINITY));
        let worst = if got.len() == want.len() { each.fold(0.0, f64::max) } else { f64::INFINITY };
        self.add(what, worst, bound);
        Ok(())
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
        println!("{}", table(&header, 1, rows));
        match self.compared.iter().map(|line| line.failed).sum() {
            0 if self.compared.is_empty() => bail!("nothing was compared"),
            0 => Ok(()),
            failed => bail!("{failed} results are further from the stored ones than they may be"),
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn failed(compare: impl Fn(&mut Checks) -> Result<()>) -> bool {
        let mut checks = Checks::default();
        compare(&mut checks).expect("tensors on the CPU");
        checks.finish().is_err()
    }

    fn compared(got: &[f32], want: &[f32], bound: f64) -> bool {
        let tensor = |x: &[f32]| Tensor::new(x, &Device::Cpu).expect("a tensor");
        !failed(|checks| checks.compare("a", &tensor(got), &tensor(want), bound))
    }

    #[test]
    fn a_difference_is_found() {
        assert!(compared(&[1.0, 2.0], &[1.0, 2.5], 0.5));
        assert!(!compared(&[1.0, 2.0], &[1.0, 2.5], 0.4));
        assert!(!compared(&[f32::NAN, 2.0], &[1.0, 2.0], 0.4));
        assert!(!compared(&[1.0], &[1.0, 2.0], 9.0));
        let equal = |got: &[u32], want: &[u32]| {
            !failed(|checks| {
                checks.equal("ids", got, want);
                Ok(())
            })
        };
        assert!(equal(&[1, 2], &[1, 2]) && !equal(&[1, 2], &[1, 3]) && !equal(&[1, 2], &[1]));
        assert!(failed(|_| Ok(())), "nothing was compared");
    }

    #[test]
    fn one_bad_tensor_among_good_ones_is_found() {
        for bad in 0..3 {
            assert!(failed(|checks| {
                let number = |n| Tensor::new(if n == bad { 2.0f32 } else { 0.0 }, &Device::Cpu);
                (0..3).try_for_each(|n| checks.compare("a", &number(n)?, &Tensor::new(0.0f32, &Device::Cpu)?, 1.0))
            }));
        }
    }
}
