//! What the threads of a remote share, each part under a lock that is never held during a request or other I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::keep::Keeper;
use super::local::Local;
use super::pace::Pace;
use super::reader::lock;
use super::tree;
use super::view::{Stamp, View};
use super::waiting::Waiting;
use crate::store::{Newest, Store, Wait};

/// How often to look whether something was closed or removed: a look at one number.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Places in [`Shared::failing`].
pub(super) const PUSHING: usize = 0;
pub(super) const SHOWING: usize = 1;
pub(super) const FILES: usize = 2;

/// How a store uses its remote.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `file:///DIRECTORY` or `s3://BUCKET/PREFIX`.
    pub url: String,
    /// This node's name.
    pub node: String,
    /// How the newest file of a lineage travels.
    pub newest: Newest,
    /// The calls that wait for the remote.
    pub wait: Wait,
    /// Bytes a second.
    pub bandwidth: Option<u64>,
    /// Age of the view at which it is read anew.
    pub refresh: Duration,
    /// How long objects stay that no name needs.
    pub grace: Duration,
}

/// The files that are still to push.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Backlog {
    pub(super) files: u64,
    /// Of these, files that cannot be pushed; known once all others have been.
    pub(super) stuck: u64,
    pub(super) bytes: u64,
    /// Modification time of the oldest.
    pub(super) oldest_ns: Option<i64>,
}

/// The data that the threads share.
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) view: Arc<Mutex<View>>,
    pub(super) pace: Pace,
    /// What the tree shows of the remote.
    shown: Mutex<BTreeMap<PathBuf, Stamp>>,
    /// Directories with shown names that may not be durable. What the tree shows is not saved before: a name that is missing
    /// after a crash would pass for one that a user removed. Taken for moments.
    unsynced: Mutex<BTreeSet<PathBuf>>,
    pub(super) backlog: Mutex<Backlog>,
    pub(super) waiting: Waiting,
    /// Directories that may be empty since their last name went, and since when. Taken for moments.
    emptied: Mutex<BTreeMap<PathBuf, Instant>>,
    /// Objects of open files whose names show others.
    pub(super) keeper: Keeper,
    /// Why pushing, showing, and the pushing of single files does not go on: [`PUSHING`], [`SHOWING`], [`FILES`].
    pub(super) failing: Mutex<[Option<String>; 3]>,
    /// All changes up to this one are pushed.
    pub(super) pushed: AtomicU64,
    /// So are all up to this one, but for files that cannot be.
    pub(super) tried: AtomicU64,
    /// Somebody waits: no pause.
    pub(super) asked: AtomicU64,
    /// The pushing thread has seen names that are to be shown or to go: a file of this store became durable since, for one.
    pub(super) is_unshown: AtomicBool,
    /// Whether the node's name was claimed, and whether the names were shown, once since the start: [`PUSHING`], [`SHOWING`].
    pub(super) begun: [AtomicBool; 2],
}

impl Shared {
    pub(super) fn new(settings: Settings, shown: BTreeMap<PathBuf, Stamp>) -> Shared {
        Shared {
            pace: Pace::new(settings.bandwidth),
            settings,
            view: Arc::default(),
            shown: Mutex::new(shown),
            unsynced: Mutex::default(),
            backlog: Mutex::default(),
            waiting: Waiting::default(),
            emptied: Mutex::default(),
            keeper: Keeper::default(),
            failing: Mutex::default(),
            pushed: AtomicU64::new(0),
            tried: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            is_unshown: AtomicBool::new(false),
            begun: Default::default(),
        }
    }

    pub(super) fn shown(&self) -> BTreeMap<PathBuf, Stamp> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notes that these names are about to be shown.
    pub(super) fn will_show<'a>(&self, names: impl Iterator<Item = &'a PathBuf>) {
        let above = names.flat_map(|path| path.ancestors().skip(1)).map(Path::to_path_buf);
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner).extend(above);
    }

    /// Makes all names durable that were shown.
    pub(super) fn sync_shown(&self, store: &Store) -> io::Result<()> {
        let above = self.unsynced.lock().unwrap_or_else(PoisonError::into_inner).clone();
        tree::sync(store, &above)?;
        self.unsynced.lock().unwrap_or_else(PoisonError::into_inner).retain(|directory| !above.contains(directory));
        Ok(())
    }

    /// Notes that the tree shows these changes, unless it shows later ones.
    pub(super) fn agree(&self, names: &BTreeMap<PathBuf, Stamp>) {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        for (path, stamp) in names {
            match shown.get_mut(path) {
                Some(had) if *had < *stamp => *had = stamp.clone(),
                Some(_) => {}
                None => drop(shown.insert(path.clone(), stamp.clone())),
            }
        }
    }

    /// Notes that these names went, so that their directories may be empty.
    pub(super) fn went<'a>(&self, names: impl Iterator<Item = &'a PathBuf>) {
        let above = names.filter_map(|path| path.parent()).filter(|above| !above.as_os_str().is_empty());
        let mut emptied = self.emptied.lock().unwrap_or_else(PoisonError::into_inner);
        emptied.extend(above.map(|above| (above.to_path_buf(), Instant::now())));
    }

    /// Removes directories that have been empty for a while. A program may be about to create a file in one that
    /// another node's file made. Where that node removed the directory, nothing comes.
    pub(super) fn remove_emptied(&self, local: &dyn Local, least: Duration) {
        let mut emptied = self.emptied.lock().unwrap_or_else(PoisonError::into_inner);
        let (due, later): (Vec<_>, Vec<_>) =
            std::mem::take(&mut *emptied).into_iter().partition(|(_, since)| since.elapsed() >= least);
        emptied.extend(later);
        drop(emptied);
        for (path, _) in due {
            match local.remove_directory(&path) {
                // The directory above may be empty now, and stays as long.
                Ok(true) => self.went(std::iter::once(&path)),
                Ok(false) => {}
                Err(error) => log::debug!("{} stays: {error}", path.display()),
            }
        }
    }

    /// Forgets names that are neither in the tree nor on the remote.
    pub(super) fn forget(&self, names: &[PathBuf]) {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().for_each(|path| drop(shown.remove(path)));
    }

    /// Forgets names whose shown change does not count any more.
    pub(super) fn prune(&self) -> BTreeMap<PathBuf, Stamp> {
        let view = lock(&self.view);
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        shown.retain(|path, stamp| view.winner(path).is_none_or(|(last, now)| last != *stamp || now.is_some()));
        shown.clone()
    }

    pub(super) fn set_backlog(&self, backlog: &Backlog) {
        *self.backlog.lock().unwrap_or_else(PoisonError::into_inner) = backlog.clone();
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.pace.is_stopped()
    }

    pub(super) fn fails(&self, thread: usize, why: Option<String>) {
        self.failing.lock().unwrap_or_else(PoisonError::into_inner)[thread] = why;
    }
}
