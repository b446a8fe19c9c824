//! A zip of torch.save: the object graph in `data.pkl`, walked to the tensors, and their records `data/KEY`.
//!
//! Each storage is one tensor of the description, however many views or names it has. A storage that the walk does
//! not reach, or that does not fit its record, is left out: it then counts as bytes that are kept as they are.

use std::collections::{BTreeSet, HashMap};

use super::best;
use super::patch::{Crcs, is_serialization_id};
use super::pickle::{self, Graph, Item, Node};
use super::progress::Progress;
use super::proof::LISTED;
use super::read::{Fail, bad};
use super::storages::{Record, Records, Storages};
use super::walk::{pairs, walk};
use super::zip::Zip;
use super::{Description, Kind, ReadAt, Role, Tensor, view};

/// Describes a file that is this zip.
pub(super) fn describe(src: &dyn ReadAt, zip: Zip) -> Result<Description, Fail> {
    let layout = Layout::of(&zip)?;
    let pickle = &zip.records[layout.pickle];
    if !pickle.stored {
        return bad("torch: the zip is compressed: kept as it is; write it as torch.save does to shrink it");
    }
    let (mut named, mut progress) = (None, Progress::default());
    let (found, of_tensor, note) = if is_big_endian(src, &zip, &layout)? {
        (Default::default(), Vec::new(), Some("torch: tensors are big-endian".to_string()))
    } else {
        let graph = pickle::load(src, pickle.payload.start, pickle.payload.end)?;
        let records = ZipRecords { zip: &zip, data: &layout.data };
        let mut storages = Storages::new(&records);
        (named, progress) = (best::named(&graph), Progress::of(&graph));
        let optimizers = walk(&graph, &mut storages)?;
        let (mut found, of_tensor, note) = storages.finish(&optimizers);
        prove_listed(&graph, &records, &mut found.0, &of_tensor);
        (found, of_tensor, note)
    };
    let serialization_id = layout.serialization_id;
    drop(layout);
    let zip = Some(Crcs::new(zip, of_tensor, serialization_id));
    let (tensors, training) = found;
    Ok(Description { note, best: named, progress, zip, ..Description::new(Kind::TorchZip, tensors, training) })
}

/// Whether the zip has the object graph of torch.save in it.
pub(super) fn is_torch(zip: &Zip) -> bool {
    zip.records.iter().any(|record| split(zip.name(record)).is_some_and(|(_, name)| name == b"data.pkl"))
}

/// What is said of a zip that no library wrote that stepfs knows.
fn foreign(zip: &Zip) -> String {
    let compressed = zip.records.iter().filter(|record| !record.stored).count();
    let how = match compressed {
        0 => String::new(),
        n => format!(" ({n} of {} members compressed)", zip.records.len()),
    };
    format!(
        "a zip that neither torch, numpy nor Keras wrote{how}: kept as it is; save the files in it by themselves to shrink them"
    )
}

/// The first directory of a record's name, and the rest.
fn split(name: &[u8]) -> Option<(&[u8], &[u8])> {
    let slash = name.iter().position(|&b| b == b'/')?;
    Some((&name[..slash], &name[slash + 1..]))
}

/// The records of a zip, by storage key.
pub(super) struct ZipRecords<'a> {
    pub(super) zip: &'a Zip,
    pub(super) data: &'a HashMap<&'a [u8], usize>,
}

impl Records for ZipRecords<'_> {
    fn record(&self, key: &str) -> Option<Record> {
        let &index = self.data.get(key.as_bytes())?;
        let record = &self.zip.records[index];
        Some(Record { number: index as u32, payload: record.payload.clone(), stored: record.stored })
    }
}

/// Where torch's own records are; indices of records.
pub(super) struct Layout<'a> {
    pub(super) pickle: usize,
    byteorder: Option<usize>,
    pub(super) serialization_id: Option<usize>,
    /// Storage key to record.
    pub(super) data: HashMap<&'a [u8], usize>,
}

impl<'a> Layout<'a> {
    /// All of torch's records have the same first directory, whose name is the file's own when it was written.
    pub(super) fn of(zip: &'a Zip) -> Result<Self, Fail> {
        let mut pickles = zip.records.iter().enumerate().filter_map(|(i, r)| {
            let (prefix, name) = split(zip.name(r))?;
            (name == b"data.pkl").then_some((i, prefix))
        });
        let Some((pickle, prefix)) = pickles.next() else {
            return bad(foreign(zip));
        };
        if pickles.next().is_some() {
            return bad("zip: more than one data.pkl");
        }
        let mut layout = Layout { pickle, byteorder: None, serialization_id: None, data: HashMap::new() };
        for (i, record) in zip.records.iter().enumerate() {
            match split(zip.name(record)) {
                Some((p, name)) if p == prefix => {
                    if let Some(key) = name.strip_prefix(b"data/") {
                        layout.data.insert(key, i);
                    } else if name == b"byteorder" {
                        layout.byteorder = Some(i);
                    } else if is_serialization_id(record, name) {
                        layout.serialization_id = Some(i);
                    }
                }
                _ => {}
            }
        }
        Ok(layout)
    }
}

/// Without the record (torch before 2.1) the writer's order is not known; all machines that train are little-endian.
pub(super) fn is_big_endian(src: &dyn ReadAt, zip: &Zip, layout: &Layout) -> Result<bool, Fail> {
    let Some(record) = layout.byteorder.map(|i| &zip.records[i]) else {
        return Ok(false);
    };
    let mut order = [0; 6];
    let len = record.payload.end - record.payload.start;
    if !record.stored || len > 6 {
        return bad("torch: byteorder is neither little nor big");
    }
    let order = &mut order[..len as usize];
    src.read_exact_at(order, record.payload.start)?;
    match &*order {
        b"little" => Ok(false),
        b"big" => Ok(true),
        _ => bad("torch: byteorder is neither little nor big"),
    }
}

/// Proves weights in DeepSpeed's `mp_rank_*_model_states.pt` (ZeRO 1 and 2), by all views of them in `module`. `numbers`
/// has each tensor's record.
///
/// All parameters are views of one flat storage, padding included. The masters and moments lie in other files, each
/// rank's share in its own. So neither a shape nor a number shows what the optimizer trains. But DeepSpeed lists it:
/// `param_shapes` has the name and the shape of each parameter that its optimizer trains, `shared_params` the names of
/// tied ones.
fn prove_listed(graph: &Graph, records: &dyn Records, tensors: &mut [Tensor], numbers: &[u32]) {
    let get = |name: &str| {
        let found = pairs(graph, graph.root).iter().find(|&&(key, _)| graph.str(key) == Some(name));
        found.map_or(Item::None, |&(_, value)| value)
    };
    let trained = trained(graph, get("param_shapes"));
    if trained.is_empty() {
        return;
    }
    let shared = pairs(graph, get("shared_params")).iter();
    let shared: HashMap<&str, &str> =
        shared.filter_map(|&(name, of)| Some((graph.str(name)?, graph.str(of)?))).collect();
    // By record: whether all views so far are trained.
    let mut views: HashMap<u32, bool> = HashMap::new();
    for &(key, value) in pairs(graph, get("module")) {
        let Some(number) = view::view(graph, value).and_then(|v| records.record(v.storage.key)).map(|r| r.number)
        else {
            continue;
        };
        let name = graph.str(key).map(|name| shared.get(name).copied().unwrap_or(name));
        let listed = name.and_then(|name| trained.get(name));
        let is_trained = listed.is_some() && view::shape(graph, value).as_ref() == listed;
        *views.entry(number).or_insert(true) &= is_trained;
    }
    for (tensor, number) in tensors.iter_mut().zip(numbers) {
        if tensor.role == Role::Weight && views.get(number) == Some(&true) {
            tensor.trained = Some(LISTED);
        }
    }
}

/// The parameters in `param_shapes`: a list with a mapping for each group, from name to shape.
fn trained(graph: &Graph, groups: Item) -> HashMap<&str, Vec<u64>> {
    let Item::Node(groups) = groups else { return HashMap::new() };
    let Node::List(groups) = graph.node(groups) else { return HashMap::new() };
    // A pickle may list one mapping a million times.
    let groups: BTreeSet<u32> = groups.nodes.iter().map(|&(_, group)| group).collect();
    let of_groups = groups.into_iter().flat_map(|group| pairs(graph, Item::Node(group)));
    of_groups.filter_map(|&(name, shape)| Some((graph.str(name)?, view::sizes(graph, shape)?))).collect()
}
