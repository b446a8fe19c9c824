//! Encodes the newest state of a lineage before it has a newer one, so that a mirror has it at a fraction of its bytes.
//!
//! The file stays as it is, exact. Once the state after it is sealed, the file becomes this object (`archive/twins.rs`), if
//! it may lose anything at all. The newest object of a lineage stays without a name, so nothing is noted of it.

use std::path::Path;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::clock::wall_ns;
use crate::encode::{StepResult, original};
use crate::mirror::Ahead;
use crate::store::durable::DeviceFile;
use crate::store::object::{Header, Id};
use crate::store::{Newest, Profile, Profiles, is_pinned};
use crate::sync::Mutex;
use formats::is_named_elsewhere;

use super::FileId;
use super::archiving::After;
use super::archiving::Encoder;
use super::base::nearest;
use super::entry::{Sealed, State};
use super::twins::is_faithful;

/// Longest wait of a file for the state before it to become its base, in nanoseconds since it was written. A mirror
/// gets the file a minute late, and not as a difference over several states.
const PATIENCE_NS: i64 = 60_000_000_000;
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

    /// The state before this one.
    fn take(&self, sealed: &Sealed) -> Option<DeviceFile> {
        let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let at =
            files.iter().position(|(id, modified_ns, ..)| (*id, *modified_ns) == (sealed.file, sealed.modified_ns))?;
        Some(files.swap_remove(at).3)
    }
}

impl Encoder {
    /// Encodes the newest file of a lineage for a mirror.
    ///
    /// # Errors
    /// Those of an archiving.
    pub(super) fn encode_ahead(&self, path: &Path) -> StepResult<Ahead> {
        let (version, sealed) = {
            let mut catalog = self.shared.catalog();
            let Some(entry) = catalog.get(path) else { return Ok(Ahead::Later) };
            let State::Sealed(sealed) = &entry.state else { return Ok(Ahead::Later) };
            let (version, sealed) = (entry.version, Arc::clone(sealed));
            // It is to stay exact everywhere.
            if entry.held.is_some() || catalog.decided().mark(path).is_some() {
                return Ok(Ahead::Whole);
            }
            // A time in the future says nothing.
            let recent = (0..PATIENCE_NS).contains(&wall_ns().saturating_sub(sealed.modified_ns));
            let Some(decision) = catalog.decided().decision(path) else { return Ok(Ahead::Later) };
            if decision.has_newer {
                // A state that is no history, that is open, or whose checkpoint waits, may wait for ever.
                // While the next checkpoint is being saved, the wait is short.
                let is_old = |since: i64| wall_ns().saturating_sub(since) >= PATIENCE_NS;
                let is_held = decision.is_held_up && decision.newest.is_some_and(is_old);
                let is_soon = catalog.steps().is_to_be_archived(path) && !is_held;
                return Ok(if is_soon { Ahead::Later } else { Ahead::Whole });
            }
            if recent
                && catalog.files().before(path).is_some_and(|before| before.held.is_none() && before.failed.is_none())
            {
                return Ok(Ahead::Later);
            }
            (version, sealed)
        };
        let profiles = self.restores.profiles(path, sealed.lineage)?;
        let exact = profiles.coarsest() == Profile::Exact || profiles.policy().is_some();
        if exact || is_named_elsewhere(path) || is_pinned(&self.shared.store.tree(), path)? {
            return Ok(Ahead::Whole);
        }
        let source = self.shared.open_file(path)?;
        if !sealed.describes(&source.metadata()?) {
            // Changed without a note: a program set its time, or writes through a mapping.
            self.shared.catalog().has_changed(path, &sealed);
            self.shared.notify();
            return Ok(Ahead::Later);
        }
        let stale = || {
            let mut catalog = self.shared.catalog();
            self.shared.is_stopping()
                || catalog.get(path).is_none_or(|entry| entry.version != version)
                || catalog.decided().decision(path).is_some_and(|decision| decision.has_newer)
        };
        if let Some(made) = self.already_ahead(&sealed, &source, &profiles, &stale)? {
            return Ok(self.shared.objects.hold(made).map_or(Ahead::Later, Ahead::Object));
        }
        let Some(before) = self.before_ahead.take(&sealed) else { return Ok(Ahead::Whole) };
        let mut states = self.shared.objects.of_lineage(sealed.lineage);
        states.retain(|header| header.modified_ns < sealed.modified_ns);
        if !nearest(states, &sealed).is_some_and(|before| is_faithful(&self.shared.objects, before.id, &profiles)) {
            return Ok(Ahead::Whole);
        }
        // Its former name is not known any more; the number in its own proves nothing then.
        if self.refusal((path, &before), (path, &source))?.is_some() {
            return Ok(Ahead::Whole);
        }
        let after = After { state: (&before, path), ahead: true, refusal: None };
        let made =
            self.difference(path, &sealed, (&source, &profiles), &after, &stale, &mut |made| self.commit(made))?;
        let Some(made) = made else { return Ok(Ahead::Whole) };
        let hold = self.shared.objects.hold(made);
        self.shared.objects.unname(made);
        if let Some((header, stored)) = self.shared.objects.get(made) {
            let percent = 100.0 * stored as f64 / header.logical_len.max(1) as f64;
            log::info!("{}: encoded ahead as {made}, {percent:.1}%", path.display());
        }
        Ok(hold.map_or(Ahead::Later, Ahead::Object))
    }

    /// Keeps an archived file open for the state after it, which is encoded ahead by the update between the two.
    pub(super) fn keep_for_ahead(&self, archived: &Sealed, next: &Sealed, file: DeviceFile) {
        let wanted =
            self.shared.store.settings().mirror.as_ref().is_some_and(|mirror| mirror.newest == Newest::Quantized);
        if wanted {
            self.before_ahead.put(archived, next, file);
        }
    }

    /// The object of this state that a former process made.
    fn already_ahead(
        &self,
        sealed: &Sealed,
        source: &DeviceFile,
        profiles: &Profiles,
        stale: &(dyn Fn() -> bool + Sync),
    ) -> StepResult<Option<Id>> {
        let mut made = self.shared.objects.of_lineage(sealed.lineage);
        let is = |header: &Header| {
            let of = (header.modified_ns, header.logical_len, header.source_sample);
            of == (sealed.modified_ns, sealed.len, sealed.sample)
                && is_faithful(&self.shared.objects, header.id, profiles)
        };
        made.retain(is);
        let Some(made) = made.first() else { return Ok(None) };
        Ok((original::hash_of(source, sealed.len, stale)? == made.original).then_some(made.id))
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
