//! Which files are states of one thing in training: its lineage.
//!
//! A file is quantized only when a newer one of its lineage is durable. So files of different runs, ranks or shards
//! must never share a lineage. Their paths may differ only in the numbers that count training, which
//! [`step_pattern::pattern`] leaves out. A file with any other number is the newest of its own lineage and stays exact.

use std::collections::BTreeSet;
use std::path::Path;

use crate::store::step_pattern;
use codec::hash::Xxh3;
use formats::{Description, Role, Tensor};

use super::entry::Part;

/// Tensors smaller than this many elements do not count: they come and go with schedulers and counters.
const SIGNATURE_ELEMENTS: u64 = 1024;

/// Names of a file's tensors: those of the model, or all when it has none (an optimizer's file).
///
/// Of a table whose rows have ids only a row's shape counts: rows come while it is trained.
///
/// The chunks of a distributed checkpoint count by their place in the file: a file is sealed before their names are
/// known.
pub fn signature(description: &Description) -> u64 {
    if description.kind.is_named_later() {
        return of_chunks(description);
    }
    let large = large(description);
    let mut tensors: Vec<_> = large.iter().filter(|(tensor, _)| tensor.is_weight()).collect();
    if tensors.is_empty() {
        tensors = large.iter().collect();
    }
    tensors.sort_by(|a, b| a.0.path.cmp(&b.0.path));
    let mut hash = Xxh3::default();
    for (tensor, shape) in tensors {
        hash.update(tensor.path.as_bytes());
        hash.update(&[0, tensor.dtype as u8]);
        shape.iter().for_each(|dim| hash.update(&dim.to_le_bytes()));
    }
    hash.digest()
}

/// The tensors that count, with the part of their shape that counts.
fn large(description: &Description) -> Vec<(&Tensor, &[u64])> {
    let mut tables = description.tables.iter().map(|table| table.tensor).peekable();
    let shapes = description.tensors.iter().enumerate().map(|(index, tensor)| {
        let is_table = tables.next_if_eq(&index).is_some() && !tensor.shape.is_empty();
        (tensor, if is_table { &tensor.shape[1..] } else { &tensor.shape[..] }, is_table)
    });
    let counts = |tensor: &Tensor| tensor.shape.iter().product::<u64>() >= SIGNATURE_ELEMENTS;
    let large = shapes.filter(|(tensor, _, is_table)| *is_table || counts(tensor));
    large.map(|(tensor, shape, _)| (tensor, shape)).collect()
}

fn of_chunks(description: &Description) -> u64 {
    let mut hash = Xxh3::default();
    for (number, tensor) in description.tensors.iter().enumerate() {
        if tensor.shape.iter().product::<u64>() >= SIGNATURE_ELEMENTS {
            hash.update(&(number as u64).to_le_bytes());
            hash.update(&[tensor.dtype as u8]);
            tensor.shape.iter().for_each(|dim| hash.update(&dim.to_le_bytes()));
        }
    }
    hash.digest()
}

/// Whether a file with this signature has tensors that count. Of files without, no one can be the base of another.
pub(super) fn has_tensors(signature: u64) -> bool {
    signature != Xxh3::default().digest()
}

/// The lineage of a file with this path.
///
/// The kinds of an optimizer's state in it count. A save of weights alone is no newer state of a save with Adam's
/// moments, because a run cannot go on from it as from the other.
pub(super) fn lineage(path: &Path, description: &Description) -> u64 {
    let mut hash = Xxh3::default();
    hash.update(&step_pattern::pattern(path));
    hash.update(&signature(description).to_le_bytes());
    optimizer_state(description).into_iter().for_each(|kind| hash.update(&[kind]));
    hash.digest()
}

/// What a run that goes on needs of the file.
pub(super) fn part(description: &Description) -> Part {
    let has_weights = large(description).iter().any(|(tensor, _)| tensor.role.group() == Role::Weight);
    match (has_weights, !optimizer_state(description).is_empty()) {
        _ if description.kind.is_named_later() => Part::Piece,
        (true, true) => Part::Whole,
        (false, false) => Part::Other,
        _ => Part::Piece,
    }
}

/// The kinds of an optimizer's state among the tensors that count. None in a distributed checkpoint, whose tensors have
/// no names when a file is sealed.
fn optimizer_state(description: &Description) -> BTreeSet<u8> {
    let large = if description.kind.is_named_later() { Vec::new() } else { large(description) };
    let roles = large.iter().map(|(tensor, _)| tensor.role);
    roles.filter(|role| role.group() == Role::Optimizer).map(|role| role as u8).collect()
}
