//! An object and all that it is a difference to.

use std::sync::Arc;

use crate::store::object::{Object, TensorEntry};
use crate::store::{Damage, Id, MAX_CHAIN, Objects};

use super::ReadError;

/// An object, its parent, that one's parent, to the keyframe. All are open, so that they stay readable whatever
/// happens to their names.
#[derive(Clone, Debug)]
pub struct Chain {
    objects: Vec<Arc<Object>>,
}

impl Chain {
    /// Opens an object and its ancestors.
    ///
    /// # Errors
    /// [`ReadError`] names the object that is missing or damaged.
    pub fn open(objects: &Objects, id: Id) -> Result<Chain, ReadError> {
        let mut chain = Vec::new();
        let mut next = Some(id);
        while let Some(id) = next {
            if chain.len() > MAX_CHAIN as usize {
                return Err(ReadError::object(id, Damage("its chain of parents is too long")));
            }
            let object = objects.open(id).map_err(|error| ReadError::object(id, error))?;
            next = object.header().parent;
            chain.push(object);
        }
        Ok(Chain { objects: chain })
    }

    /// A chain of an object that has no name yet, on top of its parent's.
    pub fn with_child(child: Object, parent: Option<&Chain>) -> Chain {
        let mut objects = vec![Arc::new(child)];
        objects.extend(parent.into_iter().flat_map(|chain| chain.objects.iter().cloned()));
        Chain { objects }
    }

    /// The object that the chain is for.
    pub fn leaf(&self) -> &Object {
        &self.objects[0]
    }

    /// The objects, from the one that the chain is for to its keyframe.
    pub fn objects(&self) -> &[Arc<Object>] {
        &self.objects
    }

    /// The objects and tensor entries to apply, from the one that decodes alone to the leaf's `tensor`.
    ///
    /// # Errors
    /// [`ReadError`] when a parent is not what its child says.
    pub fn path(&self, tensor: usize) -> Result<Vec<(&Object, &TensorEntry)>, ReadError> {
        let mut path: Vec<(&Object, &TensorEntry)> = Vec::with_capacity(self.objects.len());
        let mut tensor = tensor;
        for object in &self.objects {
            let wrong = |what| ReadError::object(object.header().id, Damage(what));
            let Some(entry) = object.index().tensors.get(tensor) else {
                return Err(wrong("it has no such tensor"));
            };
            let fits = |child: &TensorEntry| entry.dtype == child.dtype && len(entry) == len(child);
            if path.last().is_some_and(|(_, child)| !fits(child)) {
                return Err(wrong("a tensor is not what its child was made from"));
            }
            path.push((&**object, entry));
            match entry.coding.parent() {
                Some(parent) => tensor = parent as usize,
                None => {
                    path.reverse();
                    return Ok(path);
                }
            }
        }
        Err(ReadError::object(self.leaf().header().id, Damage("a tensor's base is missing")))
    }
}

fn len(entry: &TensorEntry) -> u64 {
    entry.extent.end - entry.extent.start
}
