//! This module puts the whole state dict together from `.metadata`. It tells what each chunk is to training.
//!
//! The state dict is built as torch.save would have pickled it, and walked as such a pickle is. So a tensor has the
//! same path, the same role and the same proof in both formats, and shapes are compared whole, however they are cut
//! among the ranks.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::Path;

use super::super::content::Key;
use super::super::made::{self, Places};
use super::super::pickle::{Graph, Item, Node};
use super::super::proof::{Trained, Training};
use super::super::read::{Fail, bad, bytes, refuse_if};
use super::super::storages::Stored;
use super::super::{Description, Kind, ReadAt, Role, Tensor, walk};
use super::metadata::{self, Metadata, Named, Whole};

/// The tensors of a distributed checkpoint, as a whole.
#[derive(Debug)]
pub struct Model {
    /// In the order of the state dict. Their extents are places in no file.
    tensors: Vec<Tensor>,
    training: Training,
    /// All names of the state dict.
    names: Vec<Named>,
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
    /// Index of its tensor, and of that one's name.
    tensor: usize,
    name: usize,
    /// Where it begins in the tensor, in elements by dimension.
    offsets: Vec<u64>,
}

impl Model {
    /// Reads `.metadata`. Nothing in it is executed. Memory: as for a pickle of torch.save.
    ///
    /// # Errors
    /// `InvalidData` where it is not what torch writes, in words; whatever `src` reports.
    pub fn read(src: &dyn ReadAt) -> io::Result<Model> {
        Ok(metadata::read(src).and_then(Model::of)?)
    }

    /// The container of its files.
    pub fn kind(&self) -> Kind {
        Kind::Dcp
    }

    /// All tensors, whole. Their extents are places in no file.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// All names of the state dict, those without a tensor too.
    pub fn names(&self) -> &[Named] {
        &self.names
    }

    /// Of the chunk at a byte of a file: the index of its tensor's name, that one's role, and where the chunk begins in it.
    /// `None` if no tensor is there.
    pub fn chunk(&self, file: &str, at: u64) -> Option<(usize, Role, &[u64])> {
        let chunks = &self.files.get(file)?.chunks;
        let chunk = chunks.get(chunks.partition_point(|chunk| chunk.extent.end <= at))?;
        let role = self.tensors[chunk.tensor].role;
        (chunk.extent.start <= at).then_some((chunk.name, role, &chunk.offsets))
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
        let Stored { tensors, training, numbers, .. } = walk::tensors(&graph, &places)?;
        let of_name: HashMap<u32, usize> =
            numbers.into_iter().enumerate().map(|(tensor, name)| (name, tensor)).collect();
        let of_fqn = metadata.names.iter().enumerate().map(|(name, named)| (named.fqn.as_str(), name as u32));
        let of_fqn = of_fqn.filter_map(|(fqn, name)| Some((fqn, (*of_name.get(&name)?, name as usize))));
        let of_fqn: HashMap<&str, (usize, usize)> = of_fqn.collect();
        let mut files: HashMap<String, Listed> = HashMap::new();
        for (name, file) in metadata.files {
            let chunk = |chunk: metadata::Chunk| {
                let (tensor, name) = *of_fqn.get(chunk.fqn.as_str())?;
                Some(Chunk { extent: chunk.extent, tensor, name, offsets: chunk.offsets })
            };
            let mut chunks: Vec<Chunk> = file.chunks.into_iter().filter_map(chunk).collect();
            chunks.sort_by_key(|chunk| chunk.extent.start);
            if chunks.windows(2).any(|pair| pair[1].extent.start < pair[0].extent.end) {
                return bad("dcp: two tensors at one place of a file");
            }
            files.insert(name, Listed { chunks, end: file.end });
        }
        Ok(Model { tensors, training, names: metadata.names, files })
    }
}

/// A made-up place for each tensor, in the order of the state dict. The walk needs one.
fn places(metadata: &Metadata) -> Result<Places, Fail> {
    let mut end = 0u64;
    let mut places = Vec::with_capacity(metadata.names.len());
    for named in &metadata.names {
        let len = named.tensor.as_ref().map_or(Some(0), Whole::bytes);
        let next = len
            .and_then(|len| end.checked_add(len))
            .filter(|end| *end <= i64::MAX as u64)
            .ok_or("dcp: a shape is too large")?;
        places.push(end..next);
        end = next;
    }
    Ok(Places(places))
}

/// The pickle of the state dict that these names are of.
fn state_dict(metadata: &Metadata) -> Result<Graph, Fail> {
    let mut graph = Graph::new();
    let mut mappings = Vec::new();
    let mut mapping = |graph: &mut Graph| {
        mappings.push(graph.len() as u32);
        graph.add(Node::Dict(Vec::new()));
        graph.len() as u32 - 1
    };
    let root = mapping(&mut graph);
    graph.root = Item::Node(root);
    // The mapping under a key of another one; `None` for anything else.
    let mut below: HashMap<(u32, &Key), Option<u32>> = HashMap::new();
    for (number, named) in metadata.names.iter().enumerate() {
        let Some((last, above)) = named.keys.split_last() else { continue };
        let mut at = root;
        for key in above {
            at = match below.get(&(at, key)) {
                Some(Some(below)) => *below,
                Some(None) => return bad("dcp: a name is a tensor and a mapping"),
                None => {
                    let new = mapping(&mut graph);
                    put(&mut graph, at, key, Item::Node(new));
                    below.insert((at, key), Some(new));
                    new
                }
            };
        }
        refuse_if(below.insert((at, last), None).is_some(), "dcp: two tensors of one name")?;
        let value = match &named.tensor {
            Some(whole) => tensor(&mut graph, number, whole),
            None => Item::Scalar,
        };
        put(&mut graph, at, last, value);
    }
    mappings.into_iter().for_each(|mapping| optimizer(&mut graph, mapping));
    Ok(graph)
}

/// Puts a value under a key of a mapping.
fn put(graph: &mut Graph, mapping: u32, key: &Key, value: Item) {
    let key = match key {
        Key::Name(name) => graph.add_text(name),
        Key::Number(n) => Item::Int(*n),
        Key::Index(n) => Item::Int(*n as i64),
    };
    if let Node::Dict(pairs) = graph.node_mut(mapping) {
        pairs.push((key, value));
    }
}

/// Rewrites a mapping that is an optimizer's state dict. Which parameters a group lists stands in a file of chunks, so all
/// of those that it keeps state of count as one group.
fn optimizer(graph: &mut Graph, mapping: u32) {
    let get = |name| match graph.named(graph.pairs(Item::Node(mapping)), name)? {
        Item::Node(n) => matches!(graph.node(n), Node::Dict(_)).then_some(n),
        _ => None,
    };
    let (Some(state), Some(groups)) = (get("state"), get("param_groups")) else { return };
    // torch writes the number of a parameter as text. It must not pass for the name of one. Nor does the order of
    // numbers tell: ranks list their tensors one after the other.
    let mut states = graph.pairs(Item::Node(state)).to_vec();
    for (key, _) in &mut states {
        let number = graph.str(*key).filter(|name| name.bytes().all(|b| b.is_ascii_digit()));
        if let Some(name) = number.map(|number| format!("[{number}]")) {
            *key = graph.add_text(&name);
        }
    }
    let group = made::one_group(graph, states.len() as u64);
    *graph.node_mut(state) = Node::Dict(states);
    let mut pairs = graph.pairs(Item::Node(mapping)).to_vec();
    pairs.iter_mut().filter(|pair| pair.1 == Item::Node(groups)).for_each(|pair| pair.1 = group);
    *graph.node_mut(mapping) = Node::Dict(pairs);
}

impl Whole {
    /// The tensor's length in bytes. It is 0 if stepfs does not know the type.
    fn bytes(&self) -> Option<u64> {
        let Some(dtype) = self.dtype else { return Some(0) };
        bytes(&self.shape, dtype.size() as u64)
    }
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
