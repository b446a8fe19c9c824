//! Mappings that outlive the file's last descriptor.
//!
//! With passthrough the kernel maps the store's file, not ours. RELEASE comes with the last close although the
//! mapping is still there (measured, Linux 6.18). Without passthrough a mapping holds its handle. A store through the
//! mapping must not be lost afterwards. So a file that may be mapped for writing is at rest only once the store's
//! file has no writer left. A read lease tells: the kernel refuses it (EAGAIN) while any program has the file open or
//! mapped for writing. stepfs gives the lease back at once.
//!
//! If the store's file system has no leases there is no passthrough.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::tree::Tree;
use crate::archive::FileId;
use crate::store::durable::scratch;
use crate::store::lease;

/// First pause: the kernel drops its own descriptor right after it has told us of the close.
const FIRST: Duration = Duration::from_millis(5);
/// Longest pause: how late the archive may learn that a mapping is gone.
const LONGEST: Duration = Duration::from_secs(1);

/// Whether any program has the file open or mapped for writing.
pub(super) fn being_written(path: &Path) -> io::Result<bool> {
    let file = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    Ok(!lease::is_granted(&file, libc::F_RDLCK)?)
}

/// Whether the file system of the directory `tmp` tells writers from readers. Writes an empty file there for a
/// moment.
///
/// # Errors
/// The device's errors, also if it has no leases.
pub fn has_leases(tmp: &Path) -> io::Result<bool> {
    has_leases_of(tmp, None)
}

/// [`has_leases`] for files of another user, which a daemon that root runs for others must look at.
///
/// # Errors
/// As [`has_leases`].
pub fn has_leases_of_others(tmp: &Path) -> io::Result<bool> {
    has_leases_of(tmp, Some(SOMEBODY))
}

/// Any user but root; `nobody` of most systems.
const SOMEBODY: u32 = 65534;

fn has_leases_of(tmp: &Path, owner: Option<u32>) -> io::Result<bool> {
    let path = tmp.join(format!("lease-{}", std::process::id()));
    let file = scratch::create_new(&path)?;
    if let Some(owner) = owner {
        std::os::unix::fs::fchown(&file, Some(owner), None)?;
    }
    let with_writer = being_written(&path);
    drop(file);
    let without = being_written(&path);
    std::fs::remove_file(&path)?;
    Ok(with_writer? && !without?)
}

/// A file that may still be mapped for writing.
struct Watched {
    /// By node, or by path and identity when the kernel does not know it: a mapping from before the mount.
    what: std::result::Result<u64, (PathBuf, FileId)>,
    due: Instant,
    pause: Duration,
}

#[derive(Default)]
struct State {
    files: Vec<Watched>,
    stopping: bool,
}

/// Files to look at again.
pub(super) struct Mappings {
    tree: Arc<Tree>,
    /// The store's file system can tell whether a file is being written.
    leases: bool,
    /// Taken for moments only, also under the inode table's lock.
    state: Mutex<State>,
    work: Condvar,
}

impl Mappings {
    pub(super) fn new(tree: Arc<Tree>) -> Self {
        let leases = has_leases(&tree.archive().store().tmp()).unwrap_or(false);
        Self { tree, leases, state: Mutex::default(), work: Condvar::default() }
    }

    pub(super) fn has_leases(&self) -> bool {
        self.leases
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if no file has to be looked at again.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.state().files.is_empty()
    }

    fn add(&self, what: std::result::Result<u64, (PathBuf, FileId)>, pause: Duration) {
        let mut state = self.state();
        if !state.files.iter().any(|known| known.what == what) {
            state.files.push(Watched { what, due: Instant::now() + pause, pause });
            self.work.notify_one();
        }
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        self.state().stopping = true;
        self.work.notify_all();
    }

    /// Waits for the next file that is due; none when it is over.
    fn next(&self) -> Option<Watched> {
        let mut state = self.state();
        loop {
            if state.stopping {
                return None;
            }
            let next = state.files.iter().enumerate().min_by_key(|(_, file)| file.due).map(|(i, file)| (i, file.due));
            let wait = match next {
                Some((i, due)) if due <= Instant::now() => return Some(state.files.swap_remove(i)),
                Some((_, due)) => due.saturating_duration_since(Instant::now()),
                None => Duration::from_secs(3600),
            };
            state = self.work.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Starts to look at files that may be mapped.
    pub(super) fn start(self: &Arc<Self>) -> io::Result<JoinHandle<()>> {
        let mappings = Arc::clone(self);
        std::thread::Builder::new().name("stepfs-mappings".into()).spawn(move || {
            while let Some(file) = mappings.next() {
                let at_rest = match &file.what {
                    Ok(ino) => mappings.try_rest(*ino),
                    Err((path, expect)) => mappings.try_rest_unknown(path, *expect),
                };
                if !at_rest {
                    mappings.add(file.what, (file.pause * 2).min(LONGEST));
                }
            }
        })
    }

    /// A node's last descriptor is closed and a mapping may be left: notes that it is sealed, now or when that is gone.
    pub(super) fn rest_when_unmapped(&self, ino: u64) {
        if !self.try_rest(ino) {
            self.add(Ok(ino), FIRST);
        }
    }

    /// Returns whether there is nothing left to wait for.
    fn try_rest(&self, ino: u64) -> bool {
        let mut table = self.tree.table();
        let path = table.path(ino);
        let place = table.place(ino);
        let Some(node) = table.get_mut(ino) else { return true };
        if !node.mapped {
            // Opened again meanwhile; its next release decides.
            return true;
        }
        // A file without a name is nobody's checkpoint.
        let mut len = 0;
        if let (Some(_), Ok(place)) = (&path, place) {
            match being_written(&place.path) {
                Ok(true) => return false,
                Ok(false) => {}
                Err(error) => log::warn!("{}: cannot tell whether it is mapped: {error}", place.path.display()),
            }
            len = place.metadata().map_or(u64::MAX, |metadata| metadata.len());
        }
        node.mapped = false;
        for path in table.paths(ino) {
            self.tree.archive().written(&path, len);
        }
        table.reap(ino);
        true
    }

    fn try_rest_unknown(&self, path: &Path, expect: FileId) -> bool {
        let table = self.tree.table();
        let Ok(reached) = table.reach(path) else { return true };
        let len = match reached.symlink_metadata() {
            Ok(metadata) if FileId::of(&metadata) == expect => metadata.len(),
            _ => return true,
        };
        if being_written(&reached).unwrap_or(false) {
            return false;
        }
        self.tree.archive().written(path, len);
        true
    }

    /// Whether a program writes to a file that has no open handle. If so, the archive gets a note at its end. The
    /// caller holds the table's lock. The kernel may not know the node.
    pub(super) fn written_behind(&self, reached: &Path, path: &Path, expect: FileId) -> io::Result<bool> {
        if !self.leases {
            return Ok(false);
        }
        let written = being_written(reached)?;
        if written {
            self.add(Err((path.to_path_buf(), expect)), FIRST);
        }
        Ok(written)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_seen() {
        let dir = tempfile::tempdir().unwrap();
        assert!(has_leases(dir.path()).unwrap(), "these tests need a temporary directory with leases");
        let path = dir.path().join("f");
        let writer = File::create(&path).unwrap();
        assert!(being_written(&path).unwrap());
        let reader = File::open(&path).unwrap();
        drop(writer);
        assert!(!being_written(&path).unwrap());
        drop(reader);
    }
}
