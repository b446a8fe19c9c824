//! The storages that a walk finds: one tensor each, however many paths and views reach it.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use super::proof::Training;
use super::read::{Fail, left_out, refuse_if};
use super::slots::{Flat, Optimizers, Standing};
use super::view::View;
use super::{Role, Tensor, pairing};
use codec::Dtype;

/// Other paths kept for one tensor. Two are common (tied embeddings); a thousand would be an attack.
const MAX_ALIASES: usize = 16;

/// All paths together. 250,000 tensors with names of 100 bytes are well below.
const MAX_PATH_BYTES: usize = 64 << 20;

/// Views of storages that hold several weights, all together: at most 30 MB.
const MAX_VIEWS: usize = 1 << 18;

/// The record that holds a storage's bytes.
pub(super) struct Record {
    /// Tells the records of a container apart. Two keys may lead to one record. The numbers ascend in the order in
    /// which the pickle first names the storages: an optimizer's parameters are paired with weights in that order.
    pub(super) number: u32,
    /// Bytes of the file. Those of two records are disjoint.
    pub(super) payload: Range<u64>,
    /// Neither compressed nor encrypted: the payload is the content.
    pub(super) stored: bool,
}

/// Where a container keeps its storages.
pub(super) trait Records {
    /// The record of the storage with this key.
    fn record(&self, key: &str) -> Option<Record>;
}

/// The tensors in a container's storages.
pub(super) struct Stored {
    /// By ascending extent.
    pub(super) tensors: Vec<Tensor>,
    pub(super) training: Training,
    /// Of each tensor, the number of its record.
    pub(super) numbers: Vec<u32>,
    /// On storages that were left out.
    pub(super) note: Option<String>,
}

/// One place where a storage is used.
pub(super) struct Use<'a> {
    pub(super) view: View<'a>,
    pub(super) path: &'a str,
    pub(super) role: (Role, &'static str),
    /// Names the use of a tensor, but not its role, if another place gives that.
    pub(super) reference: bool,
    /// Where it stands there among other tensors.
    pub(super) standing: Option<Standing>,
}

/// A storage's tensor.
struct Found {
    tensor: Tensor,
    /// So far only references to it were seen.
    reference: bool,
    /// Its place, at its first use that is no mere reference.
    standing: Option<Standing>,
    /// At its first use the tensor was a part of the storage.
    is_part: bool,
    /// Its parts that are weights.
    flat: Option<Box<Flat>>,
    /// Of a rank's part of a distributed tensor: the shape of the whole.
    whole: Option<Vec<u64>>,
}

/// The storages found so far.
pub(super) struct Storages<'r> {
    records: &'r dyn Records,
    /// By the number of the record.
    found: HashMap<u32, Found>,
    /// Paths in use, with the number of times another tensor wanted them.
    paths: HashMap<String, u32>,
    path_bytes: usize,
    views: usize,
    missing: u64,
    compressed: u64,
    /// Records that contradict some use of them.
    misfits: HashSet<u32>,
    /// Values whose path is too long.
    pub(super) too_deep: u64,
}

impl<'r> Storages<'r> {
    pub(super) fn new(records: &'r dyn Records) -> Self {
        Storages {
            records,
            found: HashMap::new(),
            paths: HashMap::new(),
            path_bytes: 0,
            views: 0,
            missing: 0,
            compressed: 0,
            misfits: HashSet::new(),
            too_deep: 0,
        }
    }

    /// The tensors among all storages that were found.
    pub(super) fn finish(mut self, optimizers: &Optimizers) -> Stored {
        for number in &self.misfits {
            self.found.remove(number);
        }
        let odd = [
            (self.missing, "storages have no record"),
            (self.compressed, "storages are compressed"),
            (self.misfits.len() as u64, "storages do not fit their records"),
            (self.too_deep, "values are nested too deeply to name"),
        ];
        let note = left_out("torch", &odd);
        let mut found: Vec<(u32, Found)> = self.found.into_iter().collect();
        found.sort_by_key(|(number, _)| *number);
        let mut numbers: Vec<u32> = found.iter().map(|&(number, _)| number).collect();
        let (mut tensors, mut standings) = (Vec::with_capacity(found.len()), Vec::with_capacity(found.len()));
        let mut wholes = Vec::new();
        for (i, (_, Found { mut tensor, standing, flat, whole, .. })) in found.into_iter().enumerate() {
            standings.push(match (flat, standing) {
                (Some(flat), None | Some(Standing::Listed { .. })) => Some(Standing::Views(flat)),
                (_, standing) => standing,
            });
            if tensor.role == Role::Weight && matches!(standings[i], Some(Standing::Views(_))) {
                tensor.why = "parts of it are weights in a state dict";
            }
            tensors.push(tensor);
            wholes.extend(whole.map(|whole| (i, whole)));
        }
        pairing::refine(&mut tensors, &standings, optimizers);
        let mut training = Training::of(&mut tensors, &standings, optimizers);
        training.hide(&mut tensors, &wholes);
        by_extent(&mut tensors, &mut numbers, &mut training);
        Stored { tensors, training, numbers, note }
    }

    /// Notes a use of a storage.
    pub(super) fn add(&mut self, used: Use) -> Result<(), Fail> {
        let View { storage, dtype, shape, window, whole, .. } = used.view;
        let Some(Record { number, payload, stored }) = self.records.record(storage.key) else {
            self.missing += 1;
            return Ok(());
        };
        if !stored {
            self.compressed += 1;
            return Ok(());
        }
        let len = payload.end - payload.start;
        // The storage class must fit the record, or a reader would see other values than stepfs.
        if storage.unit().is_some_and(|u| storage.len.checked_mul(u) != Some(len)) {
            self.misfits.insert(number);
            return Ok(());
        }
        if len == 0 {
            return Ok(());
        }
        self.path_bytes += used.path.len() + used.standing.as_ref().map_or(0, Standing::len);
        refuse_if(self.path_bytes > MAX_PATH_BYTES, "torch: the tensors' names are too long to keep")?;
        let (dtype, shape, (role, why)) = match dtype {
            Some(d) if len.is_multiple_of(d.size() as u64) => {
                let elements = len / d.size() as u64;
                let product = |s: &Vec<u64>| s.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
                let shape = shape.filter(|s| product(s) == Some(elements));
                (d, shape.unwrap_or(vec![elements]), used.role)
            }
            _ => {
                let why = "an element type that stepfs does not know";
                (Dtype::U8, vec![len], (Role::Other, why))
            }
        };
        let elements = len / dtype.size() as u64;
        let window = window.filter(|window| window.is_part_of(elements));
        let is_part = window.is_some();
        let window = window.filter(|_| role == Role::Weight && !used.reference && self.views < MAX_VIEWS);
        if let Some(Found { tensor, reference, standing, is_part, flat, .. }) = self.found.get_mut(&number) {
            if tensor.aliases.len() < MAX_ALIASES {
                tensor.aliases.push(used.path.to_string());
            }
            if let Some(window) = window.filter(|_| *is_part) {
                self.views += usize::from(Flat::note(flat, window, used.standing.as_ref(), used.path));
            }
            if tensor.dtype != dtype {
                (tensor.dtype, tensor.shape) = (Dtype::U8, vec![len]);
                (tensor.role, tensor.why) = (Role::Other, "read as two different element types");
                (*reference, *standing) = (false, None);
                (*is_part, *flat) = (false, None);
            } else if *reference && !used.reference {
                (tensor.role, tensor.why) = (role, why);
                (*reference, *standing) = (false, used.standing);
            } else if !used.reference && tensor.role == Role::Weight && role != Role::Weight {
                // One use that is no parameter's is enough: the bytes are the same.
                (tensor.role, tensor.why) = (role, why);
                *standing = None;
            }
            return Ok(());
        }
        let tensor = Tensor::found(self.unique(used.path), (dtype, shape), (role, why), payload);
        let Use { reference, standing, path, .. } = used;
        let mut flat = None;
        if let Some(window) = window {
            self.views += usize::from(Flat::note(&mut flat, window, standing.as_ref(), path));
        }
        self.found.insert(number, Found { tensor, reference, standing, is_part, flat, whole });
        Ok(())
    }

    /// The path, with `#2`, `#3` ... if another tensor has it: keys may contain `/`, and pickles repeat keys.
    fn unique(&mut self, path: &str) -> String {
        let Some(mut n) = self.paths.get(path).copied() else {
            self.paths.insert(path.to_string(), 1);
            return path.to_string();
        };
        let free = loop {
            n += 1;
            let candidate = format!("{path}#{n}");
            if !self.paths.contains_key(&candidate) {
                break candidate;
            }
        };
        self.paths.insert(path.to_string(), n);
        self.paths.insert(free.clone(), 1);
        free
    }
}

/// Sorts the tensors by ascending extent, and renumbers all references to them.
fn by_extent(tensors: &mut Vec<Tensor>, numbers: &mut [u32], training: &mut Training) {
    if tensors.is_sorted_by_key(|tensor| tensor.extent.start) {
        return;
    }
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| tensors[i].extent.start);
    let mut place = vec![0; order.len()];
    order.iter().enumerate().for_each(|(new, &old)| place[old] = new);
    let mut all: Vec<_> = tensors.drain(..).zip(numbers.to_vec()).zip(&place).collect();
    all.sort_by_key(|(_, place)| **place);
    for (at, ((mut tensor, number), _)) in all.into_iter().enumerate() {
        tensor.of = tensor.of.map(|of| place[of]);
        tensor.partner = tensor.partner.map(|partner| place[partner]);
        tensors.push(tensor);
        numbers[at] = number;
    }
    training.renumber(&place);
}
