//! Where the tensors are in a checkpoint's bytes, and which bytes depend on them. Pure: bytes in, description out.
//!
//! A container is found by its content, never by its name. What is not understood is described as opaque, and then
//! kept bit-exact. Nothing in a file is executed, and no length in it is believed before it was checked.

use std::io;
use std::ops::Range;

use crate::codec::Dtype;

/// Random access to the bytes of a file. Implemented for byte slices and for files (`pread`; a file may be cut
/// short by its owner while it is read, so files are never mapped).
pub trait ReadAt {
    /// Length in bytes.
    fn size(&self) -> u64;
    /// Fills `buf` from `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` when the range ends beyond the file; whatever the device reports.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()>;
}

/// Container formats that stepfs can look into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A zip written by `torch.save` (.pt .pth .bin .ckpt).
    TorchZip,
    /// A safetensors file.
    Safetensors,
    /// Anything else; `Description::tensors` is empty.
    Opaque,
}

/// What a tensor is to training. Decides whether it may be quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// A model parameter: may be quantized.
    Weight,
    /// State of an optimizer.
    Optimizer,
    /// Anything else, or not known.
    Other,
}

/// One tensor payload: a run of bytes in the file that holds elements of one type.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Path inside the checkpoint, keys joined with `/` (`model/h.0.attn.weight`): stable between saves, unlike offsets.
    pub path: String,
    /// Other paths that reach the same bytes (tied weights, views).
    pub aliases: Vec<String>,
    /// Element type.
    pub dtype: Dtype,
    /// Shape; its product times the element size is the length of `extent`.
    pub shape: Vec<u64>,
    /// Role in training.
    pub role: Role,
    /// Why it has that role, in words for `stepfs inspect`.
    pub why: &'static str,
    /// Bytes of the file. Extents of a description are disjoint and ascending.
    pub extent: Range<u64>,
}

/// What is in a file.
#[derive(Clone, Debug)]
pub struct Description {
    /// The container's format.
    pub kind: Kind,
    /// Why the file is opaque, or what was odd about it; for people.
    pub note: Option<String>,
    /// The tensors, by ascending extent.
    pub tensors: Vec<Tensor>,
}
