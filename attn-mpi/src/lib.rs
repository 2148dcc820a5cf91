//! Exact attention over the ranks of an MPI job.

mod agree;
mod cache;
mod cluster;
mod cost;
mod decode;
mod error;
mod heads;
mod nodes;
mod part;
mod prefill;
mod ring;
mod sharding;
mod tensors;
mod wire;

pub use cache::ShardedCache;
pub use cluster::{Cluster, Method, Report};
pub use cost::{Cost, Explain, Link, predict};
pub use error::{Error, Result};
pub use mpi;
pub use sharding::Sharding;
pub use wire::Traffic;
