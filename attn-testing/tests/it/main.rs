//! Tests of the tests: engines with planted bugs, and the laws that refuse them.

mod caught;
mod random;
mod sick;
