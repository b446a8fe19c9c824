//! After the last close: a file becomes durable, and its tensors and its lineage are found. Nothing that is closed waits for
//! what takes longer.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crate::encode::{StepError, StepResult};
use crate::store::durable::{CrashPoint, DeviceFile};
use crate::store::object::Id;
use crate::store::{Stub, beneath, recalled_from};

use super::catalog::{Closed, Task};
use super::entry::{Sealed, Stamp, State};
use super::resident::ResidentReason;
use super::scan;
use super::threads::Pause;
use super::together::is_passing;
use super::{Archive, FileId, Outcome, best};

impl Archive {
    /// What each sealer does until the archive stops.
    pub(super) fn seal_files(&self) {
        let mut pause = Pause::none();
        while let Some(closed) = self.next_to_seal() {
            match closed {
                Closed::Link(path) => self.look_at_link(&path),
                Closed::File(task) => self.take(&task, &mut pause, || self.step(&task)),
            }
        }
    }

    /// Makes a closed file durable, and finds its tensors and its lineage.
    pub(super) fn seal(&self, task: &Task) -> StepResult<()> {
        let began = Instant::now();
        let file = self.open_closed(task)?;
        let synced = self.sync_bytes(&file).and_then(|()| self.sync_names(&task.path));
        self.synced(task, &file, synced, began)
    }

    /// Opens a file that a program has closed.
    pub(super) fn open_closed(&self, task: &Task) -> StepResult<DeviceFile> {
        let path = task.path.as_path();
        // Not found: removed meanwhile, or renamed, and the note of it is on its way.
        let file = self.open_file(path)?;
        if Stub::looks_like_one(&file)? && !self.is_still_closed(task, &file)? {
            return Err(StepError::Superseded);
        }
        // A program wrote it, whatever it looks like.
        match Stub::disown(&file, CrashPoint::FileSealed) {
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                log::warn!(
                    "{}: looks like a stub of stepfs, and is taken for one after the next mount",
                    path.display()
                );
            }
            result => result?,
        }
        Ok(file)
    }

    /// Whether an opened file is the one that was closed. A released file may have taken the name since, and the note of
    /// that be on its way: its stub must never be marked as a program's bytes. A thread that changes names holds the
    /// file system's lock until its note is made, and this takes that lock once.
    fn is_still_closed(&self, task: &Task, file: &DeviceFile) -> StepResult<bool> {
        let opened = FileId::of(&file.metadata()?);
        let namespace = self.namespace();
        let has_changed = namespace.is_some_and(|names| names.idle(&task.path, opened) == Outcome::Changed);
        Ok(!has_changed && self.catalog().get(&task.path).is_some_and(|entry| entry.version == task.version))
    }

    /// A closed file and its names were synced, or an attempt failed: finds its tensors and its lineage.
    pub(super) fn seal_synced(
        &self,
        task: &Task,
        file: &DeviceFile,
        synced: io::Result<()>,
        began: Instant,
    ) -> StepResult<()> {
        let (path, version) = (task.path.as_path(), task.version);
        if let Err(error) = synced {
            if is_passing(&error) {
                return Err(error.into());
            }
            // The kernel reports it once; a second fsync would succeed and prove nothing. What is not durable must not
            // let an older state go.
            log::error!(
                "{}: could not be made durable: {error}; it may have lost bytes, so save it again",
                path.display()
            );
            if !self.catalog().advance(path, version, State::Resident(ResidentReason::NotDurable)) {
                // A program has opened it again, and may keep those bytes.
                self.store.sync_failed(file.as_file(), &error);
            }
            return Ok(());
        }
        let metadata = file.metadata()?;
        let describe = || self.describe(path, file);
        let scan::Examined { state, words, names, is_opaque, has_tensors } =
            scan::examine(file, &metadata, path, self.siblings(path)?, describe)?;
        self.catalog().made_durable(task, began, Some(is_opaque));
        // Before the file is known to be sealed: nothing is released while one that may speak is not.
        let late = self.catalog().examined(path, version, (Stamp::of(&metadata), has_tensors), names);
        self.warn_of_late(path, &late);
        let State::Sealed(sealed) = &state else {
            use ResidentReason::{CutShort, Incompressible, NotUnderstood};
            if let State::Resident(why @ (Incompressible | NotUnderstood(_) | CutShort(_))) = &state {
                log::info!("{}: stays as it is: {why}", path.display());
            }
            let mut catalog = self.catalog();
            catalog.keep(path, version, None);
            catalog.advance(path, version, state);
            drop(catalog);
            self.retention.news();
            return Ok(());
        };
        // Named before anything is collected: nothing is while a file is not sealed.
        let known = |id: &Id, of: &Sealed| {
            self.objects.get(*id).is_some_and(|(h, _)| (h.logical_len, h.signature) == (of.len, of.signature))
        };
        let keeps = recalled_from(file).filter(|id| known(id, sealed));
        self.catalog().keep(path, version, keeps);
        let state = match self.twins().may_be_copy(path, version, sealed) {
            true => State::Durable(Arc::clone(sealed)),
            false => state,
        };
        self.catalog().advance(path, version, state);
        log::info!("{}: sealed, {words}", path.display());
        self.retention.news();
        Ok(())
    }

    /// Looks at a name where a link may have come or gone.
    fn look_at_link(&self, path: &Path) {
        let former = self.catalog().files().link(path);
        let target = best::linked(&self.store, path, former.as_deref());
        let late = self.catalog().link_read(path, target);
        self.warn_of_late(path, &late);
        self.catalog().steps().link_read();
        self.notify();
    }

    /// Warns of files that a statement names for the first time: their exact bytes are gone.
    fn warn_of_late(&self, by: &Path, late: &[Arc<Path>]) {
        for file in late {
            log::warn!(
                "{}: {} names it as the best, but it was released before, so it is lossy",
                file.display(),
                by.display()
            );
        }
    }

    /// Makes the bytes of a closed file durable.
    pub(super) fn sync_bytes(&self, file: &DeviceFile) -> io::Result<()> {
        self.store.sync_written(file, CrashPoint::FileSealed)
    }

    /// Makes every directory on the way to a file durable: a checkpoint's directory may be as new as the file.
    fn sync_names(&self, path: &Path) -> io::Result<()> {
        path.ancestors().skip(1).try_for_each(|directory| self.sync_dir(directory, CrashPoint::NamesSealed))
    }

    /// Makes the names in a directory of the tree durable.
    pub(super) fn sync_dir(&self, directory: &Path, at: CrashPoint) -> io::Result<()> {
        let tree = self.store.tree();
        // Not where a link leads to.
        beneath::open_dir(&tree, directory)?;
        self.io().sync_dir(&beneath::reach(&tree, directory)?, at)
    }
}
