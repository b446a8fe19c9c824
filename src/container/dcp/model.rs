//! What the chunks of a distributed checkpoint are to training: the whole state dict, put together from `.metadata`.
//!
//! The state dict is built as torch.save would have pickled it, and walked as such a pickle is. So a tensor has the same path, the
//! same role and the same proof in both formats, and shapes are compared whole, however they are cut among the ranks.

use std::collections::HashMap;
use std::io;
use std::ops::Range;

use super::super::pickle::{Elements, Graph, Item, Node, Object};
use super::super::proof::{Trained, Training};
use super::super::read::{Fail, bad};
use super::super::storages::{Record, Records, Storages};
use super::super::walk::walk;
use super::super::{Description, ReadAt, Role, Tensor};
use super::metadata::{self, Key, Metadata, Whole};

/// The tensors of a distributed checkpoint, as a whole.
#[derive(Debug)]
pub struct Model {
    /// In the order of the state dict. Their extents are places in no file.
    tensors: Vec<Tensor>,
    training: Training,
    /// By name of the file, by ascending extent.
    chunks: HashMap<String, Vec<Chunk>>,
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
            Err(Fail::Bad(why)) => Err(io::Error::new(io::ErrorKind::InvalidData, why)),
        }
    }

    /// All tensors, whole. Their extents are places in no file.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The parameters that the checkpoint's optimizers train.
    pub fn optimizers(&self) -> &[Trained] {
        &self.training.optimizers
    }

    /// Names of the files that hold the tensors, sorted.
    pub fn files(&self) -> Vec<&str> {
        let mut files: Vec<&str> = self.chunks.keys().map(String::as_str).collect();
        files.sort_unstable();
        files
    }

    fn of(metadata: Metadata) -> Result<Model, Fail> {
        let payloads = Payloads::of(&metadata)?;
        let graph = state_dict(&metadata)?;
        let mut storages = Storages::new(&payloads);
        let optimizers = walk(&graph, &mut storages)?;
        let ((tensors, training), names, _) = storages.finish(&optimizers);
        let of_name: HashMap<u32, usize> = names.into_iter().enumerate().map(|(tensor, name)| (name, tensor)).collect();
        let of_fqn = metadata.names.iter().enumerate().map(|(name, named)| (named.fqn.as_str(), name as u32));
        let of_fqn: HashMap<&str, usize> = of_fqn.filter_map(|(fqn, name)| Some((fqn, *of_name.get(&name)?))).collect();
        let mut chunks: HashMap<String, Vec<Chunk>> = HashMap::new();
        for (file, listed) in metadata.chunks {
            let chunk = |chunk: metadata::Chunk| {
                let tensor = *of_fqn.get(chunk.fqn.as_str())?;
                Some(Chunk { extent: chunk.extent, tensor, offsets: chunk.offsets })
            };
            let mut listed: Vec<Chunk> = listed.into_iter().filter_map(chunk).collect();
            listed.sort_by_key(|chunk| chunk.extent.start);
            if listed.windows(2).any(|pair| pair[1].extent.start < pair[0].extent.end) {
                return bad("dcp: two tensors at one place of a file");
            }
            chunks.insert(file, listed);
        }
        Ok(Model { tensors, training, chunks })
    }
}

/// Makes up a place for each tensor, in the order of the state dict: what is walked wants places.
struct Payloads(Vec<Range<u64>>);

impl Payloads {
    fn of(metadata: &Metadata) -> Result<Payloads, Fail> {
        let mut end = 0u64;
        let mut payloads = Vec::with_capacity(metadata.names.len());
        for named in &metadata.names {
            let len = named.tensor.as_ref().map_or(Some(0), Whole::bytes);
            let Some(next) = len.and_then(|len| end.checked_add(len)).filter(|end| *end <= i64::MAX as u64) else {
                return bad("dcp: a shape is too large");
            };
            payloads.push(end..next);
            end = next;
        }
        Ok(Payloads(payloads))
    }
}

impl Records for Payloads {
    fn record(&self, key: &str) -> Option<Record> {
        let number: u32 = key.parse().ok()?;
        Some(Record { number, payload: self.0.get(number as usize)?.clone(), stored: true })
    }
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
    let groups = |branch: &Branch| groups_of(&branches, branch);
    let mut items: Vec<Item> = vec![Item::None; branches.len()];
    // A branch is made before those below it.
    for (at, branch) in branches.iter().enumerate().rev() {
        let groups = groups(branch);
        let mut pairs = Vec::with_capacity(branch.children.len());
        for (key, child) in &branch.children {
            let value = match (child, groups) {
                (_, Some(parameters)) if *key == Key::name("param_groups") => one_group(&mut graph, parameters),
                (Child::Branch(below), _) => items[*below],
                (Child::Leaf(number), _) => match &metadata.names[*number].tensor {
                    Some(whole) => tensor(&mut graph, *number, whole),
                    None => Item::Scalar,
                },
            };
            let key = match key {
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

    fn below<'b>(&self, branches: &'b [Branch], name: &str) -> Option<&'b Branch> {
        match self.children[*self.places.get(&Key::name(name))?].1 {
            Child::Branch(below) => Some(&branches[below]),
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
    /// Its length in bytes; 0 if the type is not known.
    fn bytes(&self) -> Option<u64> {
        let Some(dtype) = self.dtype else { return Some(0) };
        self.shape.iter().try_fold(dtype.size() as u64, |bytes, &dim| bytes.checked_mul(dim))
    }
}

/// Of an optimizer's state dict, how many parameters it keeps state of, where they may count as one group. Which parameters a
/// group lists stands in another file: where they have numbers, and there are several groups, nobody knows which is whose.
fn groups_of(branches: &[Branch], branch: &Branch) -> Option<u64> {
    let state = branch.below(branches, "state")?;
    let groups = branch.below(branches, "param_groups")?;
    let named = state.children.iter().all(|(key, _)| matches!(key, Key::Name(_)));
    (named || groups.children.len() == 1).then_some(state.children.len() as u64)
}

/// `param_groups` with one group of so many parameters.
fn one_group(graph: &mut Graph, parameters: u64) -> Item {
    let params = graph.add(Node::List(Elements { len: parameters, nodes: Vec::new() }));
    let name = graph.add_text("params");
    let Item::Node(group) = graph.add(Node::Dict(vec![(name, params)])) else { return Item::None };
    graph.add(Node::List(Elements { len: 1, nodes: vec![(0, group)] }))
}

/// A tensor as torch pickles one of any type; its storage's key is the number of its name.
fn tensor(graph: &mut Graph, number: usize, whole: &Whole) -> Item {
    // Neither is more than `Payloads` has found to fit.
    let int = |n: u64| Item::Int(n as i64);
    let bytes = whole.bytes().unwrap_or(0);
    let mut step = 1u64;
    let mut strides: Vec<Item> = Vec::with_capacity(whole.shape.len());
    for &dim in whole.shape.iter().rev() {
        strides.push(int(step));
        step = step.saturating_mul(dim.max(1));
    }
    strides.reverse();
    let global = |graph: &mut Graph, module: &str, name: &str| {
        let (module, name) = (graph.add_text(module), graph.add_text(name));
        graph.add(Node::Global(module, name))
    };
    let class = global(graph, "torch.storage", "UntypedStorage");
    let id = [graph.add_text("storage"), class, graph.add_text(&number.to_string()), Item::None, int(bytes)];
    let id = graph.add_tuple(&id);
    let storage = graph.add(Node::Persid(id));
    let shape: Vec<Item> = whole.shape.iter().map(|&dim| int(dim)).collect();
    let (shape, strides) = (graph.add_tuple(&shape), graph.add_tuple(&strides));
    let dtype = global(graph, "torch", &whole.type_name);
    let args = graph.add_tuple(&[storage, Item::Int(0), shape, strides, Item::Bool(false), Item::None, dtype]);
    let func = global(graph, "torch._utils", "_rebuild_tensor_v3");
    let (pairs, list, states) = (Vec::new(), Elements::default(), Vec::new());
    graph.add(Node::Object(Box::new(Object { func, args, kwargs: Item::None, pairs, list, states })))
}

impl Description {
    /// Says of each tensor of a `.distcp` file what it is to training. `file` is the file's name in its directory. What the model does
    /// not tell of stays unnamed, and is never quantized.
    pub fn name_chunks(&mut self, file: &str, model: &Model) {
        let Some(chunks) = model.chunks.get(file) else {
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
