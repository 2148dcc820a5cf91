//! Exact attention over the ranks of an MPI job, for sequences that are sharded over machines.
//!
//! ```no_run
//! use attn_core::{Align, Attention, Layout, Mask, View, ViewMut};
//! use attn_mpi::{Cluster, Sharding, mpi};
//!
//! let universe = mpi::initialize().expect("MPI is not initialised yet");
//! let cluster = Cluster::new(&universe.world());
//! let sharding = Sharding::zigzag(1_000_000, cluster.ranks()); // causal work is the same on every rank
//! let n = sharding.local_len(cluster.rank());
//! let (q, kv, mut out) = (vec![0.5f32; 8 * n * 64], vec![0.25f32; 2 * n * 64], vec![0.0f32; 8 * n * 64]);
//!
//! let attn = Attention::new().mask(Mask::causal(Align::BottomRight)); // global positions, whatever the shards
//! let (q, kv) = (View::new(&q, Layout::Bhsd, [1, 8, n, 64])?, View::new(&kv, Layout::Bhsd, [1, 2, n, 64])?);
//! let to = ViewMut::new(&mut out, Layout::Bhsd, [1, 8, n, 64])?;
//! let report = cluster.prefill(&attn, &sharding, &sharding, q, kv, kv, to)?;
//! println!("{:?}: {} bytes sent, {} s waited", report.method, report.traffic.sent, report.traffic.waited);
//! # Ok::<(), attn_mpi::Error>(())
//! ```
//!
//! | I want … | take … |
//! |---|---|
//! | attention of many queries, both sides sharded | [`Cluster::prefill`] |
//! | its gradients | [`Cluster::backward`] |
//! | to decode over a cache that does not fit one machine | [`ShardedCache`], [`Cluster::decode`] |
//! | the bits of one process, for any number of ranks | `Attention::reproducible` |
//! | to know what will be sent, and how long it takes | [`Cluster::explain`], [`Cluster::explain_backward`], [`predict`], [`predict_backward`] |
//! | to share positions out | [`Sharding`] |
//!
//! # What ranks agree on
//!
//! Before anything is computed, every rank sends a record of sizes, options, tables, element types, version and level.
//! If two differ, or one rank's arguments do not fit, **every** rank returns an [`Error`], and no output was written.
//! Of mods (the caller's functions) only their presence can be compared.
//!
//! # Masks by global positions
//!
//! The kernels compute a part of the call with rows that are numbered from 0 on. Causal masks, windows, prefixes,
//! lengths and ALiBi get other offsets; dense masks, biases and block tables are sliced without a copy. Three terms
//! stay the global mask: an order inside documents, a tree, and blocks that a shard cuts. It is looked up for each
//! position that the other terms leave visible: right, but slower. Tensors of a mask or a bias are passed whole to
//! every rank, or broadcast. Refused: seeded dropout (its draws are numbered by position; pass `Dropout::Keep`), and
//! the weights as an output.
//!
//! # Bits
//!
//! Without `reproducible()`, results depend on the shards by rounding, within the bounds of one process, twice. The
//! weight of a part is known from its lse, an f32: if all scores of a row are as large as a mask value like `f32::MIN`,
//! parts of different length count as much as each other. With `reproducible()`, or with a mask instead of such a bias,
//! they do not.
//! With it, the states of chunks of 512 keys are merged in a tree that is a function of positions alone. It costs the
//! speed of the decode kernel, and in the ring the memory of some `log₂(kv_len / 512)` states of a rank's rows. Shards
//! of many short ranges need more: up to all keys, if all ranges are shorter than a chunk.
//! Gradients refuse it: they are sums in the order of the ring, so that their bits depend on the shards.
//!
//! # When a rank is silent
//!
//! A rank that has waited for [`Cluster::timeout`] asks all ranks for a sign of life. It waits on if one of them
//! computes. If a rank does not answer for as long again, the waiting ranks name it and abort the job with code 70.
//! They also abort if all ranks only wait for each other. A rank that panics in a call ends the job at once. The
//! launcher notices the death of a process and ends the job.
//!
//! MPI is called by the thread that calls this crate, and by no other: `mpi::initialize()` is enough.

mod agree;
mod backward;
mod cache;
mod call;
mod cluster;
mod cost;
mod decode;
mod error;
mod explain;
mod heads;
mod line;
mod link;
mod nodes;
mod part;
mod prefill;
mod ring;
mod roll_call;
mod scratch;
mod sharding;
mod split;
mod tensors;
mod wire;

pub use cache::ShardedCache;
pub use cluster::{Cluster, Report};
pub use cost::{Cost, Explain, ExplainBackward, Method, predict, predict_backward};
pub use error::{Error, Result};
pub use link::Link;
pub use mpi;
pub use sharding::Sharding;
pub use wire::Traffic;
