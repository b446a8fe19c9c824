//! The entry of one file: its state, and the facts that [`super::decide`] weighs. A thread that finds a fact enters it here, and
//! no other place has rules about it.

use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::clock::wall_ns;
use crate::encode::Facts;
use crate::store::{Id, MIN_RELEASE_BYTES, changed_ns, is_trash, modified_ns, step_pattern};
use formats::may_name_best;

use super::FileId;
use super::resident::ResidentReason;

/// How long a file waits for others. The rest of the second that docs/SEMANTICS.md states is for a busy device.
pub(super) const MOMENT: Duration = Duration::from_millis(250);
/// A log of more bytes waits for nobody: others would wait for it.
const LOG_BYTES: u64 = 16 << 20;

/// Where a file is in its life.
#[derive(Clone, Debug)]
pub(super) enum State {
    /// A handle that can write is open, or was when the store was last used.
    Staged,
    /// Closed, but its bytes may not be durable yet.
    Closed,
    /// Durable, and perhaps a copy of a decoded object. Until that is known it counts as no newer state.
    Durable(Arc<Sealed>),
    /// Durable, exact and resident; waits for a newer one of its lineage.
    Sealed(Arc<Sealed>),
    /// Its object is durable; it waits for its handles to close.
    Archived(Arc<Sealed>, Id),
    /// A stub has taken its place.
    Released(Id),
    /// Stays as it is, for this reason.
    Resident(ResidentReason),
}

impl State {
    /// Whether the file may be a stub whose object nobody knows.
    pub(super) fn hides_an_object(&self) -> bool {
        matches!(self, State::Resident(why) if why.hides_an_object())
    }

    /// Whether the file is a stub, or may be one.
    pub(super) fn may_be_stub(&self) -> bool {
        matches!(self, State::Released(_)) || self.hides_an_object()
    }

    /// Whether a new name makes the state unknown.
    pub(super) fn follows_from_name(&self) -> bool {
        match self {
            State::Durable(_) | State::Sealed(_) | State::Archived(..) => true,
            // A new name makes no unreadable file readable, and it may be a stub.
            State::Resident(why) => {
                use ResidentReason::{DamagedStub, NotDurable, Unreadable};
                ![NotDurable, DamagedStub, Unreadable].contains(why)
            }
            State::Staged | State::Closed | State::Released(_) => false,
        }
    }

    /// Whether its bytes are known to be durable, as they are or as a stub.
    pub(super) fn is_durable(&self) -> bool {
        match self {
            State::Staged | State::Closed => false,
            State::Resident(why) => ![ResidentReason::NotDurable, ResidentReason::Unreadable].contains(why),
            State::Durable(_) | State::Sealed(_) | State::Archived(..) | State::Released(_) => true,
        }
    }

    /// Whether it counts as one of the files of its checkpoint.
    pub(super) fn counts_as_file(&self) -> bool {
        self.is_durable() && !matches!(self, State::Resident(ResidentReason::Empty | ResidentReason::CutShort(_)))
    }

    /// The known facts about a state of a lineage.
    pub(super) fn sealed(&self) -> Option<&Sealed> {
        match self {
            State::Sealed(sealed) | State::Archived(sealed, _) => Some(sealed),
            State::Staged | State::Closed | State::Durable(_) | State::Released(_) | State::Resident(_) => None,
        }
    }

    /// What a run needs of the file, once it was examined.
    pub(super) fn part(&self) -> Option<Part> {
        match self {
            State::Staged | State::Closed | State::Durable(_) => None,
            State::Sealed(sealed) | State::Archived(sealed, _) => Some(sealed.part),
            State::Resident(_) | State::Released(_) => Some(Part::Other),
        }
    }
}

/// What a run that goes on needs of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Weights and an optimizer's state.
    Whole,
    /// Weights, an optimizer's state, or parts of tensors of either.
    Piece,
    /// Nothing that is known.
    Other,
}

/// The known facts of a durable file. Its tensors are looked up again when it is archived: 20,000 lists of some
/// hundred tensors would take hundreds of megabytes.
#[derive(Clone, Debug)]
pub(super) struct Sealed {
    pub(super) file: FileId,
    pub(super) len: u64,
    pub(super) modified_ns: i64,
    /// Numbers in its name that count training.
    pub(super) steps: Vec<u64>,
    /// xxh3-64 of a few samples of its bytes.
    pub(super) sample: u64,
    pub(super) signature: u64,
    pub(super) lineage: u64,
    pub(super) part: Part,
    /// The files that it is no state without, if its format has such.
    pub(super) siblings: Option<Arc<Siblings>>,
    /// Its bytes equal a decoded object's: it may become a stub of that object although it is the newest.
    pub(super) copy: bool,
    /// In a shared store, where nobody tells of a change: the time of the last change. Programs cannot set it.
    pub(super) changed_ns: Option<i64>,
}

impl Sealed {
    /// What its object's header says of it.
    pub(super) fn facts(&self) -> Facts {
        let Sealed { len, modified_ns, sample, signature, lineage, .. } = *self;
        Facts { len, modified_ns, sample, signature, lineage }
    }

    /// Equal for byte-identical files: length and samples.
    pub(super) fn print(&self) -> (u64, u64) {
        (self.len, self.sample)
    }

    /// Whether this still describes the file with these metadata. Content cannot change without its time.
    pub(super) fn describes(&self, metadata: &std::fs::Metadata) -> bool {
        let is_unchanged = self.changed_ns.is_none_or(|at| at == changed_ns(metadata));
        is_unchanged
            && FileId::of(metadata) == self.file
            && metadata.len() == self.len
            && modified_ns(metadata) == self.modified_ns
    }
}

/// The files of a checkpoint whose index tells their tensors. All lie in one directory.
#[derive(Debug)]
pub(super) struct Siblings {
    pub(super) index: PathBuf,
    /// Each file that belongs to the index, and its least length. None if the index cannot be read.
    pub(super) files: Vec<(PathBuf, u64)>,
}

/// A durable file's length and times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) len: u64,
    /// This and the other in nanoseconds since 1970.
    pub(super) modified_ns: i64,
    /// `i64::MIN` if the file system does not tell.
    pub(super) born_ns: i64,
}

impl Stamp {
    pub(super) fn of(metadata: &Metadata) -> Stamp {
        let since_1970 = |born: std::time::SystemTime| born.duration_since(std::time::UNIX_EPOCH).ok();
        let born_ns = metadata.created().ok().and_then(since_1970).and_then(|age| i64::try_from(age.as_nanos()).ok());
        Stamp { len: metadata.len(), modified_ns: modified_ns(metadata), born_ns: born_ns.unwrap_or(i64::MIN) }
    }
}

impl Siblings {
    /// Whether the save of these files is finished: index and files are durable, long enough, and of one save. `find`
    /// gives the entry at a path.
    pub(super) fn are_finished<'a>(&self, find: impl Fn(&Path) -> Option<&'a Entry>) -> bool {
        let durable = |path: &Path| find(path).filter(|entry| entry.state.is_durable());
        let Some(index) = durable(&self.index).map(|entry| entry.stamp) else { return false };
        // A copy may get the index first, and all others later. A mixture of earlier and later ones is of two saves.
        let (mut earlier, mut later) = (false, false);
        let fits = |(path, least): &(PathBuf, u64)| {
            let Some(Entry { state, stamp, .. }) = durable(path) else { return false };
            earlier |= stamp.modified_ns < index.modified_ns;
            later |= stamp.modified_ns > index.modified_ns;
            // It was there when the index was written, and was written again since. Equal times are one tick of the clock.
            let is_over = stamp.modified_ns > index.modified_ns && stamp.born_ns < index.modified_ns;
            !is_over && (stamp.len >= *least || matches!(state, State::Released(_)))
        };
        self.files.iter().all(fits) && !(earlier && later)
    }
}

/// A file's statement about the best of its run.
///
/// A checkpoint names a path as the trainer saw the mount. So only the last component counts, beside the checkpoint
/// that makes the statement. That holds even after the run's directory moved.
#[derive(Debug)]
pub(super) struct Says {
    /// Paths of the best checkpoints so far, as the trainer saw them; none yet, if empty.
    names: Vec<String>,
    pub(super) modified_ns: i64,
    /// The same for all statements of a run under one name, of which the newest counts: each save states the best so far.
    pub(super) series: Vec<u8>,
    /// The paths inside the tree that may be meant.
    pub(super) targets: Vec<PathBuf>,
}

impl Says {
    /// The statement of the file at `path`, modified at this time.
    pub(super) fn new(path: &Path, names: Vec<String>, modified_ns: i64) -> Says {
        let parent = |path: &Path| path.parent().unwrap_or(Path::new("")).to_path_buf();
        let run = parent(&step_pattern::group(path).unwrap_or_else(|| path.to_path_buf()));
        let name = step_pattern::pattern(Path::new(path.file_name().unwrap_or_default()));
        let last = |name: &String| match Path::new(name).components().next_back() {
            Some(Component::Normal(last)) => Some(last.to_os_string()),
            _ => None,
        };
        let named: Vec<_> = names.iter().filter_map(last).collect();
        let beside = |directory: &PathBuf| named.iter().map(|last| directory.join(last)).collect::<Vec<_>>();
        let targets = [&run, &parent(path)].into_iter().flat_map(beside).collect();
        Says { series: [run.as_os_str().as_bytes(), b"/", &name].concat(), names, modified_ns, targets }
    }

    /// The same of a file that has this name by now.
    pub(super) fn under(&self, path: &Path) -> Says {
        Says::new(path, self.names.clone(), self.modified_ns)
    }
}

/// Why a file that could be archived stays as it is for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// A user pinned it, or a directory above it.
    Pinned,
    /// It would lose something, so it stays as long as it is marked as the best of its run.
    Best,
    /// A user brought it back.
    Recalled,
}

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) state: State,
    /// Grows whenever the content may have changed: work begun before is void.
    pub(super) version: u64,
    /// Order of sealing, unique. It decides between files of one modification time.
    pub(super) sequence: u64,
    /// The sequence when it was last opened for writing. The note of its close may come late.
    pub(super) opened: u64,
    /// A handle was open when its turn came. It waits until the file system says that the handle is closed.
    pub(super) busy: bool,
    /// A failed attempt, and when to repeat it. `None` after a failure that no repetition can mend.
    pub(super) failed: Option<Failed>,
    /// It counts as newer state for others, but stays as it is.
    pub(super) held: Option<Held>,
    /// The object that a recalled file was decoded from. Named by this entry, so that it is still there when the file
    /// is archived again: nothing is ever quantized twice.
    pub(super) keeps: Option<Id>,
    /// Whether stepfs finds tensors in it. `None` if nobody has looked: small files are read for retention only.
    pub(super) has_tensors: Option<bool>,
    /// When it was durable last.
    pub(super) stamp: Stamp,
    /// The best of its run, if it names one. It counts until the file was read again.
    pub(super) says: Option<Arc<Says>>,
    /// Of an archived file: the file that proved it to be an earlier state of its run. `None`: a former process archived it.
    pub(super) prover: Option<Box<(PathBuf, FileId)>>,
    /// It was in the tree at the mount, and was not written since.
    pub(super) found: bool,
    /// Some of its weights are not finite. Nobody goes on from it, so it is no newer state of another file.
    pub(super) unsound: bool,
    /// The disk was full when a program wrote it, and the program was told so.
    pub(super) cut: bool,
    /// When it was found, or last opened or closed for writing; nanoseconds since 1970.
    pub(super) seen_ns: i64,
    /// When a program first opened its content for writing, and when one closed it last. `None` once that is recorded.
    pub(super) written: Option<(Instant, Instant)>,
    /// A user wanted its checkpoint released, unless something of it was modified after this time.
    pub(super) asked_ns: i64,
    pub(super) turn: Turn,
}

impl Entry {
    pub(super) fn new(state: State, number: u64) -> Entry {
        let seen_ns = wall_ns();
        Entry {
            state,
            version: number,
            sequence: number,
            opened: number,
            busy: false,
            failed: None,
            held: None,
            keeps: None,
            has_tensors: None,
            stamp: Stamp::default(),
            says: None,
            prover: None,
            found: false,
            unsound: false,
            cut: false,
            seen_ns,
            written: None,
            asked_ns: i64::MIN,
            turn: Turn::new(number),
        }
    }

    /// Whether it counts as a newer state of others.
    pub(super) fn counts_as_newer(&self) -> bool {
        matches!(self.state, State::Sealed(_)) && !self.unsound && !self.cut
    }

    /// An attempt failed, and no repetition mends that.
    pub(super) fn is_given_up(&self) -> bool {
        self.failed.as_ref().is_some_and(|failed| failed.retry.is_none())
    }

    pub(super) fn forget_failure(&mut self) {
        self.failed = None;
    }

    /// Until when the file waits for others.
    pub(super) fn waits_until(&self) -> Option<Instant> {
        self.turn.at.filter(|_| matches!(self.state, State::Staged | State::Closed))
    }

    /// The file has this name or time now: its lineage and profile must be found out again, if it has any. Answers the
    /// object that was made of it, which is void then.
    pub(super) fn take_name(&mut self, path: &Path) -> Option<Id> {
        let was_small = matches!(self.state, State::Resident(ResidentReason::Small | ResidentReason::Empty));
        let object = if let State::Archived(_, id) = self.state { Some(id) } else { None };
        if self.state.follows_from_name() {
            self.state = State::Closed;
            self.forget_failure();
        }
        self.turn = self.turn.renamed(path, was_small);
        // A statement in the trash is of no run any more. A file that comes back is read again.
        self.says = self.says.take().filter(|_| !is_trash(path)).map(|says| Arc::new(says.under(path)));
        // That was of another checkpoint.
        self.asked_ns = i64::MIN;
        object
    }
}

#[derive(Clone, Debug)]
pub(super) struct Failed {
    pub(super) why: String,
    pub(super) retry: Option<Instant>,
    /// The step is tried again by itself. No user has to mend anything.
    pub(super) is_passing: bool,
}

/// When a file is made durable: at once, or together with others.
///
/// A device makes many small files durable in hardly more time than one, and programs that write to the same file
/// system wait while it does. So a file that nothing waits for stays closed for a moment, until others can join it: a
/// small file, or a log that is written again and again. It waits no longer if a program opens it again: bytes that
/// were closed become durable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    /// Tells the file from others, whatever becomes of its name and content.
    pub(super) file: u64,
    /// The file was closed, and waits until then for others. It may have been opened again since.
    pub(super) at: Option<Instant>,
    /// When this file was last made durable, if it was no checkpoint then.
    log: Option<Instant>,
}

impl Turn {
    fn new(file: u64) -> Turn {
        Turn { file, at: None, log: None }
    }

    /// The turn of the file's next content. `state` is the state of the content before.
    pub(super) fn next(self, state: &State) -> Turn {
        let is_owed = matches!(state, State::Staged | State::Closed);
        Turn { at: self.at.filter(|_| is_owed), ..self }
    }

    /// The file was closed at this time, with so many bytes.
    pub(super) fn closed(self, path: &Path, len: u64, now: Instant) -> Turn {
        let is_log = len < LOG_BYTES && self.log.is_some_and(|last| now < last + MOMENT);
        let waits = (len < MIN_RELEASE_BYTES || is_log) && !may_name_best(path);
        let latest = now + MOMENT;
        Turn { at: waits.then(|| self.at.map_or(latest, |at| at.min(latest))), ..self }
    }

    /// A closed file got this name. `was_small`: it was durable before, and too small for a checkpoint.
    fn renamed(self, path: &Path, was_small: bool) -> Turn {
        let at = if was_small { Some(Instant::now() + MOMENT) } else { self.at };
        Turn { at: at.filter(|_| !may_name_best(path)), ..self }
    }

    /// The bytes that the file had at `began` are durable. `is_log`: whether it is no checkpoint, if known.
    pub(super) fn made_durable(self, began: Instant, is_log: Option<bool>, is_closed: bool) -> Turn {
        let is_log = is_log.unwrap_or(self.log.is_some());
        Turn { at: self.at.filter(|_| is_closed).map(|_| began + MOMENT), log: is_log.then_some(began), ..self }
    }
}
