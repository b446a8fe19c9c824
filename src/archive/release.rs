//! The last step: stubs take the place of files, those of one checkpoint one right after the other.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use crate::store::durable::CrashPoint;
use crate::store::object::Id;
use crate::store::{Prepared, Stub, beneath, is_pinned};

use super::catalog::{Held, Sealed, State, Step, Task};
use super::error::{StepError, StepResult};
use super::threads::Pause;
use super::{Archive, Outcome};

impl Archive {
    /// Releases an archived file, and with it all other files of its checkpoint: the catalog offers none of them before
    /// all that can be are archived. A crash in between is harmless, the rest is released after the next mount: every
    /// file of the checkpoint had a newer state by then.
    pub(super) fn release(&self, task: &Task, sealed: &Arc<Sealed>, object: Id) -> StepResult<()> {
        let group = self.catalog().group(&task.path);
        let released = self.put_stub(&task.path, task.version, sealed, object)?;
        let Some(group) = group else {
            if released {
                log::info!("{}: released", task.path.display());
            }
            return Ok(());
        };
        let mut count = usize::from(released);
        while !self.is_stopping() {
            let next = self.catalog().claim_release(&group);
            let Some(task) = next else { break };
            self.take(&task, &mut Pause::none(), || {
                let Step::Release { sealed, object } = &task.step else { return Ok(()) };
                count += usize::from(self.put_stub(&task.path, task.version, sealed, *object)?);
                Ok(())
            });
        }
        if count > 0 {
            log::info!("{}: released, {count} file{}", group.display(), if count == 1 { "" } else { "s" });
        }
        Ok(())
    }

    /// Puts a stub in the place of an archived file; answers whether it did.
    fn put_stub(&self, path: &Path, version: u64, sealed: &Arc<Sealed>, object: Id) -> StepResult<bool> {
        let Some(namespace) = self.namespace() else {
            return Ok(false);
        };
        let stub = Stub { store: self.store.id(), object, logical_len: sealed.len };
        let metadata = beneath::metadata(&self.store.tree(), path)?;
        // A store through a mapping, or a program that set the time: what was archived may not be what is there.
        if !sealed.describes(&metadata) {
            if self.catalog().advance(path, version, State::Closed) {
                self.objects.unname(object);
            }
            return Ok(false);
        }
        if metadata.nlink() > 1 {
            self.wait_for_one_name(path, version);
            return Ok(false);
        }
        let prepared = Prepared::new(&self.store, path, &metadata, &stub)?.ok_or(StepError::Superseded)?;
        // What is closed now may name this one as the best, so it has to be looked at first.
        self.wait_for_words();
        // Before asking, so that a close in between is not missed.
        self.catalog().set_busy(path, version, true);
        let outcome = namespace.exclusively(path, sealed.file, &mut |absolute| {
            // Under the file system's lock: the path is this file's, and notes of what happens next come after this.
            self.catalog().set_busy(path, version, false);
            if self.catalog().get(path).is_none_or(|entry| entry.version != version) {
                return Ok(false);
            }
            // The newer state may have gone since this one was archived: then this is the newest, and stays exact. So
            // does a file that was pinned, or one of a checkpoint that is being written again. Pins are set under this
            // lock, so only here nobody can set one between the look and the rename: a few calls that wait for no
            // device, since what they ask for was read when the file was archived and the stub got its attributes.
            let pinned = is_pinned(&self.store.tree(), path)?;
            // Somebody may just have said that this one is the best of its run: what was closed is looked at first.
            let is_best = {
                let catalog = self.catalog();
                if catalog.may_learn() {
                    return Ok(false);
                }
                !sealed.copy && self.is_lossy(object) && catalog.named_best_by(path).is_some()
            };
            if pinned || is_best || !self.catalog().may_go(path, sealed) {
                let sealed = Sealed { copy: false, ..Sealed::clone(sealed) };
                self.catalog().advance(path, version, State::Sealed(Arc::new(sealed)));
                let held = if pinned { Some(Held::Pinned) } else { is_best.then_some(Held::Best) };
                self.catalog().hold(path, version, held);
                self.objects.unname(object);
                return Ok(false);
            }
            if !prepared.commit(absolute)? {
                return Ok(false);
            }
            self.catalog().advance(path, version, State::Released(object));
            Ok(true)
        });
        if !matches!(outcome, Ok(Outcome::Busy)) {
            self.catalog().set_busy(path, version, false);
        }
        match outcome? {
            Outcome::Done => {
                // The times of the directory before the note of them goes.
                let directory = path.parent().unwrap_or(Path::new(""));
                if let Err(error) = self.sync_dir(directory, CrashPoint::ReleaseSynced) {
                    log::warn!("{}: {error}", directory.display());
                    prepared.keep_note();
                }
                Ok(true)
            }
            Outcome::Busy => Ok(false),
            Outcome::Changed => Err(StepError::Superseded),
        }
    }
}
