//! Why a file stays as it was written.

use std::fmt;
use std::sync::Arc;

use formats::{Description, Kind};

/// Why a file stays as it was written, for as long as nobody writes it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ResidentReason {
    /// It is below the size of files that are released.
    Small,
    /// It is empty, and counts as no file of its checkpoint.
    Empty,
    /// It ends before its format says, as these words show, and counts as no file of its checkpoint.
    CutShort(Arc<str>),
    /// A user removed it. Rules and marks of its former place hold no longer, so nothing is made of it there.
    Trash,
    /// No object of it would be smaller.
    Incompressible,
    /// No object of it would be smaller, for a reason that these words name.
    NotUnderstood(Arc<str>),
    /// Its fsync failed. It stays under every name, until it is written again.
    NotDurable,
    /// Its stub is damaged, or became zeros.
    DamagedStub,
    /// It is a stub of an object that is here, and says that its store is another: the id in `stepfs.toml` is wrong.
    OtherStore,
    /// It has no more on the device than a stub has: perhaps it was one.
    Hole,
    /// The daemon may not, or cannot, read it.
    Unreadable,
}

impl ResidentReason {
    /// No object of the file would be smaller. What its format keeps stepfs from comes first.
    pub(super) fn incompressible(file: &Description) -> ResidentReason {
        match (file.kind, &file.note) {
            (Kind::Opaque, Some(note)) => ResidentReason::NotUnderstood(note.as_str().into()),
            (_, Some(note)) => {
                ResidentReason::NotUnderstood(format!("{note}; {}", ResidentReason::Incompressible).into())
            }
            (_, None) => ResidentReason::Incompressible,
        }
    }

    /// The reason of a file of so few bytes.
    pub(super) fn small(len: u64) -> ResidentReason {
        if len == 0 { ResidentReason::Empty } else { ResidentReason::Small }
    }

    /// Whether the file names an object, perhaps, and nobody knows which.
    pub(super) fn hides_an_object(&self) -> bool {
        matches!(self, ResidentReason::DamagedStub | ResidentReason::OtherStore | ResidentReason::Unreadable)
    }
}

impl fmt::Display for ResidentReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ResidentReason::Small => "it is small: stepfs keeps files below 64 KiB as they are",
            ResidentReason::Empty => "it is empty",
            ResidentReason::Trash => "it was removed, and stays in the trash as it was then",
            ResidentReason::Incompressible => "it would not become smaller",
            ResidentReason::NotUnderstood(words) | ResidentReason::CutShort(words) => words,
            ResidentReason::NotDurable => "its bytes could not be made durable; save it again",
            ResidentReason::DamagedStub => "its stub is damaged; `stepfs verify --repair` mends what it can",
            ResidentReason::OtherStore => {
                "its object is here, but its stub names another store; mend `store` in stepfs.toml"
            }
            ResidentReason::Hole => "it has no bytes on the device: it may be a lost stub, and `stepfs verify` tells",
            ResidentReason::Unreadable => "it cannot be read; the daemon's log says why",
        })
    }
}
