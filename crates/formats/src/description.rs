//! The description of a file: its tensors, their roles and places.

use super::patch::Checksums;
use super::proof::{Trained, Training};
use super::{Kind, Progress, Table, Tensor};
use codec::hash::Xxh3;

/// The description of a file.
#[derive(Clone, Debug)]
pub struct Description {
    /// The container's format.
    pub kind: Kind,
    /// Why the file is opaque, or its oddities; for people.
    pub note: Option<String>,
    /// The file ends before its format says. Its writer may have died.
    pub cut_short: bool,
    /// The tensors, by ascending extent.
    pub tensors: Vec<Tensor>,
    /// Those of the tensors whose rows stand in any order, by ascending extent.
    pub tables: Vec<Table>,
    /// Paths that the file says are the best checkpoints so far, as its writer saw them (Lightning's
    /// `best_model_path`); none if it does not speak of that.
    pub best: Option<Vec<String>>,
    /// What it counts of its training.
    pub progress: Progress,
    /// The parameters that its optimizers train.
    pub(super) training: Training,
    /// The file's checksums, for `patches`.
    pub(super) checksums: Option<Checksums>,
}

/// Smallest tensor, in elements, that counts for a file's signature: small ones (steps, RNG state, statistics) come
/// and go within a run.
const SIGNATURE_MIN_ELEMENTS: u64 = 1024;

impl Description {
    /// A file that is not looked into, and why.
    pub fn opaque(note: impl Into<String>) -> Description {
        Description { note: Some(note.into()), ..Description::new(Kind::Opaque, Vec::new(), Training::default()) }
    }

    /// A file that ends before its format says, and how that shows.
    pub(super) fn of_cut_short(why: String) -> Description {
        Description { cut_short: true, ..Description::opaque(why) }
    }

    /// A file with these tensors, and nothing odd or to be patched in it.
    pub(super) fn new(kind: Kind, tensors: Vec<Tensor>, training: Training) -> Description {
        Description {
            kind,
            note: None,
            cut_short: false,
            tensors,
            tables: Vec::new(),
            best: None,
            progress: Progress::default(),
            training,
            checksums: None,
        }
    }

    /// Whether two tensors have one path.
    pub(super) fn has_twins(tensors: &[Tensor]) -> bool {
        let mut paths: Vec<&str> = tensors.iter().map(|tensor| tensor.path.as_str()).collect();
        paths.sort_unstable();
        paths.windows(2).any(|pair| pair[0] == pair[1])
    }

    /// The parameters that the optimizers in the file train, one entry for each optimizer.
    pub fn optimizers(&self) -> &[Trained] {
        &self.training.optimizers
    }

    /// Notes which weights these optimizers, of other files of its checkpoint, show to be trained parameters.
    pub fn prove(&mut self, optimizers: &[Trained]) {
        self.training.prove(&mut self.tensors, optimizers);
    }

    /// Hash (xxh3) of path, element type and shape of all tensors of at least 1024 elements, in any order: equal for
    /// files of the same lineage. Files without such tensors all have the same one.
    pub fn signature(&self) -> u64 {
        let mut tensors: Vec<&Tensor> = self.tensors.iter().collect();
        tensors.retain(|t| t.elements() >= SIGNATURE_MIN_ELEMENTS);
        tensors.sort_by(|a, b| {
            let key = |t: &Tensor| (t.dtype as u8, t.shape.clone());
            a.path.cmp(&b.path).then_with(|| key(a).cmp(&key(b)))
        });
        let mut hash = Xxh3::default();
        for t in tensors {
            // Lengths first, so that no two lists of tensors give the same bytes.
            hash.update(&(t.path.len() as u64).to_le_bytes());
            hash.update(t.path.as_bytes());
            hash.update(&[t.dtype as u8]);
            hash.update(&(t.shape.len() as u64).to_le_bytes());
            for dim in &t.shape {
                hash.update(&dim.to_le_bytes());
            }
        }
        hash.digest()
    }
}
