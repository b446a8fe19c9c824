//! Tells users which files hold other values than were written, and the hash of the original.

use std::collections::BTreeMap;
use std::path::Path;

use crate::store::Id;
use crate::store::object::{Index, Object};
use codec::hash::hex;

use super::Archive;
use super::entry::{Entry, State};

impl Archive {
    /// The object whose decoded bytes a file holds: those of a released file, a copy of them, or of one that was
    /// brought back.
    fn decoded_from(&self, entry: &Entry) -> Option<Id> {
        match &entry.state {
            State::Released(id) => Some(*id),
            State::Archived(sealed, id) => sealed.copy.then_some(*id),
            // Where a program has written since, the samples are other ones.
            State::Sealed(sealed) => entry.keeps.filter(|id| {
                let known = self.objects.get(*id);
                known.is_some_and(|(header, _)| header.decoded_sample == sealed.sample)
            }),
            State::Staged | State::Closed | State::Durable(_) | State::Resident(_) => entry.keeps,
        }
    }

    /// The largest errors of a file, in words ([`words`]). Reads the index of its object, and decodes nothing. `None`
    /// if no such file is known.
    pub(super) fn lossy_words(&self, path: &Path) -> Option<String> {
        let entry = self.catalog().get(path)?.clone();
        let Some(id) = self.decoded_from(&entry).filter(|id| self.objects.is_lossy(*id)) else {
            return Some("0".into());
        };
        Some(self.objects.open(id).map_or("1".into(), |object| words(&object)))
    }

    /// SHA-256 of an archived file as written. `None` if unknown.
    pub(super) fn original(&self, path: &Path) -> Option<String> {
        let entry = self.catalog().get(path)?.clone();
        let id = match &entry.state {
            State::Archived(_, id) => Some(*id),
            _ => self.decoded_from(&entry),
        };
        Some(hex(&self.objects.get(id?)?.0.original))
    }

    /// The profile that the bytes of a lossy file were made with, where they are less than is asked for.
    pub(super) fn made_with(&self, path: &Path) -> Option<String> {
        let entry = self.catalog().get(path)?.clone();
        let id = self.decoded_from(&entry).filter(|id| self.objects.is_lossy(*id))?;
        let asked = self.store.profiles(path).ok()?;
        (!self.twins().is_faithful(id, &asked))
            .then(|| self.objects.open(id).ok().map(|object| object.index().profile.clone()))?
    }

    /// Says so at once if a copy of a lossy file has a name that asks for more than it holds.
    pub(super) fn note_lossy_copy(&self, path: &Path, object: Id) {
        let Ok(asked) = self.store.profiles(path) else { return };
        let named_by = self.catalog().decided().named_by(path);
        let is_less =
            self.objects.is_lossy(object) && (named_by.is_some() || !self.twins().is_faithful(object, &asked));
        let Some(copied) = self.objects.open(object).ok().filter(|_| is_less) else { return };
        let Index { origin, profile, .. } = copied.index();
        let wants = match named_by {
            Some(by) => format!("{} names it as the best", by.display()),
            None => format!("{} is asked for", asked.words()),
        };
        log::warn!(
            "{}: is a copy of {origin}, which is lossy ({profile}), but {wants}; save the original again, if you still \
             have it",
            path.display()
        );
    }
}

/// `0` if an object decodes to the original. Otherwise `1` and the largest |read - written| of each kind of tensor,
/// as in `1 weight 1.2e-4, second_moment 3.0e-9`.
pub fn words(object: &Object) -> String {
    if !object.header().lossy {
        return "0".into();
    }
    let mut largest: BTreeMap<u8, (&'static str, f64)> = BTreeMap::new();
    for tensor in object.index().tensors.iter().filter(|tensor| tensor.coding.is_lossy()) {
        let (_, error) = largest.entry(tensor.role as u8).or_insert((tensor.role.name(), 0.0));
        *error = error.max(tensor.max_abs_error);
    }
    let words: Vec<String> = largest.values().map(|(role, error)| format!("{role} {}", rounded_up(*error))).collect();
    format!("1 {}", words.join(", ")).trim_end().to_string()
}

/// A bound with two digits, as in `1.2e-4`. Never below the bound: a user may compare errors with what is printed.
pub fn rounded_up(bound: f64) -> String {
    let nearest = format!("{bound:.1e}");
    if nearest.parse::<f64>().is_ok_and(|nearest| nearest >= bound) {
        return nearest;
    }
    // Less than half of the last digit was cut off.
    let exponent = nearest.split_once('e').and_then(|(_, exponent)| exponent.parse::<i32>().ok()).unwrap_or_default();
    format!("{:.1e}", bound + 0.05 * 10f64.powi(exponent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_is_never_printed_too_small() {
        for (bound, printed) in
            [(0.0, "0.0e0"), (0.03125, "3.2e-2"), (0.03, "3.0e-2"), (9.91, "1.0e1"), (1.01e-300, "1.1e-300")]
        {
            assert_eq!(rounded_up(bound), printed);
        }
        let mut bound = f64::MIN_POSITIVE;
        while bound < 1e300 {
            let printed: f64 = rounded_up(bound).parse().unwrap();
            assert!((bound..=bound * 1.1001).contains(&printed), "{bound} is printed as {printed}");
            bound *= 1.37;
        }
        assert_eq!(rounded_up(f64::INFINITY), "inf");
    }
}
