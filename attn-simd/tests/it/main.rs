//! Integration tests of `attn-simd`, one program with a module per subject.

mod caches;
mod decode;
mod edges;
mod gate;
mod guard;
mod laws;
mod level;
mod long_sums;
mod positions;
mod prefix;
mod quantized;
mod random;
mod small;
mod strips;
mod tiles;
