//! Tensors of containers that say no more of each than its name: safetensors, npz.

use super::proof::Training;
use super::role::{self, Context};
use super::slots::{Optimizers, Standing};
use super::{Role, Tensor, pairing};
use crate::codec::Dtype;

/// Why bytes of an element type that stepfs does not know are kept as they are.
pub(super) const UNKNOWN: (Role, &str) = (Role::Other, "an element type that stepfs does not know");

/// The role of a tensor with this name. `weight`: why a weight is one.
pub(super) fn role(name: &str, dtype: Dtype, weight: &'static str) -> (Role, &'static str) {
    match role::tensor(Context::Open, true, name, dtype) {
        (Role::Weight, _) => (Role::Weight, weight),
        other => other,
    }
}

/// Finds pairs and proofs among the tensors of a file, by ascending extent.
pub(super) fn relate(tensors: &mut [Tensor]) -> Training {
    let standings: Vec<_> = tensors.iter().map(|t| Some(Standing::named(0, &t.path, false))).collect();
    let optimizers = Optimizers::default();
    pairing::refine(tensors, &standings, &optimizers);
    Training::of(tensors, &standings, &optimizers)
}
