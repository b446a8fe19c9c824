//! What checkpoints' own files and links name as the best of a run: such a file stays as it was written.
//!
//! transformers' Trainer writes `trainer_state.json` last into each checkpoint, Lightning its callbacks into each `.ckpt`, and
//! users make links such as `best.pt`. A file is looked at when it is sealed and when the store is opened. Only what
//! is resident is looked at: the newest word of a run always is. What a name means is for `catalog/named.rs` to say.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use crate::container::{Description, ReadAt, describe};
use crate::store::{MIN_RELEASE_BYTES, Profile, Store, beneath, in_parallel};

use super::Archive;
use super::catalog::{Says, State, modified_ns};
use super::resident::ResidentReason;

/// The file of a checkpoint in which Trainer says which one is the best.
const TRAINER_STATE: &str = "trainer_state.json";
/// A larger one is not looked at. Each logged step takes some 150 bytes of it: this is enough for 400,000.
const MAX_TRAINER_STATE: u64 = 64 << 20;
/// Endings of the names that torch's checkpoints have: small files of other names are not opened when a store is.
const TORCH: [&str; 3] = ["ckpt", "pt", "pth"];
/// Links on the way to a file, at most; as many as the kernel follows.
const MAX_LINKS: usize = 40;

/// What is read of Trainer's state.
#[derive(Deserialize)]
struct TrainerState {
    best_model_checkpoint: Option<String>,
}

/// A word, by whom, and since when (nanoseconds since 1970).
pub(super) type Word = (PathBuf, Says, i64);

/// What a file says. One that is cut short, or no such file, says nothing.
pub(super) fn said(file: &dyn ReadAt, path: &Path, description: Option<&Description>) -> io::Result<Option<Says>> {
    if path.file_name().is_some_and(|name| name == TRAINER_STATE) && file.size() <= MAX_TRAINER_STATE {
        let mut bytes = vec![0; file.size() as usize];
        file.read_exact_at(&mut bytes, 0)?;
        let state: Option<TrainerState> = serde_json::from_slice(&bytes).ok();
        return Ok(state.map(|state| Says::Best(state.best_model_checkpoint.into_iter().collect())));
    }
    Ok(description.and_then(|description| description.best.clone()).map(Says::Best))
}

/// What a file below the size of those that are released says.
pub(super) fn small_said(file: &(dyn ReadAt + Sync), path: &Path) -> io::Result<Option<Says>> {
    match path.extension().is_some_and(|ending| TORCH.iter().any(|torch| ending == *torch)) {
        true => said(file, path, Some(&describe(file)?)),
        false => said(file, path, None),
    }
}

/// Whether a small file of this name may name the best of a run.
pub(super) fn may_speak(path: &Path) -> bool {
    let ending = path.extension().is_some_and(|ending| TORCH.iter().any(|torch| ending == *torch));
    ending || path.file_name().is_some_and(|name| name == TRAINER_STATE)
}

/// What the small files of a store say that is being opened. All others are sealed before anything is archived, and looked at then.
pub(super) fn of_small(store: &Store, found: &[(PathBuf, io::Result<State>)]) -> Vec<Word> {
    let small = |state: &io::Result<State>| matches!(state, Ok(State::Resident(ResidentReason::Small)));
    let small = found.iter().filter(|(path, state)| small(state) && may_speak(path));
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
    words.into_iter().filter_map(|word| word.ok().flatten()).collect()
}

/// What the links of a store say.
pub(super) fn of_links(store: &Store, links: &[PathBuf]) -> Vec<Word> {
    let said = in_parallel(links, |path| link(store, path));
    let words = links.iter().zip(said);
    words.filter_map(|(path, said)| said.ok().flatten().map(|says| (path.clone(), says, 0))).collect()
}

/// What is at `path`, if it is a link whose own name asks for exact bytes and leads to something in the tree.
pub(super) fn link(store: &Store, path: &Path) -> io::Result<Option<Says>> {
    let tree = store.tree();
    if read_link(&tree, path)?.is_none() || store.profiles(path)?.coarsest() != Profile::Exact {
        return Ok(None);
    }
    Ok(resolve(&tree, path)?.map(Says::Link))
}

/// Where a link in the tree leads to; `None`: it is no link, or is not there.
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

/// The path inside the tree that a path leads to. What leads out of the tree is `None`, and so is a circle.
///
/// An absolute target is as somebody saw the mount, whose place is not known here: the longest end of it that is there is meant.
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

impl Archive {
    /// Notes what the file or link at `path` says. Where it names for the first time what was released already, that is said: its
    /// bytes are gone.
    pub(super) fn note_best(&self, path: &Path, said: Option<(Says, i64)>) {
        let late = {
            let mut catalog = self.catalog();
            let named = catalog.says(path, said);
            let mut late = Vec::new();
            for best in named {
                let lossy = |state: &State| matches!(state, State::Released(id) if self.is_lossy(*id));
                let released = catalog.below(&best).filter(|(_, entry)| lossy(&entry.state));
                late.extend(released.map(|(file, _)| file.clone()));
            }
            late
        };
        for file in late {
            log::warn!(
                "{}: {} names it as the best, but it was released before: it reads within its bounds, not as it was written",
                file.display(),
                path.display()
            );
        }
    }

    /// Looks at a name where a link may have come or gone.
    pub(super) fn look_at_link(&self, path: &Path) {
        let said = link(&self.store, path).unwrap_or_else(|error| {
            log::warn!("{}: {error}; what it leads to is not known", path.display());
            None
        });
        // A file may have the name by now, and say something itself.
        let is_file = self.catalog().get(path).is_some();
        if said.is_some() || !is_file {
            self.note_best(path, said.map(|says| (says, 0)));
        }
        self.catalog().link_read();
        self.notify();
    }
}
