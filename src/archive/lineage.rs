//! Which files are states of one thing in training: its lineage.
//!
//! A file is quantized only when a newer one of its lineage is durable, so files of different runs, ranks or shards
//! must never share one: the paths may differ only in what [`names::pattern`] leaves out, the numbers that count
//! training. What is not recognised there is the newest of its own lineage and stays exact.

use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use crate::container::{Description, Tensor};
use crate::store::names;

/// Tensors smaller than this many elements do not count: they come and go with schedulers and counters.
const SIGNATURE_ELEMENTS: u64 = 1024;

/// Names of a file's tensors: those of the model, or all when it has none (an optimizer's file).
pub(super) fn signature(description: &Description) -> u64 {
    let large = |t: &&Tensor| t.shape.iter().product::<u64>() >= SIGNATURE_ELEMENTS;
    let mut tensors: Vec<_> = description.tensors.iter().filter(large).filter(|tensor| tensor.is_weight()).collect();
    if tensors.is_empty() {
        tensors = description.tensors.iter().filter(large).collect();
    }
    tensors.sort_by(|a, b| a.path.cmp(&b.path));
    let mut hash = Xxh3::new();
    for tensor in tensors {
        hash.update(tensor.path.as_bytes());
        hash.update(&[0, tensor.dtype as u8]);
        tensor.shape.iter().for_each(|dim| hash.update(&dim.to_le_bytes()));
    }
    hash.digest()
}

/// The lineage of a file with this path and signature.
pub(super) fn lineage(path: &Path, signature: u64) -> u64 {
    let mut hash = Xxh3::new();
    hash.update(&names::pattern(path));
    hash.update(&signature.to_le_bytes());
    hash.digest()
}
