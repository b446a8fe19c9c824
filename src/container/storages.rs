//! The storages that a walk finds: one tensor each, however many paths and views reach it.

use std::collections::HashMap;

use super::read::{Fail, bad};
use super::view::Storage;
use super::zip::Zip;
use super::{Role, Tensor};
use crate::codec::Dtype;

/// Other paths kept for one tensor. Two are common (tied embeddings); a thousand would be an attack.
const MAX_ALIASES: usize = 16;

/// All paths together. 250,000 tensors with names of 100 bytes are well below.
const MAX_PATH_BYTES: usize = 64 << 20;

/// The storages found so far.
pub(super) struct Storages<'z> {
    zip: &'z Zip,
    data: &'z HashMap<&'z [u8], usize>,
    found: HashMap<usize, Tensor>,
    /// Paths in use, with the number of times another tensor wanted them.
    paths: HashMap<String, u32>,
    path_bytes: usize,
    missing: u64,
    compressed: u64,
    misfit: u64,
    /// Values whose path is too long.
    pub(super) too_deep: u64,
}

impl<'z> Storages<'z> {
    /// `data` maps storage keys to records of `zip`.
    pub(super) fn new(zip: &'z Zip, data: &'z HashMap<&'z [u8], usize>) -> Self {
        Storages {
            zip,
            data,
            found: HashMap::new(),
            paths: HashMap::new(),
            path_bytes: 0,
            missing: 0,
            compressed: 0,
            misfit: 0,
            too_deep: 0,
        }
    }

    /// The tensors, each with its record, and a note on storages that were left out.
    pub(super) fn finish(self) -> (Vec<(Tensor, u32)>, Option<String>) {
        let odd = [
            (self.missing, "storages have no record"),
            (self.compressed, "storages are compressed"),
            (self.misfit, "storages do not fit their records"),
            (self.too_deep, "values are nested too deeply to name"),
        ];
        let odd: Vec<String> = odd.into_iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
        let note = (!odd.is_empty()).then(|| format!("torch: {}", odd.join(", ")));
        let tensors = self.found.into_iter().map(|(i, t)| (t, i as u32)).collect();
        (tensors, note)
    }

    /// Notes that `path` reaches `storage`; `shape` if it is known and covers all of it.
    pub(super) fn add(
        &mut self,
        storage: Storage,
        dtype: Option<Dtype>,
        shape: Option<Vec<u64>>,
        path: &str,
        (role, why): (Role, &'static str),
    ) -> Result<(), Fail> {
        let Some(&index) = self.data.get(storage.key.as_bytes()) else {
            self.missing += 1;
            return Ok(());
        };
        let record = &self.zip.records[index];
        if !record.stored {
            self.compressed += 1;
            return Ok(());
        }
        let len = record.payload.end - record.payload.start;
        // What the storage class says must fit the record, or a reader would see something else than stepfs.
        let unit = match (storage.dtype, storage.known) {
            (Some(d), _) => Some(d.size() as u64),
            (None, true) => Some(1),
            (None, false) => None,
        };
        if unit.is_some_and(|u| storage.len.checked_mul(u) != Some(len)) {
            self.misfit += 1;
            return Ok(());
        }
        if len == 0 {
            return Ok(());
        }
        self.path_bytes += path.len();
        if self.path_bytes > MAX_PATH_BYTES {
            return bad("torch: the tensors' names are too long to keep");
        }
        let (dtype, shape, role, why) = match dtype {
            Some(d) if len.is_multiple_of(d.size() as u64) => {
                let elements = len / d.size() as u64;
                let product = |s: &Vec<u64>| s.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
                let shape = shape.filter(|s| product(s) == Some(elements));
                (d, shape.unwrap_or(vec![elements]), role, why)
            }
            _ => {
                let why = "an element type that stepfs does not know";
                (Dtype::U8, vec![len], Role::Other, why)
            }
        };
        if let Some(tensor) = self.found.get_mut(&index) {
            if tensor.aliases.len() < MAX_ALIASES {
                tensor.aliases.push(path.to_string());
            }
            if tensor.dtype != dtype {
                (tensor.dtype, tensor.shape) = (Dtype::U8, vec![len]);
                (tensor.role, tensor.why) = (Role::Other, "read as two different element types");
            } else if tensor.role == Role::Weight && role != Role::Weight {
                // One use that is no parameter's is enough: the bytes are the same.
                (tensor.role, tensor.why) = (role, why);
            }
            return Ok(());
        }
        let path = self.unique(path);
        self.found.insert(
            index,
            Tensor { path, aliases: Vec::new(), dtype, shape, role, why, extent: record.payload.clone() },
        );
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
