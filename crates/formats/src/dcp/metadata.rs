//! The pickle `.metadata`: `torch.distributed.checkpoint.metadata.Metadata`.

use std::collections::HashMap;
use std::ops::Range;

use super::super::ReadAt;
use super::super::content::{Key, MAX_DEPTH};
use super::super::pickle::{self, Graph, Item};
use super::super::read::{Fail, bad, refuse_if};
use super::super::view;
use codec::Dtype;

/// A name of the state dict.
#[derive(Debug)]
pub struct Named {
    /// The keys joined with dots. The table of files uses this name.
    pub(super) fqn: String,
    /// Keys from the state dict's root, where the planner has kept them; else the name alone.
    pub keys: Vec<Key>,
    /// `None` if the value is no tensor.
    pub tensor: Option<Whole>,
}

/// A tensor as a whole.
#[derive(Debug)]
pub struct Whole {
    /// `None` if stepfs does not know the type.
    pub dtype: Option<Dtype>,
    /// As torch calls it.
    pub(super) type_name: String,
    /// Shape.
    pub shape: Vec<u64>,
}

/// A chunk of a tensor in one of the files.
pub(super) struct Chunk {
    pub(super) fqn: String,
    /// Where it begins in the tensor, in elements by dimension.
    pub(super) offsets: Vec<u64>,
    /// Bytes of the file: its zip.
    pub(super) extent: Range<u64>,
}

/// The contents of `.metadata`.
pub(super) struct Metadata {
    pub(super) names: Vec<Named>,
    /// By name.
    pub(super) files: HashMap<String, File>,
}

/// The chunks and objects in a file of the checkpoint.
#[derive(Default)]
pub(super) struct File {
    /// Chunks of tensors, in the order of the table.
    pub(super) chunks: Vec<Chunk>,
    /// The end of the last value, in bytes: the file is at least so long.
    pub(super) end: u64,
}

/// Bytes of names, keys and offsets that are kept. A pickle may repeat a long name at the cost of two bytes.
const MAX_KEPT: usize = 128 << 20;

/// Counts the entries that are kept.
struct Budget(usize);

impl Budget {
    fn take(&mut self, bytes: usize) -> Result<(), Fail> {
        self.0 = self.0.saturating_sub(bytes + 64);
        refuse_if(self.0 == 0, "dcp: .metadata has too many names to keep")
    }
}

/// Reads the whole file.
pub(super) fn read(src: &dyn ReadAt) -> Result<Metadata, Fail> {
    let graph = pickle::load(src, 0, src.size())?;
    let graph = &graph;
    let class = |item| class(graph, item);
    refuse_if(class(graph.root) != Some("Metadata"), "dcp: .metadata is no pickle of torch's Metadata")?;
    let (Some(state_dict), Some(storage)) =
        (attribute(graph, graph.root, "state_dict_metadata"), attribute(graph, graph.root, "storage_data"))
    else {
        return bad("dcp: .metadata names no tensors or no files");
    };
    let planner = attribute(graph, graph.root, "planner_data").unwrap_or(Item::None);
    let keys: HashMap<&str, Item> =
        graph.pairs(planner).iter().filter_map(|&(fqn, keys)| Some((graph.str(fqn)?, keys))).collect();
    let mut budget = Budget(MAX_KEPT);
    let mut names = Vec::new();
    for &(fqn, about) in graph.pairs(state_dict) {
        let fqn = graph.str(fqn).ok_or("dcp: a name that is no text")?;
        let tensor = match class(about) {
            Some("TensorStorageMetadata") => Some(whole(graph, about)?),
            _ => None,
        };
        let many = keys.get(fqn).and_then(|&keys| graph.tuple(keys)).is_some_and(|keys| keys.len() > MAX_DEPTH);
        refuse_if(many, "dcp: a name has more than 64 keys")?;
        let steps = keys.get(fqn).and_then(|&keys| steps(graph, keys));
        let keys = steps.unwrap_or_else(|| vec![Key::Name(fqn.to_string())]);
        budget.take(fqn.len() + 2 * keys.iter().map(Key::size).sum::<usize>())?;
        names.push(Named { fqn: fqn.to_string(), keys, tensor });
    }
    let mut files: HashMap<String, File> = HashMap::new();
    for &(index, place) in graph.pairs(storage) {
        let name = attribute(graph, place, "relative_path")
            .and_then(|path| graph.str(path))
            .ok_or("dcp: a tensor without a file")?;
        // A name in the directory: nothing else is looked for.
        refuse_if(name.is_empty() || name.contains('/') || name == "..", "dcp: a tensor in a file elsewhere")?;
        budget.take(name.len())?;
        let file = files.entry(name.to_string()).or_default();
        let extent = extent(graph, place).ok_or("dcp: a place that makes no sense")?;
        file.end = file.end.max(extent.end);
        if let Some(chunk) = chunk(graph, index, extent)? {
            budget.take(chunk.fqn.len() + 8 * chunk.offsets.len())?;
            file.chunks.push(chunk);
        }
    }
    Ok(Metadata { names, files })
}

/// The name of an object's class.
fn class(graph: &Graph, item: Item) -> Option<&str> {
    Some(graph.global(graph.object(item)?.func)?.1)
}

/// An attribute of a dataclass, from the state that it was pickled with.
fn attribute(graph: &Graph, item: Item, name: &str) -> Option<Item> {
    graph.object(item)?.states.iter().find_map(|&state| graph.get(state, name))
}

/// The keys from the root, as the planner keeps them: a tuple of texts and numbers.
fn steps(graph: &Graph, keys: Item) -> Option<Vec<Key>> {
    let key = |item: &Item| match *item {
        Item::Int(n) => u64::try_from(n).ok().map(Key::Index),
        item => graph.str(item).map(|name| Key::Name(name.to_string())),
    };
    let keys: Option<Vec<Key>> = graph.tuple(keys)?.iter().map(key).collect();
    keys.filter(|keys| !keys.is_empty())
}

fn whole(graph: &Graph, about: Item) -> Result<Whole, Fail> {
    let shape = attribute(graph, about, "size").and_then(|size| view::sizes(graph, size));
    let shape = shape.ok_or("dcp: a tensor without a shape")?;
    let type_name = attribute(graph, about, "properties").and_then(|properties| type_name(graph, properties));
    let type_name = type_name.unwrap_or_default().to_string();
    Ok(Whole { dtype: view::dtype_named(&type_name), type_name, shape })
}

/// The name of the element type, which `TensorProperties` begin with.
fn type_name(graph: &Graph, properties: Item) -> Option<&str> {
    let first = *graph.tuple(*graph.object(properties)?.states.first()?)?.first()?;
    graph.global(first).filter(|(module, _)| *module == "torch").map(|(_, name)| name)
}

/// The bytes of a value in its file.
fn extent(graph: &Graph, place: Item) -> Option<Range<u64>> {
    let number = |name| attribute(graph, place, name)?.natural();
    let start = number("offset")?;
    Some(start..start.checked_add(number("length")?)?)
}

/// An entry of the table of files; `None` if it is no chunk of a tensor.
fn chunk(graph: &Graph, index: Item, extent: Range<u64>) -> Result<Option<Chunk>, Fail> {
    let Some(offsets) = attribute(graph, index, "offset").filter(|offset| *offset != Item::None) else {
        return Ok(None);
    };
    let fqn = attribute(graph, index, "fqn").and_then(|fqn| graph.str(fqn)).map(String::from);
    match fqn.zip(view::sizes(graph, offsets)) {
        Some((fqn, offsets)) => Ok(Some(Chunk { fqn, offsets, extent })),
        None => bad("dcp: a chunk that makes no sense"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_too_many_keys_is_refused() {
        let text = |text: &str| [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
        let pickle = |count: usize| {
            let mut pickle = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}(".to_vec();
            pickle.extend([text("state_dict_metadata"), b"}(".to_vec(), text("w"), b"Nu".to_vec()].concat());
            let keys = b"K\x01".repeat(count);
            pickle.extend(
                [text("planner_data"), b"}(".to_vec(), text("w"), b"(".to_vec(), keys, b"tu".to_vec()].concat(),
            );
            pickle.extend([text("storage_data"), b"}ub.".to_vec()].concat());
            pickle
        };
        assert_eq!(read(&pickle(64)).map(|metadata| metadata.names[0].keys.len()).ok(), Some(64));
        assert!(read(&pickle(65)).is_err());
    }
}
