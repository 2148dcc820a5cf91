//! The conformance vectors: loading suites, running a case on an engine, comparing, counting.
//!
//! A suite is `NAME.json`, a list of cases, beside `NAME.safetensors`, their tensors. What a case means is the business
//! of [`ops`]; how two tensors compare that of [`compare`]; the verdict on a case that of [`run`].

mod case;
pub mod compare;
mod loaded;
pub mod ops;
mod params;
pub mod run;
mod stop;
mod suite;
mod tensor;

pub use case::{Case, Tolerance};
pub use run::{Outcome, Runner, Tally};
pub use suite::Suite;
pub use tensor::{Data, Tensor};
