//! The bytes of one file on their way to a mirror.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::look::Found;
use super::pieces::{Blob, Bytes, PIECE};
use super::place::{Error, Result};
use super::source::{Ahead, Shape, Source};
use super::tree::{Content, Encoding, Tree, Witness};
use crate::clock::stamp_ns;
use crate::store::{Hold, Id, MAX_CHAIN};

/// The kernel's clock for files advances within this time.
const A_TICK: Duration = Duration::from_millis(10);

/// See the module.
pub(super) struct Work {
    /// The file, as it was when this began.
    pub(super) found: Found,
    /// The object that decodes to the file, if one does.
    object: Option<Id>,
    /// The file's own bytes, or the objects that the mirror lacks.
    bodies: Vec<Body>,
    /// Why some did not come.
    pub(super) failed: Option<Error>,
    /// Keeps an object made ahead until the mirror has it.
    _hold: Option<Hold>,
}

/// The bytes of a file or object.
struct Body {
    read: Read,
    len: u64,
    /// Of an object: its id and parent, and whether it is lossy.
    object: Option<(Id, Option<Id>, bool)>,
    /// The pieces that have come.
    pieces: Vec<Option<Blob>>,
}

/// Reads all bytes at an offset. It holds what must stay meanwhile.
type Read = Box<dyn Fn(&mut [u8], u64) -> io::Result<()> + Send + Sync>;

impl Body {
    fn new(len: u64, object: Option<(Id, Option<Id>, bool)>, read: Read) -> Body {
        Body { read, len, object, pieces: vec![None; len.div_ceil(PIECE) as usize] }
    }

    /// The bytes of a file of the tree.
    fn of_file(source: &dyn Source, path: &Path, found: &Found) -> io::Result<Body> {
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
            match Witness::of(&file.metadata()?) == witness {
                true => Ok(()),
                false => Err(io::Error::other("it changes while it is read")),
            }
        };
        Ok(Body::new(found.len, None, Box::new(read)))
    }

    /// An object and its ancestors, as far as the mirror lacks them.
    fn of_objects(source: &dyn Source, id: Id, tree: &Tree) -> Result<Vec<Body>> {
        let (mut bodies, mut next) = (Vec::new(), Some(id));
        // An open object stays readable, whatever takes its name.
        while let Some(id) = next.filter(|id| tree.chain(*id).is_none()) {
            let object = source.objects().open(id)?;
            let (parent, lossy, len) = (object.header().parent, object.header().lossy, object.file().size());
            let read = move |buf: &mut [u8], at| object.file().read_exact_at(buf, at);
            bodies.push(Body::new(len, Some((id, parent, lossy)), Box::new(read)));
            next = parent;
            if bodies.len() > MAX_CHAIN as usize + 1 {
                return Err(Error::Wrong(format!("object {id}: its chain of parents is too long")));
            }
        }
        Ok(bodies)
    }

    /// Its pieces, once all have come.
    fn bytes(&self) -> Option<Bytes> {
        Some(Bytes { len: self.len, pieces: self.pieces.iter().copied().collect::<Option<_>>()? })
    }
}

impl Work {
    /// Opens the bytes of a file, as far as the mirror has not its objects. `None`: later.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn begin(source: &dyn Source, path: &Path, found: &Found, tree: &Tree) -> Result<Option<Work>> {
        let (object, hold) = match found.shape {
            Shape::Object(id) => (Some(id), None),
            Shape::Whole => (None, None),
            Shape::Newest => match source.ahead(path)? {
                Ahead::Object(hold) => (Some(hold.id()), Some(hold)),
                Ahead::Whole => (None, None),
                Ahead::Later => return Ok(None),
            },
            Shape::Stuck | Shape::Unsettled => {
                return Err(io::Error::other("it cannot be read, or is not durable; `stepfs why` says why").into());
            }
        };
        let bodies = match object {
            Some(id) => Body::of_objects(source, id, tree)?,
            None => vec![Body::of_file(source, path, found)?],
        };
        Ok(Some(Work { found: found.clone(), object, bodies, failed: None, _hold: hold }))
    }

    /// The objects that it brings.
    pub(super) fn objects(&self) -> impl Iterator<Item = Id> {
        self.bodies.iter().filter_map(|body| Some(body.object?.0))
    }

    /// Those that have come whole.
    pub(super) fn whole_objects(&self) -> impl Iterator<Item = Encoding> {
        self.bodies.iter().filter_map(|body| {
            let (id, parent, lossy) = body.object?;
            Some(Encoding { id, parent, lossy, bytes: body.bytes()? })
        })
    }

    /// What the file has on the mirror, once all bytes have come.
    pub(super) fn content(&self) -> Option<Content> {
        let bytes = self.bodies.iter().map(Body::bytes).collect::<Option<Vec<_>>>()?;
        match self.object {
            Some(id) => Some(Content::Object(id, self.found.len)),
            None => bytes.into_iter().next().map(Content::Plain),
        }
    }

    /// The pieces that have not come, by numbers of their own.
    pub(super) fn missing(&self) -> impl Iterator<Item = (usize, usize)> {
        self.bodies.iter().enumerate().flat_map(|(body, of)| {
            let missing = of.pieces.iter().enumerate().filter(|(_, piece)| piece.is_none());
            missing.map(move |(piece, _)| (body, piece))
        })
    }

    /// The blobs that have.
    pub(super) fn blobs(&self) -> impl Iterator<Item = Id> {
        self.bodies.iter().flat_map(|body| &body.pieces).flatten().map(|blob| blob.hash)
    }

    /// Packs a piece.
    ///
    /// # Errors
    /// Device errors; the file has changed.
    pub(super) fn pack(&self, (body, piece): (usize, usize)) -> io::Result<(Blob, Vec<u8>)> {
        let (body, from) = (&self.bodies[body], piece as u64 * PIECE);
        let mut bytes = vec![0; (body.len - from).min(PIECE) as usize];
        (body.read)(&mut bytes, from)?;
        Blob::pack(&bytes)
    }

    /// A piece has come.
    pub(super) fn has_come(&mut self, (body, piece): (usize, usize), blob: Blob) {
        self.bodies[body].pieces[piece] = Some(blob);
    }
}
