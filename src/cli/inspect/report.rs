//! Describes one file, or one distributed checkpoint.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::cli::source::Local;
use crate::store::object::Object;
use crate::store::{Named, open_aside};
use formats::{Model, Siblings, Tensor, describe_at, index_in, siblings};

#[derive(Serialize)]
pub(super) struct Report {
    #[serde(flatten)]
    pub path: Named,
    pub container: &'static str,
    pub note: Option<String>,
    /// In a mount: the reason if the file stays as written.
    pub why: Option<String>,
    pub bytes: u64,
    /// In a mount: the profile of the archived file, or the one that would apply. `generations` counts the restores
    /// from lossy files behind it.
    pub profile: Option<String>,
    pub generations: Option<u32>,
    pub tensors: Vec<Row>,
}

/// How a tensor is kept that no object has.
pub(super) const AS_WRITTEN: &str = "as written";
const DIFFERENCE: &str = "difference";

#[derive(Serialize)]
pub(super) struct Row {
    pub path: String,
    pub aliases: Vec<String>,
    pub dtype: &'static str,
    pub shape: Vec<u64>,
    pub role: &'static str,
    pub why: &'static str,
    /// For a weight or an average: the evidence in the file that it is trained. Without evidence, only its changes can
    /// show it.
    pub trained: Option<&'static str>,
    /// Path of the parameter that this state or average belongs to, if known.
    pub of: Option<String>,
    /// Path of the parameter's other moment.
    pub partner: Option<String>,
    /// `None` if chunks of several files are shown as one tensor.
    pub offset: Option<u64>,
    pub bytes: u64,
    #[serde(flatten)]
    pub how: HowKept,
}

/// How the store keeps a tensor.
#[derive(Clone, Serialize)]
pub(super) struct HowKept {
    /// `lossless` or `lattice`.
    pub codec: &'static str,
    /// `difference` to the parent, `keyframe`, in the `skeleton` with all small data, or `as written`.
    pub kept: &'static str,
    pub step: Option<f64>,
    pub bound: f64,
    pub max_abs_error: f64,
    pub stored_bytes: Option<u64>,
}

/// Describes a file, or the directory of a distributed checkpoint.
pub(super) fn of(path: &Path) -> Result<Report> {
    if path.is_dir() { of_model(path) } else { of_file(path) }.with_context(|| path.display().to_string())
}

/// Describes a file. Chunks of a distributed checkpoint get their names from the index beside it.
fn of_file(path: &Path) -> Result<Report> {
    let file = open_aside(path)?;
    let mut description = describe_at(path, &file, open_aside)?;
    if let Some(Siblings { index, files: None }) = siblings(path) {
        match open_aside(&index).and_then(|file| Model::read(&file)) {
            Ok(model) => description.name_chunks(path, &model),
            Err(error) => description.note = Some(format!("no names: {}: {error}", index.display())),
        }
    }
    let object = object_of(path);
    let mut kept = Kept::default();
    kept.add(object.as_ref(), &HashSet::new());
    Ok(Report {
        path: Named("path", path.to_path_buf()),
        container: description.kind.name(),
        note: description.note.clone(),
        why: word(path, "why").filter(|_| word(path, "state").as_deref() != Some("released")),
        bytes: file.metadata()?.len(),
        profile: object.as_ref().map(|object| object.index().profile.clone()).or_else(|| word(path, "profile")),
        generations: word(path, "generations").and_then(|count| count.parse().ok()),
        tensors: rows(&description.tensors, &kept, true),
    })
}

/// Describes a distributed checkpoint: its whole tensors, regardless of how the ranks split them.
fn of_model(path: &Path) -> Result<Report> {
    let index = index_in(path);
    let metadata = open_aside(&index).with_context(|| {
        let name = index.file_name().unwrap_or_default().display();
        format!("this directory has no {name}, so it is no distributed checkpoint; name a file in it")
    })?;
    let model = Model::read(&metadata)?;
    let wholes: HashSet<&str> = model.tensors().iter().map(|tensor| tensor.path.as_str()).collect();
    let (mut kept, mut bytes, mut profiles) = (Kept::default(), metadata.metadata()?.len(), BTreeSet::new());
    let mut files: Vec<&str> = model.files().map(|(name, _)| name).collect();
    files.sort_unstable();
    let mut gone = 0;
    for file in &files {
        let file = path.join(file);
        let Ok(metadata) = std::fs::symlink_metadata(&file) else {
            gone += 1;
            continue;
        };
        bytes += metadata.len();
        let object = object_of(&file);
        profiles.extend(object.as_ref().map(|object| object.index().profile.clone()));
        kept.add(object.as_ref(), &wholes);
    }
    Ok(Report {
        path: Named("path", path.to_path_buf()),
        container: model.kind().name(),
        note: Some(match gone {
            0 => format!("whole, from {} files", files.len()),
            gone => format!("{gone} of {} files are not there", files.len()),
        }),
        why: None,
        bytes,
        profile: (!profiles.is_empty()).then(|| profiles.into_iter().collect::<Vec<_>>().join(", ")),
        generations: None,
        tensors: rows(model.tensors(), &kept, false),
    })
}

fn rows(tensors: &[Tensor], kept: &Kept, placed: bool) -> Vec<Row> {
    let path_of = |index: Option<usize>| index.map(|index| tensors[index].path.clone());
    let row = |tensor: &Tensor| Row {
        path: tensor.path.clone(),
        aliases: tensor.aliases.clone(),
        dtype: tensor.dtype.name(),
        shape: tensor.shape.clone(),
        role: tensor.role.name(),
        why: tensor.why,
        trained: tensor.trained,
        of: path_of(tensor.of),
        partner: path_of(tensor.partner),
        offset: placed.then_some(tensor.extent.start),
        bytes: tensor.extent.end - tensor.extent.start,
        how: kept.of(&tensor.path),
    };
    tensors.iter().map(row).collect()
}

/// An attribute that the daemon gives for a file in a mount.
fn word(path: &Path, name: &str) -> Option<String> {
    let (mount, local) = Local::in_mount(path).ok()?;
    mount.text(&local.path, name)
}

/// The object of a file in a mount.
fn object_of(path: &Path) -> Option<Object> {
    let local = Local::of(path).ok()?;
    let told = match &local.mount {
        Some(mount) => Some(mount.text(&local.path, "object")?.parse().ok()?),
        // A daemon that is not the keeper of its store knows no objects: the file is read.
        None => None,
    };
    let tree = local.tree().ok()?;
    let id = match told {
        Some(id) => id,
        None => tree.stub(&local.path).ok()??.object,
    };
    Object::open(&tree.store.objects(), id).ok()
}

/// How a store keeps tensors, by path. Chunks of one tensor are combined.
#[derive(Default)]
struct Kept {
    tensors: HashMap<String, HowKept>,
    /// Number of released files.
    objects: usize,
}

impl Kept {
    /// How the tensor at a path is kept. Small ones are in the skeletons of objects.
    fn of(&self, path: &str) -> HowKept {
        let kept = if self.objects == 0 { AS_WRITTEN } else { "skeleton" };
        let exact = HowKept { codec: "lossless", kept, step: None, bound: 0.0, max_abs_error: 0.0, stored_bytes: None };
        self.tensors.get(path).cloned().unwrap_or(exact)
    }

    /// Adds the tensors of an object. A chunk of a tensor in `wholes` counts as that tensor.
    fn add(&mut self, object: Option<&Object>, wholes: &HashSet<&str>) {
        self.objects += usize::from(object.is_some());
        for tensor in object.iter().flat_map(|object| &object.index().tensors) {
            let how = HowKept {
                codec: tensor.coding.codec.name(),
                kept: if tensor.coding.parent.is_some() { DIFFERENCE } else { "keyframe" },
                step: tensor.coding.step(),
                bound: tensor.bound,
                max_abs_error: tensor.max_abs_error,
                stored_bytes: Some(tensor.stored()),
            };
            let path = if wholes.contains(whole(&tensor.path)) { whole(&tensor.path) } else { &tensor.path };
            self.tensors.entry(path.to_string()).and_modify(|all| all.join(&how)).or_insert(how);
        }
    }
}

/// The path of the tensor that a chunk belongs to.
fn whole(path: &str) -> &str {
    path.strip_suffix(']').and_then(|path| path.rsplit_once('[')).map_or(path, |(whole, _)| whole)
}

impl HowKept {
    fn join(&mut self, other: &HowKept) {
        self.bound = self.bound.max(other.bound);
        self.max_abs_error = self.max_abs_error.max(other.max_abs_error);
        self.stored_bytes = self.stored_bytes.zip(other.stored_bytes).map(|(own, others)| own + others);
        if other.kept == DIFFERENCE {
            self.kept = DIFFERENCE;
        }
    }
}
