//! Copies of a tensor. Low-precision trainers compute with narrower weights than those that they update. Such copies
//! are found by their values, whatever their names. A copy of the same type is an optimizer's iterate that has not
//! yet left its parameter (ASGD's average before it begins).

use std::collections::HashMap;
use std::io;
use std::slice::from_ref;

use codec::hash::xxh3_64;
use codec::{Dtype, cast};
use formats::{ReadAt, Tensor, Use};

use super::lattice::read;

/// Elements compared in the middle of a tensor. The encoder compares all.
const LOOKED_AT: u64 = 256;
/// Smaller tensors are not compared: their copies have a place in the skeleton anyway.
const LEAST_ELEMENTS: u64 = 128;

/// For each tensor that seems to be a copy, its original. Numbers are the description's.
pub(super) fn copies(source: &dyn ReadAt, tensors: &[Tensor]) -> io::Result<HashMap<usize, usize>> {
    let narrow = |tensor: &&Tensor| matches!(tensor.dtype, Dtype::F16 | Dtype::Bf16);
    let mut originals: HashMap<(Dtype, &[u64], u64), usize> = HashMap::new();
    let mut found = iterates(source, tensors)?;
    if !tensors.iter().any(|tensor| narrow(&tensor)) {
        return Ok(found);
    }
    for (index, tensor) in tensors.iter().enumerate() {
        if !matches!(tensor.dtype, Dtype::F32 | Dtype::F64) || tensor.elements() < LEAST_ELEMENTS {
            continue;
        }
        let wide = middle(source, tensor)?;
        for to in [Dtype::F16, Dtype::Bf16] {
            let mut copy = vec![0; wide.len() / tensor.dtype.size() * to.size()];
            // Zeros would be a copy of anything's zeros.
            if cast::cast(tensor.dtype, &wide, to, &mut copy).is_ok() && copy.iter().any(|byte| *byte != 0) {
                originals.entry((to, &tensor.shape, xxh3_64(&copy))).or_insert(index);
            }
        }
    }
    for (index, tensor) in tensors.iter().enumerate() {
        if narrow(&tensor) && tensor.elements() >= LEAST_ELEMENTS {
            let hash = xxh3_64(&middle(source, tensor)?);
            found.extend(originals.get(&(tensor.dtype, &tensor.shape, hash)).map(|original| (index, *original)));
        }
    }
    Ok(found)
}

/// Iterates that equal their parameter.
fn iterates(source: &dyn ReadAt, tensors: &[Tensor]) -> io::Result<HashMap<usize, usize>> {
    let mut found = HashMap::new();
    for (index, tensor) in tensors.iter().enumerate() {
        let Some(of) = tensor.of.filter(|_| tensor.used == Use::Iterate && tensor.elements() >= LEAST_ELEMENTS) else {
            continue;
        };
        let same_type = tensors[of].dtype == tensor.dtype && tensor.dtype.is_lattice_float();
        if same_type && middle(source, tensor)? == middle(source, &tensors[of])? {
            found.insert(index, of);
        }
    }
    Ok(found)
}

/// The extent of a copy that has the same elements as its original has in `planned`. The first and last elements of
/// large tensors stay in the skeleton.
pub(super) fn matching(copy: &Tensor, original: &Tensor, planned: &Tensor) -> std::ops::Range<u64> {
    let (from, to) = (original.dtype.size() as u64, copy.dtype.size() as u64);
    let head = (planned.extent.start - original.extent.start) / from * to;
    let tail = (original.extent.end - planned.extent.end) / from * to;
    copy.extent.start + head..copy.extent.end - tail
}

fn middle(source: &dyn ReadAt, tensor: &Tensor) -> io::Result<Vec<u8>> {
    let size = tensor.dtype.size() as u64;
    let count = LOOKED_AT.min(tensor.elements());
    let first = (tensor.elements() - count) / 2;
    read(source, tensor, from_ref(&(first * size..(first + count) * size)))
}
