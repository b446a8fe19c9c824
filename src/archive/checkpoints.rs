//! Finds the checkpoints in the tree for the rules of retention. Reads the store's directories only.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::clock::wall_ns;
use crate::store::retention::{Kind, Rule, Unit, Verdict, complete, plan};
use crate::store::step_pattern::{self, Counted, Shard};
use crate::store::{Store, beneath, has_pin};
use formats::siblings;

use super::FileId;
use super::catalog::modified_ns;
use super::condition::Condition;
use super::namespace::found_at;

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

impl Member {
    fn new(path: PathBuf, metadata: &Metadata) -> Member {
        let (file, modified_ns, len) = (FileId::of(metadata), modified_ns(metadata), metadata.len());
        Member { path, file, modified_ns, len, counts: false }
    }
}

/// The verdict on each checkpoint of a store, by path. `condition` describes a regular file inside the tree, `is_best` says
/// whether the run names it as its best.
pub fn policy(
    store: &Store,
    condition: &dyn Fn(&Path) -> Condition,
    is_best: &dyn Fn(&Path) -> bool,
) -> io::Result<Vec<(Checkpoint, Verdict)>> {
    let rules = store.settings().retention();
    let found = find(store, rules, condition, is_best)?;
    let units: Vec<Unit> = found.iter().map(|checkpoint| checkpoint.unit.clone()).collect();
    Ok(found.into_iter().zip(plan(&units, rules, wall_ns())).collect())
}

/// All checkpoints of a store, whatever its rules say, and whether each is whole. Arguments as of [`policy`].
///
/// # Errors
/// Device errors.
pub fn checkpoints(
    store: &Store,
    condition: &dyn Fn(&Path) -> Condition,
    is_best: &dyn Fn(&Path) -> bool,
) -> io::Result<Vec<(Unit, bool)>> {
    let rules = [Rule::all().map_err(io::Error::other)?];
    let units: Vec<Unit> = find(store, &rules, condition, is_best)?.into_iter().map(|found| found.unit).collect();
    let complete = complete(&units, &rules, wall_ns());
    Ok(units.into_iter().zip(complete).collect())
}

/// The checkpoints that rules match, by path.
fn find(
    store: &Store,
    rules: &[Rule],
    condition: &dyn Fn(&Path) -> Condition,
    is_best: &dyn Fn(&Path) -> bool,
) -> io::Result<Vec<Checkpoint>> {
    let tree = store.tree();
    let mut walk = Walk { tree: &tree, rules, condition, is_best, found: Vec::new() };
    if !rules.is_empty() {
        walk.directory(PathBuf::new(), is_pinned(&tree))?;
    }
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
    condition: &'a dyn Fn(&Path) -> Condition,
    is_best: &'a dyn Fn(&Path) -> bool,
    found: Vec<Checkpoint>,
}

impl Walk<'_> {
    /// Everything in a directory and below it. A path has at most `PATH_MAX` bytes, so the recursion is bounded.
    fn directory(&mut self, root: PathBuf, pinned: bool) -> io::Result<()> {
        let mut rest = vec![(root, pinned)];
        while let Some((directory, pinned)) = rest.pop() {
            // Shards of one name, by rule.
            let mut shards: BTreeMap<(usize, PathBuf), Vec<Part>> = BTreeMap::new();
            for (path, file_type) in self.list(&directory)? {
                let is_dir = file_type.is_dir();
                let rule = self.rules.iter().position(|rule| rule.matches(&path, is_dir));
                match rule {
                    // `exp1` and `exp2` are different runs unless the glob says otherwise.
                    Some(rule) if is_dir && (!self.rules[rule].is_wild() || step_pattern::counts_training(&path)) => {
                        let mut gathered = Gathered { pinned, ..Gathered::default() };
                        self.gather(&path, &mut gathered)?;
                        self.add(rule, Kind::Directory, path, gathered);
                    }
                    _ if is_dir => {
                        let pinned = pinned || is_pinned(&self.tree.join(&path));
                        rest.push((path, pinned));
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
                let mut gathered = Gathered { pinned, ..Gathered::default() };
                gathered.lacks = lacks(files.iter().filter_map(|(_, _, shard)| shard.as_ref()));
                for (member, metadata, _) in files {
                    self.file(member, &metadata, &mut gathered);
                }
                self.add(rule, Kind::File, path, gathered);
            }
        }
        Ok(())
    }

    /// Entries of a directory. None if it is gone, or a link has its place.
    fn list(&self, directory: &Path) -> io::Result<Vec<(PathBuf, fs::FileType)>> {
        let directory_file = match beneath::open_dir(self.tree, directory) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) => return Ok(Vec::new()),
            opened => opened?,
        };
        let entries = fs::read_dir(beneath::by_descriptor(&directory_file))?;
        let mut listed = Vec::new();
        for entry in entries {
            let entry = entry?;
            // It may be gone by now.
            if let Ok(file_type) = entry.file_type() {
                listed.push((directory.join(entry.file_name()), file_type));
            }
        }
        Ok(listed)
    }

    /// Everything that belongs to the checkpoint in a directory.
    fn gather(&self, root: &Path, gathered: &mut Gathered) -> io::Result<()> {
        let mut rest = vec![root.to_path_buf()];
        while let Some(directory) = rest.pop() {
            // A link may have taken its place since it was listed.
            let Some(metadata) = found_at(self.tree, &directory)?.filter(Metadata::is_dir) else { continue };
            gathered.pinned |= is_pinned(&self.tree.join(&directory));
            gathered.directories.push(Member::new(directory.clone(), &metadata));
            let mut shards: BTreeMap<Vec<u8>, Vec<Shard>> = BTreeMap::new();
            let entries = self.list(&directory)?;
            // A checkpoint in several files is complete only with its index.
            let files = || entries.iter().filter(|(_, file_type)| file_type.is_file()).map(|(path, _)| path);
            let indexes: BTreeSet<PathBuf> = files().filter_map(|path| Some(siblings(path)?.index)).collect();
            gathered.lacks |= indexes.len() > files().filter(|path| indexes.contains(*path)).count();
            if directory == root {
                gathered.is_version = is_version(entries.iter().map(|(path, file_type)| (name(path), *file_type)));
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
                    true => self.file(member, &metadata, gathered),
                    false => gathered.members.push(member),
                }
            }
            gathered.lacks |= shards.values().any(|shards| lacks(shards.iter()));
        }
        Ok(())
    }

    /// A regular file of a checkpoint.
    fn file(&self, member: Member, metadata: &Metadata, gathered: &mut Gathered) {
        let condition = (self.condition)(&member.path);
        // What is empty or cut short, or goes again, makes no checkpoint complete.
        let is_cut = metadata.len() == 0 || condition == Condition::CutShort;
        let counts = !is_cut && !step_pattern::is_temporary(&member.path);
        match condition {
            Condition::CutShort => {}
            Condition::Whole { has_tensors } => gathered.with_tensors += u64::from(counts && has_tensors),
            Condition::BeingWritten => gathered.being_written = true,
            Condition::Damaged => gathered.lacks = true,
        }
        gathered.lacks |= is_cut && step_pattern::shard(name(&member.path)).is_some();
        gathered.pinned |= is_pinned(&self.tree.join(&member.path));
        gathered.best |= (self.is_best)(&member.path);
        gathered.modified_ns = gathered.modified_ns.max(Some(member.modified_ns));
        gathered.files += u64::from(counts);
        gathered.bytes += metadata.len();
        gathered.members.push(Member { counts, ..member });
    }

    fn add(&mut self, rule: usize, kind: Kind, path: PathBuf, gathered: Gathered) {
        let Counted { series, steps, step, .. } = match kind {
            Kind::File => step_pattern::of_file(&path),
            Kind::Directory => step_pattern::of_directory(&path),
        };
        let own = || gathered.directories.first().map(|directory| directory.modified_ns);
        let unit = Unit {
            path,
            rule,
            kind,
            series,
            steps,
            step,
            modified_ns: gathered.modified_ns.or_else(own).unwrap_or(i64::MAX),
            files: gathered.files,
            with_tensors: gathered.with_tensors,
            bytes: gathered.bytes,
            being_written: gathered.being_written,
            lacks: gathered.lacks,
            is_version: gathered.is_version,
            pinned: gathered.pinned,
            best: gathered.best,
        };
        self.found.push(Checkpoint { unit, members: gathered.members, directories: gathered.directories });
    }
}

#[derive(Default)]
struct Gathered {
    members: Vec<Member>,
    directories: Vec<Member>,
    modified_ns: Option<i64>,
    files: u64,
    with_tensors: u64,
    bytes: u64,
    being_written: bool,
    lacks: bool,
    is_version: bool,
    pinned: bool,
    best: bool,
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
