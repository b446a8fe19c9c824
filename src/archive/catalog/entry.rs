//! The entry of one file.

use std::sync::Arc;
use std::time::Instant;

use crate::archive::FileId;
use crate::archive::resident::ResidentReason;
use crate::clock::wall_ns;
use crate::encode::Facts;
use crate::store::{Id, modified_ns};

use super::queue::Turn;

/// Where a file is in its life.
#[derive(Clone, Debug)]
pub(in crate::archive) enum State {
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

    /// Whether it is a state of its lineage, or may turn out to be one.
    pub(in crate::archive) fn waits_or_is_a_state(&self) -> bool {
        matches!(self, State::Closed | State::Durable(_) | State::Sealed(_) | State::Archived(..))
    }

    /// Whether its bytes are known to be durable, as they are or as a stub.
    pub(in crate::archive) fn is_durable(&self) -> bool {
        match self {
            State::Staged | State::Closed => false,
            State::Resident(why) => ![ResidentReason::NotDurable, ResidentReason::Unreadable].contains(why),
            State::Durable(_) | State::Sealed(_) | State::Archived(..) | State::Released(_) => true,
        }
    }

    /// Whether it counts as one of the files of its checkpoint.
    pub(in crate::archive) fn counts_as_file(&self) -> bool {
        self.is_durable() && !matches!(self, State::Resident(ResidentReason::Empty | ResidentReason::CutShort(_)))
    }

    /// The known facts about a state of a lineage.
    pub(in crate::archive) fn sealed(&self) -> Option<&Sealed> {
        match self {
            State::Sealed(sealed) | State::Archived(sealed, _) => Some(sealed),
            State::Staged | State::Closed | State::Durable(_) | State::Released(_) | State::Resident(_) => None,
        }
    }

    /// What a run needs of the file, once it was examined.
    pub(in crate::archive) fn part(&self) -> Option<Part> {
        match self {
            State::Staged | State::Closed | State::Durable(_) => None,
            State::Sealed(sealed) | State::Archived(sealed, _) => Some(sealed.part),
            State::Resident(_) | State::Released(_) => Some(Part::Other),
        }
    }
}

/// What a run that goes on needs of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::archive) enum Part {
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
pub(in crate::archive) struct Sealed {
    pub(in crate::archive) file: FileId,
    pub(in crate::archive) len: u64,
    pub(in crate::archive) modified_ns: i64,
    /// Numbers in its name that count training.
    pub(in crate::archive) steps: Vec<u64>,
    /// xxh3-64 of a few samples of its bytes.
    pub(in crate::archive) sample: u64,
    pub(in crate::archive) signature: u64,
    pub(in crate::archive) lineage: u64,
    pub(in crate::archive) part: Part,
    /// Its bytes equal a decoded object's: it may become a stub of that object although it is the newest.
    pub(in crate::archive) copy: bool,
}

impl Sealed {
    /// What its object's header says of it.
    pub(in crate::archive) fn facts(&self) -> Facts {
        let Sealed { len, modified_ns, sample, signature, lineage, .. } = *self;
        Facts { len, modified_ns, sample, signature, lineage }
    }

    /// Equal for byte-identical files: length and samples.
    pub(in crate::archive) fn print(&self) -> (u64, u64) {
        (self.len, self.sample)
    }

    /// Whether this still describes the file with these metadata. Content cannot change without its time.
    pub(in crate::archive) fn describes(&self, metadata: &std::fs::Metadata) -> bool {
        FileId::of(metadata) == self.file && metadata.len() == self.len && modified_ns(metadata) == self.modified_ns
    }
}

/// Why a file that could be archived stays as it is for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::archive) enum Held {
    /// A user pinned it, or a directory above it.
    Pinned,
    /// A checkpoint's own files, or a link, name it as the best of its run.
    Best,
    /// Of the resident files of its run, its name shows the best result.
    Result,
    /// A user brought it back.
    Recalled,
}

#[derive(Clone, Debug)]
pub(in crate::archive) struct Entry {
    pub(in crate::archive) state: State,
    /// Grows whenever the content may have changed: work begun before is void.
    pub(in crate::archive) version: u64,
    /// Order of sealing, unique. It decides between files of one modification time.
    pub(in crate::archive) sequence: u64,
    /// The sequence when it was last opened for writing. The note of its close may come late.
    pub(in crate::archive) opened: u64,
    /// A handle was open when its turn came. It waits until the file system says that the handle is closed.
    pub(in crate::archive) busy: bool,
    /// A failed attempt, and when to repeat it. `None` after a failure that no repetition can mend.
    pub(in crate::archive) failed: Option<Failed>,
    /// It counts as newer state for others, but stays as it is.
    pub(in crate::archive) held: Option<Held>,
    /// The object that a recalled file was decoded from. Named by this entry, so that it is still there when the file
    /// is archived again: nothing is ever quantized twice.
    pub(in crate::archive) keeps: Option<Id>,
    /// Whether stepfs finds tensors in it. `None` if nobody has looked: small files are read for retention only.
    pub(in crate::archive) has_tensors: Option<bool>,
    /// It was in the tree at the mount, and was not written since.
    pub(in crate::archive) found: bool,
    /// Some of its weights are not finite. Nobody goes on from it, so it is no newer state of another file.
    pub(in crate::archive) unsound: bool,
    /// When it was found, or last opened or closed for writing; nanoseconds since 1970.
    pub(in crate::archive) seen_ns: i64,
    /// A user wanted its checkpoint released, unless something of it was modified after this time.
    pub(in crate::archive) asked_ns: i64,
    /// See [`Turn`].
    pub(super) turn: Turn,
}

impl Entry {
    pub(in crate::archive) fn new(state: State, number: u64) -> Entry {
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
            found: false,
            unsound: false,
            seen_ns,
            asked_ns: i64::MIN,
            turn: Turn::new(number),
        }
    }

    /// Whether it counts as a newer state of others.
    pub(in crate::archive) fn counts_as_newer(&self) -> bool {
        matches!(self.state, State::Sealed(_)) && !self.unsound
    }

    /// An attempt failed, and no repetition mends that.
    pub(in crate::archive) fn is_given_up(&self) -> bool {
        self.failed.as_ref().is_some_and(|failed| failed.retry.is_none())
    }

    pub(super) fn forget_failure(&mut self) {
        self.failed = None;
    }
}

#[derive(Clone, Debug)]
pub(in crate::archive) struct Failed {
    pub(in crate::archive) why: String,
    pub(in crate::archive) retry: Option<Instant>,
    /// The step is tried again by itself. No user has to mend anything.
    pub(in crate::archive) is_passing: bool,
}
