//! After the last close: a file becomes durable, and its tensors and its lineage are found. Nothing that is closed waits for
//! what takes longer.
//!
//! Many small files become durable in one go. First the bytes of all are sent to the device. So the first fsync commits the
//! journal for all, and the others only wait for the device's cache, several at a time. Each file still has an fsync of its
//! own, because only that says which file lost bytes. syncfs would not, and it would also wait for large files that programs
//! write meanwhile. Each directory is synced once.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use crate::encode::{StepError, StepResult};
use crate::store::durable::{CrashPoint, DeviceFile};
use crate::store::object::Id;
use crate::store::{Stub, changed_ns, recalled_from, side_by_side};

use super::catalog::{Closed, Step, Task};
use super::entry::{Sealed, Stamp, State};
use super::namespace::{FileId, Outcome};
use super::resident::ResidentReason;
use super::retention::Retention;
use super::shared::{Pause, Shared};
use super::source::Contents;
use super::twins::Twins;
use super::{best, scan};

/// Makes closed files durable, and finds what they are.
pub(super) struct Sealer {
    shared: Arc<Shared>,
    contents: Arc<Contents>,
    twins: Arc<Twins>,
    retention: Arc<Retention>,
}

impl Sealer {
    /// Of an archive with these parts.
    pub(super) fn new(
        shared: Arc<Shared>,
        contents: Arc<Contents>,
        twins: Arc<Twins>,
        retention: Arc<Retention>,
    ) -> Sealer {
        Sealer { shared, contents, twins, retention }
    }

    /// What each sealer does until the archive stops.
    pub(super) fn seal_files(&self) {
        let mut pause = Pause::none();
        while let Some(closed) = self.shared.next_to_seal() {
            match closed {
                Closed::Link(path) => self.look_at_link(&path),
                Closed::File(task) => self.shared.take(&task, &mut pause, || self.seal(&task)),
            }
        }
    }

    /// Makes a closed file durable, and finds its tensors and its lineage.
    fn seal(&self, task: &Task) -> StepResult<()> {
        let began = Instant::now();
        let file = self.open_closed(task)?;
        let synced = self.sync_bytes(&file).and_then(|()| self.sync_names(&task.path));
        self.synced(task, &file, synced, began)
    }

    /// Opens a file that a program has closed.
    fn open_closed(&self, task: &Task) -> StepResult<DeviceFile> {
        let path = task.path.as_path();
        // Not found: removed meanwhile, or renamed, and the note of it is on its way.
        let file = self.shared.open_file(path)?;
        // In a shared store the writer's daemon has marked it, if a program wrote it. This may be a former keeper by now.
        if Stub::looks_like_one(&file)? && (self.shared.store.is_shared() || !self.is_still_closed(task, &file)?) {
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
        let namespace = self.shared.namespace();
        let has_changed = namespace.is_some_and(|names| names.idle(&task.path, opened) == Outcome::Changed);
        Ok(!has_changed && self.shared.catalog().get(&task.path).is_some_and(|entry| entry.version == task.version))
    }

    /// A closed file and its names were synced, or an attempt failed: finds its tensors and its lineage.
    fn seal_synced(&self, task: &Task, file: &DeviceFile, synced: io::Result<()>, began: Instant) -> StepResult<()> {
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
            if !self.shared.catalog().advance(path, version, State::Resident(ResidentReason::NotDurable)) {
                // A program has opened it again, and may keep those bytes.
                self.shared.store.sync_failed(file.as_file(), &error);
            }
            return Ok(());
        }
        let metadata = file.metadata()?;
        if changed_ns(&metadata) >= self.shared.quiet_ns.load(Ordering::Relaxed) {
            // It was changed since the look: the next one says when it is closed again.
            self.shared.catalog().opened_for_writing(path, Instant::now());
            return Ok(());
        }
        let describe = || self.contents.describe(path, file);
        let scan::Examined { state, words, names, is_opaque, has_tensors } =
            scan::examine(file, &metadata, path, self.contents.siblings(path)?, describe)?;
        self.shared.catalog().made_durable(task, began, Some(is_opaque));
        // Before the file is known to be sealed: nothing is released while one that may speak is not.
        let late = self.shared.catalog().examined(path, version, (Stamp::of(&metadata), has_tensors), names);
        self.warn_of_late(path, &late);
        let State::Sealed(sealed) = &state else {
            use ResidentReason::{CutShort, Incompressible, NotUnderstood};
            if let State::Resident(why @ (Incompressible | NotUnderstood(_) | CutShort(_))) = &state {
                log::info!("{}: stays as it is: {why}", path.display());
            }
            // Of a file that the kernel served, nobody else knows.
            let free =
                || rustix::fs::statvfs(self.shared.store.root()).map(|of| of.f_bavail.saturating_mul(of.f_frsize));
            if matches!(&state, State::Resident(CutShort(_))) && free().is_ok_and(|free| free < metadata.len()) {
                log::warn!("{}: is cut short, and the disk of the store is nearly full", path.display());
            }
            let mut catalog = self.shared.catalog();
            catalog.keep(path, version, None);
            catalog.advance(path, version, state);
            drop(catalog);
            self.retention.news();
            return Ok(());
        };
        // Named before anything is collected: nothing is while a file is not sealed.
        let known = |id: &Id, of: &Sealed| {
            self.shared.objects.get(*id).is_some_and(|(h, _)| (h.logical_len, h.signature) == (of.len, of.signature))
        };
        let keeps = recalled_from(file).filter(|id| known(id, sealed));
        self.shared.catalog().keep(path, version, keeps);
        let sealed = &match self.shared.store.is_shared() {
            true => Arc::new(Sealed { changed_ns: Some(changed_ns(&metadata)), ..Sealed::clone(sealed) }),
            false => Arc::clone(sealed),
        };
        let state = match self.twins.may_be_copy(path, version, sealed) {
            true => State::Durable(Arc::clone(sealed)),
            false => State::Sealed(Arc::clone(sealed)),
        };
        self.shared.catalog().advance(path, version, state);
        log::info!("{}: sealed, {words}", path.display());
        self.retention.news();
        Ok(())
    }

    /// Looks at a name where a link may have come or gone.
    fn look_at_link(&self, path: &Path) {
        let former = self.shared.catalog().files().others.links.get(path).cloned();
        let target = best::linked(&self.shared.store, path, former.as_deref());
        let late = self.shared.catalog().link_read(path, target);
        self.warn_of_late(path, &late);
        self.shared.catalog().steps().link_read();
        self.shared.notify();
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
    fn sync_bytes(&self, file: &DeviceFile) -> io::Result<()> {
        self.shared.store.sync_written(file, CrashPoint::FileSealed)
    }

    /// Makes every directory on the way to a file durable: a checkpoint's directory may be as new as the file.
    fn sync_names(&self, path: &Path) -> io::Result<()> {
        path.ancestors().skip(1).try_for_each(|directory| self.shared.sync_dir(directory, CrashPoint::NamesSealed))
    }

    /// Makes files durable together until the archive stops, and then those that are left.
    pub(super) fn seal_together(&self) {
        let mut pause = Pause::none();
        while let Some(tasks) = self.shared.next_together() {
            match catch_unwind(AssertUnwindSafe(|| self.make_all_durable(&tasks))) {
                Ok(results) => {
                    let results = tasks.iter().zip(results);
                    results.for_each(|(task, result)| self.shared.conclude(task, &mut pause, || result));
                }
                // A defect. An fsync may have failed, so none is tried again: each file fails like one with a defect of
                // its own.
                Err(_) => {
                    tasks.iter().for_each(|task| self.shared.conclude(task, &mut pause, || resume_unwind(Box::new(()))))
                }
            }
            self.shared.notify();
        }
    }

    /// Takes the step of each of these files.
    fn make_all_durable(&self, tasks: &[Task]) -> Vec<StepResult<()>> {
        let began = Instant::now();
        let opened: Vec<_> = tasks.iter().map(|task| self.open_closed(task)).collect();
        for file in opened.iter().flatten() {
            if let Err(error) = file.begin_sync() {
                // The kernel may not report it again. `sync_bytes` fails for a file that has this note.
                self.shared.store.sync_failed(file.as_file(), &error);
            }
        }
        let sync = |opened: &StepResult<DeviceFile>| opened.as_ref().ok().map(|file| self.sync_bytes(file));
        let synced = side_by_side(&opened, |opened| sync(opened));
        let above = |task: &Task| task.path.ancestors().skip(1).map(Path::to_path_buf).collect::<Vec<_>>();
        let directories: BTreeSet<_> = tasks.iter().flat_map(above).collect();
        // The tree itself, the only one without a name, comes last: then all is durable.
        let directories: Vec<_> = directories.into_iter().rev().collect();
        let sync = |directory: &PathBuf| self.shared.sync_dir(directory, CrashPoint::NamesSealed);
        let (tree, below) =
            directories.split_last().map_or((None, &directories[..]), |(tree, below)| (Some(tree), below));
        let names: Vec<_> = side_by_side(below, sync).into_iter().chain(tree.map(sync)).collect();
        let failed: BTreeMap<&Path, io::Error> =
            directories.iter().zip(names).filter_map(|(path, result)| Some((path.as_path(), result.err()?))).collect();
        let named = |task: &Task| task.path.ancestors().skip(1).find_map(|above| failed.get(above)).map(same_error);
        let results = tasks.iter().zip(opened.into_iter().zip(synced));
        let results = results.map(|(task, (opened, synced))| {
            let synced = synced.unwrap_or(Ok(())).and_then(|()| named(task).map_or(Ok(()), Err));
            self.synced(task, &opened?, synced, began)
        });
        results.collect()
    }

    /// Ends the step of a file whose bytes and names were synced, or could not be.
    fn synced(&self, task: &Task, file: &DeviceFile, synced: io::Result<()>, began: Instant) -> StepResult<()> {
        match (&task.step, synced) {
            (Step::Sync, Ok(())) => self.shared.catalog().made_durable(task, began, None),
            (Step::Sync, Err(error)) if is_passing(&error) => return Err(error.into()),
            (Step::Sync, Err(error)) => {
                // Nobody else reports it: the file is not durable either once it is closed again.
                self.shared.store.sync_failed(file.as_file(), &error);
                log::error!("{}: bytes that were closed could not be made durable: {error}", task.path.display());
                self.shared.catalog().made_durable(task, began, None);
            }
            (_, synced) => return self.seal_synced(task, file, synced, began),
        }
        Ok(())
    }
}

/// Whether an error says nothing of the file, and passes: a directory could not even be opened.
fn is_passing(error: &io::Error) -> bool {
    let passing = [libc::ENOENT, libc::ENOTDIR, libc::EMFILE, libc::ENFILE, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| passing.contains(&code))
}

/// The same error for another file.
fn same_error(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}
