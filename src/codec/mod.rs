//! Tensors to symbols and back; pure functions over one tile at a time.

mod dtype;

pub use dtype::Dtype;
