//! A zip of torch.save: the object graph in `data.pkl`, walked to the tensors, and their records `data/KEY`.
//!
//! Each storage is one tensor of the description, however many views or names it has. A storage that the walk does
//! not reach, or that does not fit its record, is left out: it then counts as bytes that are kept as they are.

use std::collections::{BTreeSet, HashMap};

use super::patch::{Checksums, is_serialization_id};
use super::pickle::{self, Graph, Item};
use super::progress::Progress;
use super::proof::LISTED;
use super::read::{Fail, bad, refuse_if};
use super::storages::{Record, Records, Stored};
use super::zip::Zip;
use super::{Description, Kind, ReadAt, Role, best, view, walk};

/// The content of a zip of torch.save.
pub(super) struct Contents {
    pub(super) stored: Stored,
    /// The record that is its serialization id.
    pub(super) id: Option<usize>,
    best: Option<Vec<String>>,
    progress: Progress,
}

/// Describes a file that is this zip.
pub(super) fn describe(src: &dyn ReadAt, zip: Zip) -> Result<Description, Fail> {
    let Contents { stored, id, best, progress } = read(src, &zip)?;
    let Stored { tensors, training, note, .. } = stored;
    let checksums = Some(Checksums::of([(zip, id)]));
    Ok(Description { note, best, progress, checksums, ..Description::new(Kind::TorchZip, tensors, training) })
}

/// Reads a zip, which is a file or a part of one.
pub(super) fn read(src: &dyn ReadAt, zip: &Zip) -> Result<Contents, Fail> {
    let layout = Layout::of(zip)?;
    let graph = layout.graph(src)?;
    let mut stored = walk::tensors(&graph, &layout)?;
    prove_listed(&graph, &layout, &mut stored);
    Ok(Contents { stored, id: layout.id, best: best::named(&graph), progress: Progress::of(&graph) })
}

pub(super) const BIG_ENDIAN: &str = "torch: tensors are big-endian: kept as they are";

/// The object graph of a zip, and the records of its storages.
pub(super) fn load<'z>(src: &dyn ReadAt, zip: &'z Zip) -> Result<(Graph, impl Records + use<'z>), Fail> {
    let layout = Layout::of(zip)?;
    Ok((layout.graph(src)?, layout))
}

/// Whether the zip has the object graph of torch.save in it.
pub(super) fn is_torch(zip: &Zip) -> bool {
    zip.records.iter().any(|record| split(zip.name(record)).is_some_and(|(_, name)| name == b"data.pkl"))
}

/// The first directory of a record's name, and the rest.
fn split(name: &[u8]) -> Option<(&[u8], &[u8])> {
    let slash = name.iter().position(|&b| b == b'/')?;
    Some((&name[..slash], &name[slash + 1..]))
}

/// Where torch's own records are; indices of records.
struct Layout<'a> {
    zip: &'a Zip,
    pickle: usize,
    byteorder: Option<usize>,
    id: Option<usize>,
    /// Storage key to record.
    data: HashMap<&'a [u8], usize>,
}

impl Records for Layout<'_> {
    fn record(&self, key: &str) -> Option<Record> {
        let &index = self.data.get(key.as_bytes())?;
        let record = &self.zip.records[index];
        Some(Record { number: index as u32, payload: record.payload.clone(), stored: record.stored })
    }
}

impl<'a> Layout<'a> {
    /// All of torch's records have the same first directory, whose name is the file's own when it was written.
    fn of(zip: &'a Zip) -> Result<Self, Fail> {
        let mut pickles = zip.records.iter().enumerate().filter_map(|(i, r)| {
            let (prefix, name) = split(zip.name(r))?;
            (name == b"data.pkl").then_some((i, prefix))
        });
        let (Some((pickle, prefix)), None) = (pickles.next(), pickles.next()) else {
            return bad("torch: a zip with no data.pkl, or with several");
        };
        let mut layout = Layout { zip, pickle, byteorder: None, id: None, data: HashMap::new() };
        for (i, record) in zip.records.iter().enumerate() {
            let Some((_, name)) = split(zip.name(record)).filter(|(first, _)| *first == prefix) else { continue };
            if let Some(key) = name.strip_prefix(b"data/") {
                layout.data.insert(key, i);
            } else if name == b"byteorder" {
                layout.byteorder = Some(i);
            } else if is_serialization_id(record, name) {
                layout.id = Some(i);
            }
        }
        Ok(layout)
    }

    fn graph(&self, src: &dyn ReadAt) -> Result<Graph, Fail> {
        let pickle = &self.zip.records[self.pickle];
        refuse_if(
            !pickle.stored,
            "torch: the zip is compressed: kept as it is; write it as torch.save does to shrink it",
        )?;
        refuse_if(self.is_big_endian(src)?, BIG_ENDIAN)?;
        pickle::load(src, pickle.payload.start, pickle.payload.end)
    }

    /// Without the record (torch before 2.1) the writer's order is not known; all machines that train are little-endian.
    fn is_big_endian(&self, src: &dyn ReadAt) -> Result<bool, Fail> {
        let Some(record) = self.byteorder.map(|i| &self.zip.records[i]) else {
            return Ok(false);
        };
        let mut order = [0; 6];
        let len = record.payload.end - record.payload.start;
        let order = &mut order[..len.min(6) as usize];
        src.read_exact_at(order, record.payload.start)?;
        match &*order {
            b"little" if record.stored && len == 6 => Ok(false),
            b"big" if record.stored => Ok(true),
            _ => bad("torch: byteorder is neither little nor big"),
        }
    }
}

/// Proves weights in DeepSpeed's `mp_rank_*_model_states.pt` (ZeRO 1 and 2), by all views of them in `module`.
///
/// All parameters are views of one flat storage, padding included. The masters and moments lie in other files, each
/// rank's share in its own. So neither a shape nor a number shows what the optimizer trains. But DeepSpeed lists it:
/// `param_shapes` has the name and the shape of each parameter that its optimizer trains, `shared_params` the names of
/// tied ones.
fn prove_listed(graph: &Graph, records: &dyn Records, stored: &mut Stored) {
    let get = |name| graph.get(graph.root, name).unwrap_or(Item::None);
    let trained = trained(graph, get("param_shapes"));
    if trained.is_empty() {
        return;
    }
    let shared = graph.pairs(get("shared_params")).iter();
    let shared: HashMap<&str, &str> =
        shared.filter_map(|&(name, of)| Some((graph.str(name)?, graph.str(of)?))).collect();
    // By record: whether all views so far are trained.
    let mut views: HashMap<u32, bool> = HashMap::new();
    for &(key, value) in graph.pairs(get("module")) {
        let record = view::view(graph, value).and_then(|view| records.record(view.storage.key));
        let Some(Record { number, .. }) = record else { continue };
        let name = graph.str(key).map(|name| shared.get(name).copied().unwrap_or(name));
        let listed = name.and_then(|name| trained.get(name));
        let is_trained = listed.is_some() && view::shape(graph, value).as_ref() == listed;
        *views.entry(number).or_insert(true) &= is_trained;
    }
    for (tensor, number) in stored.tensors.iter_mut().zip(&stored.numbers) {
        if tensor.role == Role::Weight && views.get(number) == Some(&true) {
            tensor.trained = Some(LISTED);
        }
    }
}

/// The parameters in `param_shapes`: a list with a mapping for each group, from name to shape.
fn trained(graph: &Graph, groups: Item) -> HashMap<&str, Vec<u64>> {
    // A pickle may list one mapping a million times.
    let groups: BTreeSet<u32> = graph.list(groups).iter().flat_map(|list| &list.nodes).map(|node| node.1).collect();
    let of_groups = groups.into_iter().flat_map(|group| graph.pairs(Item::Node(group)));
    of_groups.filter_map(|&(name, shape)| Some((graph.str(name)?, view::sizes(graph, shape)?))).collect()
}
