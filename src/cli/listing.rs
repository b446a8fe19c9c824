//! Examines every file of a store, mounted or not, without changes.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use rayon::prelude::*;
use serde::{Serialize, Serializer};

use crate::archive::{self, Condition, FileStatus, condition_of_plain, condition_on_disk, lossy_words};
use crate::store::object::{Id, Object};
use crate::store::retention::{Kind, Rule};
use crate::store::{
    MAX_CHAIN, Named, STUB_BYTES, Store, files_below, is_pinned, is_trash, modified_ns, natural, recalled_from,
    step_pattern,
};
use codec::hash::hex;

use super::color::Look;
use super::source::{Local, Tree};

/// Properties of a file.
#[derive(Debug, Default, Serialize)]
pub(super) struct Entry {
    /// Path inside the mount.
    #[serde(flatten)]
    pub(super) at: Named,
    /// The number in its path that counts training.
    pub(super) step: Option<u64>,
    /// When it was modified, in nanoseconds since 1970.
    pub(super) modified_ns: i64,
    #[serde(skip)]
    pub(super) condition: Condition,
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
    /// Its name shows the best result of its run, as far as a daemon knows.
    pub(super) has_best_result: bool,
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
    /// The reason if it ends before its format says: its writer died.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cut_short: Option<String>,
}

/// Size of the tensors of one role.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(super) struct Weight {
    /// In the file.
    pub(super) raw_bytes: u64,
    /// In the object.
    pub(super) stored_bytes: u64,
}

/// Every regular file at or below a place, by path. Files in the trash are among them only if the place is there.
pub(super) fn survey(local: &Local) -> Result<Vec<Entry>> {
    let all = survey_all(local)?;
    Ok(all.into_iter().filter(|entry| !is_trash(&entry.at) || is_trash(&local.path)).collect())
}

/// The same with the trash.
pub(super) fn survey_all(local: &Local) -> Result<Vec<Entry>> {
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

/// Every regular file below a directory that is in no mount and no store, by path.
pub(super) fn survey_plain(directory: &Path) -> Result<Vec<Entry>> {
    let mut files = files_below(directory, Path::new(""))?;
    files.sort_by(|a, b| natural::order(a, b));
    let entry = |path: &PathBuf| {
        // A file may disappear during the survey.
        let metadata = fs::symlink_metadata(directory.join(path)).ok()?;
        let mut entry = Entry::resident(path, &metadata, condition_of_plain(directory, path));
        // It takes its own size, whatever its file system makes of that.
        entry.stored_bytes = entry.logical_bytes;
        entry.note_fault(None);
        Some(entry)
    };
    // On each core one: the description of a large file takes megabytes.
    Ok(files.par_iter().filter_map(entry).collect())
}

/// How faithful the bytes of a file, or of a checkpoint, are.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Fidelity {
    grade: Grade,
    /// The run names it as the best.
    pub(super) is_best: bool,
    pub(super) pinned: bool,
    /// More is asked for than it holds.
    is_less_than_asked: bool,
}

/// The worse grade is the greater.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
enum Grade {
    #[default]
    Exact,
    /// Largest error of a weight, in updates.
    Error(f64),
    /// A copy of a lossy file.
    AsRead,
    Lossy,
    Unfinished,
    BeingWritten,
    NotFinite,
    CutShort,
    Damaged,
}

impl Entry {
    /// A file as it was written. Only its metadata and its condition are known.
    fn resident(path: &Path, metadata: &Metadata, condition: Condition) -> Entry {
        Entry {
            at: Named("path", path.to_path_buf()),
            step: step_pattern::of_file(path).step,
            modified_ns: modified_ns(metadata),
            condition,
            state: "sealed".into(),
            logical_bytes: metadata.len(),
            stored_bytes: metadata.blocks() * 512,
            lossy: "0".into(),
            ..Entry::default()
        }
    }

    /// Notes why it is not whole.
    fn note_fault(&mut self, fault: Option<String>) {
        match self.condition {
            Condition::CutShort => {
                self.cut_short = Some(fault.unwrap_or_else(|| "cut short: `stepfs inspect` shows how".into()));
            }
            _ => self.damage = self.damage.take().or(fault),
        }
    }

    /// How faithful its bytes are.
    pub(super) fn fidelity(&self) -> Fidelity {
        let grade = match self.error_updates {
            _ if self.damage.is_some() => Grade::Damaged,
            _ if self.cut_short.is_some() => Grade::CutShort,
            _ if self.state == "staged" && self.condition == Condition::BeingWritten => Grade::BeingWritten,
            _ if self.condition == Condition::NotFinite => Grade::NotFinite,
            _ if self.lossy == "0" => Grade::Exact,
            _ if self.chain_len == 0 => Grade::AsRead,
            None => Grade::Lossy,
            Some(error) => Grade::Error(error),
        };
        let is_best = self.best.is_some() || self.has_best_result;
        Fidelity { grade, is_best, pinned: self.pinned, is_less_than_asked: self.is_less_than_asked }
    }
}

impl Serialize for Fidelity {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.words())
    }
}

impl Fidelity {
    /// Of two things as one: the worse grade, and whatever is true of either.
    fn and(self, other: Fidelity) -> Fidelity {
        Fidelity {
            grade: if other.grade > self.grade { other.grade } else { self.grade },
            is_best: self.is_best || other.is_best,
            pinned: self.pinned || other.pinned,
            is_less_than_asked: self.is_less_than_asked || other.is_less_than_asked,
        }
    }

    /// A few words for people.
    pub(super) fn words(&self) -> String {
        let grade = match self.grade {
            Grade::Exact => "exact".into(),
            Grade::Error(error) => in_updates(error),
            Grade::AsRead => "lossy copy".into(),
            Grade::Lossy => "lossy".into(),
            Grade::Unfinished => "unfinished".into(),
            Grade::BeingWritten => "being written".into(),
            Grade::NotFinite => "NOT FINITE".into(),
            Grade::CutShort => "CUT SHORT".into(),
            Grade::Damaged => "DAMAGED".into(),
        };
        let words = [(self.is_best, "best, "), (self.pinned, "pinned, "), (self.is_less_than_asked, "LOSSY ")];
        words.iter().filter(|(is_so, _)| *is_so).map(|(_, word)| *word).collect::<String>() + &grade
    }

    /// The bytes are as written.
    pub(super) fn is_exact(&self) -> bool {
        self.grade == Grade::Exact
    }

    /// The largest error of a weight, in updates, if it is known.
    pub(super) fn error(&self) -> Option<f64> {
        if let Grade::Error(error) = self.grade { Some(error) } else { None }
    }

    /// It is whole, but its weights are not finite.
    pub(super) fn is_diverged(&self) -> bool {
        self.grade == Grade::NotFinite
    }

    /// True if nobody should go on from it.
    pub(super) fn is_bad(&self) -> bool {
        self.grade >= Grade::Unfinished
    }

    pub(super) fn look(&self) -> Look {
        match self.grade {
            Grade::NotFinite | Grade::CutShort | Grade::Damaged => Look::Bad,
            _ if self.is_best => Look::Good,
            _ => Look::Plain,
        }
    }
}

/// An error with one digit, never too small.
pub(super) fn in_updates(error: f64) -> String {
    let tenths = (error * 10.0).ceil();
    format!("{:.1} update{}", tenths / 10.0, if tenths > 10.0 { "s" } else { "" })
}

/// A checkpoint, or a file that belongs to none: a line for people. Programs learn it of each of its files.
#[derive(Serialize)]
pub(super) struct Checkpoint<'a> {
    /// Path inside the tree; with `*` for the number of shards.
    #[serde(flatten)]
    pub(super) path: Named,
    pub(super) is_directory: bool,
    pub(super) step: Option<u64>,
    /// When it was modified, in nanoseconds since 1970.
    pub(super) modified_ns: i64,
    /// It is closed and readable, and has no less than the one before it.
    pub(super) is_whole: bool,
    #[serde(skip)]
    pub(super) has_tensors: bool,
    /// Its files.
    #[serde(skip)]
    pub(super) entries: Vec<&'a Entry>,
    #[serde(rename = "faithful")]
    pub(super) fidelity: Fidelity,
}

impl Checkpoint<'_> {
    /// True if a run can go on from it.
    pub(super) fn is_state(&self) -> bool {
        self.is_whole && self.has_tensors && !self.fidelity.is_bad()
    }

    /// Size that programs see.
    pub(super) fn logical_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.logical_bytes).sum()
    }

    /// Bytes that it occupies in the store.
    pub(super) fn stored_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.stored_bytes).sum()
    }
}

/// The checkpoints and other files among the entries at and below a place, in their order. A place inside a checkpoint
/// shows its files.
pub(super) fn checkpoints<'a>(local: &Local, entries: &'a [Entry]) -> Result<Vec<Checkpoint<'a>>> {
    let store = &local.tree()?.store;
    grouped(&store.tree(), store.settings().retention(), &local.path, entries)
}

/// The same of the entries at and below a path in a tree with these rules, or in any directory.
pub(super) fn grouped<'a>(
    tree: &Path,
    rules: &[Rule],
    place: &Path,
    entries: &'a [Entry],
) -> Result<Vec<Checkpoint<'a>>> {
    let known: HashMap<&Path, &Entry> = entries.iter().map(|entry| (&*entry.at, entry)).collect();
    let condition = |path: &Path| known.get(path).map_or(Condition::BeingWritten, |entry| entry.condition);
    let is_best = |path: &Path| known.get(path).is_some_and(|entry| entry.best.is_some());
    let units = archive::checkpoints(tree, rules, &condition, &is_best)?;
    let at: HashMap<&Path, usize> = units.iter().enumerate().map(|(at, (unit, _))| (unit.path.as_path(), at)).collect();
    let unit_of = |entry: &Entry| {
        let file = entry.at.file_name().unwrap_or_default();
        let shards =
            step_pattern::shard(file.as_bytes()).map(|shard| entry.at.with_file_name(OsStr::from_bytes(&shard.of)));
        let all = shards.iter().map(PathBuf::as_path).chain(entry.at.ancestors());
        let found = all.into_iter().find_map(|path| at.get(path)).copied();
        found.filter(|at| units[*at].0.path == *entry.at || !place.starts_with(&units[*at].0.path))
    };
    let mut found: Vec<Checkpoint<'a>> = Vec::new();
    let mut places: HashMap<usize, usize> = HashMap::new();
    for entry in entries {
        let unit = unit_of(entry);
        if let Some(place) = unit.and_then(|unit| places.get(&unit)) {
            found[*place].entries.push(entry);
            continue;
        }
        let alone = Checkpoint {
            path: Named("path", entry.at.to_path_buf()),
            is_directory: false,
            step: entry.step,
            modified_ns: entry.modified_ns,
            is_whole: entry.condition.tensors().is_some(),
            has_tensors: entry.condition.tensors() == Some(true),
            entries: vec![entry],
            fidelity: Fidelity::default(),
        };
        let Some(unit) = unit else {
            found.push(alone);
            continue;
        };
        places.insert(unit, found.len());
        let (unit, is_whole) = &units[unit];
        found.push(Checkpoint {
            path: Named("path", unit.path.clone()),
            is_directory: unit.kind == Kind::Directory,
            step: unit.step,
            modified_ns: unit.modified_ns,
            is_whole: *is_whole,
            has_tensors: unit.with_tensors > 0,
            ..alone
        });
    }
    for checkpoint in &mut found {
        let is_part = checkpoint.is_directory || checkpoint.entries.len() > 1;
        let grade = if is_part && !checkpoint.is_whole { Grade::Unfinished } else { Grade::Exact };
        let worst = Fidelity { grade, ..Fidelity::default() };
        checkpoint.fidelity = checkpoint.entries.iter().map(|entry| entry.fidelity()).fold(worst, Fidelity::and);
    }
    Ok(found)
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
    let known = match &local.mount {
        Some(mount) => mount.text(path, "file").and_then(|text| serde_json::from_str::<FileStatus>(&text).ok()),
        None => None,
    };
    let condition = match known.as_ref().map(|known| known.condition) {
        // Right after a mount these are all files that are as written. A job that starts then goes on from the newest.
        None | Some(Condition::Closed) => condition_on_disk(store, path),
        Some(condition) => condition,
    };
    let mut entry = Entry {
        pinned: is_pinned(&store.tree(), path)?,
        profile: asked.words(),
        asked: asked.words(),
        ..Entry::resident(path, &metadata, condition)
    };
    if let Some(stub) = tree.stub(path)? {
        entry.state = "released".into();
        entry.stored_bytes = STUB_BYTES as u64;
        add_object(store, parents, stub.object, &mut entry);
    } else if let Some(known) = &known {
        // Only the daemon knows about open handles.
        entry.state.clone_from(&known.state);
        entry.profile = known.profile.clone().unwrap_or(entry.profile);
        entry.lossy = known.lossy.clone().unwrap_or(entry.lossy);
        entry.generations = known.generations;
        if let Some(id) = known.object.as_ref().filter(|_| entry.state == "archived").and_then(|id| id.parse().ok()) {
            // The file is archived but still holds the written bytes, so the object's error does not apply. If it is a
            // copy of a lossy file, the daemon's word already says so.
            let lossy = entry.lossy.clone();
            add_object(store, parents, id, &mut entry);
            entry.lossy = lossy;
        }
    } else if let Some(id) = recalled_from(&store.io().open_beneath(&store.tree(), path, 0)?) {
        entry.lossy = Object::open(&store.objects(), id).map_or(entry.lossy, |object| lossy_words(&object));
    }
    entry.note_fault(known.as_ref().and_then(|known| known.fault.clone()));
    if let Some(known) = known {
        (entry.best, entry.has_best_result) = (known.best, known.has_best_result);
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_shown_in_updates() {
        let shown = [0.001, 0.51, 1.0, 2.41].map(in_updates);
        assert_eq!(shown, ["0.1 update", "0.6 update", "1.0 update", "2.5 updates"]);
    }

    #[test]
    fn what_a_person_must_know_comes_first() {
        let of = |grade| Fidelity { grade, is_best: true, pinned: false, is_less_than_asked: false };
        assert_eq!(of(Grade::Exact).words(), "best, exact");
        assert_eq!(of(Grade::CutShort).words(), "best, CUT SHORT");
        assert!(Grade::CutShort > Grade::Error(9.0) && Grade::Error(2.0) > Grade::Error(1.0));
        assert!(of(Grade::Unfinished).is_bad() && !of(Grade::Lossy).is_bad());
    }
}
