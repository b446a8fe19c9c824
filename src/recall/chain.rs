//! An object and all its ancestors.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use crate::store::object::{Index, Object, TensorEntry};
use crate::store::{Damage, Id, MAX_CHAIN, Objects};
use crate::tile::Codec;

use super::{Memory, ReadError};

/// How often to open a chain again because an object was re-parented meanwhile. Each re-parenting takes the archive
/// longer than opening a chain.
const ATTEMPTS: u32 = 8;

/// An object, its parent, the parent's parent, and so on to the keyframe. All are open, so they stay readable if their
/// names change.
#[derive(Clone, Debug)]
pub struct Chain {
    objects: Vec<Arc<Object>>,
    memory: Option<Arc<Memory>>,
    leaf: Leaf,
    /// Decoded tiles of the leaf.
    beside: Arc<Beside>,
}

/// How the chain's own object uses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaf {
    /// Like any other object.
    Known,
    /// Keep its states: the next state will be a difference to it.
    Remember,
    /// Keep its states, but read its ancestors from the device, to prove that they are still good there.
    Prove,
}

/// A tensor in one object of a chain.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// The object.
    pub object: &'a Object,
    /// Its place in the chain.
    pub place: usize,
    /// Index of the tensor in the object's table.
    pub tensor: usize,
    /// The tensor.
    pub entry: &'a TensorEntry,
}

impl Chain {
    /// Opens an object and its ancestors.
    pub fn open(objects: &Objects, id: Id) -> Result<Chain, ReadError> {
        let mut attempt = 1;
        loop {
            match Chain::open_once(objects, id) {
                // The parent may be missing because its child was re-parented after the child was opened.
                Err(error)
                    if error.object != id && error.source.kind() == io::ErrorKind::NotFound && attempt < ATTEMPTS =>
                {
                    attempt += 1;
                }
                result => return result,
            }
        }
    }

    /// The chain of an object with all its ancestors, the object first, that were opened elsewhere.
    pub fn of_opened(objects: Vec<Arc<Object>>) -> Chain {
        Chain::of(objects, None)
    }

    /// Opens an object and those of its ancestors that exist; tensors that need the others cannot be decoded.
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
            // This also catches a parent that is its own ancestor.
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

    /// Decoded tiles of the leaf that will be needed again.
    pub(super) fn beside(&self) -> &Beside {
        &self.beside
    }

    /// The same chain, decoded with the help of states in memory.
    pub fn with_memory(self, memory: &Arc<Memory>) -> Chain {
        Chain { memory: Some(Arc::clone(memory)), ..self }
    }

    /// A chain of a new object without a name, on top of its parent's. Memory keeps its states as they are decoded.
    /// With `prove`, memory provides nothing of its ancestors.
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

    /// The objects, from the chain's own to its keyframe.
    pub fn objects(&self) -> &[Arc<Object>] {
        &self.objects
    }

    /// The memory, if it may hold anything.
    pub(super) fn memory(&self) -> Option<&Memory> {
        self.memory.as_deref().filter(|memory| memory.is_used())
    }

    /// The memory that keeps the states of the object at this place, because the next state will be a difference to it.
    pub(super) fn keeps(&self, place: usize) -> Option<&Memory> {
        self.memory().filter(|_| place == 0 && self.leaf != Leaf::Known)
    }

    /// True if memory may provide states of this object.
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

    /// The objects and tensor entries to apply: from the first that decodes alone to tensor `tensor` of the object at
    /// `place` in the chain.
    ///
    /// # Errors
    /// [`ReadError`] if a parent does not match its child.
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
                return Err(wrong("a tensor has changed since its child was made"));
            }
            path.push(Step { object, place, tensor, entry });
            match entry.coding.parent {
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

/// Maximum number of kept tiles. Tensors up to 32 MiB fit whole, which is the distance between a parameter's two
/// moments in a file. Of a larger tensor only a part fits.
const TILES: usize = 64;

type Kept = (usize, usize, Arc<Vec<u8>>);

/// Decoded tiles of one object that will be needed once more: those of second moments, for the first moment beside each and
/// as themselves, in either order.
#[derive(Debug)]
pub(super) struct Beside {
    /// Tensors that another tensor needs as companion.
    wanted: HashSet<usize>,
    /// Oldest first. The lock is held only briefly.
    tiles: Mutex<VecDeque<Kept>>,
}

impl Beside {
    pub(super) fn of(index: &Index) -> Beside {
        let second = |codec: Codec| match codec {
            Codec::Moment { second, .. } => Some(second as usize),
            _ => None,
        };
        let wanted = index.tensors.iter().filter_map(|entry| second(entry.coding.codec)).collect();
        Beside { wanted, tiles: Mutex::default() }
    }

    /// Returns the tile if it was decoded before, and drops it: nobody needs it a third time.
    pub(super) fn take(&self, tensor: usize, tile: usize) -> Option<Arc<Vec<u8>>> {
        if !self.wanted.contains(&tensor) {
            return None;
        }
        let mut tiles = self.tiles.lock().unwrap_or_else(PoisonError::into_inner);
        let at = tiles.iter().position(|kept| (kept.0, kept.1) == (tensor, tile))?;
        tiles.remove(at).map(|(.., bytes)| bytes)
    }

    /// Keeps a tile that was decoded for the first time.
    pub(super) fn put(&self, tensor: usize, tile: usize, bytes: &Arc<Vec<u8>>) {
        if !self.wanted.contains(&tensor) {
            return;
        }
        let mut tiles = self.tiles.lock().unwrap_or_else(PoisonError::into_inner);
        if tiles.len() >= TILES {
            // Keep the beginning of a tensor that is read from end to end: it is needed first.
            match tiles.back().is_some_and(|kept| kept.0 == tensor) {
                true => tiles.pop_back(),
                false => tiles.pop_front(),
            };
        }
        tiles.push_back((tensor, tile, Arc::clone(bytes)));
    }
}
