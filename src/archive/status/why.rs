//! Why a file is exact, lossy, or as it was written, in plain words: one answer for every file of a store.

use std::io;
use std::path::Path;

use crate::archive::catalog::{Catalog, Held, State};
use crate::archive::decide::Why;
use crate::archive::resident::ResidentReason;
use crate::archive::{Archive, lossy_words};
use crate::store::object::Object;
use crate::store::{
    Id, MIN_RELEASE_BYTES, PROFILE, Profile, Store, Stub, beneath, is_pinned, recalled_from, step_pattern,
};
use formats::Kind;

/// Why a file is no stub, and the next step.
pub(super) struct Kept {
    /// The value of `user.stepfs.release`: `working` while something is done about the file, or the reason.
    pub(super) words: String,
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

impl Archive {
    /// Why the file at `path` is exact, lossy, or as it was written, with the next step where there is one. Reads a
    /// few attributes and the index of the file's object, and decodes nothing. `None` if no such file is known.
    pub(super) fn why(&self, path: &Path) -> Option<String> {
        let kept = {
            let mut catalog = self.catalog();
            match catalog.get(path)?.state {
                State::Released(id) => Err(id),
                _ => Ok(what_keeps(&mut catalog, path)?),
            }
        };
        Some(match kept {
            Ok(kept) => kept.why() + &self.reconstructed(path),
            Err(id) => match self.objects.open(id) {
                Ok(object) => of_object(&self.store, path, &object),
                Err(error) => of_damage(id, &error),
            },
        })
    }

    /// A sentence for a plain file with the values of a lossy object.
    fn reconstructed(&self, path: &Path) -> String {
        match self.lossy_words(path).as_deref() {
            None | Some("0") => String::new(),
            Some(words) => format!(". It holds reconstructed values, {}", at_most(words)),
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
            _ => {
                Kept::new("it is as it was written", "only a mount knows why: `stepfs mount` the store, and ask there")
            }
        };
        Ok(kept.why())
    }
}

/// Why a file is no stub. `None` if no such file is known.
pub(super) fn what_keeps(catalog: &mut Catalog, path: &Path) -> Option<Kept> {
    let why = catalog.decision(path)?.why;
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
        (Why::Held(Held::Best), ..) => match catalog.named_best_by(path) {
            Some(by) => Kept::new(format!("{} names it as the best, so it stays exact", by.display()), ""),
            None => at_work(),
        },
        (Why::Held(Held::Result), ..) => Kept::new(
            "its name shows the best result of its run, so it stays exact",
            "it may shrink once a newer file with a better result is saved",
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
        (Why::Newest, ..) => Kept::new("it is the newest of its lineage, and stays exact", what_is_newer(path)),
        (Why::Highest, ..) => Kept::new(
            "it has the highest step of its lineage, and stays exact",
            "it may shrink once a file with a higher step is saved",
        ),
        (Why::Fullest, ..) => {
            Kept::new("it waits until a newer checkpoint has as many files; `stepfs release` ends the wait", "")
        }
        (Why::HeldUpBy(_), ..) => match catalog.held_up_by(path) {
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
