//! The states of a store that its mirror has: a manifest names the tree of one. And the mark, which says whose mirror it is.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::place::{Error, Place, Result, get_all};
use super::tree::Blob;
use crate::store::{Id, in_parallel, record};

/// Format of a mirror: the only one that this program reads and writes.
const FORMAT: u32 = 1;
/// The name of the mark.
pub(super) const MARK: &str = "stepfs-mirror";
/// Longest mark.
const MARK_BYTES: u64 = 4096;
const MANIFESTS: &str = "manifests/";
const MAGIC: &[u8; 8] = b"stepfsMM";
/// Longest manifest.
const MANIFEST_BYTES: u64 = 4096;
/// All states of this time stay: somebody may read them, or may have removed something a minute ago.
pub(super) const ALL_FOR: Duration = Duration::from_secs(3600);
/// Of older ones, the last of each hour stays for a day, and then the last of each day.
const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;

/// A state of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Number {
    /// When it was written: milliseconds since 1970, and later than those before it.
    pub at_ms: u64,
    /// The first four bytes of the store's id.
    store: u32,
}

impl Number {
    /// The next one of a store.
    pub(super) fn after(last: Option<Number>, now_ms: u64, store: Id) -> Number {
        let at_ms = last.map_or(now_ms, |last| now_ms.max(last.at_ms + 1));
        Number { at_ms, store: short(store) }
    }

    /// The name of the manifest.
    pub(super) fn name(&self) -> String {
        format!("{MANIFESTS}{:016x}-{:08x}", self.at_ms, self.store)
    }

    fn parse(name: &str) -> Option<Number> {
        let (at, store) = name.strip_prefix(MANIFESTS)?.split_once('-')?;
        let number = Number { at_ms: u64::from_str_radix(at, 16).ok()?, store: u32::from_str_radix(store, 16).ok()? };
        (number.name() == name).then_some(number)
    }
}

fn short(store: Id) -> u32 {
    u32::from_be_bytes([store.0[0], store.0[1], store.0[2], store.0[3]])
}

/// What a manifest says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    store: Id,
    at_ms: u64,
    /// The directory that all names are in.
    root: Blob,
}

/// Puts a manifest. What it names is there.
pub(super) fn put(place: &dyn Place, store: Id, number: Number, root: Blob) -> Result<()> {
    place.put(&number.name(), &record::encode(MAGIC, &Manifest { store, at_ms: number.at_ms, root }))
}

/// The directory that a manifest names.
pub(super) fn get(place: &dyn Place, number: Number) -> Result<Blob> {
    let bytes = get_all(place, &number.name(), MANIFEST_BYTES)?;
    let wrong = |why: &str| Error::Wrong(format!("{}: {why}", number.name()));
    let manifest: Manifest = record::decode(MAGIC, &bytes).map_err(|damage| wrong(&damage.to_string()))?;
    match (manifest.at_ms, short(manifest.store)) == (number.at_ms, number.store) {
        true => Ok(manifest.root),
        false => Err(wrong("it is another manifest under this name")),
    }
}

/// The states of the mirror's owner, the oldest first. Those of a former owner count only as long as there are no others.
pub(super) fn list(place: &dyn Place, owner: Id) -> Result<Vec<Number>> {
    let mut all: Vec<Number> = place.list(MANIFESTS)?.iter().filter_map(|of| Number::parse(&of.name)).collect();
    all.sort_unstable();
    if let Some(first) = all.iter().position(|number| number.store == short(owner)) {
        // What came later from another store is of a writer that was too late.
        let begins = all[first].at_ms;
        all.retain(|number| number.store == short(owner) || number.at_ms < begins);
    }
    Ok(all)
}

/// The store that the mirror belongs to. `None`: there is no mirror.
pub(super) fn owner(place: &dyn Place) -> Result<Option<Id>> {
    let bytes = match get_all(place, MARK, MARK_BYTES) {
        Err(Error::Missing(_)) => return Ok(None),
        bytes => bytes?,
    };
    let mark: Mark = std::str::from_utf8(&bytes)
        .ok()
        .and_then(|text| toml::from_str(text).ok())
        .ok_or_else(|| Error::Wrong(format!("{MARK} is no mark of stepfs")))?;
    match (mark.format == FORMAT, mark.store.parse()) {
        (false, _) => {
            Err(Error::Wrong(format!("it has format {}, and this stepfs reads format {FORMAT}", mark.format)))
        }
        (true, Err(())) => Err(Error::Wrong(format!("{MARK} names no store"))),
        (true, Ok(store)) => Ok(Some(store)),
    }
}

#[derive(Deserialize)]
struct Mark {
    format: u32,
    store: String,
}

/// Makes a place the mirror of a store. One that is another store's, and has a state of it, stays that.
///
/// # Errors
/// It is another store's; those of the mirror.
pub fn claim(place: &dyn Place, store: Id) -> Result<()> {
    match owner(place)? {
        Some(owner) if owner == store => return Ok(()),
        Some(owner) if !list(place, owner)?.is_empty() => return Err(belongs_to(owner)),
        _ => {}
    }
    place.put(MARK, format!("# The mirror of a stepfs store.\nformat = {FORMAT}\nstore = \"{store}\"\n").as_bytes())
}

/// Refuses a mirror that is not this store's.
pub(super) fn check(place: &dyn Place, store: Id) -> Result<()> {
    match owner(place)? {
        Some(owner) if owner == store => Ok(()),
        Some(owner) => Err(belongs_to(owner)),
        None => Err(Error::Away(format!(
            "{MARK} is missing: is the file system mounted? A new mirror begins with `stepfs mount --mirror URL`"
        ))),
    }
}

fn belongs_to(owner: Id) -> Error {
    Error::Denied(format!(
        "it is the mirror of another store, {owner}: use another name; if that store is gone for good, delete the \
         mirror's {MARK} and mount this one with --mirror again"
    ))
}

/// The time of states. After a clock that was ahead it goes on from the `last` state, which is so long ago. Otherwise all
/// states would look new until the clock gets there.
pub(super) fn now_ms(clock_ms: u64, last: Option<Number>, since: Duration) -> u64 {
    let since = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
    clock_ms.max(last.map_or(0, |last| last.at_ms.saturating_add(since)))
}

/// The states that nobody needs any more. A state was true until the next one.
pub(super) fn outdated(all: &[Number], now_ms: u64, keep: Duration) -> Vec<Number> {
    let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let is_outdated = |pair: &&[Number]| {
        let (this, next) = (pair[0], pair[1]);
        let age = now_ms.saturating_sub(next.at_ms);
        let slot = if age < DAY_MS { HOUR_MS } else { DAY_MS };
        age >= ms(keep) || age >= ms(ALL_FOR) && this.at_ms / slot == next.at_ms / slot
    };
    all.windows(2).filter(is_outdated).map(|pair| pair[0]).collect()
}

/// Deletes manifests. What they name may go only after that.
pub(super) fn delete(place: &dyn Place, numbers: &[Number]) -> Result<()> {
    in_parallel(numbers, |number| place.delete(&number.name())).into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(at_ms: u64) -> Number {
        Number { at_ms, store: 7 }
    }

    /// The clock was a year ahead, and was set back.
    #[test]
    fn a_clock_that_was_ahead_keeps_no_states_for_ever() {
        let (now, day, week) = (1000 * DAY_MS, Duration::from_secs(24 * 3600), Duration::from_secs(7 * 24 * 3600));
        let mut all = vec![number(now + 365 * DAY_MS)];
        for today in (1..=30).map(|today| now + today * DAY_MS) {
            let time = now_ms(today, all.last().copied(), day);
            all.push(Number::after(all.last().copied(), time, Id([0; 16])));
        }
        let time = now_ms(now + 30 * DAY_MS, all.last().copied(), Duration::ZERO);
        assert_eq!(all.len() - outdated(&all, time, week).len(), 8);
        // Without the future in it, the clock counts.
        assert_eq!(now_ms(now, Some(number(now - DAY_MS)), Duration::from_secs(60)), now);
        assert_eq!(now_ms(now, None, week), now);
    }

    #[test]
    fn states_thin_out_with_age() {
        let (now, minute) = (100 * DAY_MS, 60_000);
        let all: Vec<Number> = (0..14 * 24 * 60).rev().map(|age| number(now - age * minute)).collect();
        let week = Duration::from_secs(7 * 24 * 3600);
        let gone = outdated(&all, now, week);
        let kept: Vec<u64> = all.iter().filter(|of| !gone.contains(of)).map(|of| (now - of.at_ms) / minute).collect();
        assert!(kept.iter().filter(|age| **age <= 60).count() >= 60, "{kept:?}");
        assert!((22..=24).contains(&kept.iter().filter(|age| **age > 61 && **age <= 24 * 60).count()), "{kept:?}");
        assert!((6..=8).contains(&kept.iter().filter(|age| **age > 24 * 60).count()), "{kept:?}");
        // Thinning again takes nothing more, and the newest always stays.
        let left: Vec<Number> = all.iter().filter(|of| !gone.contains(of)).copied().collect();
        assert!(outdated(&left, now, week).is_empty());
        assert_eq!(outdated(&all[..1], now, Duration::ZERO), []);
        assert_eq!(outdated(&all[..2], now, Duration::ZERO), all[..1]);
    }

    #[test]
    fn a_state_that_was_the_last_for_long_stays() {
        let now = 100 * DAY_MS;
        // Removed a moment ago, after days without a change.
        let all = [number(now - 30 * DAY_MS), number(now - 1)];
        assert!(outdated(&all, now, Duration::from_secs(60)).is_empty());
    }

    #[test]
    fn names_are_read_as_they_were_written() {
        let number = Number::after(Some(number(9)), 5, Id([255; 16]));
        assert_eq!(number, Number { at_ms: 10, store: u32::MAX });
        assert_eq!(Number::parse(&number.name()), Some(number));
        for wrong in ["manifests/a-7", "manifests/", "manifests/0000000000000009-00000007-s", "blobs/x"] {
            assert_eq!(Number::parse(wrong), None);
        }
    }
}
