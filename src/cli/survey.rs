//! Looks at every file of a store, mounted or not, without changing anything.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::archive::lossy_words;
use crate::hash::hex;
use crate::store::object::{Id, Object};
use crate::store::{MAX_CHAIN, STUB_BYTES, Store, Stub, beneath, is_pinned, recalled_from};

use super::natural;
use super::place::{Place, attribute};

/// What there is to say about a file.
#[derive(Debug, Serialize)]
pub(super) struct Entry {
    /// Path inside the mount.
    pub(super) path: String,
    /// `staged`, `sealed`, `archived` or `released`.
    pub(super) state: String,
    /// It, or a directory above it, is pinned.
    pub(super) pinned: bool,
    /// Bytes that programs see.
    pub(super) logical_bytes: u64,
    /// Bytes that the file occupies in the store; of a file that is archived and still resident, both.
    pub(super) stored_bytes: u64,
    /// Profile that it was, or would be, archived with.
    pub(super) profile: String,
    /// Profile that is asked for.
    pub(super) asked: String,
    /// `0`: its bytes are as they were written; `1` and the largest error of each kind of tensor: they are not.
    pub(super) lossy: String,
    /// What names it as the best of its run, as far as a daemon knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) best: Option<String>,
    /// It holds lossy bytes, and its name, a profile or a checkpoint's own files ask for more.
    pub(super) is_less_than_asked: bool,
    /// SHA-256 of the file as it was written, once it is archived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) original: Option<String>,
    /// Restores from lossy files that are behind it; none where that is not known, as of a resident file of a store that
    /// is not mounted.
    pub(super) generations: Option<u32>,
    /// The object that holds it.
    pub(super) object: Option<String>,
    /// Path, when it was archived, of the state that this one is a difference to.
    pub(super) parent: Option<String>,
    /// `keyframe`, `super-step` or `delta`; none for a resident file.
    pub(super) kind: Option<&'static str>,
    /// Why it is a keyframe or a super-step: what was predicted.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(super) note: String,
    /// Objects that a read applies; 0 for a resident file.
    pub(super) chain_len: u32,
    /// Largest error of any element of any tensor.
    pub(super) max_abs_error: f64,
    /// Bytes of the weights, of all of the optimizer's state, of other tensors, and of the skeleton.
    pub(super) roles: BTreeMap<&'static str, Weight>,
    /// Bytes per role of the tensors, the optimizer's by kind.
    pub(super) kinds: BTreeMap<&'static str, Weight>,
    /// Why it cannot be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) damage: Option<String>,
}

/// What the tensors of one role weigh.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Weight {
    /// As the file has them.
    pub(super) raw_bytes: u64,
    /// As the object has them.
    pub(super) stored_bytes: u64,
}

/// Every regular file at or below a place, by path.
pub(super) fn survey(place: &Place) -> Result<Vec<Entry>> {
    let store = Store::look(&place.store)?;
    let mut entries = Vec::new();
    let mut parents = HashMap::new();
    for path in files(&store, &place.path)? {
        // A file may go while the store is looked at.
        if let Ok(entry) = entry(&store, &mut parents, place, &path) {
            entries.push(entry);
        }
    }
    Ok(entries)
}

/// Paths inside the tree of the regular files at or below `path`. What goes while it is looked at is left out.
pub(super) fn files(store: &Store, path: &Path) -> Result<Vec<PathBuf>> {
    let root = store.tree();
    let mut files = Vec::new();
    let mut rest = vec![path.to_path_buf()];
    while let Some(found) = rest.pop() {
        let mut look = || -> std::io::Result<()> {
            let metadata = beneath::metadata(&root, &found)?;
            if metadata.is_file() {
                files.push(found.clone());
            } else if metadata.is_dir() {
                let directory = beneath::open_dir(&root, &found)?;
                for entry in fs::read_dir(beneath::by_descriptor(&directory))? {
                    rest.push(found.join(entry?.file_name()));
                }
            }
            Ok(())
        };
        match look() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && found != path => {}
            result => result.with_context(|| format!("{}", root.join(&found).display()))?,
        }
    }
    files.sort_by(|a, b| natural::order(a, b));
    Ok(files)
}

/// The stub of a file in the tree, if one stands for it.
pub(super) fn stub(store: &Store, path: &Path) -> Result<Option<Stub>> {
    let name = || format!("{}", store.tree().join(path).display());
    let file = beneath::open_file(&store.tree(), path).with_context(name)?;
    Ok(Stub::read(&file, store.id())?)
}

/// Parents of the objects that were looked at: most files of a run share most of their ancestors.
type Parents = HashMap<Id, Option<Id>>;

/// Objects that a read of this one applies, as far as they are there.
fn chain_len(store: &Store, parents: &mut Parents, id: Id) -> u32 {
    let objects = store.objects();
    let parent = |id: &Id| {
        let read = || Object::header_of(&objects, *id).ok().and_then(|(header, _)| header.parent);
        *parents.entry(*id).or_insert_with(read)
    };
    std::iter::successors(Some(id), parent).take(MAX_CHAIN as usize + 1).count() as u32
}

fn entry(store: &Store, parents: &mut Parents, place: &Place, path: &Path) -> Result<Entry> {
    let metadata = fs::symlink_metadata(store.tree().join(path))?;
    let asked = store.profiles(path)?;
    let word = |name| {
        let value = attribute(&place.mount.as_ref()?.join(path), name).ok()?;
        String::from_utf8(value).ok()
    };
    let mut entry = Entry {
        path: path.to_string_lossy().into_owned(),
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
        roles: BTreeMap::new(),
        kinds: BTreeMap::new(),
        damage: None,
    };
    if let Some(stub) = stub(store, path)? {
        entry.state = "released".into();
        entry.stored_bytes = STUB_BYTES as u64;
        add_object(store, parents, stub.object, &mut entry);
    } else if place.mount.is_some() {
        // Only the daemon knows about open handles.
        entry.state = word("state").unwrap_or(entry.state);
        entry.profile = word("profile").unwrap_or(entry.profile);
        entry.lossy = word("lossy").unwrap_or(entry.lossy);
        entry.generations = word("generations").and_then(|count| count.parse().ok());
        if let Some(id) = word("object").filter(|_| entry.state == "archived").and_then(|id| id.parse().ok()) {
            // The object is made, and the file is still as it was written; unless it is a copy of what was not.
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
    entry.note = object.index().note.clone();
    // Chains of published systems have none, whatever place a state has in them.
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
