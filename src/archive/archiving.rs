//! Archives a sealed file of which a newer state is sealed too: choose the base, write the difference to it, commit.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::encode::{Base, Difference, Material, StepError, StepResult, Workers, Written, succession, yield_to_others};
use crate::store::durable::DeviceFile;
use crate::store::object::Id;
use crate::store::{Newest, Profile, Profiles, is_pinned, step_pattern};
use crate::sync::Mutex;
use formats::{InOrder, ReadAt, is_named_elsewhere};

use super::FileId;
use super::base::Bases;
use super::catalog::{Step, Task};
use super::decide::Mark;
use super::entry::{Held, Sealed, State};
use super::lineage;
use super::namespace::Outcome;
use super::release::Releaser;
use super::resident::ResidentReason;
use super::restores::Restores;
use super::shared::{Pause, Shared};
use super::source::Contents;
use super::twins::Twins;

/// The state after a file.
pub(super) struct After<'a> {
    /// Its bytes, and its path. With `ahead`, the state before.
    pub(super) state: (&'a (dyn ReadAt + Sync), &'a Path),
    /// It is not known yet.
    pub(super) ahead: bool,
    /// Why it is no proven later state of the file's run.
    pub(super) refusal: Option<&'a str>,
}

/// How long an archived file is kept open for the state after it: a mirror may be away for a while. A released file
/// that is open takes its room on the disk until then.
const KEEP_OPEN: Duration = Duration::from_secs(600);
/// Files kept open at most. A process may open 1,024 by default, or a little more.
const MOST_OPEN: usize = 256;

/// Archived files that are kept open until the state after each is encoded ahead.
#[derive(Debug, Default)]
pub(super) struct Before {
    /// By the state after them. Taken for moments; no other lock is taken under it.
    files: Mutex<Vec<(FileId, i64, Instant, DeviceFile)>>,
}

impl Before {
    fn put(&self, archived: &Sealed, next: &Sealed, file: DeviceFile) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|(id, _, since, _)| ![archived.file, next.file].contains(id) && since.elapsed() < KEEP_OPEN);
        if files.len() < MOST_OPEN {
            files.push((next.file, next.modified_ns, Instant::now(), file));
        }
    }

    /// Lets files go that were kept open for long.
    pub(super) fn let_go_old(&self) {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        files.retain(|(_, _, since, _)| since.elapsed() < KEEP_OPEN);
    }

    /// Lets all files go, since the disk lacks room. A mirror gets the states after them with more bytes.
    pub(super) fn let_go(&self) {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The state before this one.
    pub(super) fn take(&self, sealed: &Sealed) -> Option<DeviceFile> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let at =
            files.iter().position(|(id, modified_ns, ..)| (*id, *modified_ns) == (sealed.file, sealed.modified_ns))?;
        Some(files.swap_remove(at).3)
    }
}

/// Archives files, and takes the steps after that.
pub(super) struct Encoder {
    pub(super) shared: Arc<Shared>,
    pub(super) twins: Arc<Twins>,
    pub(super) before_ahead: Before,
    contents: Arc<Contents>,
    pub(super) restores: Arc<Restores>,
    workers: Arc<Workers>,
    releaser: Releaser,
}

impl Encoder {
    /// Of an archive with these parts.
    pub(super) fn new(
        shared: &Arc<Shared>,
        contents: Arc<Contents>,
        twins: Arc<Twins>,
        restores: Arc<Restores>,
        workers: Arc<Workers>,
    ) -> Encoder {
        Encoder {
            shared: Arc::clone(shared),
            twins,
            before_ahead: Before::default(),
            contents,
            restores,
            workers,
            releaser: Releaser::of(Arc::clone(shared)),
        }
    }

    /// The loop of an encoder, until the archive stops.
    pub(super) fn archive_files(&self) {
        yield_to_others();
        let mut pause = Pause::none();
        while let Some(task) = self.shared.next_to_archive() {
            self.shared.take(&task, &mut pause, || match &task.step {
                // An object may decode to the file's bytes. Then the file is archived by that object, without a newer state.
                Step::Compare { sealed } => self.twins.compare(&task, sealed),
                // A newer state with other bytes is sealed. The file is encoded as a difference to an older state, made
                // durable, read back from the device, and compared with its bounds. Its bytes are still in the tree.
                Step::Archive { sealed, newer } => self.archive_file(&task, sealed, newer),
                // All files of the checkpoint are archived, and none is open. A durable stub takes its place.
                Step::Release { .. } => self.releaser.release(&task),
                Step::Seal | Step::Sync => unreachable!("a sealer's step"),
            });
        }
    }

    /// Archives a sealed file of which a newer state is sealed too: plan, encode, read back, commit.
    fn archive_file(&self, task: &Task, sealed: &Arc<Sealed>, newer: &(PathBuf, Arc<Sealed>)) -> StepResult<()> {
        let (path, version) = (task.path.as_path(), task.version);
        let source = self.shared.open_file(path)?;
        let metadata = source.metadata()?;
        if !sealed.describes(&metadata) {
            self.shared.catalog().advance(path, version, State::Closed);
            return Ok(());
        }
        if metadata.nlink() > 1 {
            self.shared.catalog().wait_for_one_name(path, version);
            return Ok(());
        }
        if !self.is_idle(path, version, sealed) || self.is_held_by_pin(path, version)? {
            return Ok(());
        }
        let started = Instant::now();
        let stale =
            || self.shared.is_stopping() || self.shared.catalog().get(path).is_none_or(|e| e.version != version);
        let mut profiles = self.restores.profiles(path, sealed.lineage)?;
        let mut refusal = None;
        if profiles.coarsest() != Profile::Exact {
            if self.is_best(path, version) || !self.is_followed_by_sound((path, &source), newer)? {
                return Ok(());
            }
            let after = self.open_newer(newer)?;
            refusal = self.refusal((path, &source), (&newer.0, &after))?;
        }
        if let Some(why) = &refusal {
            log::info!("{}: stays exact, not proven to be a step of one run: {why}", path.display());
            profiles = profiles.overridden(Profile::Exact);
        }
        let refusal = refusal.as_deref();
        // Bytes that do not say to which tensor they belong must not share the errors of others.
        let twin = if is_named_elsewhere(path) { None } else { self.twins.find(&profiles, sealed, &source, &stale)? };
        let object = match twin {
            Some(object) => object,
            None => match self.write_object(path, sealed, (&source, &profiles), newer, (refusal, &stale))? {
                Some(object) => object,
                None => {
                    let why = ResidentReason::incompressible(&self.contents.describe(path, &source)?);
                    log::info!("{}: stays as it is: {why}", path.display());
                    self.shared.catalog().advance(path, version, State::Resident(why));
                    return Ok(());
                }
            },
        };
        // Before anybody sees it archived: the mirror asks for it then.
        self.keep_for_ahead(sealed, &newer.1, source);
        // Its lineage has another newest state now.
        self.shared.garbage.store(true, Ordering::Relaxed);
        {
            let mut catalog = self.shared.catalog();
            let prover = self.shared.objects.is_lossy(object).then(|| Box::new((newer.0.clone(), newer.1.file)));
            catalog.edit(path, version, |entry| entry.prover = prover);
            if !catalog.advance(path, version, State::Archived(Arc::clone(sealed), object)) {
                return Ok(());
            }
            catalog.keep(path, version, None);
        }
        if let Some((header, stored)) = self.shared.objects.get(object) {
            let percent = 100.0 * stored as f64 / header.logical_len.max(1) as f64;
            log::info!("{}: archived as {object}, {percent:.1}% in {:.1?}", path.display(), started.elapsed());
        }
        Ok(())
    }

    /// Why one file is no proven later state of another one's run. `None`: it is.
    pub(super) fn refusal(
        &self,
        before: (&Path, &DeviceFile),
        after: (&Path, &DeviceFile),
    ) -> StepResult<Option<String>> {
        let [of_before, of_after] =
            &[self.contents.describe_named(before.0, before.1)?, self.contents.describe_named(after.0, after.1)?];
        let [counted, of_after_counted] = [before.0, after.0].map(step_pattern::of_file);
        let before = succession::State { source: before.1, description: of_before, counted };
        let after = succession::State { source: after.1, description: of_after, counted: of_after_counted };
        Ok(succession::refusal(&before, &after)?)
    }

    /// Whether the state after a file is finite wherever the file itself is. If it is not, it is a newer state of nothing: a
    /// run that diverged must not make its last sound state history. Some models always have an infinite weight.
    fn is_followed_by_sound(&self, own: (&Path, &DeviceFile), newer: &(PathBuf, Arc<Sealed>)) -> StepResult<bool> {
        let (path, file) = (newer.0.as_path(), self.open_newer(newer)?);
        let not_finite = |path: &Path, file: &DeviceFile| -> StepResult<HashSet<String>> {
            let description = self.contents.describe_named(path, file)?;
            Ok(self.workers.install(|| succession::not_finite(file, &description))?)
        };
        let found = not_finite(path, &file)?;
        if found.is_empty() || found.is_subset(&not_finite(own.0, own.1)?) {
            return Ok(true);
        }
        log::warn!("{}: some of its weights are not finite, so it is no newer state of another file", path.display());
        self.shared.catalog().is_unsound(path, &newer.1);
        Ok(false)
    }

    /// Whether no handle is open on the file; if one is, the file waits until it is closed.
    fn is_idle(&self, path: &Path, version: u64, sealed: &Sealed) -> bool {
        // Set before the question, so that a close in between is not missed.
        self.shared.catalog().edit(path, version, |entry| entry.busy = true);
        if self.shared.namespace().is_some_and(|ns| ns.idle(path, sealed.file) == Outcome::Busy) {
            return false;
        }
        self.shared.catalog().edit(path, version, |entry| entry.busy = false);
        true
    }

    /// Whether the file is pinned: then it is held.
    fn is_held_by_pin(&self, path: &Path, version: u64) -> StepResult<bool> {
        if !is_pinned(&self.shared.store.tree(), path)? {
            return Ok(false);
        }
        self.shared.catalog().edit(path, version, |entry| entry.held = Some(Held::Pinned));
        // Asked again, because the note of the pin's removal may have come in between.
        if is_pinned(&self.shared.store.tree(), path)? {
            log::debug!("{}: stays as it is, it is pinned", path.display());
            return Ok(true);
        }
        self.shared.catalog().edit(path, version, |entry| entry.held = None);
        Ok(false)
    }

    /// Whether the file is the best of its run: then it is held as long as it is.
    fn is_best(&self, path: &Path, version: u64) -> bool {
        let mut catalog = self.shared.catalog();
        let Some(mark) = catalog.decided().mark(path) else { return false };
        catalog.edit(path, version, |entry| entry.held = Some(Held::Best));
        match mark {
            Mark::Named(by) => {
                log::info!("{}: stays as it was written, {} names it as the best", path.display(), by.display());
            }
            Mark::Result => {
                log::info!("{}: stays as it was written, its name shows the best result of its run", path.display());
            }
        }
        true
    }

    /// Encodes, reads back and commits, `None`: not worth it. The caller names the object from now on.
    fn write_object(
        &self,
        path: &Path,
        sealed: &Sealed,
        (source, profiles): (&DeviceFile, &Profiles),
        newer: &(PathBuf, Arc<Sealed>),
        (refusal, stale): (Option<&str>, &(dyn Fn() -> bool + Sync)),
    ) -> StepResult<Option<Id>> {
        let after = self.open_newer(newer)?;
        let after = After { state: (&after, &newer.0), ahead: false, refusal };
        self.difference(path, sealed, (source, profiles), &after, stale, &mut |difference| self.commit(difference))
    }

    /// Opens the state after a file.
    pub(super) fn open_newer(&self, (path, sealed): &(PathBuf, Arc<Sealed>)) -> StepResult<DeviceFile> {
        let after = self.shared.open_file(path)?;
        if !sealed.describes(&after.metadata()?) {
            // Changed without a note: a program set its time, or writes through a mapping.
            self.shared.catalog().has_changed(path, sealed);
            return Err(StepError::Superseded);
        }
        Ok(after)
    }

    /// Calls `act` with a file as difference to its base.
    pub(super) fn difference<T>(
        &self,
        path: &Path,
        sealed: &Sealed,
        (source, profiles): (&DeviceFile, &Profiles),
        after: &After,
        stale: &(dyn Fn() -> bool + Sync),
        act: &mut dyn FnMut(&Difference) -> StepResult<T>,
    ) -> StepResult<T> {
        let mut description = self.contents.describe(path, source)?;
        // Archive the sealed content, or nothing.
        if lineage::signature(&description) != sealed.signature {
            // A file beside it that describes it came or went: it is examined anew.
            self.shared.catalog().has_changed(path, sealed);
            self.shared.notify();
            return Err(StepError::Superseded);
        }
        self.contents.name_chunks(path, &mut description)?;
        let of_newer = self.contents.describe_named(after.state.1, after.state.0)?;
        self.contents.prove_by_companions(path, &mut description);
        description.hold_unsteady(source)?;
        let profiles = match self.workers.install(|| description.is_intact(source))? {
            true => profiles.clone(),
            false => profiles.overridden(Profile::Exact),
        };
        let written: &(dyn ReadAt + Sync) = source;
        let source = InOrder::new(source, &description);
        let (newer, of_newer) = InOrder::as_later_state(after.state.0, &of_newer, &description);
        let base = Bases::of(&self.shared).base(sealed, &description, &source, profiles.policy())?;
        act(&Difference {
            path,
            refusal: after.refusal,
            facts: sealed.facts(),
            material: Material {
                source: &source,
                description: &description,
                newer: (&newer, &of_newer),
                ahead: after.ahead,
                base: &base,
                apart: step_pattern::iterations(path, after.state.1),
                profiles: &profiles,
            },
            written,
            generations: &|| self.restores.generations_at(sealed.lineage, sealed.modified_ns),
            tmp: (self.shared.io(), &self.shared.store.tmp()),
            memory: self.shared.recall.memory(),
            workers: &self.workers,
            cancelled: stale,
        })
    }

    /// Keeps an archived file open for the state after it, which is encoded ahead by the update between the two.
    pub(super) fn keep_for_ahead(&self, archived: &Sealed, next: &Sealed, file: DeviceFile) {
        let wanted =
            self.shared.store.settings().mirror.as_ref().is_some_and(|mirror| mirror.newest == Newest::Quantized);
        // Below the reserve its room is needed at once.
        if wanted && !self.shared.is_low.load(Ordering::Relaxed) {
            self.before_ahead.put(archived, next, file);
        }
    }

    /// Encodes a file as difference to its base, or as keyframe, and adds the object.
    pub(super) fn commit(&self, difference: &Difference) -> StepResult<Option<Id>> {
        let written = match difference.write() {
            Err(error @ StepError::Object(_)) if difference.material.base.chain.is_some() => {
                log::error!("{error}; {} begins a new chain", difference.path.display());
                let note = "keyframe: the state before is damaged";
                let material = Material { base: &Base { note, ..Base::default() }, ..difference.material };
                Difference { material, ..*difference }.write()
            }
            written => written,
        };
        let Some(Written { writer, header, chain }) = written? else { return Ok(None) };
        let id = header.id;
        self.shared
            .objects
            .add(writer, header, chain.leaf().stored())
            .inspect_err(|_| self.shared.recall.forget(id))?;
        self.remember(id, difference.material.base);
        Ok(Some(id))
    }

    /// Remembers the states: the next state will be a difference to this one, or to the super-step before it.
    fn remember(&self, id: Id, base: &Base) {
        let former = base.previous.as_ref().map(|chain| chain.leaf());
        if let Some(former) = former.filter(|former| !former.is_super_step()) {
            self.shared.recall.memory().forget(former.header().id);
        }
        if let Ok(chain) = self.shared.recall.chain(id) {
            self.shared.recall.memory().hold(&chain);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::durable::{CrashPoint, Io};

    #[test]
    fn a_file_that_was_kept_open_for_long_is_let_go() {
        let (dir, before, io) = (tempfile::tempdir().unwrap(), Before::default(), Io::disk());
        let mut files = before.files.lock().unwrap();
        for (name, age) in [("old", KEEP_OPEN), ("new", Duration::ZERO)] {
            let file = io.create(&dir.path().join(name), CrashPoint::Fsync).unwrap();
            files.push((FileId::of(&file.metadata().unwrap()), 0, Instant::now() - age, file));
        }
        drop(files);
        before.let_go_old();
        let left: Vec<FileId> = before.files.lock().unwrap().iter().map(|(id, ..)| *id).collect();
        assert_eq!(left, [FileId::of(&std::fs::metadata(dir.path().join("new")).unwrap())]);
    }
}
