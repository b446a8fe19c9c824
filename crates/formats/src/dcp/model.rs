//! This module puts the whole state dict together from `.metadata`. It tells what each chunk is to training.
//!
//! The state dict is built as torch.save would have pickled it, and walked as such a pickle is. So a tensor has the
//! same path, the same role and the same proof in both formats, and shapes are compared whole, however they are cut
//! among the ranks.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::Path;

use super::super::made::{self, Places};
use super::super::pickle::{Graph, Item, Node};
use super::super::proof::{Trained, Training};
use super::super::read::{Fail, bad};
use super::super::storages::Storages;
use super::super::walk::walk;
use super::super::{Description, Kind, ReadAt, Role, Tensor};
use super::metadata::{self, Key, Metadata, Whole};

/// The tensors of a distributed checkpoint, as a whole.
#[derive(Debug)]
pub struct Model {
    /// In the order of the state dict. Their extents are places in no file.
    tensors: Vec<Tensor>,
    training: Training,
    /// By name.
    files: HashMap<String, Listed>,
}

/// The chunks and objects of one file.
#[derive(Debug)]
struct Listed {
    /// By ascending extent.
    chunks: Vec<Chunk>,
    /// The end of its last value, in bytes.
    end: u64,
}

#[derive(Debug)]
struct Chunk {
    /// Bytes of the file: its zip.
    extent: Range<u64>,
    /// Index of its tensor.
    tensor: usize,
    /// Where it begins in the tensor, in elements by dimension.
    offsets: Vec<u64>,
}

impl Model {
    /// Reads `.metadata`. Nothing in it is executed. Memory: as for a pickle of torch.save.
    ///
    /// # Errors
    /// `InvalidData` where it is not what torch writes, in words; whatever `src` reports.
    pub fn read(src: &dyn ReadAt) -> io::Result<Model> {
        match metadata::read(src).and_then(Model::of) {
            Ok(model) => Ok(model),
            Err(Fail::Io(error)) => Err(error),
            Err(Fail::Bad(why) | Fail::CutShort(why)) => Err(io::Error::new(io::ErrorKind::InvalidData, why)),
        }
    }

    /// The container of its files.
    pub fn kind(&self) -> Kind {
        Kind::Dcp
    }

    /// All tensors, whole. Their extents are places in no file.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The parameters that the checkpoint's optimizers train.
    pub fn optimizers(&self) -> &[Trained] {
        &self.training.optimizers
    }

    /// The files of the checkpoint in its directory, each with the least length, in bytes, that it must have.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.files.iter().map(|(name, file)| (name.as_str(), file.end))
    }

    fn of(metadata: Metadata) -> Result<Model, Fail> {
        let places = places(&metadata)?;
        let graph = state_dict(&metadata)?;
        let mut storages = Storages::new(&places);
        let optimizers = walk(&graph, &mut storages)?;
        let ((tensors, training), names, _) = storages.finish(&optimizers);
        let of_name: HashMap<u32, usize> = names.into_iter().enumerate().map(|(tensor, name)| (name, tensor)).collect();
        let of_fqn = metadata.names.iter().enumerate().map(|(name, named)| (named.fqn.as_str(), name as u32));
        let of_fqn: HashMap<&str, usize> = of_fqn.filter_map(|(fqn, name)| Some((fqn, *of_name.get(&name)?))).collect();
        let mut files: HashMap<String, Listed> = HashMap::new();
        for (name, file) in metadata.files {
            let chunk = |chunk: metadata::Chunk| {
                let tensor = *of_fqn.get(chunk.fqn.as_str())?;
                Some(Chunk { extent: chunk.extent, tensor, offsets: chunk.offsets })
            };
            let mut chunks: Vec<Chunk> = file.chunks.into_iter().filter_map(chunk).collect();
            chunks.sort_by_key(|chunk| chunk.extent.start);
            if chunks.windows(2).any(|pair| pair[1].extent.start < pair[0].extent.end) {
                return bad("dcp: two tensors at one place of a file");
            }
            files.insert(name, Listed { chunks, end: file.end });
        }
        Ok(Model { tensors, training, files })
    }
}

/// A made-up place for each tensor, in the order of the state dict. The walk needs one.
fn places(metadata: &Metadata) -> Result<Places, Fail> {
    let mut end = 0u64;
    let mut places = Vec::with_capacity(metadata.names.len());
    for named in &metadata.names {
        let len = named.tensor.as_ref().map_or(Some(0), Whole::bytes);
        let Some(next) = len.and_then(|len| end.checked_add(len)).filter(|end| *end <= i64::MAX as u64) else {
            return bad("dcp: a shape is too large");
        };
        places.push(end..next);
        end = next;
    }
    Ok(Places(places))
}

/// A mapping of the state dict that is being put together.
#[derive(Default)]
struct Branch {
    places: HashMap<Key, usize>,
    children: Vec<(Key, Child)>,
}

enum Child {
    /// The number of the name.
    Leaf(usize),
    Branch(usize),
}

/// The pickle of the state dict that these names are of.
fn state_dict(metadata: &Metadata) -> Result<Graph, Fail> {
    let mut branches = vec![Branch::default()];
    for (number, named) in metadata.names.iter().enumerate() {
        let Some((last, above)) = named.keys.split_last() else { continue };
        let mut at = 0;
        for key in above {
            let next = branches.len();
            let place = branches[at].places.get(key).copied();
            at = match place.map(|place| &branches[at].children[place].1) {
                Some(Child::Branch(below)) => *below,
                Some(Child::Leaf(_)) => return bad("dcp: a name is a tensor and a mapping"),
                None => {
                    branches[at].add(key, Child::Branch(next));
                    branches.push(Branch::default());
                    next
                }
            };
        }
        if branches[at].places.contains_key(last) {
            return bad("dcp: two tensors of one name");
        }
        branches[at].add(last, Child::Leaf(number));
    }
    let mut graph = Graph::new();
    let states = branches.iter().filter_map(|branch| groups_of(&branches, branch).map(|(state, _)| state));
    let mut is_state = vec![false; branches.len()];
    states.for_each(|state| is_state[state] = true);
    let mut items: Vec<Item> = vec![Item::None; branches.len()];
    // A branch is made before those below it.
    for (at, branch) in branches.iter().enumerate().rev() {
        let groups = groups_of(&branches, branch).map(|(_, parameters)| parameters);
        let mut pairs = Vec::with_capacity(branch.children.len());
        for (key, child) in &branch.children {
            let value = match (child, groups) {
                (_, Some(parameters)) if *key == Key::name("param_groups") => made::one_group(&mut graph, parameters),
                (Child::Branch(below), _) => items[*below],
                (Child::Leaf(number), _) => match &metadata.names[*number].tensor {
                    Some(whole) => tensor(&mut graph, *number, whole),
                    None => Item::Scalar,
                },
            };
            let key = match key {
                // torch writes the number of a parameter as text. It must not pass for the name of one. Nor does the
                // order of numbers tell: ranks list their tensors one after the other.
                Key::Name(name) if is_state[at] => match name.bytes().all(|b| b.is_ascii_digit()) {
                    true => graph.add_text(&format!("[{name}]")),
                    false => graph.add_text(name),
                },
                Key::Name(name) => graph.add_text(name),
                Key::Number(n) => Item::Int(*n),
            };
            pairs.push((key, value));
        }
        items[at] = graph.add(Node::Dict(pairs));
    }
    graph.root = items[0];
    Ok(graph)
}

impl Branch {
    fn add(&mut self, key: &Key, child: Child) {
        self.places.insert(key.clone(), self.children.len());
        self.children.push((key.clone(), child));
    }

    fn below(&self, name: &str) -> Option<usize> {
        match self.children[*self.places.get(&Key::name(name))?].1 {
            Child::Branch(below) => Some(below),
            Child::Leaf(_) => None,
        }
    }
}

impl Key {
    fn name(name: &str) -> Key {
        Key::Name(name.to_string())
    }
}

impl Whole {
    /// The tensor's length in bytes. It is 0 if stepfs does not know the type.
    fn bytes(&self) -> Option<u64> {
        let Some(dtype) = self.dtype else { return Some(0) };
        self.shape.iter().try_fold(dtype.size() as u64, |bytes, &dim| bytes.checked_mul(dim))
    }
}

/// Of an optimizer's state dict, the branch `state` and the number of parameters that it keeps state of. Which
/// parameters a group lists stands in a file of chunks, so all of them count as one group.
fn groups_of(branches: &[Branch], branch: &Branch) -> Option<(usize, u64)> {
    let state = branch.below("state")?;
    branch.below("param_groups")?;
    Some((state, branches[state].children.len() as u64))
}

/// A tensor as torch pickles it; its storage's key is the number of its name.
fn tensor(graph: &mut Graph, number: usize, whole: &Whole) -> Item {
    // `places` has checked that lengths and dimensions fit.
    let tensor = made::tensor(graph, number, &whole.type_name, &whole.shape, whole.bytes().unwrap_or(0));
    graph.add(tensor)
}

impl Description {
    /// Gives each tensor of the `.distcp` file at `path` its name and its role. A tensor that the model does not list
    /// gets none, and is never quantized.
    pub fn name_chunks(&mut self, path: &Path, model: &Model) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let Some(Listed { chunks, .. }) = model.files.get(name.as_ref()) else {
            self.note = Some("dcp: .metadata does not tell of this file".to_string());
            return;
        };
        let mut places: HashMap<(usize, &[u64]), usize> = HashMap::new();
        let mut named = Vec::new();
        for (index, tensor) in self.tensors.iter().enumerate() {
            let at = chunks.partition_point(|chunk| chunk.extent.end <= tensor.extent.start);
            if let Some(chunk) = chunks.get(at).filter(|chunk| chunk.holds(tensor, &model.tensors[chunk.tensor]))
                && places.insert((chunk.tensor, &chunk.offsets), index).is_none()
            {
                named.push((index, chunk));
            }
        }
        if named.len() < self.tensors.len() {
            let unnamed = self.tensors.len() - named.len();
            self.note = Some(format!("dcp: {unnamed} tensors of which .metadata does not tell"));
        }
        let same = |a: &Tensor, b: &Tensor| a.shape == b.shape;
        let beside = |of: Option<usize>, chunk: &Chunk| places.get(&(of?, &chunk.offsets)).copied();
        let relations: Vec<_> = named
            .iter()
            .map(|(index, chunk)| {
                let (whole, tensor) = (&model.tensors[chunk.tensor], &self.tensors[*index]);
                let fits = |other: &usize| same(tensor, &self.tensors[*other]);
                (beside(whole.of, chunk).filter(fits), beside(whole.partner, chunk).filter(fits))
            })
            .collect();
        for ((index, chunk), (of, partner)) in named.into_iter().zip(relations) {
            let (whole, tensor) = (&model.tensors[chunk.tensor], &mut self.tensors[index]);
            tensor.path = chunk.path(whole, tensor);
            (tensor.role, tensor.why, tensor.used) = (whole.role, whole.why, whole.used);
            (tensor.lossless, tensor.trained) = (whole.lossless, whole.trained);
            (tensor.of, tensor.partner) = (of, partner);
            tensor.is_part_of(&whole.shape);
            if tensor.role == Role::FirstMoment && partner.is_none() {
                (tensor.role, tensor.why) = (Role::Optimizer, "a first moment whose second is in another file");
            }
        }
    }
}

impl Chunk {
    /// Whether a tensor of the file is this chunk of that tensor.
    fn holds(&self, tensor: &Tensor, whole: &Tensor) -> bool {
        let inside = |((&at, &len), &of): ((&u64, &u64), &u64)| at.checked_add(len).is_some_and(|end| end <= of);
        let ranks = [self.offsets.len(), tensor.shape.len(), whole.shape.len()];
        self.extent.start <= tensor.extent.start
            && tensor.extent.end <= self.extent.end
            && tensor.dtype == whole.dtype
            && ranks[0] == ranks[1]
            && ranks[1] == ranks[2]
            && self.offsets.iter().zip(&tensor.shape).zip(&whole.shape).all(inside)
    }

    /// The tensor's path, and of a part of it where it begins.
    fn path(&self, whole: &Tensor, chunk: &Tensor) -> String {
        if whole.shape == chunk.shape {
            return whole.path.clone();
        }
        let offsets: Vec<String> = self.offsets.iter().map(u64::to_string).collect();
        format!("{}[{}]", whole.path, offsets.join(","))
    }
}
