//! The tensors of archived states, by name.

use std::collections::HashMap;

use crate::container::Tensor;
use crate::recall::Chain;
use crate::store::object::TensorEntry;

/// A tensor of an archived state.
#[derive(Clone, Copy)]
pub(super) struct Archived<'a> {
    pub(super) chain: &'a Chain,
    /// Number in the leaf's table.
    pub(super) number: u32,
    pub(super) entry: &'a TensorEntry,
}

/// The tensors of an archived state by path.
pub(super) struct Tensors<'a>(HashMap<&'a str, Archived<'a>>);

impl<'a> Tensors<'a> {
    pub(super) fn of(chain: Option<&'a Chain>) -> Tensors<'a> {
        let tensors = chain.into_iter().flat_map(|chain| {
            let tensors = chain.leaf().index().tensors.iter().enumerate();
            tensors.map(move |(at, entry)| (entry.path.as_str(), Archived { chain, number: at as u32, entry }))
        });
        Tensors(tensors.collect())
    }

    /// The one that this tensor can be a difference to.
    pub(super) fn get(&self, tensor: &Tensor) -> Option<Archived<'a>> {
        let len = |extent: &std::ops::Range<u64>| extent.end - extent.start;
        let found = self.0.get(tensor.path.as_str()).copied();
        found.filter(|other| other.entry.dtype == tensor.dtype && len(&other.entry.extent) == len(&tensor.extent))
    }
}
