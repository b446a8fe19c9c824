//! Formats that say no more of each array than its name: safetensors, npz, HDF5, TensorFlow's bundles.
//!
//! A reader of such a format finds the arrays. [`describe`] makes a description of them.

use std::ops::Range;

use super::proof::Training;
use super::read::{Fail, bad, bytes, cut_short};
use super::role::{self, Context};
use super::slots::{Optimizers, Standing};
use super::{Description, Kind, Role, Tensor, pairing};
use codec::Dtype;

/// An array as a file tells it.
pub(super) struct Array {
    /// Stays the same in each save of one run.
    pub(super) name: String,
    /// `None` if stepfs does not know the type: then its bytes stay as they are.
    pub(super) dtype: Option<Dtype>,
    pub(super) shape: Vec<u64>,
    /// Bytes of the file.
    pub(super) extent: Range<u64>,
}

/// Describes a file of `size` bytes with these arrays. Those without elements are left out. `weight`: why a weight is one.
pub(super) fn describe(kind: Kind, size: u64, arrays: Vec<Array>, weight: &'static str) -> Result<Description, Fail> {
    let name = kind.name();
    let mut tensors = Vec::with_capacity(arrays.len());
    for Array { name: path, dtype, shape, extent } in arrays {
        if extent.start > extent.end || extent.end > size {
            return cut_short(format!("{name}: a tensor lies beyond the end of the file"));
        }
        let len = extent.end - extent.start;
        let (elements, role) = match dtype {
            Some(dtype) if bytes(&shape, dtype.size() as u64) != Some(len) => {
                return bad(format!("{name}: a shape does not fit its bytes"));
            }
            Some(dtype) => ((dtype, shape), role(&path, dtype, weight)),
            None => ((Dtype::U8, vec![len]), UNKNOWN),
        };
        if len > 0 {
            tensors.push(Tensor::found(path, elements, role, extent));
        }
    }
    tensors.sort_by_key(|tensor| tensor.extent.start);
    if tensors.windows(2).any(|pair| pair[1].extent.start < pair[0].extent.end) {
        return bad(format!("{name}: tensors overlap"));
    }
    if Description::has_twins(&tensors) {
        return bad(format!("{name}: two tensors have the same name"));
    }
    let training = relate(&mut tensors);
    Ok(Description::new(kind, tensors, training))
}

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
