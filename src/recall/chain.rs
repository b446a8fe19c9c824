//! An object and all that it is a difference to.

use std::io;
use std::sync::Arc;

use crate::store::object::{Object, TensorEntry};
use crate::store::{Damage, Id, MAX_CHAIN, Objects};

use super::beside::Beside;
use super::{Memory, ReadError};

/// How often a chain is opened anew because an object was re-parented while it was. Each time takes the archive
/// longer than opening a chain does.
const ATTEMPTS: u32 = 8;

/// An object, its parent, that one's parent, to the keyframe. All are open, so that they stay readable whatever
/// happens to their names.
#[derive(Clone, Debug)]
pub struct Chain {
    objects: Vec<Arc<Object>>,
    memory: Option<Arc<Memory>>,
    leaf: Leaf,
    /// Of the leaf.
    beside: Arc<Beside>,
}

/// What memory is to the object that a chain is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaf {
    /// As to any other.
    Known,
    /// Its states are to be kept: the next state will be a difference to it.
    Remember,
    /// The same; and what it is a difference to comes from the device, to see that it is still good there.
    Prove,
}

/// A tensor in one object of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The object.
    pub object: &'a Object,
    /// Its place in the chain.
    pub place: usize,
    /// Number of the tensor in its table.
    pub tensor: usize,
    /// The tensor.
    pub entry: &'a TensorEntry,
}

impl Chain {
    /// Opens an object and its ancestors.
    ///
    /// # Errors
    /// [`ReadError`] names the object that is missing or damaged.
    pub fn open(objects: &Objects, id: Id) -> Result<Chain, ReadError> {
        let mut attempt = 1;
        loop {
            match Chain::open_once(objects, id) {
                // A parent that is gone may have gone because its child was re-parented after that was opened.
                Err(error)
                    if error.object != id && error.source.kind() == io::ErrorKind::NotFound && attempt < ATTEMPTS =>
                {
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    /// Opens an object and as many of its ancestors as are there: what needs others cannot be decoded.
    ///
    /// # Errors
    /// [`ReadError`] when the object itself is missing or damaged.
    pub fn open_part(objects: &Objects, id: Id) -> Result<Chain, ReadError> {
        let mut chain = vec![objects.open(id).map_err(|error| ReadError::object(id, error))?];
        while let Some(next) = chain[chain.len() - 1].header().parent.filter(|_| chain.len() <= MAX_CHAIN as usize) {
            match objects.open(next) {
                Ok(object) => chain.push(object),
                Err(_) => break,
            }
        }
        Ok(Chain::of(chain, None))
    }

    fn open_once(objects: &Objects, id: Id) -> Result<Chain, ReadError> {
        let mut chain = Vec::new();
        let mut next = Some(id);
        while let Some(id) = next {
            // Also what a parent that is its own ancestor leads to.
            if chain.len() > MAX_CHAIN as usize {
                return Err(ReadError::object(id, Damage("its chain of parents is too long")));
            }
            let object = objects.open(id).map_err(|error| ReadError::object(id, error))?;
            next = object.header().parent;
            chain.push(object);
        }
        Ok(Chain::of(chain, None))
    }

    fn of(objects: Vec<Arc<Object>>, memory: Option<Arc<Memory>>) -> Chain {
        let beside = Arc::new(Beside::of(objects[0].index()));
        Chain { objects, memory, leaf: Leaf::Known, beside }
    }

    /// Tiles of the leaf that were decoded and will be asked for again.
    pub(super) fn beside(&self) -> &Beside {
        &self.beside
    }

    /// The same chain, decoded with the help of what is in memory.
    pub fn with_memory(self, memory: &Arc<Memory>) -> Chain {
        Chain { memory: Some(Arc::clone(memory)), ..self }
    }

    /// A chain of a new object that has no name yet, on top of its parent's. Its states are kept in memory as they are
    /// decoded. With `prove` nothing that it needs is taken from there.
    pub fn of_new(child: Object, parent: Option<&Chain>, memory: &Arc<Memory>, prove: bool) -> Chain {
        let leaf = if prove { Leaf::Prove } else { Leaf::Remember };
        Chain { memory: Some(Arc::clone(memory)), leaf, ..Chain::of_rewritten(child, parent) }
    }

    /// A chain of another encoding of an object, on top of its new parent's. Everything comes from the device.
    pub fn of_rewritten(child: Object, parent: Option<&Chain>) -> Chain {
        let mut objects = vec![Arc::new(child)];
        objects.extend(parent.into_iter().flat_map(|chain| chain.objects.iter().cloned()));
        Chain::of(objects, None)
    }

    /// The object that the chain is for.
    pub fn leaf(&self) -> &Object {
        &self.objects[0]
    }

    /// The objects, from the one that the chain is for to its keyframe.
    pub fn objects(&self) -> &[Arc<Object>] {
        &self.objects
    }

    /// The memory, if it may hold anything: where it may not, nobody should wait for anybody's claim.
    pub(super) fn memory(&self) -> Option<&Memory> {
        self.memory.as_deref().filter(|memory| memory.is_used())
    }

    /// Whether the states of this object are to be kept, because the next state will be a difference to it.
    pub(super) fn remembers(&self, id: Id) -> bool {
        self.leaf != Leaf::Known && id == self.leaf().header().id
    }

    /// Whether memory may be asked for the states of this object.
    pub(super) fn may_ask_for(&self, object: &Object) -> bool {
        self.leaf != Leaf::Prove || object.header().id == self.leaf().header().id
    }

    /// The chain of its keyframe alone.
    pub fn root(&self) -> Option<Chain> {
        self.from_ancestor(self.objects.last()?.header().id)
    }

    /// The chain from the ancestor with this id on.
    pub fn from_ancestor(&self, id: Id) -> Option<Chain> {
        let at = self.objects.iter().position(|object| object.header().id == id)?;
        Some(Chain::of(self.objects[at..].to_vec(), self.memory.clone()))
    }

    /// The objects and tensor entries to apply, from the one that decodes alone to tensor number `tensor` of the object at
    /// `place` in the chain.
    ///
    /// # Errors
    /// [`ReadError`] when a parent is not what its child says.
    pub fn path_from(&self, place: usize, tensor: usize) -> Result<Vec<Step<'_>>, ReadError> {
        let mut path: Vec<Step> = Vec::with_capacity(self.objects.len());
        let mut tensor = tensor;
        for (place, object) in self.objects.iter().enumerate().skip(place) {
            let wrong = |what| ReadError::object(object.header().id, Damage(what));
            let Some(entry) = object.index().tensors.get(tensor) else {
                return Err(wrong("it has no such tensor"));
            };
            let fits = |child: &TensorEntry| entry.dtype == child.dtype && len(entry) == len(child);
            if path.last().is_some_and(|child| !fits(child.entry)) {
                return Err(wrong("a tensor is not what its child was made from"));
            }
            path.push(Step { object, place, tensor, entry });
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
