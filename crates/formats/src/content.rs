//! The tensors of a file as a program would load them: each under its own name, with its own shape and strides, however
//! many of them share a storage.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io;

use super::pickle::{Graph, Item, Node};
use super::read::{Fail, bad, bytes};
use super::storages::Records;
use super::view::{self, Strided};
use super::zip::Zip;
use super::{ReadAt, safetensors, torch};
use codec::Dtype;

/// One step of a tensor's name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    /// Of a dictionary.
    Name(String),
    /// Of a dictionary that has numbers as keys.
    Number(i64),
    /// A place in a list.
    Index(u64),
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Key::Name(name) => f.write_str(name),
            Key::Number(number) => number.fmt(f),
            Key::Index(index) => index.fmt(f),
        }
    }
}

impl Key {
    /// Bytes of memory.
    pub(super) fn size(&self) -> usize {
        match self {
            Key::Name(name) => name.len() + 32,
            Key::Number(_) | Key::Index(_) => 32,
        }
    }
}

/// The keys of a tensor as one name, with dots between them.
pub fn dotted(keys: &[Key]) -> String {
    keys.iter().map(Key::to_string).collect::<Vec<_>>().join(".")
}

/// The elements of a tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Elements {
    /// Element type.
    pub dtype: Dtype,
    /// Shape; of a single number empty.
    pub shape: Vec<u64>,
    /// Of each dimension the distance from one element to the next, in elements.
    pub strides: Vec<u64>,
    /// Place of the first element in the file, in bytes.
    pub at: u64,
}

/// The content of a file of torch, of a distributed checkpoint, or of a safetensors file.
#[derive(Debug, Default)]
pub struct Content {
    /// In the file's order, with the keys from its root.
    pub tensors: Vec<(Vec<Key>, Elements)>,
    /// Number of values that are no tensors. An object counts as one.
    pub others: u64,
}

/// Tensors and containers that are looked at. A pickle may name one dictionary in many places.
const MAX_VALUES: usize = 1 << 19;

/// Deepest nesting: real files have ten levels.
pub(super) const MAX_DEPTH: usize = 64;

/// Tied names of a safetensors file that are kept: real models have a few.
const MAX_TIED: usize = 1 << 16;

/// Bytes of keys that are kept. Real files have some 100 for each value, and a pickle may repeat a long key.
const MAX_KEYS: usize = 256 << 20;

impl Content {
    /// Reads names and places of all tensors in dictionaries, lists and tuples. All elements lie inside of the file. Nothing
    /// in it is executed.
    ///
    /// # Errors
    /// `InvalidData` where a tensor cannot be told exactly, in words; whatever `src` reports.
    pub fn read(src: &dyn ReadAt) -> io::Result<Content> {
        Content::of(src).map_err(io::Error::from)
    }

    fn of(src: &dyn ReadAt) -> Result<Content, Fail> {
        let (mut content, size) = (Content::default(), src.size());
        if Zip::is_zip(src, size)? {
            let mut kept = 0;
            for zip in Zip::read_chain(src, size)? {
                let (graph, records) = torch::load(src, &zip)?;
                content.add(&graph, &records, &mut kept)?;
            }
            return Ok(content);
        }
        let Some((payload, arrays)) = safetensors::arrays(src, size)? else {
            return bad("neither of torch nor safetensors");
        };
        for array in arrays {
            let len = array.extent.end.checked_sub(array.extent.start).filter(|_| array.extent.end <= size);
            let Some(dtype) = array.dtype else { return bad(format!("{}: {UNKNOWN}", array.name)) };
            if len.is_none() || bytes(&array.shape, dtype.size() as u64) != len {
                return bad(format!("{}: its shape does not fit its bytes", array.name));
            }
            let elements = Elements::contiguous(dtype, array.shape, array.extent.start);
            content.tensors.push((vec![Key::Name(array.name)], elements));
        }
        let mut header = vec![0; payload as usize - 8];
        src.read_exact_at(&mut header, 8)?;
        content.add_tied(&header);
        Ok(content)
    }

    /// Adds the names that `save_model` of safetensors tells in the metadata: `{"tied": "written"}`.
    fn add_tied(&mut self, header: &[u8]) {
        #[derive(serde::Deserialize)]
        struct Header {
            #[serde(rename = "__metadata__", default)]
            metadata: BTreeMap<String, String>,
        }
        let Ok(Header { metadata }) = serde_json::from_slice(header) else { return };
        let written: HashMap<_, _> = self.tensors.iter().map(|(keys, elements)| (dotted(keys), elements)).collect();
        let tied = metadata.iter().filter(|(tied, _)| *tied != "format" && !written.contains_key(*tied));
        let tied = tied.filter_map(|(tied, of)| Some((vec![Key::Name(tied.clone())], (*written.get(of)?).clone())));
        let tied: Vec<_> = tied.take(MAX_TIED).collect();
        self.tensors.extend(tied);
    }

    /// Adds what is below a pickle's root, depth first. `kept` counts bytes of keys.
    fn add(&mut self, graph: &Graph, records: &dyn Records, kept: &mut usize) -> Result<(), Fail> {
        let mut stack = vec![(graph.root, Vec::<Key>::new())];
        let mut seen = 0;
        while let Some((item, keys)) = stack.pop() {
            if seen > MAX_VALUES || *kept > MAX_KEYS || keys.len() > MAX_DEPTH {
                return bad("torch: values are nested too deeply, or are too many");
            }
            if view::is_tensor(graph, item) {
                match elements(graph, item, records) {
                    Ok(elements) => self.tensors.push((keys, elements)),
                    Err(why) => return bad(format!("{}: {why}", dotted(&keys))),
                }
                continue;
            }
            let (before, above) = (stack.len(), keys.iter().map(Key::size).sum::<usize>());
            let mut others = 0;
            let mut below = |key: Option<Key>, item: Item| match (key, item) {
                (Some(key), Item::Node(_)) => {
                    seen += 1;
                    *kept += above + key.size();
                    if seen <= MAX_VALUES && *kept <= MAX_KEYS {
                        stack.push((item, [&keys[..], &[key]].concat()));
                    }
                }
                _ => others += 1,
            };
            match item {
                Item::Node(node) => match graph.node(node) {
                    Node::Tuple { .. } => {
                        let items = graph.tuple(item).unwrap_or_default().iter();
                        items.zip(0..).for_each(|(item, at)| below(Some(Key::Index(at)), *item));
                    }
                    Node::List(list) => {
                        list.nodes.iter().for_each(|(at, node)| below(Some(Key::Index(*at)), Item::Node(*node)));
                        others += list.len - list.nodes.len() as u64;
                    }
                    Node::Dict(pairs) => {
                        pairs.iter().for_each(|(key, value)| below(of_dictionary(graph, *key), *value))
                    }
                    // OrderedDict, defaultdict.
                    Node::Object(object) if graph.global(object.func).is_some_and(|(of, _)| of == "collections") => {
                        object.pairs.iter().for_each(|(key, value)| below(of_dictionary(graph, *key), *value));
                    }
                    _ => others += 1,
                },
                _ => others += 1,
            }
            self.others += others;
            stack[before..].reverse();
        }
        Ok(())
    }
}

/// The key that stepfs can write; `None` for anything but text and numbers.
fn of_dictionary(graph: &Graph, key: Item) -> Option<Key> {
    match key {
        Item::Int(number) => Some(Key::Number(number)),
        key => graph.str(key).map(|name| Key::Name(name.to_string())),
    }
}

const UNKNOWN: &str = "an element type that stepfs does not know";

/// The elements of a tensor of a pickle, or why they cannot be told.
fn elements(graph: &Graph, item: Item, records: &dyn Records) -> Result<Elements, &'static str> {
    let (Some(view), Some(strided)) = (view::view(graph, item), view::strided(graph, item)) else {
        return Err("a kind of tensor that stepfs does not know");
    };
    let Strided { offset, shape, strides } = strided;
    let dtype = view.dtype.ok_or(UNKNOWN)?;
    if view.whole.is_some() {
        return Err("a rank's part of a distributed tensor; save the whole, or a distributed checkpoint");
    }
    let record = records.record(view.storage.key).filter(|record| record.stored && !view.storage.part);
    let payload = record.ok_or("its storage is not in the file, or compressed")?.payload;
    let len = payload.end - payload.start;
    if view.storage.unit().and_then(|unit| unit.checked_mul(view.storage.len)) != Some(len) {
        return Err("its storage does not fit its record");
    }
    let size = dtype.size() as u64;
    if shape.contains(&0) {
        return Ok(Elements { dtype, shape, strides, at: payload.start });
    }
    let last =
        shape.iter().zip(&strides).try_fold(offset, |at, (dim, step)| (dim - 1).checked_mul(*step)?.checked_add(at));
    let end = last.and_then(|last| last.checked_add(1)?.checked_mul(size));
    // Elements that are repeated have no bytes of their own.
    if end.is_none_or(|end| end > len) || bytes(&shape, size).is_none() {
        return Err("elements outside of its storage");
    }
    Ok(Elements { dtype, shape, strides, at: payload.start + offset * size })
}

impl Elements {
    /// Elements without gaps, in order.
    pub fn contiguous(dtype: Dtype, shape: Vec<u64>, at: u64) -> Elements {
        let mut strides = vec![1u64; shape.len()];
        for dim in (1..shape.len()).rev() {
            strides[dim - 1] = strides[dim].saturating_mul(shape[dim].max(1));
        }
        Elements { dtype, shape, strides, at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tied_names_of_the_metadata_are_tensors() {
        let header = br#"{"__metadata__":{"b":"a","format":"a","c":"none"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}"#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header, b"xy"].concat();
        let tensors = Content::read(&file).unwrap().tensors;
        let names: Vec<_> = tensors.iter().map(|(keys, _)| dotted(keys)).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(tensors[0].1, tensors[1].1);
    }

    /// A list that names one tensor often, below long keys, is refused before its names fill the memory.
    #[test]
    fn keys_are_bounded() {
        const COUNT: usize = 400_000;
        let key = [&b"X"[..], &1_000u32.to_le_bytes(), &[b'k'; 1_000]].concat();
        let mut pickle = b"\x80\x02".to_vec();
        (0..50).for_each(|_| pickle.extend([&b"}"[..], &key].concat()));
        pickle.extend(b"](");
        // One empty tuple of a name, then again and again.
        pickle.extend(b")q\0");
        (0..COUNT).for_each(|_| pickle.extend(b"h\0"));
        pickle.push(b'e');
        (0..50).for_each(|_| pickle.push(b's'));
        pickle.push(b'.');
        let graph = super::super::pickle::load(&pickle, 0, pickle.len() as u64).unwrap();
        struct NoRecords;
        impl Records for NoRecords {
            fn record(&self, _: &str) -> Option<super::super::storages::Record> {
                None
            }
        }
        assert!(Content::default().add(&graph, &NoRecords, &mut 0).is_err());
    }
}
