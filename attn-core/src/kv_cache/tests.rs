//! Each cache against a plain call over the same tokens, and the errors of each.

mod append;
mod paged;
mod ring;
mod stream;
