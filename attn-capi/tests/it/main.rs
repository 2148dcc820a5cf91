//! Integration tests of `attn-capi`: its functions, called as C would.

mod allocations;
mod backward;
mod c;
mod decode;
mod errors;
mod fork;
mod header;
mod level;
mod merge;
mod packed;
mod results;
mod structs;
