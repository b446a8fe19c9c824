//! How a store keeps the tensors of a file, or of several files of one model.

use std::collections::{HashMap, HashSet};

use crate::store::object::Object;

/// How a store keeps tensors, by path. Chunks of one tensor are combined.
#[derive(Default)]
pub(super) struct Kept {
    pub tensors: HashMap<String, HowKept>,
    /// Number of released files.
    pub objects: usize,
}

pub(super) struct HowKept {
    pub codec: &'static str,
    pub difference: bool,
    pub step: Option<f64>,
    pub bound: f64,
    pub max_abs_error: f64,
    pub stored: u64,
}

impl Kept {
    /// Adds the tensors of an object. A chunk of a tensor in `wholes` counts as that tensor.
    pub(super) fn add(&mut self, object: Option<&Object>, wholes: &HashSet<&str>) {
        self.objects += usize::from(object.is_some());
        for tensor in object.iter().flat_map(|object| &object.index().tensors) {
            let how = HowKept {
                codec: tensor.coding.codec.name(),
                difference: tensor.coding.parent.is_some(),
                step: tensor.coding.step(),
                bound: tensor.bound,
                max_abs_error: tensor.max_abs_error,
                stored: tensor.stored(),
            };
            let path = if wholes.contains(whole(&tensor.path)) { whole(&tensor.path) } else { &tensor.path };
            self.tensors.entry(path.to_string()).and_modify(|all| all.join(&how)).or_insert(how);
        }
    }
}

/// The path of the tensor that a chunk belongs to.
fn whole(path: &str) -> &str {
    path.strip_suffix(']').and_then(|path| path.rsplit_once('[')).map_or(path, |(whole, _)| whole)
}

impl HowKept {
    fn join(&mut self, other: &HowKept) {
        self.bound = self.bound.max(other.bound);
        self.max_abs_error = self.max_abs_error.max(other.max_abs_error);
        self.stored += other.stored;
        self.difference |= other.difference;
    }
}
