//! What users are told of one file: its attributes, and in plain words why it is exact, lossy, or as it was written.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use crate::store::object::Object;
use crate::store::{
    Id, MIN_RELEASE_BYTES, PROFILE, Profile, Store, Stub, beneath, is_pinned, profile_mark, recalled_from, step_pattern,
};
use codec::hash::hex;
use formats::Kind;

use super::catalog::Catalog;
use super::decide::{Mark, Why, rank};
use super::entry::{Entry, Held, State};
use super::resident::ResidentReason;
use super::restores::Restores;
use super::shared::Shared;
use super::twins::is_faithful;

/// Why a file is no stub, and the next step.
struct Kept {
    /// The value of `user.stepfs.release`: `working` while something is done about the file, or the reason.
    words: String,
    /// The step that a user can take, or wait for. Empty if there is none.
    next: String,
}

impl Kept {
    fn new(words: impl Into<String>, next: impl Into<String>) -> Kept {
        Kept { words: words.into(), next: next.into() }
    }

    fn working(next: &str) -> Kept {
        Kept::new("working", next)
    }

    fn why(self) -> String {
        match (&*self.words, &*self.next) {
            ("working", _) => self.next,
            (_, "") => self.words,
            (words, next) => format!("{words}; {next}"),
        }
    }
}

/// What users are told of one file.
pub(super) struct About<'a> {
    pub(super) shared: &'a Shared,
    pub(super) restores: &'a Restores,
    pub(super) path: &'a Path,
}

impl About<'_> {
    /// The value of an attribute. `None` if there is none, or no such file is known.
    pub(super) fn attribute(&self, name: &str) -> Option<Vec<u8>> {
        let (path, catalog) = (self.path, || self.shared.catalog());
        let entry = || catalog().get(path).cloned();
        let words = match name {
            "profile" => self.profile()?,
            "lossy" => self.lossy_words()?,
            "why" => self.why()?,
            "original" => self.original()?,
            "generations" => self.restores.generations(&entry()?.state)?.to_string(),
            "release" => what_keeps(&mut catalog(), path)?.words,
            "condition" => {
                entry()?;
                serde_json::to_string(&self.shared.condition(path)).ok()?
            }
            "state" => state_name(&entry()?).into(),
            "object" => match entry()?.state {
                State::Released(id) | State::Archived(_, id) => id.to_string(),
                _ => return None,
            },
            "best" => return Some(catalog().decided().named_by(path)?.as_os_str().as_encoded_bytes().to_vec()),
            _ => return None,
        };
        Some(words.into_bytes())
    }

    fn profile(&self) -> Option<String> {
        let entry = self.shared.catalog().get(self.path).cloned();
        let Some(entry) = entry else {
            let mark = profile_mark(&self.shared.store.tree(), self.path).ok().flatten();
            return mark.map(|profile| profile.name().into_owned());
        };
        let asked = self.shared.store.profiles(self.path).ok()?;
        let used = match &entry.state {
            State::Sealed(sealed) => asked.in_force(self.restores.seen_of(sealed.lineage)),
            _ => asked,
        };
        let less = self.made_with().map(|made| format!("; its bytes are {made}"));
        Some(used.words() + &less.unwrap_or_default())
    }

    /// The object whose decoded bytes a file holds: those of a released file, a copy of them, or of one that was
    /// brought back.
    fn decoded_from(&self, entry: &Entry) -> Option<Id> {
        match &entry.state {
            State::Released(id) => Some(*id),
            State::Archived(sealed, id) => sealed.copy.then_some(*id),
            // Where a program has written since, the samples are other ones.
            State::Sealed(sealed) => entry.keeps.filter(|id| {
                let known = self.shared.objects.get(*id);
                known.is_some_and(|(header, _)| header.decoded_sample == sealed.sample)
            }),
            State::Staged | State::Closed | State::Durable(_) | State::Resident(_) => entry.keeps,
        }
    }

    /// The largest errors of a file, in words ([`lossy_words`]). Reads the index of its object, and decodes nothing. `None`
    /// if no such file is known.
    fn lossy_words(&self) -> Option<String> {
        let entry = self.shared.catalog().get(self.path)?.clone();
        let Some(id) = self.decoded_from(&entry).filter(|id| self.shared.objects.is_lossy(*id)) else {
            return Some("0".into());
        };
        Some(self.shared.objects.open(id).map_or("1".into(), |object| lossy_words(&object)))
    }

    /// SHA-256 of an archived file as written. `None` if unknown.
    fn original(&self) -> Option<String> {
        let entry = self.shared.catalog().get(self.path)?.clone();
        let id = match &entry.state {
            State::Archived(_, id) => Some(*id),
            _ => self.decoded_from(&entry),
        };
        Some(hex(&self.shared.objects.get(id?)?.0.original))
    }

    /// The profile that the bytes of a lossy file were made with, where they are less than is asked for.
    fn made_with(&self) -> Option<String> {
        let entry = self.shared.catalog().get(self.path)?.clone();
        let id = self.decoded_from(&entry).filter(|id| self.shared.objects.is_lossy(*id))?;
        let asked = self.shared.store.profiles(self.path).ok()?;
        (!is_faithful(&self.shared.objects, id, &asked))
            .then(|| self.shared.objects.open(id).ok().map(|object| object.index().profile.clone()))?
    }

    /// Why the file at `path` is exact, lossy, or as it was written, with the next step where there is one. Reads a
    /// few attributes and the index of the file's object, and decodes nothing. `None` if no such file is known.
    fn why(&self) -> Option<String> {
        let kept = {
            let mut catalog = self.shared.catalog();
            match catalog.get(self.path)?.state {
                State::Released(id) => Err(id),
                _ => Ok(what_keeps(&mut catalog, self.path)?),
            }
        };
        Some(match kept {
            Ok(kept) => kept.why() + &self.reconstructed(),
            Err(id) => match self.shared.objects.open(id) {
                Ok(object) => of_object(&self.shared.store, self.path, &object),
                Err(error) => of_damage(id, &error),
            },
        })
    }

    /// A sentence for a plain file with the values of a lossy object.
    fn reconstructed(&self) -> String {
        match self.lossy_words().as_deref() {
            None | Some("0") => String::new(),
            Some(words) => format!(". It holds reconstructed values, {}", at_most(words)),
        }
    }
}

/// Why a file of a store that is not mounted is as it is, as far as the store shows it.
///
/// # Errors
/// Those of the device.
pub fn why_at_rest(store: &Store, path: &Path) -> io::Result<String> {
    let file = store.io().open_beneath(&store.tree(), path, 0)?;
    let resident = |why: ResidentReason| Ok(why.to_string());
    match Stub::read_on(&file, store.id()) {
        Ok(Some(stub)) => match Object::open_on(store.io(), &store.objects(), stub.object) {
            Ok(object) => return Ok(of_object(store, path, &object)),
            Err(error) => return Ok(of_damage(stub.object, &error)),
        },
        Err(error) if error.kind() == io::ErrorKind::InvalidData => return resident(ResidentReason::DamagedStub),
        Err(error) => return Err(error),
        Ok(None) => {}
    }
    let len = file.metadata()?.len();
    if len < MIN_RELEASE_BYTES {
        return resident(ResidentReason::small(len));
    }
    let kept = match (is_pinned(&store.tree(), path)?, recalled_from(&file)) {
        (true, _) => pinned(),
        (_, Some(_)) => recalled(),
        _ => Kept::new("it is as it was written", "only a mount knows why: `stepfs mount` the store, and ask there"),
    };
    Ok(kept.why())
}

/// The word for a file's state in `stepfs ls`.
fn state_name(entry: &Entry) -> &'static str {
    match entry.state {
        State::Staged | State::Closed => "staged",
        State::Durable(_) | State::Sealed(_) | State::Resident(_) => "sealed",
        State::Archived(..) => "archived",
        State::Released(_) => "released",
    }
}

/// Why a file is no stub. `None` if no such file is known.
fn what_keeps(catalog: &mut Catalog, path: &Path) -> Option<Kept> {
    let (why, mark) = (catalog.decided().decision(path)?.why, catalog.decided().mark(path));
    let entry = catalog.get(path)?;
    Some(match (why, &entry.state, &entry.failed) {
        (Why::Released, ..) => Kept::new("released", ""),
        (_, State::Resident(why), _) => Kept::new(why.to_string(), ""),
        (Why::Open, ..) => Kept::new("it is open for writing", "stepfs looks at it once it is closed"),
        (Why::Failed, _, Some(failed)) => {
            let shown = format!("{}: ", path.display());
            let again =
                if failed.retry.is_some() { "stepfs tries again by itself" } else { "`stepfs sync` tries again" };
            Kept::new(failed.why.strip_prefix(&shown).unwrap_or(&failed.why), again)
        }
        (Why::Held(Held::Pinned), ..) => pinned(),
        (Why::Held(Held::Best), ..) => match mark {
            Some(Mark::Named(by)) => Kept::new(format!("{} names it as the best, so it stays exact", by.display()), ""),
            _ => Kept::new(
                "its name shows the best result of its run, so it stays exact",
                "it may shrink once a newer file with a better result is saved",
            ),
        },
        (Why::Unfinished, ..) => Kept::new(
            "the save is not finished: it has no .metadata or .index of its own yet, another file is missing, or `cp -r` \
             copied it (`cp -a` keeps the order)",
            "",
        ),
        (Why::Held(Held::Recalled), ..) => recalled(),
        (Why::Busy, ..) => Kept::new("it is open, or has several names", "close it, or remove its other names"),
        (Why::Unexamined, ..) => {
            Kept::working("stepfs has not looked at it since it was closed; `stepfs sync` waits for that")
        }
        (Why::Unsound, ..) => Kept::new(
            "some of its weights are not finite, so it counts as no newer state of another file",
            "it may shrink once a later state without such weights is saved",
        ),
        (Why::Newest, ..) if is_followed_by_unsound(catalog, path) => Kept::new(
            "it is the last of its lineage whose weights are finite, and stays exact",
            "it may shrink once a later state with finite weights is saved",
        ),
        (Why::Newest, ..) => Kept::new("it is the newest of its lineage, and stays exact", what_is_newer(path)),
        (Why::Highest, ..) => Kept::new(
            "it has the highest step of its lineage, and stays exact",
            "it may shrink once a file with a higher step is saved",
        ),
        (Why::Fullest, ..) => {
            Kept::new("it waits until a newer checkpoint has as many files; `stepfs release` ends the wait", "")
        }
        (Why::HeldUpBy(_), ..) => match catalog.decided().held_up_by(path) {
            Some(by) => Kept::new(
                format!("it waits until {} of its checkpoint has a newer state", by.display()),
                "`stepfs release` ends the wait",
            ),
            None => at_work(),
        },
        (Why::Resident | Why::Failed | Why::Work, ..) => at_work(),
    })
}

fn pinned() -> Kept {
    Kept::new("it is pinned", "`stepfs unpin` lets it go")
}

fn recalled() -> Kept {
    Kept::new("it was recalled", "`stepfs release` makes it the same object again")
}

fn at_work() -> Kept {
    Kept::working("stepfs is at work on it, or on files before it; `stepfs sync` waits for that")
}

/// The words before a number that `stepfs why` advises.
const WRITE: &str = "write step_N (or epoch_N, iter_N, checkpoint-N)";

/// Whether a later state of the file's lineage has weights that are not finite.
fn is_followed_by_unsound(catalog: &Catalog, path: &Path) -> bool {
    let lineage = |entry: &Entry| entry.state.sealed().map(|sealed| sealed.lineage);
    catalog.files().file(path).is_some_and(|file| {
        let own = &file.entry;
        let is_later = |other: &Entry| other.unsound && lineage(other) == lineage(own) && rank(other) > rank(own);
        catalog.files().below(&file.run).any(|(_, other)| is_later(other))
    })
}

/// Which file would be a newer state of this one.
fn what_is_newer(path: &Path) -> String {
    let counted = step_pattern::of_file(path);
    let series = String::from_utf8_lossy(&counted.series);
    // In the part of the path that counts training: another number in it counts nothing.
    let has_others = |part: &Path| {
        let stem = part.file_stem().unwrap_or_default().to_string_lossy();
        stem.contains('#') && stem.contains(|c: char| c.is_ascii_digit())
    };
    if counted.steps.is_empty() {
        format!(
            "no number in this name is known to count training, so no other file is a newer state of it; {WRITE} to \
             let it shrink"
        )
    } else if !counted.is_worded {
        format!(
            "no number in this name is known to count training, so a later {series} is a newer state of it only if \
             their contents prove that; {WRITE} to let it shrink"
        )
    } else if Path::new(&*series).iter().any(|part| has_others(Path::new(part))) {
        format!(
            "only # in {series} is known to count training, so a file with another number elsewhere is no newer state \
             of it; {WRITE} for the number that counts training"
        )
    } else {
        format!("it may shrink once a later {series} with the same tensors is saved")
    }
}

/// The words of `user.stepfs.lossy` for a lossy file, within a sentence.
fn at_most(words: &str) -> String {
    match words.strip_prefix("1 ") {
        Some(errors) => format!("with errors of at most {errors}"),
        None => "with errors that its object states".into(),
    }
}

fn of_damage(id: Id, error: &io::Error) -> String {
    format!(
        "its object {id} cannot be read: {error}; `stepfs verify --repair` on the unmounted store mends what it can"
    )
}

/// Why a released file is lossy, or exact, and the room that its object takes.
fn of_object(store: &Store, path: &Path, object: &Object) -> String {
    let (header, index) = (object.header(), object.index());
    let kind = match header.parent {
        None => "a keyframe",
        Some(_) if object.is_super_step() => "a super-step",
        Some(_) => "a difference",
    };
    let percent = 100.0 * object.stored() as f64 / header.logical_len.max(1) as f64;
    let room = format!("Its object, {kind}, takes {percent:.1}% of its bytes");
    match header.lossy {
        true => {
            let count = index.tensors.iter().filter(|tensor| tensor.coding.is_lossy()).count();
            let (tensors, errors) = (if count == 1 { "tensor" } else { "tensors" }, lossy_words(object));
            format!(
                "it is lossy: {} keeps {count} {tensors} {}, and all else exact{}. {room}; `stepfs inspect` shows each \
                 tensor",
                index.profile,
                at_most(&errors),
                less_than_asked(store, path, &index.profile)
            )
        }
        false => format!("it is exact: {}. {room}", why_exact(store, path, object)),
    }
}

/// A clause for a lossy file from which more is asked by now.
fn less_than_asked(store: &Store, path: &Path, made: &str) -> String {
    let Ok(asked) = store.profiles(path) else { return String::new() };
    let is_enough = made.parse().is_ok_and(|made: Profile| asked.are_at_most_as_fine_as(made)) || made == asked.words();
    match is_enough {
        true => String::new(),
        false => format!("; {} is asked for now, but the bytes as written are gone", asked.words()),
    }
}

/// Why a released file is exact.
fn why_exact(store: &Store, path: &Path, object: &Object) -> String {
    let index = object.index();
    // Other notes are about its size.
    if index.note.starts_with("not proven") {
        return format!("it is {}", index.note);
    }
    let asked = store.profiles(path).ok();
    let is_exact = |asked: &crate::store::Profiles| asked.coarsest() == Profile::Exact;
    match (&*index.profile, asked) {
        ("exact", Some(asked)) if is_exact(&asked) => {
            let by = who_asks_for_exact(store, path);
            format!("{by}; `stepfs profile --set balanced` lets later files shrink")
        }
        ("exact", _) => "it was archived as exact, because of its profile or of restores at that time, or because its \
                         own checksums do not match"
            .into(),
        _ if index.container == Kind::Opaque.name() => "stepfs knows no tensors in its format".into(),
        (profile, _) => format!(
            "{profile} changes only tensors that are proven to be trained, are finite and shrink that way, and it has \
             none (`stepfs inspect` shows the evidence)"
        ),
    }
}

/// Who asks for exact bytes of a file: a mark on it or above it, its name, or the settings.
fn who_asks_for_exact(store: &Store, path: &Path) -> String {
    let tree = store.tree();
    let is_marked = |above: &&Path| {
        beneath::reach(&tree, above).and_then(|above| xattr::get(&above, PROFILE)).is_ok_and(|mark| mark.is_some())
    };
    if let Some(marked) = path.ancestors().find(is_marked) {
        let what = match marked {
            above if above == path => "it".into(),
            above if above.as_os_str().is_empty() => "the whole mount".into(),
            above => format!("{}/", above.display()),
        };
        return format!("`stepfs profile` has set exact for {what}");
    }
    // The rules themselves tell: asked about a name without these words, or about no name at all.
    let is_exact = |path: &str| store.settings().profiles(Path::new(path)).coarsest() == Profile::Exact;
    let without = path.to_string_lossy().to_lowercase().replace("best", "-").replace("final", "-");
    if is_exact("-") {
        "stepfs.toml asks for exact by default".into()
    } else if is_exact(&without) {
        "a rule of stepfs.toml asks for exact at its path".into()
    } else {
        "a rule of stepfs.toml asks for exact, because its path has `best` or `final`".into()
    }
}

/// `0` if an object decodes to the original. Otherwise `1` and the largest |read - written| of each kind of tensor,
/// as in `1 weight 1.2e-4, second_moment 3.0e-9`.
pub fn lossy_words(object: &Object) -> String {
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
