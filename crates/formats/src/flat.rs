//! Several weights in one storage: each is a view of a part of it. `flatten_parameters` of an LSTM or a GRU makes
//! such storages on a GPU.

use std::collections::BTreeSet;

use super::proof::is_of_layer;
use super::slots::Standing;

/// Most dimensions of a view that is noted, which bounds memory.
const MAX_DIMS: usize = 8;

/// Where a view lies in its storage.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Window {
    /// Its first element.
    pub(super) offset: u64,
    pub(super) shape: Vec<u64>,
    /// No others lie between its elements.
    pub(super) is_dense: bool,
}

impl Window {
    /// Number of elements; 0 if there are more than can be counted.
    fn elements(&self) -> u64 {
        self.shape.iter().try_fold(1u64, |n, &dim| n.checked_mul(dim)).unwrap_or(0)
    }

    /// Whether it is a part of a storage of so many elements, small enough to be noted.
    pub(super) fn is_part_of(&self, elements: u64) -> bool {
        (1..elements).contains(&self.elements()) && self.shape.len() <= MAX_DIMS
    }
}

/// The views of one storage that are weights of one mapping.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Flat {
    /// Where the first of them stands.
    pub(super) mapping: u32,
    pub(super) key: String,
    pub(super) average: bool,
    /// The first element and the shape of each. Tied weights are one.
    windows: BTreeSet<(u64, Vec<u64>)>,
    /// None of them has gaps.
    is_dense: bool,
    /// All of them have names of layers.
    pub(super) is_of_layers: bool,
}

impl Flat {
    /// Notes a view of this path in `flat`, if it stands under a key of the same mapping. Answers whether it does.
    pub(super) fn note(flat: &mut Option<Box<Flat>>, window: Window, standing: Option<&Standing>, path: &str) -> bool {
        let Some(Standing::Listed { mapping, key, average }) = standing else { return false };
        let flat = flat.get_or_insert_with(|| {
            Box::new(Flat {
                mapping: *mapping,
                key: key.clone(),
                average: *average,
                windows: BTreeSet::new(),
                is_dense: true,
                is_of_layers: true,
            })
        });
        if flat.mapping != *mapping {
            return false;
        }
        flat.is_dense &= window.is_dense;
        flat.is_of_layers &= is_of_layer(path);
        // Of one with gaps only the number of its elements is compared.
        let elements = window.elements();
        flat.windows.insert((window.offset, if window.is_dense { window.shape } else { vec![elements] }));
        true
    }

    /// The shape of each view.
    pub(super) fn shapes(&self) -> impl Iterator<Item = &Vec<u64>> {
        self.windows.iter().map(|(_, shape)| shape)
    }

    /// Whether each of so many elements is in exactly one view.
    pub(super) fn covers(&self, elements: u64) -> bool {
        let mut at = Some(0u64);
        for (offset, shape) in &self.windows {
            at = at.filter(|at| at == offset).and_then(|at| at.checked_add(shape.iter().product()));
        }
        self.is_dense && at == Some(elements)
    }
}
