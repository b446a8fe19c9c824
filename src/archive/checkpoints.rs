//! Finds the checkpoints in the tree for the rules of retention. Reads the store's directories only.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::clock::age_ns;
use crate::store::durable::DeviceFile;
use crate::store::object::Object;
use crate::store::retention::{Kind, Own, Rule, Unit, Verdict, complete, plan};
use crate::store::step_pattern::{self, Counted, Shard};
use crate::store::{
    Objects, Store, Stub, beneath, entries_if_any, found_at, has_pin, in_parallel, is_trash, modified_ns, open_aside,
};
use formats::{Model, ReadAt, Siblings, cut_short, describe_at, siblings};

use super::FileId;
use super::catalog::Catalog;
use super::entry::{self, State};
use super::lineage::has_tensors;
use super::resident::ResidentReason;
use super::scan;

/// The condition of a regular file's content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Condition {
    /// It is durable, and can be read.
    Whole {
        /// stepfs finds tensors in it. Of a checkpoint that was cut short it finds none.
        has_tensors: bool,
    },
    /// It is open for writing, not durable yet, or not known.
    #[default]
    BeingWritten,
    /// It is closed, and stepfs has not looked at it yet.
    Closed,
    /// It ends before its format says: its writer died.
    CutShort,
    /// It is an unreadable stub, or belongs to a save that is not finished.
    Damaged,
    /// It is whole, but some of its weights are not finite, and those of the state before it are.
    NotFinite,
}

impl Condition {
    /// Whether stepfs finds tensors in the file. `None` if it is not whole.
    pub fn tensors(self) -> Option<bool> {
        match self {
            Condition::Whole { has_tensors } => Some(has_tensors),
            Condition::NotFinite => Some(true),
            Condition::BeingWritten | Condition::Closed | Condition::CutShort | Condition::Damaged => None,
        }
    }

    /// The condition of the file at a path, by the decision about it.
    pub(super) fn of(catalog: &mut Catalog, objects: &Objects, path: &Path) -> Condition {
        let Some(decision) = catalog.decided().decision(path) else { return Condition::BeingWritten };
        let Some(entry) = catalog.get(path) else { return Condition::BeingWritten };
        let has_tensors = match &entry.state {
            State::Staged | State::Resident(ResidentReason::NotDurable) => return Condition::BeingWritten,
            _ if entry.cut => return Condition::CutShort,
            State::Closed => return Condition::Closed,
            State::Resident(ResidentReason::CutShort(_)) => return Condition::CutShort,
            State::Resident(why) if why.hides_an_object() => return Condition::Damaged,
            State::Released(id) => match objects.get(*id) {
                Some((header, _)) => has_tensors(header.signature),
                None => return Condition::Damaged,
            },
            _ if decision.is_unfinished => return Condition::Damaged,
            _ => entry.has_tensors == Some(true),
        };
        // It may be released by now, as an older state of another one like it.
        if entry.unsound { Condition::NotFinite } else { Condition::Whole { has_tensors } }
    }
}

/// The condition of a plain file that nobody writes, at a path below a directory.
pub fn condition_of_plain(directory: &Path, path: &Path) -> Condition {
    let open = |path: &Path| open_aside(&directory.join(path));
    open(path).and_then(|file| condition_of(path, &file, open)).unwrap_or(Condition::Damaged)
}

fn condition_of<T: ReadAt>(
    path: &Path,
    file: &dyn ReadAt,
    open: impl Fn(&Path) -> io::Result<T>,
) -> io::Result<Condition> {
    let description = describe_at(path, file, open)?;
    Ok(match cut_short(path, file, &description)? {
        Some(_) => Condition::CutShort,
        None => Condition::Whole { has_tensors: !description.tensors.is_empty() },
    })
}

/// The condition of a file in a store's tree that nobody writes.
pub fn condition_on_disk(store: &Store, path: &Path) -> Condition {
    let tree = store.tree();
    let look = || {
        let file = store.io().open_beneath(&tree, path, 0)?;
        if let Some(stub) = Stub::read_on(&file, store.id())? {
            let header = Object::header_of(store.io(), &store.objects(), stub.object)?.0;
            return Ok(Condition::Whole { has_tensors: has_tensors(header.signature) });
        }
        condition_of(path, &file, |beside| beneath::open_file(&tree, beside))
    };
    look().unwrap_or(Condition::Damaged)
}

/// What is known of a file of a store that is not mounted: its condition, and whether it is named as the best of its run.
/// Reads the tree only.
pub fn facts_at_rest(store: &Store) -> io::Result<impl Fn(&Path) -> (Condition, bool)> {
    let objects = Arc::new(Objects::load_on(store.io().clone(), &store.objects(), |_, _| {})?);
    let mut catalog = Catalog::new(store.settings().settle, Arc::clone(&objects));
    scan::enter(scan::scan(store)?, &objects, &mut catalog);
    let closed = catalog.files().iter().filter(|(_, entry)| matches!(entry.state, State::Closed));
    let closed: Vec<(PathBuf, u64)> = closed.map(|(path, entry)| (path.to_path_buf(), entry.version)).collect();
    let tree = store.tree();
    let examined = in_parallel(&closed, |(path, _)| -> io::Result<_> {
        let open = |path: &Path| store.io().open_beneath(&tree, path, 0);
        let (file, siblings) = (open(path)?, siblings_at_rest(store, path, open)?.map(Arc::new));
        let metadata = file.metadata()?;
        let examined = scan::examine(&file, &metadata, path, siblings, || describe_at(path, &file, open))?;
        Ok((entry::Stamp::of(&metadata), examined))
    });
    for ((path, version), examined) in closed.iter().zip(examined) {
        let state = match examined {
            Ok((stamp, scan::Examined { state, has_tensors, names, .. })) => {
                catalog.examined(path, *version, (stamp, has_tensors), names);
                state
            }
            Err(_) => State::Resident(ResidentReason::Unreadable),
        };
        catalog.advance(path, *version, state);
    }
    let catalog = RefCell::new(catalog);
    Ok(move |path: &Path| {
        let mut catalog = catalog.borrow_mut();
        (Condition::of(&mut catalog, &objects, path), catalog.decided().named_by(path).is_some())
    })
}

/// A checkpoint and its parts.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// The facts that decide on it.
    pub unit: Unit,
    /// Everything in it but directories.
    pub(super) members: Vec<Member>,
    /// It and the directories in it, each before those below it.
    pub(super) directories: Vec<Member>,
}

/// A part of a checkpoint.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) path: PathBuf,
    pub(super) file: FileId,
    pub(super) modified_ns: i64,
    pub(super) len: u64,
    /// It is one of [`Unit::files`].
    pub(super) counts: bool,
}

impl Checkpoint {
    /// A checkpoint of which no file was looked at.
    fn new(rule: usize, kind: Kind, path: PathBuf, pinned: bool) -> Checkpoint {
        let Counted { series, steps, step, .. } = match kind {
            Kind::File => step_pattern::of_file(&path),
            Kind::Directory => step_pattern::of_directory(&path),
        };
        let (modified_ns, files, with_tensors, bytes, own) = (i64::MIN, 0, 0, 0, Own::default());
        let (being_written, lacks, diverged, is_version, best) = (false, false, false, false, false);
        let unit = Unit {
            path,
            rule,
            kind,
            series,
            steps,
            step,
            modified_ns,
            files,
            with_tensors,
            bytes,
            own,
            being_written,
            lacks,
            diverged,
            is_version,
            pinned,
            best,
        };
        Checkpoint { unit, members: Vec::new(), directories: Vec::new() }
    }
}

impl Member {
    fn new(path: PathBuf, metadata: &Metadata) -> Member {
        let (file, modified_ns, len) = (FileId::of(metadata), modified_ns(metadata), metadata.len());
        Member { path, file, modified_ns, len, counts: false }
    }
}

/// The verdict on each checkpoint of a store, by path. `condition` describes a regular file inside the tree, `is_best` says
/// whether the run names it as its best. Checkpoints that no rule matches are among them, and stay: a file of a rule may
/// belong to one.
pub fn policy(
    store: &Store,
    condition: &dyn Fn(&Path) -> Condition,
    is_best: &dyn Fn(&Path) -> bool,
) -> io::Result<Vec<(Checkpoint, Verdict)>> {
    if store.settings().retention().is_empty() {
        return Ok(Vec::new());
    }
    let rules = and_all(store.settings().retention())?;
    let found = find(&store.tree(), (&rules, 0), condition, is_best)?;
    let units: Vec<Unit> = found.iter().map(|checkpoint| checkpoint.unit.clone()).collect();
    Ok(found.into_iter().zip(plan(&units, &rules, age_ns())).collect())
}

/// Whether a path goes with a directory that goes. It is no checkpoint of its own then.
pub fn goes_with_directory(planned: &[(Checkpoint, Verdict)]) -> impl Fn(&Path) -> bool + use<> {
    let going = planned.iter().filter(|(found, verdict)| verdict.removes() && found.unit.kind == Kind::Directory);
    let going: HashSet<PathBuf> = going.map(|(found, _)| found.unit.path.clone()).collect();
    move |path| path.ancestors().skip(1).any(|above| going.contains(above))
}

/// All checkpoints in a store's tree or in any directory, and whether each is whole. `rules` say only which files may be
/// missing in older ones. Other arguments as of [`policy`].
///
/// # Errors
/// Device errors.
pub fn checkpoints(
    tree: &Path,
    rules: &[Rule],
    condition: &dyn Fn(&Path) -> Condition,
    is_best: &dyn Fn(&Path) -> bool,
) -> io::Result<Vec<(Unit, bool)>> {
    let all = and_all(rules)?;
    let found = find(tree, (&all, rules.len()), condition, is_best)?;
    let units: Vec<Unit> = found.into_iter().map(|found| found.unit).collect();
    let complete = complete(&units, &all, age_ns());
    Ok(units.into_iter().zip(complete).collect())
}

/// The rules, and one that keeps all that they do not match.
fn and_all(rules: &[Rule]) -> io::Result<Vec<Rule>> {
    Ok(rules.iter().cloned().chain([Rule::all().map_err(io::Error::other)?]).collect())
}

/// The checkpoints that rules match, those from the given one on, by path.
fn find(
    tree: &Path,
    (rules, from): (&[Rule], usize),
    condition: &dyn Fn(&Path) -> Condition,
    is_best: &dyn Fn(&Path) -> bool,
) -> io::Result<Vec<Checkpoint>> {
    let mut walk = Walk { tree, rules, from, condition, is_best, found: Vec::new() };
    walk.directory(is_pinned(tree))?;
    let mut found = walk.found;
    found.sort_by(|a, b| {
        (&a.unit.series, &a.unit.steps, &a.unit.path).cmp(&(&b.unit.series, &b.unit.steps, &b.unit.path))
    });
    Ok(found)
}

/// Whether the file or directory at an absolute path is pinned itself. An unreadable mark counts as a pin.
fn is_pinned(path: &Path) -> bool {
    has_pin(path).unwrap_or(true)
}

/// A file that is a checkpoint, or one of several shards of one.
type Part = (Member, Metadata, Option<Shard>);

struct Walk<'a> {
    tree: &'a Path,
    rules: &'a [Rule],
    /// The first rule that makes checkpoints. Those before it only tell which files have a rule of their own.
    from: usize,
    condition: &'a dyn Fn(&Path) -> Condition,
    is_best: &'a dyn Fn(&Path) -> bool,
    found: Vec<Checkpoint>,
}

/// The files that the one at a path is no state without. Nothing is known of them if their index is released.
fn siblings_at_rest(
    store: &Store,
    path: &Path,
    open: impl Fn(&Path) -> io::Result<DeviceFile>,
) -> io::Result<Option<entry::Siblings>> {
    let Some(Siblings { index, files }) = siblings(path) else { return Ok(None) };
    let list = || -> io::Result<Option<Vec<(PathBuf, u64)>>> {
        let opened = open(&index)?;
        if Stub::read_on(&opened, store.id())?.is_some() {
            return Ok(None);
        }
        Ok(Some(Model::read(&opened)?.files().map(|(name, least)| (index.with_file_name(name), least)).collect()))
    };
    let files = match files {
        Some(files) => Some(files.into_iter().map(|path| (path, 0)).collect()),
        None => list().or_else(|error| match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::InvalidData => Ok(Some(Vec::new())),
            _ => Err(error),
        })?,
    };
    Ok(files.map(|files| entry::Siblings { index, files }))
}

impl Walk<'_> {
    /// Everything in the tree. Rules before the one that matches a directory also match in it.
    fn directory(&mut self, pinned: bool) -> io::Result<()> {
        let mut rest = vec![(PathBuf::new(), pinned, self.rules.len())];
        while let Some((directory, pinned, end)) = rest.pop() {
            // Shards of one name, by rule.
            let mut shards: BTreeMap<(usize, PathBuf), Vec<Part>> = BTreeMap::new();
            for (path, file_type) in
                entries_if_any(self.tree, &directory)?.into_iter().filter(|(path, _)| !is_trash(path))
            {
                let is_dir = file_type.is_dir();
                let rule = (self.from..end).find(|rule| self.rules[*rule].matches(&path, is_dir));
                match rule {
                    // `exp1` and `exp2` are different runs unless the glob says otherwise.
                    Some(rule) if is_dir && (!self.rules[rule].is_wild() || step_pattern::counts_training(&path)) => {
                        let mut found = Checkpoint::new(rule, Kind::Directory, path.clone(), pinned);
                        self.gather(&mut found)?;
                        self.found.push(found);
                        if rule > self.from {
                            let pinned = pinned || is_pinned(&self.tree.join(&path));
                            rest.push((path, pinned, rule));
                        }
                    }
                    _ if is_dir => {
                        let pinned = pinned || is_pinned(&self.tree.join(&path));
                        rest.push((path, pinned, end));
                    }
                    Some(rule) if file_type.is_file() => {
                        let Some(metadata) = found_at(self.tree, &path)? else { continue };
                        let shard = step_pattern::shard(name(&path));
                        let unit = shard.as_ref().map_or(path.clone(), |s| directory.join(OsStr::from_bytes(&s.of)));
                        shards.entry((rule, unit)).or_default().push((Member::new(path, &metadata), metadata, shard));
                    }
                    _ => {}
                }
            }
            for ((rule, path), files) in shards {
                let mut found = Checkpoint::new(rule, Kind::File, path, pinned);
                found.unit.lacks = lacks(files.iter().filter_map(|(_, _, shard)| shard.as_ref()));
                for (member, metadata, _) in files {
                    self.file(member, &metadata, &mut found);
                }
                self.found.push(found);
            }
        }
        Ok(())
    }

    /// Everything that belongs to the checkpoint in a directory.
    fn gather(&self, found: &mut Checkpoint) -> io::Result<()> {
        let root = found.unit.path.clone();
        let mut rest = vec![root.clone()];
        while let Some(directory) = rest.pop() {
            // A link may have taken its place since it was listed.
            let Some(metadata) = found_at(self.tree, &directory)?.filter(Metadata::is_dir) else { continue };
            found.unit.pinned |= is_pinned(&self.tree.join(&directory));
            found.directories.push(Member::new(directory.clone(), &metadata));
            let mut shards: BTreeMap<Vec<u8>, Vec<Shard>> = BTreeMap::new();
            let entries = entries_if_any(self.tree, &directory)?;
            // A checkpoint in several files is complete only with its index.
            let files = || entries.iter().filter(|(_, file_type)| file_type.is_file()).map(|(path, _)| path);
            let indexes: BTreeSet<PathBuf> = files().filter_map(|path| Some(siblings(path)?.index)).collect();
            found.unit.lacks |= indexes.len() > files().filter(|path| indexes.contains(*path)).count();
            if directory == root {
                found.unit.is_version = is_version(entries.iter().map(|(path, file_type)| (name(path), *file_type)));
            }
            for (path, file_type) in entries {
                if file_type.is_dir() {
                    rest.push(path);
                    continue;
                }
                let Some(metadata) = found_at(self.tree, &path)? else { continue };
                if let Some(shard) = step_pattern::shard(name(&path)) {
                    shards.entry(shard.of.clone()).or_default().push(shard);
                }
                let member = Member::new(path, &metadata);
                match metadata.is_file() {
                    true => self.file(member, &metadata, found),
                    false => found.members.push(member),
                }
            }
            found.unit.lacks |= shards.values().any(|shards| lacks(shards.iter()));
        }
        // Without files, the time of the directory counts.
        if found.unit.modified_ns == i64::MIN {
            found.unit.modified_ns = found.directories.first().map_or(i64::MAX, |directory| directory.modified_ns);
        }
        Ok(())
    }

    /// A regular file of a checkpoint.
    fn file(&self, member: Member, metadata: &Metadata, Checkpoint { unit, members, .. }: &mut Checkpoint) {
        let condition = (self.condition)(&member.path);
        // What is empty or cut short, or goes again, makes no checkpoint complete.
        let is_cut = metadata.len() == 0 || condition == Condition::CutShort;
        let counts = !is_cut && !step_pattern::is_temporary(&member.path);
        match condition {
            Condition::BeingWritten | Condition::Closed => unit.being_written = true,
            Condition::Damaged => unit.lacks = true,
            Condition::NotFinite => unit.diverged = true,
            Condition::Whole { .. } | Condition::CutShort => {}
        }
        let has_tensors = counts && condition.tensors() == Some(true);
        unit.with_tensors += u64::from(has_tensors);
        unit.lacks |= is_cut && step_pattern::shard(name(&member.path)).is_some();
        unit.pinned |= is_pinned(&self.tree.join(&member.path));
        unit.best |= (self.is_best)(&member.path);
        unit.modified_ns = unit.modified_ns.max(member.modified_ns);
        unit.files += u64::from(counts);
        unit.bytes += metadata.len();
        let is_own = |rule: &Rule| unit.kind == Kind::Directory && rule.matches(&member.path, false);
        if self.rules[..unit.rule].iter().any(is_own) {
            unit.own.with_tensors += u64::from(has_tensors);
            unit.own.files += u64::from(counts);
            unit.own.bytes += metadata.len();
        }
        members.push(Member { counts, ..member });
    }
}

fn name(path: &Path) -> &[u8] {
    path.file_name().unwrap_or_default().as_bytes()
}

/// Whether a shard of one name is missing.
fn lacks<'a>(shards: impl Iterator<Item = &'a Shard>) -> bool {
    let (mut there, mut total) = (BTreeSet::new(), 0);
    for shard in shards {
        there.insert(shard.index);
        total = shard.total;
    }
    (there.len() as u64) < total
}

/// Whether the entries of a directory form a valid version: as many as each of their names says.
fn is_version<'a>(entries: impl Iterator<Item = (&'a [u8], fs::FileType)>) -> bool {
    let shards: Option<Vec<Shard>> =
        entries.map(|(name, file_type)| step_pattern::shard(name).filter(|_| file_type.is_file())).collect();
    let Some(shards) = shards else { return false };
    let indices: BTreeSet<u64> = shards.iter().map(|shard| shard.index).collect();
    !shards.is_empty() && indices.len() == shards.len() && shards.iter().all(|s| s.total == shards.len() as u64)
}
