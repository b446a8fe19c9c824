//! Empties the trash: the directories `.stepfs-trash/UID/MINUTE`, once their time is over. `src/fs/trash.rs` fills it.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::clock::age_ns;
use crate::store::{TRASH, beneath, entries_if_any, is_pinned, modified_ns};

use super::namespace::{FileId, Namespace, Outcome, found_at};
use super::shared::Shared;

/// How often the trash is looked at; a directory of it covers a minute, too.
const INTERVAL: Duration = Duration::from_secs(60);

/// The schedule. The housekeeper alone has it.
pub(super) struct Trash {
    shared: Arc<Shared>,
    /// When the next look is due.
    at: Instant,
    /// The last look removed everything, since the disk lacked room.
    has_hurried: bool,
}

impl Trash {
    /// One that is due now.
    pub(super) fn of(shared: Arc<Shared>) -> Trash {
        Trash { shared, at: Instant::now(), has_hurried: false }
    }

    /// How long until there may be something to remove. None: removed files do not go to the trash.
    pub(super) fn until(&self) -> Option<Duration> {
        self.shared.store.settings().trash_for?;
        let is_due = self.shared.is_low.load(Ordering::Relaxed) && !self.has_hurried;
        Some(if is_due { Duration::ZERO } else { self.at.saturating_duration_since(Instant::now()) })
    }

    /// Removes the files whose time is over, if a look is due; all files if the disk has less room than the reserve. A crash
    /// in between leaves some of them, and the next look removes those.
    pub(super) fn empty(&mut self) {
        let (Some(keep), Some(Duration::ZERO)) = (self.shared.store.settings().trash_for, self.until()) else { return };
        let Some(namespace) = self.shared.namespace() else { return };
        self.has_hurried = self.shared.is_low.load(Ordering::Relaxed);
        self.at = Instant::now() + INTERVAL.min(keep.max(Duration::from_secs(1)));
        let look = || -> io::Result<()> {
            for user in self.directories(Path::new(TRASH))? {
                // A directory with another name is a user's own.
                for minute in self.directories(&user)?.into_iter().filter(|path| is_minute(path)) {
                    let Some(found) = found_at(&self.shared.store.tree(), &minute)? else { continue };
                    let age = Duration::from_nanos(age_ns().saturating_sub(modified_ns(&found)).max(0).unsigned_abs());
                    if age > keep || self.has_hurried {
                        log::info!("{}: removed after {} s in the trash", minute.display(), age.as_secs());
                        self.remove(namespace.as_ref(), &minute)?;
                    }
                }
                // Refused while it has a directory of a later minute.
                self.remove_directory(namespace.as_ref(), &user)?;
            }
            self.remove_directory(namespace.as_ref(), Path::new(TRASH))
        };
        if let Err(error) = look() {
            log::warn!("the trash cannot be emptied: {error}");
        }
    }

    /// The directories in one; none if it is gone.
    fn directories(&self, of: &Path) -> io::Result<Vec<PathBuf>> {
        let listed = entries_if_any(&self.shared.store.tree(), of)?;
        Ok(listed.into_iter().filter(|(_, kind)| kind.is_dir()).map(|(path, _)| path).collect())
    }

    /// Removes a directory and everything in it, but pinned files.
    fn remove(&self, namespace: &dyn Namespace, directory: &Path) -> io::Result<()> {
        let (mut rest, mut directories) = (vec![directory.to_path_buf()], Vec::new());
        let tree = self.shared.store.tree();
        while let Some(directory) = rest.pop() {
            for (path, kind) in entries_if_any(&tree, &directory)? {
                if kind.is_dir() {
                    rest.push(path);
                    continue;
                }
                let Some(found) = found_at(&tree, &path)? else { continue };
                // So that the file's blocks are freed behind the file system's lock, not under it.
                let _held = beneath::hold(&tree, &path).ok();
                let version = || self.shared.catalog().get(&path).map(|entry| entry.version);
                let (before, mut still) = (version(), || is_pinned(&tree, &path).map(|pinned| !pinned));
                let outcome = namespace.remove(&path, FileId::of(&found), &mut still)?;
                // A mount has noted it already. At rest the entry is still there.
                if outcome == Outcome::Done && before.is_some() && version() == before {
                    self.shared.catalog().removed(&path);
                }
            }
            directories.push(directory);
        }
        directories.iter().rev().try_for_each(|directory| self.remove_directory(namespace, directory))
    }

    fn remove_directory(&self, namespace: &dyn Namespace, directory: &Path) -> io::Result<()> {
        match found_at(&self.shared.store.tree(), directory)? {
            Some(found) if found.is_dir() => namespace.remove_directory(directory, FileId::of(&found)).map(drop),
            _ => Ok(()),
        }
    }
}

/// Whether a directory has the name that `src/fs/trash.rs` gives, such as `2026-11-28_15-26`.
fn is_minute(path: &Path) -> bool {
    const PATTERN: &[u8] = b"0000-00-00_00-00";
    let name = path.file_name().unwrap_or_default().as_bytes();
    let fits = |(byte, pattern): (&u8, &u8)| if *pattern == b'0' { byte.is_ascii_digit() } else { byte == pattern };
    name.len() == PATTERN.len() && name.iter().zip(PATTERN).all(fits)
}
