//! The whole tree of the mount and of the plain directory, compared with the model's.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use super::history::{History, difference};
use super::judge::may_be_released;
use super::model::{Kind, Model, Node, TOP};
use super::sys::{self, Stat};
use super::world::list;

/// Index of the world on the mount; the plain directory is 1.
const MOUNT: usize = 0;

/// Compares everything of both worlds. The times found are the times expected from then on.
pub(crate) fn compare(history: &mut History<'_>) -> Result<(), String> {
    for world in [1, MOUNT] {
        let top = history.worlds[world].top.clone();
        let mut numbers = HashMap::new();
        compare_directory(history, world, TOP, &top, &mut numbers)
            .map_err(|why| format!("{}: {why}", ["on the mount", "beside the mount"][world]))?;
    }
    Ok(())
}

fn compare_directory(
    history: &mut History<'_>,
    world: usize,
    node: Node,
    path: &Path,
    numbers: &mut HashMap<u64, Node>,
) -> Result<(), String> {
    compare_inode(history, world, node, path, numbers)?;
    let (there, wanted) =
        (list(path).map_err(|code| format!("{}: errno {code}", path.display()))?, history.model.names(node));
    if there != wanted {
        return Err(format!("{}: lists {there:?}, expected is {wanted:?}", path.display()));
    }
    for (name, child) in history.model.nodes[node].children.clone() {
        let path = path.join(name);
        match history.model.nodes[child].kind {
            Kind::Directory => compare_directory(history, world, child, &path, numbers)?,
            _ => compare_inode(history, world, child, &path, numbers)?,
        }
    }
    Ok(())
}

fn compare_inode(
    history: &mut History<'_>,
    world: usize,
    node: Node,
    path: &Path,
    numbers: &mut HashMap<u64, Node>,
) -> Result<(), String> {
    let at = |code: i32| format!("{}: errno {code}", path.display());
    let stat = sys::lstat(path).map_err(at)?;
    check_stat(history, node, &stat, world).map_err(|why| format!("{}: {why}", path.display()))?;
    if *numbers.entry(stat.ino).or_insert(node) != node {
        return Err(format!("{}: has the inode number of another file, {}", path.display(), stat.ino));
    }
    if world == MOUNT {
        let before = *history.numbers.entry(node).or_insert(stat.ino);
        if before != stat.ino && !history.renumbered.contains(&node) {
            return Err(format!("{}: its inode number is {}, and was {before}", path.display(), stat.ino));
        }
        history.numbers.insert(node, stat.ino);
    }
    let names = sys::listxattr(path).map_err(at)?;
    let inode = &history.model.nodes[node];
    let wanted: Vec<&String> = inode.xattrs.keys().collect();
    if names.iter().collect::<Vec<_>>() != wanted {
        return Err(format!("{}: has the attributes {names:?}, expected are {wanted:?}", path.display()));
    }
    for (name, value) in &inode.xattrs {
        if sys::getxattr(path, name).map_err(at)? != *value {
            return Err(format!("{}: {name} has another value", path.display()));
        }
    }
    match inode.kind {
        Kind::Link => {
            let target = sys::readlink(path).map_err(at)?;
            if target != Path::new(&inode.target) {
                return Err(format!("{}: leads to {}", path.display(), target.display()));
            }
        }
        Kind::File => {
            if world == MOUNT {
                history.settle(node, path, None)?;
            } else {
                let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
                if bytes != inode.data {
                    return Err(format!("{}: {}", path.display(), difference(&inode.data, &bytes)));
                }
            }
        }
        _ => {}
    }
    // From now on it is known.
    history.model.nodes[node].mtime[world] = vec![(stat.mtime, stat.mtime)];
    Ok(())
}

/// Whether these can be the attributes of `node`.
pub(crate) fn check_stat(history: &History<'_>, node: Node, stat: &Stat, world: usize) -> Result<(), String> {
    let inode = &history.model.nodes[node];
    let size = match inode.kind {
        Kind::File => inode.data.len() as u64,
        Kind::Link => inode.target.len() as u64,
        // The size that the store's file system gives it.
        Kind::Directory => stat.size,
        _ => 0,
    };
    let wanted = (inode.kind.bits() | inode.mode, inode.uid, inode.gid, history.model.nlink(node), size);
    let found = (stat.mode, stat.uid, stat.gid, stat.nlink, stat.size);
    if found != wanted {
        return Err(format!("(mode, owner, group, links, size) is {found:?}, expected is {wanted:?}"));
    }
    let spans = &inode.mtime[world];
    // Stores through a mapping may be written back at any time.
    let stored = history.model.stored(node).is_some_and(|since| stat.mtime >= since);
    if node != TOP && !stored && !spans.iter().any(|span| (span.0..=span.1).contains(&stat.mtime)) {
        return Err(format!("was modified at {}, expected is one of {spans:?}", stat.mtime));
    }
    Ok(())
}

/// An open file shows its content, with a name or without.
pub(crate) fn compare_handles(history: &mut History<'_>) -> Result<(), String> {
    for slot in 0..history.model.handles.len() {
        let Some(handle) = &history.model.handles[slot] else { continue };
        let inode = &history.model.nodes[handle.node];
        if inode.kind != Kind::File || !handle.read {
            continue;
        }
        let kept = handle.kept.as_ref().filter(|_| history.model.uncertain(slot as u8));
        for world in [MOUNT, 1] {
            let fd = history.worlds[world].handles[slot].as_ref().expect("as in the model");
            // The whole of either: a reader may keep more bytes than the file has now.
            let len = kept.map_or(0, Vec::len).max(inode.data.len()) + 1;
            let bytes = sys::pread(fd, len, 0).map_err(|code| format!("handle {slot}: errno {code}"))?;
            if bytes != inode.data && (world != MOUNT || kept != Some(&bytes)) {
                return Err(format!("handle {slot} in world {world}: {}", difference(&inode.data, &bytes)));
            }
        }
    }
    Ok(())
}

/// The files that may be released from now on: those with a newer state in their lineage, and copies of them.
///
/// stepfs's lineages are narrower. Here a lineage is all paths that differ in digits only.
pub(crate) fn note_superseded(history: &mut History<'_>) {
    let nodes = &history.model.nodes;
    if !nodes.iter().any(|inode| inode.names > 0 && may_be_released(&inode.data)) {
        return;
    }
    let mut files = Vec::new();
    large_files(&history.model, TOP, "", &mut files);
    let mut superseded = Vec::new();
    for (path, node) in &files {
        let inode = &nodes[*node];
        let newest = |spans: &[(i128, i128)]| spans.iter().map(|span| span.1).max().unwrap_or(i128::MAX);
        let oldest = inode.mtime[MOUNT].iter().map(|span| span.0).min().unwrap_or(i128::MIN);
        let others = |(other_path, other): &(String, Node)| {
            let other = &nodes[*other];
            let newer = other_path == path && other.data != inode.data && newest(&other.mtime[MOUNT]) >= oldest;
            newer || (other.data == inode.data && (other.fate.superseded || other.fate.last))
        };
        if files.iter().any(others) {
            superseded.push(*node);
        }
    }
    for node in superseded {
        history.model.nodes[node].fate.superseded = true;
    }
}

/// Large files with their paths, digits left out.
fn large_files(model: &Model, node: Node, path: &str, found: &mut Vec<(String, Node)>) {
    for (name, child) in &model.nodes[node].children {
        let path = format!("{path}/{}", name.replace(|c: char| c.is_ascii_digit(), ""));
        match model.nodes[*child].kind {
            Kind::Directory => large_files(model, *child, &path, found),
            Kind::File if may_be_released(&model.nodes[*child].data) => found.push((path, *child)),
            _ => {}
        }
    }
}

/// The state of an open file by stepfs.
pub(crate) fn state(fd: &OwnedFd) -> Option<String> {
    let mut value = [0u8; 32];
    let name = c"user.stepfs.state";
    // SAFETY: the descriptor is open, the name ends with NUL, the buffer has its length.
    let len = unsafe { libc::fgetxattr(fd.as_raw_fd(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    Some(String::from_utf8_lossy(&value[..usize::try_from(len).ok()?]).into_owned())
}
