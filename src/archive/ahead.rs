//! Encodes the newest state of a lineage before it has a newer one, so that a mirror has it at a fraction of its bytes.
//!
//! The file stays as it is, exact. Once the state after it is sealed, the file becomes this object (`archive/twins.rs`), if
//! it may lose anything at all. The newest object of a lineage stays without a name, so nothing is noted of it.

use std::path::Path;
use std::sync::Arc;

use crate::clock::wall_ns;
use crate::encode::{StepResult, original};
use crate::mirror::Ahead;
use crate::store::durable::DeviceFile;
use crate::store::object::{Header, Id};
use crate::store::{Profile, Profiles, is_pinned};
use formats::is_named_elsewhere;

use super::archiving::{After, Encoder};
use super::entry::{Sealed, State};
use super::twins::is_faithful;

/// Longest wait of a file for the state before it to become its base, in nanoseconds since it was written. A mirror
/// gets the file a minute late, and not as a difference over several states.
const PATIENCE_NS: i64 = 60_000_000_000;
/// Encodes the newest file of a lineage for a mirror.
///
/// # Errors
/// Those of an archiving.
pub(super) fn encode_ahead(encoder: &Encoder, path: &Path) -> StepResult<Ahead> {
    let (version, sealed) = {
        let mut catalog = encoder.shared.catalog();
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
        if recent && catalog.files().before(path).is_some_and(|before| before.held.is_none() && before.failed.is_none())
        {
            return Ok(Ahead::Later);
        }
        (version, sealed)
    };
    let profiles = encoder.restores.profiles(path, sealed.lineage)?;
    let exact = profiles.coarsest() == Profile::Exact || profiles.policy().is_some();
    if exact || is_named_elsewhere(path) || is_pinned(&encoder.shared.store.tree(), path)? {
        return Ok(Ahead::Whole);
    }
    let source = encoder.shared.open_file(path)?;
    if !sealed.describes(&source.metadata()?) {
        // Changed without a note: a program set its time, or writes through a mapping.
        encoder.shared.catalog().has_changed(path, &sealed);
        encoder.shared.notify();
        return Ok(Ahead::Later);
    }
    let stale = || {
        let mut catalog = encoder.shared.catalog();
        encoder.shared.is_stopping()
            || catalog.get(path).is_none_or(|entry| entry.version != version)
            || catalog.decided().decision(path).is_some_and(|decision| decision.has_newer)
    };
    if let Some(made) = already_ahead(encoder, &sealed, &source, &profiles, &stale)? {
        return Ok(encoder.shared.objects.hold(made).map_or(Ahead::Later, Ahead::Object));
    }
    let Some(before) = encoder.before_ahead.take(&sealed) else { return Ok(Ahead::Whole) };
    let nearest = encoder.shared.objects.nearest(sealed.lineage, sealed.modified_ns.saturating_sub(1));
    let last = nearest.filter(|header| header.modified_ns < sealed.modified_ns);
    if !last.is_some_and(|last| is_faithful(&encoder.shared.objects, last.id, &profiles)) {
        return Ok(Ahead::Whole);
    }
    // Its former name is not known any more; the number in its own proves nothing then.
    if encoder.refusal((path, &before), (path, &source))?.is_some() {
        return Ok(Ahead::Whole);
    }
    let after = After { state: (&before, path), ahead: true, refusal: None };
    let made =
        encoder.difference(path, &sealed, (&source, &profiles), &after, &stale, &mut |made| encoder.commit(made))?;
    let Some(made) = made else { return Ok(Ahead::Whole) };
    let hold = encoder.shared.objects.hold(made);
    encoder.shared.objects.unname(made);
    if let Some((header, stored)) = encoder.shared.objects.get(made) {
        let percent = 100.0 * stored as f64 / header.logical_len.max(1) as f64;
        log::info!("{}: encoded ahead as {made}, {percent:.1}%", path.display());
    }
    Ok(hold.map_or(Ahead::Later, Ahead::Object))
}

/// The object of this state that a former process made.
fn already_ahead(
    encoder: &Encoder,
    sealed: &Sealed,
    source: &DeviceFile,
    profiles: &Profiles,
    stale: &(dyn Fn() -> bool + Sync),
) -> StepResult<Option<Id>> {
    let mut made = encoder.shared.objects.of_sample(sealed.sample);
    let is = |header: &Header| {
        let of = (header.lineage, header.modified_ns, header.logical_len, header.source_sample);
        of == (sealed.lineage, sealed.modified_ns, sealed.len, sealed.sample)
            && is_faithful(&encoder.shared.objects, header.id, profiles)
    };
    made.retain(is);
    let Some(made) = made.first() else { return Ok(None) };
    Ok((original::hash_of(source, sealed.len, stale)? == made.original).then_some(made.id))
}
