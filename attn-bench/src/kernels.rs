//! Single shapes beside the machine's peak and beside other libraries.
//!
//! The [shapes](SHAPES) are a table. For each, samples are taken in rounds: probe, ours, probe, each peer on the same
//! inputs. A ratio is the peer's time over ours within a round, above 1 if ours is faster. A report has the median over
//! the rounds, which a slower moment of the machine does not move. On one thread all times are those of the processor,
//! not of the wall clock: other programs on the same core slow neither side.

mod gradients;
mod inputs;
mod measure;
mod oracle;
mod ours;
mod result;
mod shapes;

pub use inputs::Inputs;
pub use measure::{Setup, measure};
pub use result::{KernelReport, KernelResult, PeerResult, case_name};
pub use shapes::{Kernel, RowError, SHAPES, What, parse, types};
