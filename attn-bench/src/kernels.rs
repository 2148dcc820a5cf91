//! Single shapes beside the machine's peak and beside other libraries.
//!
//! The [shapes](SHAPES) are a table. For each, samples are taken in rounds: probe, ours, probe, each peer on the same
//! inputs. A ratio is peer's time over ours within a round, above 1 where ours is faster; reported is the median over
//! the rounds, which does not care whether the machine was slower for a while. On one thread all times are those
//! of the processor, not of the wall: other programs on the same core take nothing from either side.

mod gradients;
mod inputs;
mod measure;
mod ours;
mod result;
mod shapes;

pub use inputs::Inputs;
pub use measure::{Setup, measure};
pub use result::{KernelReport, KernelResult, PeerResult, case_name};
pub use shapes::{Kernel, RowError, SHAPES, What, parse, types};
