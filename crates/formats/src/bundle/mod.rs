//! Bundles of TensorFlow (`tf.train.Checkpoint`): tensors lie in `NAME.data-00000-of-00001`, their names and places in
//! `NAME.index`.
//!
//! The index also has a CRC-32C of each tensor, which TensorFlow checks when it reads one. Two files cannot change in
//! one moment, so the index never changes: a quantized tensor keeps its CRC ([`steady`]).

mod graph;
pub(super) mod steady;
mod table;
mod wire;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use self::graph::Graph;
use self::steady::{Steady, TAIL_BYTES};
use self::table::{Entry, Table};
use self::wire::Fields;
use super::patch::Checksums;
use super::proof::Training;
use super::protobuf::data_type;
use super::read::{Fail, bad, bytes, refuse_if};
use super::role::{self, Context};
use super::slots::{Optimizers, Parameter, Standing};
use super::{Description, Kind, ReadAt, Role, Tensor, named, pairing, path};

/// Key of the object graph, and the number of its type.
const GRAPH: &str = "_CHECKPOINTABLE_OBJECT_GRAPH";
const TEXT: u64 = 7;
/// Largest object graph that is read, in bytes. A model of 10,000 variables has 4 MiB.
const MAX_GRAPH: u64 = 16 << 20;

/// The end of most keys.
const VALUE: &str = "/.ATTRIBUTES/VARIABLE_VALUE";

/// Most files of one bundle: a parameter server has one each.
const MAX_SHARDS: u64 = 1024;

/// Shorter tensors stay exact: the end that keeps a checksum would be most of them.
const MIN_BYTES: u64 = 4 * TAIL_BYTES;

/// Standings: one mapping of weights, and the optimizers.
const MODEL: u32 = 0;
const STATE: u32 = 1;

const WEIGHT: &str = "floating point, in a bundle of TensorFlow";
const LISTED: &str = "Keras lists it among the variables that an optimizer trains";
const OF_OPTIMIZER: (Role, &str) = (Role::Optimizer, "a variable of an optimizer");

/// A file's part in its bundle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shard {
    /// The index beside it.
    pub(super) index: PathBuf,
    number: u64,
    of: u64,
    prefix: PathBuf,
}

impl Shard {
    /// By the name of a file with tensors; `None` for any other.
    pub(super) fn of(path: &Path) -> Option<Shard> {
        let name = path.file_name()?.to_str()?;
        let (prefix, numbers) = name.rsplit_once(".data-")?;
        let (number, of) = numbers.split_once("-of-")?;
        let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        let parse = |text: &str| text.parse().ok().filter(|_| is_number(text));
        let (number, of) = (parse(number)?, parse(of)?);
        (number < of && of <= MAX_SHARDS).then(|| {
            let prefix = path.with_file_name(prefix);
            Shard { index: with_end(&prefix, ".index"), number, of, prefix }
        })
    }

    /// All files with tensors of its bundle.
    pub(super) fn files(&self) -> impl Iterator<Item = PathBuf> {
        (0..self.of).map(|number| with_end(&self.prefix, &format!(".data-{number:05}-of-{:05}", self.of)))
    }
}

fn with_end(prefix: &Path, end: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_os_string();
    name.push(end);
    PathBuf::from(name)
}

/// Describes a file with tensors of a bundle, by its index.
pub(super) fn describe(src: &dyn ReadAt, index: &dyn ReadAt, shard: &Shard) -> Result<Description, Fail> {
    let Table { shards, mut entries } = table::read(index)?;
    refuse_if(shards != shard.of, "TensorFlow: the index is of another number of files")?;
    entries.retain(|entry| entry.shard == shard.number && !entry.is_parted);
    entries.sort_by_key(|entry| entry.offset);
    let mut end = 0;
    for entry in &entries {
        refuse_if(entry.offset < end, "TensorFlow: two tensors at one place")?;
        end = entry.offset.saturating_add(entry.size);
    }
    refuse_if(end > src.size(), "TensorFlow: a tensor is beyond the end of the file")?;
    let text = entries.iter().find(|entry| entry.key == GRAPH && entry.kind == TEXT);
    let text = text.map(|entry| graph(src, entry)).transpose()?;
    let graph = text.as_deref().map(Graph::read).transpose()?;
    let mut found = Found::default();
    for entry in entries {
        found.add(entry)?;
    }
    let Found { mut tensors, keys, crcs } = found;
    let training = relate(&mut tensors, &keys, graph.as_ref());
    refuse_if(Description::has_twins(&tensors), "TensorFlow: two tensors of one name")?;
    for tensor in tensors.iter_mut().filter(|tensor| tensor.tail() == 0) {
        tensor.lossless = true;
    }
    let checksums = Some(Checksums::Steady(Steady { crcs }));
    Ok(Description { checksums, ..Description::new(Kind::Bundle, tensors, training) })
}

/// The object graph: a text with its length and a CRC before it.
fn graph(src: &dyn ReadAt, entry: &Entry) -> Result<Vec<u8>, Fail> {
    refuse_if(entry.size > MAX_GRAPH, "TensorFlow: an object graph of more than 16 MiB")?;
    let mut bytes = vec![0; entry.size as usize];
    src.read_exact_at(&mut bytes, entry.offset)?;
    let mut fields = Fields::new(&bytes);
    let len = fields.varint()?;
    fields.take(4)?;
    Ok(fields.take(len)?.to_vec())
}

/// The tensors of a file, and of each its key and its CRC.
#[derive(Default)]
struct Found {
    tensors: Vec<Tensor>,
    keys: Vec<String>,
    crcs: Vec<u32>,
}

impl Found {
    fn add(&mut self, entry: Entry) -> Result<(), Fail> {
        let Some(dtype) = data_type(entry.kind).filter(|_| entry.size > 0) else { return Ok(()) };
        if bytes(&entry.shape, dtype.size() as u64) != Some(entry.size) {
            return bad("TensorFlow: a tensor's length is not that of its shape");
        }
        let tail = if steady::is_able(dtype) && entry.size >= MIN_BYTES { TAIL_BYTES } else { 0 };
        let extent = entry.offset..entry.offset + entry.size - tail;
        self.tensors.push(Tensor::found(String::new(), (dtype, entry.shape), named::UNKNOWN, extent));
        self.keys.push(entry.key);
        self.crcs.push(entry.crc);
        Ok(())
    }
}

/// Gives tensors their names and roles; finds pairs and proofs.
fn relate(tensors: &mut [Tensor], keys: &[String], graph: Option<&Graph>) -> Training {
    let numbers: HashMap<&str, usize> = keys.iter().enumerate().map(|(number, key)| (key.as_str(), number)).collect();
    let none = Graph::default();
    let graph = graph.unwrap_or(&none);
    let name = |key: &str| graph.names.get(key).copied().filter(|name| !name.is_empty());
    let mut counts: HashMap<&str, usize> = HashMap::new();
    keys.iter().filter_map(|key| name(key)).for_each(|name| *counts.entry(name).or_default() += 1);
    for (tensor, key) in tensors.iter_mut().zip(keys) {
        // A name is what people know, but a key is unique.
        let own = name(key).filter(|name| counts[name] == 1 && !numbers.contains_key(name));
        path::push_text(&mut tensor.path, own.unwrap_or(key.strip_suffix(VALUE).unwrap_or(key)));
    }
    let mut standings: Vec<Option<Standing>> = Vec::with_capacity(keys.len());
    for (tensor, key) in tensors.iter_mut().zip(keys) {
        let named = named::role(&tensor.path, tensor.dtype, WEIGHT);
        let by_key = role::tensor(Context::Open, true, key.strip_suffix(VALUE).unwrap_or(key), tensor.dtype);
        // Without a graph, an optimizer's variable has the name of its parameter, and one more part.
        let is_beside = |key: &str| key.rsplit_once('/').is_some_and(|(above, _)| numbers.contains_key(above));
        (tensor.role, tensor.why) = match by_key {
            _ if key.contains("/.OPTIMIZER_SLOT/") || is_beside(key) => OF_OPTIMIZER,
            (role, why) if role != Role::Weight && !graph.trained.contains(key.as_str()) => (role, why),
            _ => named,
        };
        let is_listed = tensor.role == Role::Weight;
        standings.push(is_listed.then(|| Standing::Listed {
            mapping: MODEL,
            key: tensor.path.clone(),
            average: false,
        }));
    }
    for slot in &graph.slots {
        let Some(&number) = numbers.get(slot.key) else { continue };
        (tensors[number].role, tensors[number].why) = OF_OPTIMIZER;
        standings[number] = slot.of.and_then(|(key, slot_name)| {
            let parameter = Parameter::Name(tensors[*numbers.get(key)?].path.clone());
            let owner = STATE.saturating_add(slot.optimizer as u32);
            Some(Standing::Slot { owner, parameter, slot: slot_name.to_string() })
        });
    }
    let optimizers = Optimizers::default();
    pairing::refine(tensors, &standings, &optimizers);
    let training = Training::of(tensors, &standings, &optimizers);
    for (tensor, key) in tensors.iter_mut().zip(keys) {
        if tensor.is_weight() && graph.trained.contains(key.as_str()) {
            tensor.trained = tensor.trained.or(Some(LISTED));
        }
    }
    training
}
