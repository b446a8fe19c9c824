//! What the archive knows of every file: a map from path to state, changed by notes from the file system and by the
//! archive's own thread. No I/O happens here.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use crate::container::Description;
use crate::store::{Id, Objects};

use super::FileId;

/// Why a file whose fsync failed stays as it is, under whatever name, until it is written again.
pub(super) const NOT_DURABLE: &str = "could not be made durable";

/// Where a file is in its life.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// A handle that can write is open, or was when the store was last used.
    Staged,
    /// Closed; its bytes are not yet known to be durable.
    Closed,
    /// Durable, exact and resident; waits for a newer one of its lineage.
    Sealed(Arc<Sealed>),
    /// Its object is durable; it waits for its handles to close.
    Archived(Arc<Sealed>, Id),
    /// A stub stands in its place.
    Released(Id),
    /// Stays as it is, for this reason.
    Resident(&'static str),
}

impl State {
    /// Whether it must be found out again under another name.
    fn follows_from_name(&self) -> bool {
        match self {
            State::Sealed(_) | State::Archived(..) => true,
            State::Resident(why) => *why != NOT_DURABLE,
            State::Staged | State::Closed | State::Released(_) => false,
        }
    }
}

/// What is known of a durable file.
#[derive(Debug)]
pub(super) struct Sealed {
    pub(super) file: FileId,
    pub(super) len: u64,
    pub(super) modified_ns: i64,
    /// Numbers in its name that count training.
    pub(super) steps: Vec<u64>,
    /// xxh3-64 of a few samples of its bytes.
    pub(super) sample: u64,
    pub(super) signature: u64,
    pub(super) lineage: u64,
    pub(super) description: Description,
}

impl Sealed {
    /// Whether this is still said of the file that has these metadata: content cannot have changed without its time.
    pub(super) fn describes(&self, metadata: &std::fs::Metadata) -> bool {
        FileId::of(metadata) == self.file && metadata.len() == self.len && modified_ns(metadata) == self.modified_ns
    }
}

/// Modification time in nanoseconds since 1970.
pub(super) fn modified_ns(metadata: &std::fs::Metadata) -> i64 {
    metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec())
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) state: State,
    /// Grows whenever the content may have changed: work begun before is void.
    pub(super) version: u64,
    /// Order of sealing; decides between files of one modification time.
    pub(super) sequence: u64,
    /// A handle was open when it was to be archived or released: wait for the file system to say it is closed.
    pub(super) busy: bool,
    /// An attempt failed; not before then again. `None` after a failure that trying again cannot mend.
    pub(super) failed: Option<Failed>,
}

#[derive(Clone, Debug)]
pub(super) struct Failed {
    pub(super) why: String,
    pub(super) retry: Option<Instant>,
}

/// All files of the tree.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    entries: BTreeMap<PathBuf, Entry>,
    next: u64,
}

/// Something to do for a file.
#[derive(Clone, Debug)]
pub(super) enum Task {
    /// Make it durable and find its tensors.
    Seal { path: PathBuf, version: u64 },
    /// Encode it: `newer` holds the bytes, as written, of the state after it.
    Archive { path: PathBuf, version: u64, sealed: Arc<Sealed>, newer: (PathBuf, Arc<Sealed>) },
    /// Put the stub in its place.
    Release { path: PathBuf, version: u64, sealed: Arc<Sealed>, object: Id },
}

impl Catalog {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Adds a file that was found in the tree.
    pub(super) fn found(&mut self, path: PathBuf, state: State) {
        let number = self.number();
        self.entries.insert(path, Entry { state, version: number, sequence: number, busy: false, failed: None });
    }

    pub(super) fn get(&self, path: &Path) -> Option<&Entry> {
        self.entries.get(path)
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (&PathBuf, &Entry)> {
        self.entries.iter()
    }

    /// The file's content may change from now on.
    pub(super) fn opened_for_writing(&mut self, path: &Path, objects: &Objects) {
        let number = self.number();
        let entry = Entry { state: State::Staged, version: number, sequence: number, busy: false, failed: None };
        if let Some(old) = self.entries.insert(path.to_path_buf(), entry) {
            unname(&old, objects);
        }
    }

    /// The last handle is gone: everything that waited for it may go on. `written`: the content may have changed.
    pub(super) fn closed(&mut self, path: &Path, written: bool, objects: &Objects) {
        let number = self.number();
        let Some(entry) = self.entries.get_mut(path) else {
            return;
        };
        entry.busy = false;
        if written && !matches!(entry.state, State::Released(_)) {
            unname(entry, objects);
            *entry = Entry { state: State::Closed, version: number, sequence: number, busy: false, failed: None };
        }
    }

    pub(super) fn removed(&mut self, path: &Path, objects: &Objects) {
        if let Some(old) = self.entries.remove(path) {
            unname(&old, objects);
        }
    }

    pub(super) fn linked(&mut self, from: &Path, to: &Path) {
        if let Some(mut entry) = self.entries.get(from).cloned() {
            // Lineage and profile follow from the name: what is known of the other one does not hold for this.
            if entry.state.follows_from_name() {
                entry.state = State::Closed;
            }
            (entry.version, entry.sequence) = (self.number(), self.number());
            entry.busy = false;
            self.entries.insert(to.to_path_buf(), entry);
        }
    }

    /// A file or a directory with all that is below it has a new name; what had the name before is gone.
    pub(super) fn renamed(&mut self, from: &Path, to: &Path, objects: &Objects) {
        let moved = self.take(from);
        for (_, old) in self.take(to) {
            unname(&old, objects);
        }
        self.put(moved, from, to, objects);
    }

    pub(super) fn exchanged(&mut self, a: &Path, b: &Path, objects: &Objects) {
        let (at_a, at_b) = (self.take(a), self.take(b));
        self.put(at_a, a, b, objects);
        self.put(at_b, b, a, objects);
    }

    /// Takes out a path and everything below it.
    fn take(&mut self, path: &Path) -> Vec<(PathBuf, Entry)> {
        let range = (Bound::Included(path), Bound::Unbounded);
        let below = self.entries.range::<Path, _>(range).map(|(p, _)| p).take_while(|p| p.starts_with(path));
        let paths: Vec<PathBuf> = below.cloned().collect();
        paths.into_iter().filter_map(|p| self.entries.remove_entry(&p)).collect()
    }

    fn put(&mut self, entries: Vec<(PathBuf, Entry)>, from: &Path, to: &Path, objects: &Objects) {
        for (path, mut entry) in entries {
            let path = match path.strip_prefix(from) {
                Ok(rest) if rest.as_os_str().is_empty() => to.to_path_buf(),
                Ok(rest) => to.join(rest),
                Err(_) => path,
            };
            // Lineage and profile follow from the name: they must be found out again, and what is under way is void.
            // That goes for an object made under the old name, too: the new one may ask for an exact file.
            entry.version = self.number();
            if entry.state.follows_from_name() {
                unname(&entry, objects);
                entry.state = State::Closed;
                entry.failed = None;
            }
            entry.busy = false;
            self.entries.insert(path, entry);
        }
    }

    /// Changes a file's state if its content is still that of `version`.
    pub(super) fn advance(&mut self, path: &Path, version: u64, state: State) -> bool {
        match self.entries.get_mut(path) {
            Some(entry) if entry.version == version => {
                entry.state = state;
                entry.failed = None;
                true
            }
            _ => false,
        }
    }

    /// Notes that the file has, or may have, an open handle.
    pub(super) fn set_busy(&mut self, path: &Path, version: u64, busy: bool) {
        if let Some(entry) = self.entries.get_mut(path).filter(|entry| entry.version == version) {
            entry.busy = busy;
        }
    }

    /// Whether a newer state of the same lineage is sealed: only then may this one lose anything.
    pub(super) fn is_history(&self, path: &Path, sealed: &Sealed) -> bool {
        let Some(own) = self.entries.get(path).map(order) else {
            return false;
        };
        self.entries.values().any(|entry| match &entry.state {
            State::Sealed(other) => other.lineage == sealed.lineage && !twins(sealed, other) && order(entry) > own,
            _ => false,
        })
    }

    /// Notes that an attempt failed.
    pub(super) fn set_failed(&mut self, path: &Path, version: u64, failed: Failed) {
        if let Some(entry) = self.entries.get_mut(path).filter(|entry| entry.version == version) {
            entry.failed = Some(failed);
        }
    }

    /// Forgets all failures, and that handles were open.
    pub(super) fn retry(&mut self) {
        for entry in self.entries.values_mut() {
            entry.failed = None;
            entry.busy = false;
        }
    }

    /// The first thing that can be done now: make files durable before anything else, then release, then archive the
    /// oldest. Also says when a failed attempt may be repeated, if that is all there is.
    pub(super) fn next_task(&self, now: Instant) -> (Option<Task>, Option<Instant>) {
        let tasks = self.tasks();
        let mut retry: Option<Instant> = None;
        let mut best = None;
        for (path, entry, task) in tasks {
            if let Some(failed) = &self.entries[path].failed {
                match failed.retry {
                    Some(at) if at <= now => {}
                    Some(at) => {
                        retry = Some(retry.map_or(at, |other| other.min(at)));
                        continue;
                    }
                    None => continue,
                }
            }
            let urgency = match task {
                Task::Seal { .. } => 0,
                Task::Release { .. } => 1,
                Task::Archive { .. } => 2,
            };
            let order = (urgency, order(entry));
            if best.as_ref().is_none_or(|(other, _)| order < *other) {
                best = Some((order, task));
            }
        }
        (best.map(|(_, task)| task), retry)
    }

    /// Number of things that can be done now or after a failure has passed, and why the last one failed.
    pub(super) fn queued(&self) -> (usize, Option<String>) {
        let mut queued = 0;
        let mut why = None;
        for (path, _, _) in self.tasks() {
            match &self.entries[path].failed {
                Some(Failed { retry: None, .. }) => continue,
                Some(failed) => why = Some(failed.why.clone()),
                None => {}
            }
            queued += 1;
        }
        (queued, why)
    }

    /// Everything that waits for nobody but the archive.
    fn tasks(&self) -> Vec<(&PathBuf, &Entry, Task)> {
        let mut lineages: HashMap<u64, Vec<Member>> = HashMap::new();
        let mut tasks = Vec::new();
        for (path, entry) in &self.entries {
            let version = entry.version;
            match &entry.state {
                State::Closed => tasks.push((path, entry, Task::Seal { path: path.clone(), version })),
                State::Sealed(sealed) => {
                    lineages.entry(sealed.lineage).or_default().push((path, entry, sealed.clone()))
                }
                State::Archived(sealed, object) if !entry.busy => {
                    let (path_, sealed, object) = (path.clone(), sealed.clone(), *object);
                    tasks.push((path, entry, Task::Release { path: path_, version, sealed, object }));
                }
                _ => {}
            }
        }
        for mut members in lineages.into_values() {
            members.sort_by_key(|(_, entry, _)| order(entry));
            for (at, (path, entry, sealed)) in members.iter().enumerate() {
                // A twin is not a newer state: it has the same samples, and is compared whole before it is believed.
                let newer = members[at + 1..].iter().find(|(_, _, other)| !twins(sealed, other));
                if let (Some((newer_path, _, newer)), false) = (newer, entry.busy) {
                    let newer = ((*newer_path).clone(), newer.clone());
                    let (path_, version, sealed) = ((*path).clone(), entry.version, sealed.clone());
                    tasks.push((*path, *entry, Task::Archive { path: path_, version, sealed, newer }));
                }
            }
        }
        tasks
    }
}

/// A sealed file among those of its lineage.
type Member<'a> = (&'a PathBuf, &'a Entry, Arc<Sealed>);

fn twins(a: &Sealed, b: &Sealed) -> bool {
    a.len == b.len && a.sample == b.sample
}

/// Which state of a lineage is the older one: by modification time, then by the steps in their names (an archive is
/// unpacked with whole seconds), then by the order of closing.
fn order(entry: &Entry) -> (i64, &[u64], u64) {
    match &entry.state {
        State::Sealed(sealed) | State::Archived(sealed, _) => (sealed.modified_ns, &sealed.steps, entry.sequence),
        _ => (0, &[], entry.sequence),
    }
}

fn unname(entry: &Entry, objects: &Objects) {
    if let State::Released(id) | State::Archived(_, id) = entry.state {
        objects.unname(id);
    }
}
