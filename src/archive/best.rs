//! Reads which file a checkpoint or a link names as the best of a run. Such a file stays exact.
//!
//! transformers' Trainer writes `trainer_state.json` last into each checkpoint, Lightning its callbacks into each
//! `.ckpt`, and users make links such as `best.pt`. stepfs looks at a file when it is sealed and when the store is
//! opened. It looks at resident files only; a run's newest statement always is resident. `catalog/named.rs` resolves
//! the names.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use crate::store::{MIN_RELEASE_BYTES, Profile, Store, beneath, in_parallel};
use formats::{Description, ReadAt, best_of_trainer, describe, is_trainer_state, may_name_best};

use super::catalog::{Catalog, Says, State, modified_ns};
use super::resident::ResidentReason;
use super::scan::scan;
use super::{Archive, found_at};

/// Larger files are not read. Each logged step takes some 150 bytes, so this is enough for 400,000.
const MAX_TRAINER_STATE: u64 = 64 << 20;
/// Longer names of checkpoints are not kept: the kernel takes none.
const MAX_NAME: usize = 4096;
/// Links on the way to a file, at most; as many as the kernel follows.
const MAX_LINKS: usize = 40;

/// A file, its statement, and the statement's time in nanoseconds since 1970.
pub(super) type Word = (PathBuf, Says, i64);

/// The statement of a file. A truncated file and any other file say nothing.
pub(super) fn said(file: &dyn ReadAt, path: &Path, description: Option<&Description>) -> io::Result<Option<Says>> {
    if is_trainer_state(path) && file.size() <= MAX_TRAINER_STATE {
        return match best_of_trainer(file) {
            Ok(best) => Ok(Some(Says::Best(best.into_iter().filter(|name| name.len() <= MAX_NAME).collect()))),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                log::warn!("{}: {error}; the run's best checkpoint is unknown", path.display());
                Ok(None)
            }
            Err(error) => Err(error),
        };
    }
    Ok(description.and_then(|description| description.best.clone()).map(Says::Best))
}

/// The statement of a file that is too small to be released.
pub(super) fn small_said(file: &(dyn ReadAt + Sync), path: &Path) -> io::Result<Option<Says>> {
    match may_name_best(path) && !is_trainer_state(path) {
        true => said(file, path, Some(&describe(file)?)),
        false => said(file, path, None),
    }
}

/// What the small files of a store say that is being opened. All others are sealed before anything is archived, and
/// looked at then.
pub(super) fn of_small(store: &Store, found: &[(PathBuf, io::Result<State>)]) -> Vec<Word> {
    let small = |state: &io::Result<State>| matches!(state, Ok(State::Resident(ResidentReason::Small)));
    let small = found.iter().filter(|(path, state)| small(state) && may_name_best(path));
    let paths: Vec<&Path> = small.map(|(path, _)| path.as_path()).collect();
    let word = |path: &&Path| -> io::Result<Option<Word>> {
        let file = store.io().open_beneath(&store.tree(), path, 0)?;
        let metadata = file.metadata()?;
        if metadata.len() >= MIN_RELEASE_BYTES {
            return Ok(None);
        }
        Ok(small_said(&file, path)?.map(|says| (path.to_path_buf(), says, modified_ns(&metadata))))
    };
    let words = in_parallel(&paths, word);
    paths.into_iter().zip(words).filter_map(|(path, word)| known(path, word)).collect()
}

/// The statement of a file or link. A warning says if it cannot be read: then nobody knows what it names as the best.
fn known<T>(path: &Path, said: io::Result<Option<T>>) -> Option<T> {
    said.unwrap_or_else(|error| {
        log::warn!("{}: {error}; if it names the best of a run, that one is not known", path.display());
        None
    })
}

/// The statements of a store's links.
pub(super) fn of_links(store: &Store, links: &[PathBuf]) -> Vec<Word> {
    let said = in_parallel(links, |path| link(store, path));
    let words = links.iter().zip(said);
    words.filter_map(|(path, said)| known(path, said).map(|says| (path.clone(), says, 0))).collect()
}

/// The target of the link at `path`, if the link's own name asks for exact bytes and the target lies in the tree.
pub(super) fn link(store: &Store, path: &Path) -> io::Result<Option<Says>> {
    match names_exact(store, path)? {
        true => Ok(resolve(&store.tree(), path)?.map(Says::Link)),
        false => Ok(None),
    }
}

/// Whether a link is at `path` whose own name asks for exact bytes.
fn names_exact(store: &Store, path: &Path) -> io::Result<bool> {
    Ok(read_link(&store.tree(), path)?.is_some() && store.profiles(path)?.coarsest() == Profile::Exact)
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

/// Whether a file is named as the best of its run, in a store that is not mounted. Reads the tree only.
pub fn best_at_rest(store: &Store) -> io::Result<impl Fn(&Path) -> bool> {
    let found = scan(store)?;
    let mut catalog = Catalog::new(store.settings().settle);
    let large = |(path, state): &(PathBuf, io::Result<State>)| match state {
        Ok(State::Closed) if may_name_best(path) => Some(path.clone()),
        _ => None,
    };
    let large: Vec<PathBuf> = found.files.iter().filter_map(large).collect();
    let words = in_parallel(&large, |path| -> io::Result<Option<Word>> {
        let file = store.io().open_beneath(&store.tree(), path, 0)?;
        let metadata = file.metadata()?;
        Ok(said(&file, path, Some(&describe(&file)?))?.map(|says| (path.clone(), says, modified_ns(&metadata))))
    });
    let words = large.iter().zip(words).filter_map(|(path, word)| known(path, word));
    for (path, says, modified_ns) in found.words.into_iter().chain(words) {
        catalog.says(&path, Some((says, modified_ns)));
    }
    Ok(move |path: &Path| catalog.named_best_by(path).is_some())
}

impl Archive {
    /// Notes the statement of the file or link at `path`. Warns if it names for the first time a file that is
    /// released already: its exact bytes are gone.
    pub(super) fn note_best(&self, path: &Path, said: Option<(Says, i64)>) {
        let late = {
            let mut catalog = self.catalog();
            let named = catalog.says(path, said);
            let mut late = Vec::new();
            for best in named {
                let lossy = |state: &State| matches!(state, State::Released(id) if self.objects.is_lossy(*id));
                let released = catalog.below(&best).filter(|(_, entry)| lossy(&entry.state));
                late.extend(released.map(|(file, _)| file.to_path_buf()));
            }
            late
        };
        for file in late {
            log::warn!(
                "{}: {} names it as the best, but it was released before, so it is lossy",
                file.display(),
                path.display()
            );
        }
    }

    /// Looks at a name where a link may have come or gone.
    pub(super) fn look_at_link(&self, path: &Path) {
        let said = link(&self.store, path).unwrap_or_else(|error| {
            log::warn!("{}: {error}; its target is unknown", path.display());
            None
        });
        // A file may have the name by now, with a statement of its own.
        let is_file = self.catalog().get(path).is_some();
        // A script removes a link on the way, and makes it anew: until then the former target counts.
        let leads_nowhere = || match &said {
            Some(Says::Link(target)) => !matches!(found_at(&self.store.tree(), target), Ok(Some(_))),
            _ => matches!(names_exact(&self.store, path), Ok(true)),
        };
        let stays = self.catalog().has_said(path) && leads_nowhere();
        if !stays && (said.is_some() || !is_file) {
            self.note_best(path, said.map(|says| (says, 0)));
        }
        self.catalog().link_read();
        self.notify();
    }
}
