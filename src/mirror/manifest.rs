//! The states of a store that its mirror has: a manifest names the tree of one. And the mark, which says whose mirror it is.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::pieces::Bytes;
use super::place::{Error, Place, Result, get_all};
use crate::store::{Id, in_parallel, record};

/// Format of a mirror: the only one that this program reads and writes.
const FORMAT: u32 = 1;
/// The name of the mark.
pub(super) const MARK: &str = "stepfs-mirror";
/// Longest mark.
const MARK_BYTES: u64 = 4096;
/// Where all manifests are.
pub(super) const MANIFESTS: &str = "manifests/";
const MAGIC: &[u8; 8] = b"stepfsMM";
/// Longest manifest: a gigabyte of names has 256 pieces.
const MANIFEST_BYTES: u64 = 1 << 14;
/// All states of this time stay: somebody may read them, or may have removed something a minute ago.
pub(super) const ALL_FOR: Duration = Duration::from_secs(3600);
/// Of older ones, the last of each hour stays for a day, and then the last of each day. Nanoseconds.
const HOUR: i64 = 3_600_000_000_000;
const DAY: i64 = 24 * HOUR;

/// A state of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Number {
    /// When it was written: milliseconds since 1970, and later than those before it.
    pub at_ms: u64,
    store: Id,
}

impl Number {
    /// The next one of a store.
    pub(super) fn after(last: Option<Number>, now_ms: u64, store: Id) -> Number {
        Number { at_ms: last.map_or(now_ms, |last| now_ms.max(last.at_ms + 1)), store }
    }

    /// The name of the manifest.
    pub(super) fn name(&self) -> String {
        format!("{MANIFESTS}{:016x}-{}", self.at_ms, self.store)
    }

    fn parse(name: &str) -> Option<Number> {
        let (at, store) = name.strip_prefix(MANIFESTS)?.split_once('-')?;
        let number = Number { at_ms: u64::from_str_radix(at, 16).ok()?, store: store.parse().ok()? };
        (number.name() == name).then_some(number)
    }
}

/// Longest top directory that lies in the manifest, and not beside it: a save asks once less, and a reader.
pub(super) const TOP_BYTES: usize = 1 << 13;
/// The directory that all names are in: the pieces of its bytes; and these themselves, if they are few.
pub(super) type Top = (Bytes, Vec<u8>);

/// Puts a manifest: its number, and the top directory. What it names is there.
pub(super) fn put(place: &dyn Place, number: Number, top: &Top) -> Result<()> {
    place.put(&number.name(), &record::encode(MAGIC, &(number, top)))
}

/// The top directory of a state.
pub(super) fn get(place: &dyn Place, number: Number) -> Result<Top> {
    let bytes = get_all(place, &number.name(), MANIFEST_BYTES)?;
    let wrong = |why: &str| Error::Wrong(format!("{}: {why}", number.name()));
    let (is, top): (Number, Top) = record::decode(MAGIC, &bytes).map_err(|damage| wrong(&damage.to_string()))?;
    if is == number { Ok(top) } else { Err(wrong("it is another manifest under this name")) }
}

/// The states of the mirror's owner among all manifests, the oldest first, and when each was put. Those of a former owner
/// count only as long as there are no others.
pub(super) fn of_owner(listed: &[(String, i64)], owner: Id) -> Vec<(Number, i64)> {
    let mut all: Vec<_> = listed.iter().filter_map(|(name, put_ns)| Some((Number::parse(name)?, *put_ns))).collect();
    all.sort_unstable();
    if let Some(first) = all.iter().position(|(number, _)| number.store == owner) {
        // What came later from another store is of a writer that was too late.
        let begins = all[first].0.at_ms;
        all.retain(|(number, _)| number.store == owner || number.at_ms < begins);
    }
    all
}

/// The store that the mirror belongs to. `None`: there is no mirror.
pub(super) fn owner(place: &dyn Place) -> Result<Option<Id>> {
    let bytes = match get_all(place, MARK, MARK_BYTES) {
        Err(Error::Missing(_)) => return Ok(None),
        bytes => bytes?,
    };
    let mark: Mark = toml::from_slice(&bytes).map_err(|_| Error::Wrong(format!("{MARK} is no mark of stepfs")))?;
    if mark.format != FORMAT {
        return Err(Error::Wrong(format!("it has format {}, and this stepfs reads format {FORMAT}", mark.format)));
    }
    mark.store.parse().map(Some).map_err(|()| Error::Wrong(format!("{MARK} names no store")))
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
        Some(owner) if !of_owner(&place.list(MANIFESTS)?, owner).is_empty() => return Err(belongs_to(owner)),
        _ => {}
    }
    place.put(MARK, format!("# The mirror of a stepfs store.\nformat = {FORMAT}\nstore = \"{store}\"\n").as_bytes())
}

/// Refuses a mirror that is not this store's.
pub(super) fn check(place: &dyn Place, store: Id) -> Result<()> {
    let owner = owner(place)?.ok_or_else(|| {
        Error::Away(format!(
            "{MARK} is missing: is the file system mounted? A new mirror begins with `stepfs mount --mirror URL`"
        ))
    })?;
    if owner == store { Ok(()) } else { Err(belongs_to(owner)) }
}

fn belongs_to(owner: Id) -> Error {
    Error::Denied(format!(
        "it is the mirror of another store, {owner}: use another name; if that store is gone for good, delete the \
         mirror's {MARK} and mount this one with --mirror again"
    ))
}

/// The states that nobody needs any more. A state was true until the next one was put. All times are the mirror's own.
pub(super) fn outdated(all: &[(Number, i64)], now_ns: i64, keep: Duration) -> Vec<Number> {
    let is_older = |age: i64, than: Duration| age >= i64::try_from(than.as_nanos()).unwrap_or(i64::MAX);
    let is_outdated = |pair: &&[(Number, i64)]| {
        let ((_, this), (_, next)) = (pair[0], pair[1]);
        let age = now_ns.saturating_sub(next).max(0);
        let slot = if age < DAY { HOUR } else { DAY };
        is_older(age, keep) || is_older(age, ALL_FOR) && this / slot == next / slot
    };
    all.windows(2).filter(is_outdated).map(|pair| pair[0].0).collect()
}

/// Deletes manifests, durably: their blobs may go after that, and a crash must not bring them back then.
pub(super) fn delete(place: &dyn Place, numbers: &[Number]) -> Result<()> {
    in_parallel(numbers, |number| place.delete(&number.name())).into_iter().collect::<Result<()>>()?;
    place.sync(MANIFESTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: i64 = HOUR / 60;

    fn number(at_ms: u64) -> Number {
        Number { at_ms, store: Id([7; 16]) }
    }

    /// A state that was put then, with a time in its name that says nothing.
    fn state(put_ns: i64) -> (Number, i64) {
        (number((put_ns / MINUTE) as u64), put_ns)
    }

    #[test]
    fn states_thin_out_with_age() {
        let now = 100 * DAY;
        let all: Vec<_> = (0..14 * 24 * 60).rev().map(|age| state(now - age * MINUTE)).collect();
        let week = Duration::from_secs(7 * 24 * 3600);
        let gone = outdated(&all, now, week);
        let left: Vec<_> = all.iter().filter(|(of, _)| !gone.contains(of)).copied().collect();
        let kept: Vec<i64> = left.iter().map(|(_, put_ns)| (now - put_ns) / MINUTE).collect();
        assert!(kept.iter().filter(|age| **age <= 60).count() >= 60, "{kept:?}");
        assert!((22..=24).contains(&kept.iter().filter(|age| **age > 61 && **age <= 24 * 60).count()), "{kept:?}");
        assert!((6..=8).contains(&kept.iter().filter(|age| **age > 24 * 60).count()), "{kept:?}");
        // Thinning again takes nothing more, and the newest always stays.
        assert!(outdated(&left, now, week).is_empty());
        assert_eq!(outdated(&all[..1], now, Duration::ZERO), []);
        assert_eq!(outdated(&all[..2], now, Duration::ZERO), [all[0].0]);
        // One that was put after now is of a clock that was ahead.
        assert_eq!(outdated(&all, 0, week), []);
    }

    #[test]
    fn a_state_that_was_the_last_for_long_stays() {
        let now = 100 * DAY;
        // Removed a moment ago, after days without a change.
        let all = [state(now - 30 * DAY), state(now - 1)];
        assert!(outdated(&all, now, Duration::from_secs(60)).is_empty());
    }

    #[test]
    fn names_are_read_as_they_were_written() {
        let number = Number::after(Some(number(9)), 5, Id([255; 16]));
        assert_eq!(number, Number { at_ms: 10, store: Id([255; 16]) });
        assert_eq!(Number::parse(&number.name()), Some(number));
        for wrong in ["manifests/a-7", "manifests/", "manifests/0000000000000009-00000007", "blobs/x"] {
            assert_eq!(Number::parse(wrong), None);
        }
    }
}
