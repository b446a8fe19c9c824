//! Examines every file of a store, mounted or not, without changes.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::Result;
use serde::Serialize;

use crate::archive::lossy_words;
use crate::store::object::{Id, Object};
use crate::store::{MAX_CHAIN, STUB_BYTES, Store, is_pinned, name_bytes, recalled_from};
use codec::hash::hex;

use super::source::{Local, Tree};

/// Properties of a file.
#[derive(Debug, Serialize)]
pub(super) struct Entry {
    /// Path inside the mount.
    pub(super) path: String,
    /// In hexadecimal, if it is not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) path_bytes: Option<String>,
    /// `staged`, `sealed`, `archived` or `released`.
    pub(super) state: String,
    /// True if the file, or a directory above it, is pinned.
    pub(super) pinned: bool,
    /// Size that programs see.
    pub(super) logical_bytes: u64,
    /// Bytes that the file occupies in the store. For a file that is archived and still resident: both copies.
    pub(super) stored_bytes: u64,
    /// Profile of the archived file, or the one that would apply.
    pub(super) profile: String,
    /// The requested profile.
    pub(super) asked: String,
    /// `0`: the bytes are as written. `1` and the largest error of each kind of tensor: the bytes are lossy. [`UNKNOWN`].
    pub(super) lossy: String,
    /// The name or file that marks it as the best of its run, as far as a daemon knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) best: Option<String>,
    /// True if it holds lossy bytes although its name, a profile or the checkpoint's own files ask for more.
    pub(super) is_less_than_asked: bool,
    /// SHA-256 of the file as written, once it is archived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) original: Option<String>,
    /// Number of restores from lossy files behind it. `None` if unknown, as for a resident file of an unmounted store.
    pub(super) generations: Option<u32>,
    /// The object that holds it.
    pub(super) object: Option<String>,
    /// Path of its parent state at the time of archiving.
    pub(super) parent: Option<String>,
    /// `keyframe`, `super-step` or `delta`; `None` for a resident file.
    pub(super) kind: Option<&'static str>,
    /// The prediction that made it a keyframe or a super-step.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) note: String,
    /// Objects that a read applies; 0 for a resident file.
    pub(super) chain_len: u32,
    /// Largest error of any element of any tensor.
    pub(super) max_abs_error: f64,
    /// Largest error of a weight, in root mean squares of its update to the next newer state. `None` if none is lossy, or
    /// it is unknown.
    pub(super) error_updates: Option<f64>,
    /// Bytes of the weights, of the whole optimizer state, of other tensors, and of the skeleton.
    pub(super) roles: BTreeMap<&'static str, Weight>,
    /// Bytes per role of the tensors; the optimizer's by kind.
    pub(super) kinds: BTreeMap<&'static str, Weight>,
    /// The reason if it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) damage: Option<String>,
}

/// Size of the tensors of one role.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Weight {
    /// In the file.
    pub(super) raw_bytes: u64,
    /// In the object.
    pub(super) stored_bytes: u64,
}

/// Every regular file at or below a place, by path.
pub(super) fn survey(local: &Local) -> Result<Vec<Entry>> {
    let tree = local.tree()?;
    let mut entries = Vec::new();
    let mut parents = HashMap::new();
    for path in tree.files(&local.path)? {
        // A file may disappear during the survey.
        if let Ok(entry) = entry(&tree, &mut parents, local, &path) {
            entries.push(entry);
        }
    }
    Ok(entries)
}

/// Parents of the objects seen so far: most files of a run share most ancestors.
type Parents = HashMap<Id, Option<Id>>;

/// Number of objects that a read of this object applies, as far as they exist.
fn chain_len(store: &Store, parents: &mut Parents, id: Id) -> u32 {
    let objects = store.objects();
    let parent = |id: &Id| {
        let read = || Object::header_of(store.io(), &objects, *id).ok().and_then(|(header, _)| header.parent);
        *parents.entry(*id).or_insert_with(read)
    };
    std::iter::successors(Some(id), parent).take(MAX_CHAIN as usize + 1).count() as u32
}

fn entry(tree: &Tree, parents: &mut Parents, local: &Local, path: &Path) -> Result<Entry> {
    let store = &tree.store;
    let metadata = fs::symlink_metadata(store.tree().join(path))?;
    let asked = store.profiles(path)?;
    let word = |name| local.mount.as_ref()?.text(path, name);
    let mut entry = Entry {
        path: path.to_string_lossy().into_owned(),
        path_bytes: name_bytes(path),
        state: "sealed".into(),
        pinned: is_pinned(&store.tree(), path)?,
        logical_bytes: metadata.len(),
        stored_bytes: metadata.blocks() * 512,
        profile: asked.words(),
        asked: asked.words(),
        lossy: "0".into(),
        best: None,
        is_less_than_asked: false,
        original: None,
        generations: None,
        object: None,
        parent: None,
        kind: None,
        note: String::new(),
        chain_len: 0,
        max_abs_error: 0.0,
        error_updates: None,
        roles: BTreeMap::new(),
        kinds: BTreeMap::new(),
        damage: None,
    };
    if let Some(stub) = tree.stub(path)? {
        entry.state = "released".into();
        entry.stored_bytes = STUB_BYTES as u64;
        add_object(store, parents, stub.object, &mut entry);
    } else if local.mount.is_some() {
        // Only the daemon knows about open handles.
        entry.state = word("state").unwrap_or(entry.state);
        entry.profile = word("profile").unwrap_or(entry.profile);
        entry.lossy = word("lossy").unwrap_or(entry.lossy);
        entry.generations = word("generations").and_then(|count| count.parse().ok());
        if let Some(id) = word("object").filter(|_| entry.state == "archived").and_then(|id| id.parse().ok()) {
            // The file is archived but still holds the written bytes, so the object's error does not apply. If it is a
            // copy of a lossy file, the daemon's word already says so.
            let lossy = entry.lossy.clone();
            add_object(store, parents, id, &mut entry);
            entry.lossy = lossy;
        }
    } else if let Some(id) = recalled_from(&store.io().open_beneath(&store.tree(), path, 0)?) {
        entry.lossy = Object::open(&store.objects(), id).map_or(entry.lossy, |object| lossy_words(&object));
    }
    entry.best = word("best");
    let made =
        entry.profile.parse().is_ok_and(|made| asked.are_at_most_as_fine_as(made)) || entry.profile == entry.asked;
    entry.is_less_than_asked = entry.lossy != "0" && (entry.best.is_some() || !made);
    Ok(entry)
}

fn add_object(store: &Store, parents: &mut Parents, id: Id, entry: &mut Entry) {
    entry.object = Some(id.to_string());
    let object = match Object::open(&store.objects(), id) {
        Ok(object) => object,
        Err(error) => {
            entry.damage = Some(format!("object {id}: {error}"));
            return;
        }
    };
    let header = object.header();
    entry.stored_bytes += object.stored();
    entry.profile = object.index().profile.clone();
    entry.lossy = lossy_words(&object);
    entry.original = Some(hex(&header.original));
    entry.generations = Some(object.index().generations);
    entry.error_updates = Some(object.index().error_updates).filter(|error| *error > 0.0);
    entry.note = object.index().note.clone();
    // Chains of published systems have no super-steps, whatever place a state has in them.
    let published = object.index().tensors.iter().any(|tensor| tensor.coding.is_external());
    entry.kind = Some(match header.parent {
        None => "keyframe",
        Some(_) if header.is_super_step() && !published => "super-step",
        Some(_) => "delta",
    });
    entry.chain_len = chain_len(store, parents, id);
    entry.parent = header.parent.map(|parent| match Object::open(&store.objects(), parent) {
        Ok(parent) => parent.index().origin.clone(),
        Err(_) => parent.to_string(),
    });
    let mut tensors = 0;
    for tensor in &object.index().tensors {
        let (role, kind) = (tensor.role.group().name(), tensor.role.name());
        for weight in [entry.roles.entry(role).or_default(), entry.kinds.entry(kind).or_default()] {
            weight.raw_bytes += tensor.extent.end - tensor.extent.start;
            weight.stored_bytes += tensor.stored();
        }
        tensors += tensor.extent.end - tensor.extent.start;
        entry.max_abs_error = entry.max_abs_error.max(tensor.max_abs_error);
    }
    let skeleton = object.index().skeleton.iter().map(|chunk| u64::from(chunk.stored)).sum();
    let raw_bytes = header.logical_len - tensors;
    entry.roles.insert("skeleton", Weight { raw_bytes, stored_bytes: skeleton });
}
