//! Reads which file a checkpoint or a link names as the best of a run. Such a file stays exact.
//!
//! transformers' Trainer writes `trainer_state.json` last into each checkpoint, Lightning its callbacks into each
//! `.ckpt`, and users make links such as `best.pt`. stepfs looks at a file when it is sealed and when the store is
//! opened. It looks at resident files only; a run's newest statement always is resident. `decide/marks.rs` weighs the
//! statements.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::store::{Profile, Store, beneath, found_at};
use formats::{Description, MAX_TRAINER_STATE, ReadAt, best_of_trainer, is_trainer_state};

/// Longer names of checkpoints are not kept: the kernel takes none.
const MAX_NAME: usize = 4096;
/// Links on the way to a file, at most; as many as the kernel follows.
const MAX_LINKS: usize = 40;

/// The paths that a file names as the best so far. `None` if it says nothing, as a truncated file does.
pub(super) fn named(file: &dyn ReadAt, path: &Path, description: &Description) -> io::Result<Option<Vec<String>>> {
    if !is_trainer_state(path) || file.size() > MAX_TRAINER_STATE {
        return Ok(description.best.clone());
    }
    match best_of_trainer(file) {
        Ok(best) => Ok(Some(best.into_iter().filter(|name| name.len() <= MAX_NAME).collect())),
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            log::warn!("{}: {error}; the run's best checkpoint is unknown", path.display());
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The target of the link at `path`, if the link's own name asks for exact bytes and the target lies in the tree. A target
/// that cannot be read is unknown. `former`: what the link's target was.
pub(super) fn linked(store: &Store, path: &Path, former: Option<&Path>) -> Option<PathBuf> {
    let is_exact = matches!(read_link(&store.tree(), path), Ok(Some(_)))
        && store.profiles(path).is_ok_and(|profiles| profiles.coarsest() == Profile::Exact);
    if !is_exact {
        return None;
    }
    let target = resolve(&store.tree(), path).unwrap_or_else(|error| {
        log::warn!("{}: {error}; its target is unknown", path.display());
        None
    });
    // A script removes a link on the way, and makes it anew: until then the former target counts.
    let is_there = |target: &PathBuf| matches!(found_at(&store.tree(), target), Ok(Some(_)));
    match former {
        Some(former) if !target.as_ref().is_some_and(is_there) => Some(former.to_path_buf()),
        _ => target,
    }
}

/// The target of a link in the tree. `None` if it is no link, or does not exist.
fn read_link(tree: &Path, path: &Path) -> io::Result<Option<PathBuf>> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
    let directory = match beneath::open_dir(tree, directory) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP)) => {
            return Ok(None);
        }
        opened => opened?,
    };
    match fs::read_link(beneath::by_descriptor(&directory).join(name)) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Ok(None),
        target => target.map(Some),
    }
}

/// The path inside the tree that a path leads to. `None` if it leads out of the tree or in a circle.
///
/// An absolute target shows the mount as its maker saw it, at an unknown place. So the longest end of it that exists
/// counts.
fn resolve(tree: &Path, path: &Path) -> io::Result<Option<PathBuf>> {
    let names = |path: &Path| -> Vec<OsString> {
        path.components()
            .filter_map(|part| match part {
                Component::Normal(name) => Some(name.to_os_string()),
                Component::ParentDir => Some("..".into()),
                _ => None,
            })
            .collect()
    };
    let mut rest: VecDeque<OsString> = names(path).into();
    let (mut at, mut links) = (PathBuf::new(), 0);
    while let Some(name) = rest.pop_front() {
        if name == ".." {
            if !at.pop() {
                return Ok(None);
            }
            continue;
        }
        let next = at.join(&name);
        let Some(target) = read_link(tree, &next)? else {
            at = next;
            continue;
        };
        links += 1;
        if links > MAX_LINKS {
            return Ok(None);
        }
        let mut parts = names(&target);
        if target.is_absolute() {
            let there = |from: &usize| beneath::metadata(tree, &parts[*from..].iter().collect::<PathBuf>()).is_ok();
            let Some(from) = (0..parts.len()).find(there) else { return Ok(None) };
            parts.drain(..from);
            at = PathBuf::new();
        }
        parts.into_iter().rev().for_each(|part| rest.push_front(part));
    }
    Ok(Some(at).filter(|at| !at.as_os_str().is_empty()))
}
