//! The device after a power failure: any state that the syncs before it allow.
//!
//! Synced parts are durable for certain: a file's bytes and attributes by an fsync of the file, names in a directory by
//! one of the directory. Every other part may be durable by luck, in any order, under these rules. The changes of one
//! name happen in order. A rename is never seen as neither name, and within one directory never as both. Attributes
//! come in order. A directory whose names are durable has at least the times of the last of them. Unsynced bytes come
//! by sectors or pages, or not at all; if the length is durable before them, they read as zeros.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::hash::{Hash, Hasher};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;

use stepfs::store::durable::{Attribute, CrashPoint, Device, Disk, Times};

use super::recorder::{Name, Node, Op, Record};
use super::series::Random;

/// The unsynced parts that are durable nevertheless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Luck {
    /// Nothing.
    None,
    /// Everything: the process was killed, or the machine was lucky.
    All,
    /// All names and attributes, and of the bytes only the lengths.
    Names,
    /// All bytes, and no name.
    Bytes,
    /// Some of each, torn.
    Some(u64),
}

/// The device after a failure.
#[derive(Debug, PartialEq)]
pub(crate) struct Image {
    nodes: Vec<Left>,
}

/// The remaining state of a node.
#[derive(Clone, Debug, PartialEq)]
struct Left {
    is_dir: bool,
    mode: u32,
    owner: (u32, u32),
    times: Times,
    bytes: Vec<u8>,
    extended: BTreeMap<OsString, Vec<u8>>,
    names: BTreeMap<OsString, Node>,
    /// When it was last renamed.
    changed: Option<(i64, i64)>,
}

/// When files were last renamed, by device and inode number.
pub(crate) type Changed = HashMap<(u64, u64), (i64, i64)>;

/// For one name: the time of its change, and its target.
type Changes = BTreeMap<Name, Vec<(usize, Option<Node>)>>;

impl Image {
    /// The state after the first `done` changes.
    pub(crate) fn after(record: &Record, done: usize, luck: Luck) -> Image {
        let mut random = Random(match luck {
            Luck::Some(seed) => seed ^ (done as u64) << 32,
            _ => 0,
        });
        let log = &record.log[..done];
        let mut nodes: Vec<Left> = record.nodes.iter().map(Left::from).collect();
        let mut synced: HashMap<Node, usize> = HashMap::new();
        let mut all = None;
        for (at, entry) in log.iter().enumerate() {
            match entry.op {
                Op::Sync { node } => drop(synced.insert(node, at)),
                Op::SyncAll => all = Some(at),
                _ => {}
            }
        }
        let synced = |node: Node| synced.get(&node).copied().max(all);
        let names = names(record, log, &synced, luck, &mut random);
        for ((dir, name), node) in &names.now {
            nodes[*dir].names.insert(name.clone(), *node);
        }
        for (at, entry) in log.iter().enumerate() {
            if let Op::Rename { to, node, .. } = &entry.op
                && names.applied.contains(&(to.0, at))
            {
                nodes[*node].changed = entry.stamped.last().map(|(_, times)| times.modified);
            }
        }
        // Names that were there at the beginning and went.
        for (dir, name) in &names.gone {
            nodes[*dir].names.remove(name);
        }
        for (node, left) in nodes.iter_mut().enumerate() {
            if left.is_dir {
                stamp(left, node, log, synced(node), &names.applied, luck, &mut random);
            } else {
                fill(left, node, log, synced(node), luck, &mut random);
            }
        }
        let mut image = Image { nodes };
        image.forget_what_has_no_name();
        image
    }

    /// So that images that look the same to a mount are equal.
    fn forget_what_has_no_name(&mut self) {
        let mut named = vec![false; self.nodes.len()];
        let mut queue = vec![0];
        while let Some(node) = queue.pop() {
            if !std::mem::replace(&mut named[node], true) {
                queue.extend(self.nodes[node].names.values());
            }
        }
        for (node, left) in self.nodes.iter_mut().enumerate().filter(|(node, _)| !named[*node]) {
            let _ = node;
            (left.bytes, left.names, left.extended) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
            (left.times, left.mode) = (Times { accessed: (0, 0), modified: (0, 0) }, 0);
        }
    }

    /// Equal for equal images.
    pub(crate) fn key(&self) -> u64 {
        let mut hash = std::hash::DefaultHasher::new();
        for left in &self.nodes {
            (left.is_dir, left.mode, left.owner, left.changed, &left.bytes, &left.extended, &left.names)
                .hash(&mut hash);
            (left.times.accessed, left.times.modified).hash(&mut hash);
        }
        hash.finish()
    }

    /// Writes it into an empty directory. Returns the times of renames: nobody can set those of a file.
    pub(crate) fn write(&self, root: &Path) -> Changed {
        let mut first = HashMap::new();
        self.put(0, root, &mut first);
        let place = |path: &std::path::PathBuf| {
            let metadata = fs::symlink_metadata(path).unwrap();
            (metadata.dev(), metadata.ino())
        };
        first.iter().filter_map(|(node, path)| Some((place(path), self.nodes[*node].changed?))).collect()
    }

    fn put(&self, node: Node, path: &Path, first: &mut HashMap<Node, std::path::PathBuf>) {
        let left = &self.nodes[node];
        if left.is_dir {
            if node != 0 {
                fs::create_dir(path).unwrap();
            }
            left.names.iter().for_each(|(name, child)| self.put(*child, &path.join(name), first));
        } else if let Some(other) = first.get(&node) {
            return fs::hard_link(other, path).unwrap();
        } else {
            first.insert(node, path.to_path_buf());
            let file = File::create_new(path).unwrap();
            let end = left.bytes.iter().rposition(|byte| *byte != 0).map_or(0, |at| at + 1);
            file.write_all_at(&left.bytes[..end], 0).unwrap();
            file.set_len(left.bytes.len() as u64).unwrap();
        }
        let file = File::open(path).unwrap();
        for (name, value) in &left.extended {
            Disk.set_attribute(&file, &Attribute::Extended(name, value), CrashPoint::Fsync).unwrap();
        }
        std::os::unix::fs::fchown(&file, Some(left.owner.0), Some(left.owner.1)).unwrap();
        fs::set_permissions(path, Permissions::from_mode(left.mode)).unwrap();
        Disk.set_attribute(&file, &Attribute::Times(left.times), CrashPoint::Fsync).unwrap();
    }
}

impl From<&super::recorder::Start> for Left {
    fn from(start: &super::recorder::Start) -> Left {
        let super::recorder::Start { is_dir, mode, owner, times, bytes, extended, names, changed } = start.clone();
        Left { is_dir, mode, owner, times, bytes, extended, names, changed }
    }
}

struct Names {
    now: BTreeMap<Name, Node>,
    gone: Vec<Name>,
    /// Directories and changes of a name in them that are durable.
    applied: HashSet<(Node, usize)>,
}

/// The existing names.
fn names(
    record: &Record,
    log: &[super::recorder::Entry],
    synced: &impl Fn(Node) -> Option<usize>,
    luck: Luck,
    random: &mut Random,
) -> Names {
    let mut changes: Changes = BTreeMap::new();
    let mut renames: Vec<(usize, &Name, &Name)> = Vec::new();
    for (at, entry) in log.iter().enumerate() {
        match &entry.op {
            Op::Create { name, node } | Op::Link { to: name, node } => {
                changes.entry(name.clone()).or_default().push((at, Some(*node)));
            }
            Op::Remove { name, .. } => changes.entry(name.clone()).or_default().push((at, None)),
            Op::Rename { from, to, node } => {
                changes.entry(from.clone()).or_default().push((at, None));
                changes.entry(to.clone()).or_default().push((at, Some(*node)));
                renames.push((at, from, to));
            }
            _ => {}
        }
    }
    // The number of durable changes of each name.
    let mut kept: BTreeMap<&Name, usize> = BTreeMap::new();
    for (name, changes) in &changes {
        let certain = changes.iter().take_while(|(at, _)| synced(name.0).is_some_and(|synced| *at < synced)).count();
        let count = match luck {
            Luck::None | Luck::Bytes => certain,
            Luck::All | Luck::Names => changes.len(),
            Luck::Some(_) => certain + random.below((changes.len() - certain + 1) as u64) as usize,
        };
        kept.insert(name, count);
    }
    let reaches = |name: &Name, at: usize| changes[name].iter().position(|(change, _)| *change == at).unwrap() + 1;
    loop {
        let before = kept.clone();
        for (at, from, to) in &renames {
            let (gone, come) = (kept[from] >= reaches(from, *at), kept[to] >= reaches(to, *at));
            if gone && !come {
                kept.insert(to, reaches(to, *at));
            }
            if come && !gone && from.0 == to.0 {
                kept.insert(from, reaches(from, *at));
            }
        }
        if kept == before {
            break;
        }
    }
    let mut result = Names { now: BTreeMap::new(), gone: Vec::new(), applied: HashSet::new() };
    for (name, count) in kept {
        let start = record.nodes[name.0].names.get(&name.1).copied();
        let last = changes[name][..count].last();
        result.applied.extend(changes[name][..count].iter().map(|(at, _)| (name.0, *at)));
        match last.map_or(start, |(_, node)| *node) {
            Some(node) => {
                result.now.insert(name.clone(), node);
            }
            None => result.gone.push(name.clone()),
        }
    }
    result
}

/// The times of a directory.
fn stamp(
    left: &mut Left,
    node: Node,
    log: &[super::recorder::Entry],
    synced: Option<usize>,
    applied: &HashSet<(Node, usize)>,
    luck: Luck,
    random: &mut Random,
) {
    let mut stamps: Vec<(usize, Times)> = Vec::new();
    for (at, entry) in log.iter().enumerate() {
        // With its change, or not at all.
        if applied.contains(&(node, at)) {
            stamps.extend(entry.stamped.iter().filter(|(dir, _)| *dir == node).map(|(_, times)| (at, *times)));
        }
        match &entry.op {
            Op::Times { node: of, times } if *of == node => stamps.push((at, *times)),
            Op::Mode { node: of, mode } if *of == node => left.mode = *mode,
            _ => {}
        }
    }
    let last = applied.iter().filter(|(dir, _)| *dir == node).map(|(_, at)| *at).max();
    let certain = synced.max(last);
    let certain = stamps.iter().take_while(|(at, _)| certain.is_some_and(|certain| *at <= certain)).count();
    let count = match luck {
        Luck::None | Luck::Bytes => certain,
        Luck::All | Luck::Names => stamps.len(),
        Luck::Some(_) => certain + random.below((stamps.len() - certain + 1) as u64) as usize,
    };
    if let Some((_, times)) = stamps[..count].last() {
        left.times = *times;
    }
}

/// The bytes and attributes of a file.
fn fill(
    left: &mut Left,
    node: Node,
    log: &[super::recorder::Entry],
    synced: Option<usize>,
    luck: Luck,
    random: &mut Random,
) {
    let is_certain = |at: usize| synced.is_some_and(|synced| at < synced);
    let mut length = left.bytes.len();
    let mut lengths = vec![length];
    let mut attributes = true;
    // In one image in two: none, all, or some of the unsynced bytes.
    let (share, block) = (random.below(4), if random.below(2) == 0 { 512 } else { 4096 });
    for (at, entry) in log.iter().enumerate() {
        let certain = is_certain(at);
        let keeps = |random: &mut Random| match luck {
            Luck::None | Luck::Names => certain,
            Luck::All | Luck::Bytes => true,
            Luck::Some(_) => certain || random.below(4) < share,
        };
        let named = |random: &mut Random| match luck {
            Luck::None | Luck::Bytes => certain,
            Luck::All | Luck::Names => true,
            Luck::Some(_) => certain || random.below(2) == 0,
        };
        match &entry.op {
            Op::Write { node: of, offset, bytes } if *of == node => {
                let offset = *offset as usize;
                length = length.max(offset + bytes.len());
                if left.bytes.len() < length {
                    left.bytes.resize(length, 0);
                }
                let mut at = 0;
                while at < bytes.len() {
                    let end = ((offset + at) / block * block + block - offset).min(bytes.len());
                    if keeps(random) {
                        left.bytes[offset + at..offset + end].copy_from_slice(&bytes[at..end]);
                    }
                    at = end;
                }
            }
            Op::SetLen { node: of, len } if *of == node => {
                length = *len as usize;
                if left.bytes.len() > length && keeps(random) {
                    left.bytes[length..].fill(0);
                }
                left.bytes.resize(left.bytes.len().max(length), 0);
            }
            Op::Owner { node: of, user, group } if *of == node => {
                attributes = attributes && named(random);
                if attributes {
                    left.owner = (*user, *group);
                }
            }
            Op::Mode { node: of, mode } if *of == node => {
                attributes = attributes && named(random);
                if attributes {
                    left.mode = *mode & 0o7777;
                }
            }
            Op::Times { node: of, times } if *of == node => {
                attributes = attributes && named(random);
                if attributes {
                    left.times = *times;
                }
            }
            Op::Extended { node: of, name, value } if *of == node => {
                attributes = attributes && named(random);
                match value {
                    Some(value) if attributes => drop(left.extended.insert(name.clone(), value.clone())),
                    None if attributes => drop(left.extended.remove(name)),
                    _ => {}
                }
            }
            _ => continue,
        }
        if certain {
            lengths.clear();
        }
        lengths.push(length);
    }
    let length = match luck {
        Luck::None => lengths[0],
        Luck::All | Luck::Bytes | Luck::Names => *lengths.last().unwrap(),
        Luck::Some(_) => lengths[random.below(lengths.len() as u64) as usize],
    };
    left.bytes.resize(length, 0);
}
