//! Makes many closed files durable in one go (`catalog/queue.rs` says which).
//!
//! First the bytes of all are sent to the device. So the first fsync commits the journal for all, and the others only
//! wait for the device's cache, several at a time. Each file still has an fsync of its own, because only that says
//! which file lost bytes. syncfs would not, and it would also wait for large files that programs write meanwhile. Each
//! directory is synced once.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::encode::StepResult;
use crate::store::durable::{CrashPoint, DeviceFile};
use crate::store::side_by_side;

use super::Archive;
use super::catalog::{Step, Task};
use super::threads::Pause;

impl Archive {
    /// Makes files durable together until the archive stops, and then those that are left.
    pub(super) fn seal_together(&self) {
        let mut pause = Pause::none();
        while let Some(tasks) = self.next_together() {
            match catch_unwind(AssertUnwindSafe(|| self.make_all_durable(&tasks))) {
                Ok(results) => {
                    let results = tasks.iter().zip(results);
                    results.for_each(|(task, result)| self.conclude(task, &mut pause, || result));
                }
                // A defect. An fsync may have failed, so none is tried again: each file fails like one with a defect of
                // its own.
                Err(_) => tasks.iter().for_each(|task| self.conclude(task, &mut pause, || resume_unwind(Box::new(())))),
            }
            self.notify();
        }
    }

    /// Takes the step of each of these files.
    fn make_all_durable(&self, tasks: &[Task]) -> Vec<StepResult<()>> {
        let began = Instant::now();
        let opened: Vec<_> = tasks.iter().map(|task| self.open_closed(task)).collect();
        for file in opened.iter().flatten() {
            if let Err(error) = file.begin_sync() {
                // The kernel may not report it again. `sync_bytes` fails for a file that has this note.
                self.store.sync_failed(file.as_file(), &error);
            }
        }
        let sync = |opened: &StepResult<DeviceFile>| opened.as_ref().ok().map(|file| self.sync_bytes(file));
        let synced = side_by_side(&opened, |opened| sync(opened));
        let above = |task: &Task| task.path.ancestors().skip(1).map(Path::to_path_buf).collect::<Vec<_>>();
        let directories: BTreeSet<_> = tasks.iter().flat_map(above).collect();
        // The tree itself, the only one without a name, comes last: then all is durable.
        let directories: Vec<_> = directories.into_iter().rev().collect();
        let sync = |directory: &PathBuf| self.sync_dir(directory, CrashPoint::NamesSealed);
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
    pub(super) fn synced(
        &self,
        task: &Task,
        file: &DeviceFile,
        synced: io::Result<()>,
        began: Instant,
    ) -> StepResult<()> {
        match (&task.step, synced) {
            (Step::Sync, Ok(())) => self.catalog().made_durable(task, began, None),
            (Step::Sync, Err(error)) if is_passing(&error) => return Err(error.into()),
            (Step::Sync, Err(error)) => {
                // Nobody else reports it: the file is not durable either once it is closed again.
                self.store.sync_failed(file.as_file(), &error);
                log::error!("{}: bytes that were closed could not be made durable: {error}", task.path.display());
                self.catalog().made_durable(task, began, None);
            }
            (_, synced) => return self.seal_synced(task, file, synced, began),
        }
        Ok(())
    }
}

/// Whether an error says nothing of the file, and passes: a directory could not even be opened.
pub(super) fn is_passing(error: &io::Error) -> bool {
    let passing = [libc::ENOENT, libc::ENOTDIR, libc::EMFILE, libc::ENFILE, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| passing.contains(&code))
}

/// The same error for another file.
fn same_error(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}
