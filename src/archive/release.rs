//! The last step: stubs take the place of files, those of one checkpoint one right after the other.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use crate::encode::{StepError, StepResult};
use crate::store::durable::CrashPoint;
use crate::store::object::Id;
use crate::store::{Committed, Prepared, Stub, beneath, is_pinned, locks, side_by_side};
use crate::sync::Mutex;

use super::catalog::{Catalog, Step, Task};
use super::decide::rank;
use super::entry::{Held, Sealed, State};
use super::namespace::Outcome;
use super::shared::{Pause, Shared};

/// Files of a checkpoint that are released in one go: each directory is synced once for all of them.
const TOGETHER: usize = 16;

/// A file that is being released, and the stub that is ready for it.
struct Ready<'a> {
    task: &'a Task,
    sealed: &'a Arc<Sealed>,
    object: Id,
    prepared: Prepared,
}

/// Files that were claimed beside the first one. Also where a step panics, no claim must stay.
struct Claimed<'a> {
    shared: &'a Shared,
    tasks: Vec<Task>,
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        let mut catalog = self.shared.catalog();
        self.tasks.iter().for_each(|task| catalog.steps().done(task));
    }
}

/// The newest state of the lineage after a file.
fn newest_after(catalog: &Catalog, path: &Path) -> Option<(PathBuf, Arc<Sealed>)> {
    let own = catalog.get(path)?;
    let lineage = own.state.sealed()?.lineage;
    let states = catalog.files().iter().filter_map(|(path, entry)| match &entry.state {
        State::Sealed(sealed) if sealed.lineage == lineage && entry.counts_as_newer() => {
            Some((rank(entry), path, sealed))
        }
        _ => None,
    });
    let newest = states.filter(|(newer, ..)| *newer > rank(own)).max_by(|a, b| a.0.cmp(&b.0));
    newest.map(|(_, path, sealed)| (path.to_path_buf(), Arc::clone(sealed)))
}

/// Keeps programs from writing a file, until the result is dropped. `None`: one may write it already.
fn keep_unwritten(shared: &Shared, path: &Path) -> std::io::Result<Option<File>> {
    let opened = beneath::open(&shared.store.tree(), path, libc::O_RDWR | libc::O_NONBLOCK);
    let file = beneath::plain(opened?)?;
    Ok(locks::unwritten(&file)?.then_some(file))
}

/// Puts stubs in the places of archived files.
pub(super) struct Releaser {
    shared: Arc<Shared>,
}

impl Releaser {
    /// Of an archive.
    pub(super) fn of(shared: Arc<Shared>) -> Releaser {
        Releaser { shared }
    }

    /// Releases an archived file, and with it all other files of its checkpoint: the catalog offers none of them before
    /// all that can be are archived. A crash in between is harmless, the rest is released after the next mount: every
    /// file of the checkpoint had a newer state by then.
    pub(super) fn release(&self, task: &Task) -> StepResult<()> {
        // Files beside other checkpoints are released one by one.
        let checkpoint = self.shared.catalog().files().file(&task.path).and_then(|file| file.checkpoint.clone());
        let Step::Release { sealed, .. } = &task.step else { return Ok(()) };
        let Some(checkpoint) = checkpoint.filter(|checkpoint| checkpoint.is_directory() && !sealed.copy) else {
            if self.release_together(&[task]).swap_remove(0)? {
                log::info!("{}: released", task.path.display());
            }
            return Ok(());
        };
        let (mut first, mut count) = (Some(task), 0);
        while !self.shared.is_stopping() {
            let mut claimed = Claimed { shared: &self.shared, tasks: Vec::new() };
            let room = TOGETHER - usize::from(first.is_some());
            claimed
                .tasks
                .extend(std::iter::from_fn(|| self.shared.catalog().steps().claim_release(&checkpoint)).take(room));
            let tasks: Vec<&Task> = first.into_iter().chain(&claimed.tasks).collect();
            if tasks.is_empty() {
                break;
            }
            let mut results = self.release_together(&tasks);
            count += results.iter().filter(|result| matches!(result, Ok(true))).count();
            let own = first.take().map(|_| results.remove(0));
            for (task, result) in claimed.tasks.drain(..).zip(results) {
                self.shared.take(&task, &mut Pause::none(), || result.map(|_| ()));
            }
            own.transpose()?;
        }
        if count > 0 {
            log::info!(
                "{}: released, {count} file{}",
                checkpoint.group.directory.display(),
                if count == 1 { "" } else { "s" }
            );
        }
        Ok(())
    }

    /// Puts stubs in the places of archived files; answers of each whether it did. The stubs are made durable side by
    /// side. They take their places one after the other: each commit gives its directory the times back that the next
    /// one has to find.
    fn release_together(&self, tasks: &[&Task]) -> Vec<StepResult<bool>> {
        let ready = side_by_side(tasks, |task| self.prepare(task));
        let mut results = Vec::with_capacity(tasks.len());
        let mut released: BTreeMap<&Path, Vec<Prepared>> = BTreeMap::new();
        for ready in ready {
            let result = match ready {
                Ok(Some(mut ready)) => self.put_stub(&mut ready).inspect(|done| {
                    if *done {
                        let directory = ready.task.path.parent().unwrap_or(Path::new(""));
                        released.entry(directory).or_default().push(ready.prepared);
                    }
                }),
                Ok(None) => Ok(false),
                Err(error) => Err(error),
            };
            results.push(result);
        }
        // The times of a directory before the notes of them go.
        for (directory, stubs) in &released {
            if let Err(error) = self.shared.sync_dir(directory, CrashPoint::ReleaseSynced) {
                // Removed or renamed meanwhile: its note would find nothing.
                if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR)) {
                    continue;
                }
                log::warn!("{}: {error}", directory.display());
                stubs.iter().for_each(Prepared::keep_note);
            }
        }
        // Each frees the blocks of its old file.
        let released: Vec<_> = released.into_values().flatten().map(|stub| Mutex::new(Some(stub))).collect();
        side_by_side(&released, |stub| drop(stub.lock().unwrap_or_else(PoisonError::into_inner).take()));
        results
    }

    /// Makes the stub of a file durable. `None`: the file is not to be released now.
    fn prepare<'a>(&self, task: &'a Task) -> StepResult<Option<Ready<'a>>> {
        let Step::Release { sealed, object } = &task.step else { return Ok(None) };
        let (path, version, object) = (task.path.as_path(), task.version, *object);
        let stub = Stub { store: self.shared.store.id(), object, logical_len: sealed.len };
        let metadata = beneath::metadata(&self.shared.store.tree(), path)?;
        // A store through a mapping, or a program that set the time: the archived bytes may be outdated.
        if !sealed.describes(&metadata) {
            self.shared.catalog().reseal(path, version, |_| State::Closed);
            return Ok(None);
        }
        if metadata.nlink() > 1 {
            self.shared.catalog().wait_for_one_name(path, version);
            return Ok(None);
        }
        match Prepared::new(&self.shared.store, path, &metadata, &stub) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                // The next look finds out when it is free.
                self.shared.catalog().edit(path, version, |entry| entry.busy = true);
                Ok(None)
            }
            prepared => {
                let prepared = prepared?.ok_or(StepError::Superseded)?;
                Ok(Some(Ready { task, sealed, object, prepared }))
            }
        }
    }

    /// Puts a stub in the place of its file; answers whether it did.
    fn put_stub(&self, ready: &mut Ready) -> StepResult<bool> {
        let mut committed = self.try_to_put_stub(ready)?;
        if committed == Some(Committed::DirectoryChanged) {
            ready.prepared.without_note()?;
            committed = self.try_to_put_stub(ready)?;
        }
        Ok(committed == Some(Committed::Done))
    }

    /// In a shared store: keeps programs on all machines from writing the newest state of a file's lineage, for which the file
    /// loses something. `None`: that state is not as it was when it was sealed.
    fn keep_newest(&self, path: &Path, is_copy: bool, object: Id) -> StepResult<Option<Option<File>>> {
        let shared = &self.shared;
        if !shared.store.is_shared() || is_copy || !shared.objects.is_lossy(object) {
            return Ok(Some(None));
        }
        let newest = newest_after(&shared.catalog(), path);
        let Some((newest, sealed)) = newest else { return Ok(None) };
        let kept = match keep_unwritten(shared, &newest) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            kept => kept?,
        };
        let is_sealed = |file: &File| file.metadata().is_ok_and(|metadata| sealed.describes(&metadata));
        Ok(kept.filter(is_sealed).map(Some))
    }

    /// `None`: the file is in use, or held.
    fn try_to_put_stub(&self, ready: &Ready) -> StepResult<Option<Committed>> {
        let Some(namespace) = self.shared.namespace() else { return Ok(None) };
        let Ready { task, sealed, object, prepared } = ready;
        let (path, version, object) = (task.path.as_path(), task.version, *object);
        // Before asking, so that a close in between is not missed.
        self.shared.catalog().edit(path, version, |entry| entry.busy = true);
        // In a shared store: kept as it is until the stub is in place.
        let Some(_newest) = self.keep_newest(path, sealed.copy, object)? else { return Ok(None) };
        let (mut committed, mut is_held) = (None, false);
        let outcome = namespace.exclusively(path, sealed.file, &mut |absolute| {
            // Under the file system's lock: the path is this file's, and later notes come after this.
            self.shared.catalog().edit(path, version, |entry| entry.busy = false);
            if self.shared.catalog().get(path).is_none_or(|entry| entry.version != version) {
                return Ok(false);
            }
            // The newer state may have gone since this one was archived. Then this one is the newest, and stays
            // exact. So does a pinned file, or one of a checkpoint that is being written again. Pins are set under
            // this lock, so none can come between the look and the rename. This takes a few calls that wait for no
            // device: their data was read when the file was archived and the stub got its attributes.
            let pinned = is_pinned(&self.shared.store.tree(), path)?;
            let loses = !sealed.copy && self.shared.objects.is_lossy(object);
            let mut catalog = self.shared.catalog();
            // A file closed just now may name this one as the best of its run: it is examined first.
            if catalog.steps().may_learn() {
                return Ok(false);
            }
            let is_best = loses && catalog.decided().mark(path).is_some();
            let may_go = catalog.decided().may_go(path);
            if pinned || is_best || !may_go || loses && !catalog.files().is_still_proven(path) {
                let held = pinned.then_some(Held::Pinned).or(is_best.then_some(Held::Best));
                is_held = held.is_some();
                catalog.reseal(path, version, |entry| {
                    entry.held = held;
                    State::Sealed(Arc::new(Sealed { copy: false, ..Sealed::clone(sealed) }))
                });
                return Ok(false);
            }
            drop(catalog);
            let done = prepared.commit(absolute)?;
            committed = Some(done);
            if done != Committed::Done {
                return Ok(false);
            }
            self.shared.catalog().advance(path, version, State::Released(object));
            Ok(true)
        });
        if !matches!(outcome, Ok(Outcome::Busy)) {
            self.shared.catalog().edit(path, version, |entry| entry.busy = false);
        }
        match outcome? {
            // No failure: it would hide the reason from `user.stepfs.why` for as long as the file is held.
            Outcome::Changed if is_held => Ok(None),
            Outcome::Changed if committed != Some(Committed::DirectoryChanged) => Err(StepError::Superseded),
            Outcome::Done | Outcome::Busy | Outcome::Changed => Ok(committed),
        }
    }
}
