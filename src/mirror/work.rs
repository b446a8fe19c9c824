//! Bytes on their way to a mirror: those of one file, or one object that a file needs.
//!
//! A file comes with its objects one after the other, the oldest first. So files bring no object twice that they share.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::pieces::{Bytes, PIECE, Packed, pack};
use super::place::{Error, Result};
use super::source::{Ahead, Found, Shape, Source};
use super::tree::{Content, Encoding, Tree, Witness};
use crate::clock::stamp_ns;
use crate::store::{Hold, Id, MAX_CHAIN};

/// The kernel's clock for files advances within this time.
const A_TICK: Duration = Duration::from_millis(10);

/// See the module.
pub(super) struct Work {
    /// The file, as it was when this began.
    pub(super) found: Found,
    read: Read,
    /// Of an object: its id and parent, and whether it is lossy.
    pub(super) object: Option<(Id, Option<Id>, bool)>,
    len: u64,
    /// The hashes of the pieces that have come.
    pub(super) pieces: Vec<Option<Id>>,
    /// Why some did not come.
    pub(super) failed: Option<Error>,
    /// Keeps an object made ahead until the mirror has it.
    hold: Option<Hold>,
}

/// Reads all bytes at an offset. It holds the open file.
type Read = Box<dyn Fn(&mut [u8], u64) -> io::Result<()> + Send + Sync>;

impl Work {
    fn new(found: &Found, len: u64, read: Read) -> Work {
        let pieces = vec![None; len.div_ceil(PIECE) as usize];
        Work { found: found.clone(), read, object: None, len, pieces, failed: None, hold: None }
    }

    /// Opens the next bytes of a file that the mirror lacks. `None`: later.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn begin(source: &dyn Source, path: &Path, found: &Found, tree: &Tree) -> Result<Option<Work>> {
        match found.shape {
            Shape::Object(id) => Work::of_object(source, found, id, tree).map(Some),
            Shape::Whole => Work::of_file(source, path, found).map(Some),
            Shape::Newest => match source.ahead(path)? {
                Ahead::Object(hold) => {
                    Work::of_object(source, found, hold.id(), tree).map(|work| Some(Work { hold: Some(hold), ..work }))
                }
                Ahead::Whole => Work::of_file(source, path, found).map(Some),
                Ahead::Later => Ok(None),
            },
            Shape::Stuck | Shape::Unsettled => {
                Err(io::Error::other("it cannot be read, or is not durable; `stepfs why` says why").into())
            }
        }
    }

    /// The oldest object of a chain that the mirror lacks.
    fn of_object(source: &dyn Source, found: &Found, id: Id, tree: &Tree) -> Result<Work> {
        let (mut object, mut newer) = (source.objects().open(id)?, 0);
        while let Some(parent) = object.header().parent.filter(|parent| tree.chain(*parent).is_none()) {
            object = source.objects().open(parent)?;
            newer += 1;
            if newer > MAX_CHAIN {
                return Err(Error::Wrong(format!("object {id}: its chain of parents is too long")));
            }
        }
        let (header, len) = (object.header().clone(), object.file().size());
        // An open object stays readable, whatever takes its name.
        let read = Box::new(move |buf: &mut [u8], at| object.file().read_exact_at(buf, at));
        Ok(Work { object: Some((header.id, header.parent, header.lossy)), ..Work::new(found, len, read) })
    }

    /// All bytes of a file of the tree.
    fn of_file(source: &dyn Source, path: &Path, found: &Found) -> Result<Work> {
        let (store, witness) = (source.store(), found.witness);
        // A write in the same tick of the clock for files would not show.
        if (0..A_TICK.as_nanos() as i64).contains(&(stamp_ns() - witness.changed_ns)) {
            std::thread::sleep(A_TICK);
        }
        // Only the owner may leave the access time alone.
        let open = |flags| store.io().open_beneath(&store.tree(), path, flags);
        let file = open(libc::O_NOATIME).or_else(|_| open(0))?;
        let read = move |buf: &mut [u8], at| {
            file.read_exact_at(buf, at)?;
            // After the piece that is read last, this says it of all.
            let is_same = Witness::of(&file.metadata()?) == witness;
            is_same.then_some(()).ok_or_else(|| io::Error::other("it changes while it is read"))
        };
        Ok(Work::new(found, found.len, Box::new(read)))
    }

    /// The object that has come, if it is one, and the file's content, if that has come.
    pub(super) fn come(&self) -> Option<(Option<Encoding>, Option<Content>)> {
        let bytes = Bytes { len: self.len, pieces: self.pieces.iter().copied().collect::<Option<_>>()? };
        let Some((id, parent, lossy)) = self.object else { return Some((None, Some(Content::Plain(bytes)))) };
        let is_ahead = self.hold.as_ref().is_some_and(|hold| hold.id() == id);
        let content = is_ahead.then_some(Content::Object(id, self.found.len));
        Some((Some(Encoding { id, parent, lossy, bytes }), content))
    }

    /// The numbers of the pieces that have not come.
    pub(super) fn missing(&self) -> impl Iterator<Item = usize> {
        self.pieces.iter().enumerate().filter(|(_, piece)| piece.is_none()).map(|(number, _)| number)
    }

    /// Packs a piece.
    ///
    /// # Errors
    /// Device errors; the file has changed.
    pub(super) fn pack(&self, piece: usize) -> io::Result<Packed> {
        let from = piece as u64 * PIECE;
        let mut bytes = vec![0; (self.len - from).min(PIECE) as usize];
        (self.read)(&mut bytes, from)?;
        pack(&bytes)
    }
}
