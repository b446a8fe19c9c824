//! The bytes of one file on their way to a mirror.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::look::{Found, witness_of};
use super::place::{Error, Result};
use super::source::{Ahead, Shape, Source};
use super::tree::{Blob, Content, Encoding, PIECE, Tree};
use super::whole;
use crate::clock::stamp_ns;
use crate::store::{Hold, Id, MAX_CHAIN, MIN_RELEASE_BYTES};
use formats::ReadAt;

/// The kernel's clock for files advances within this time.
const A_TICK: Duration = Duration::from_millis(10);

/// See the module.
pub(super) struct Work {
    /// What the file's bytes are once all have come.
    pub(super) content: Content,
    /// The file, as it was when this began.
    pub(super) found: Found,
    bodies: Vec<Body>,
    /// Keeps an object made ahead until the mirror has it.
    _hold: Option<Hold>,
}

/// An object, or a packed small file.
struct Body {
    read: Read,
    len: u64,
    object: Option<Encoding>,
    /// The hashes of the pieces that have come.
    pieces: Vec<Option<Id>>,
}

/// Reads all bytes at an offset.
type Read = Box<dyn Fn(&mut [u8], u64) -> io::Result<()> + Send + Sync>;

impl Work {
    fn new(found: &Found, content: Content, hold: Option<Hold>) -> Work {
        Work { content, found: found.clone(), bodies: Vec::new(), _hold: hold }
    }

    /// Adds a body. `object`: its id and parent, and whether it is lossy.
    fn add(&mut self, len: u64, read: Read, object: Option<(Id, Option<Id>, bool)>) {
        let object = object.map(|(id, parent, lossy)| Encoding { id, parent, len, lossy, pieces: Vec::new() });
        self.bodies.push(Body { read, len, object, pieces: vec![None; len.div_ceil(PIECE) as usize] });
    }

    /// Opens the bytes of a file, as far as the mirror has not its objects. `None`: later.
    ///
    /// # Errors
    /// It cannot be read, or changes meanwhile; [`Error::Away`] once `going` is false.
    pub(super) fn begin(
        source: &dyn Source,
        path: &Path,
        found: &Found,
        tree: &Tree,
        going: &(dyn Fn() -> bool + Sync),
    ) -> Result<Option<Work>> {
        match found.shape {
            Shape::Object(id) => Work::of_object(source, found, id, tree, None).map(Some),
            Shape::Newest => match source.ahead(path)? {
                Ahead::Object(hold) => Work::of_object(source, found, hold.id(), tree, Some(hold)).map(Some),
                Ahead::Whole => Work::of_whole(source, path, found, tree, going).map(Some),
                Ahead::Later => Ok(None),
            },
            Shape::Whole => Work::of_whole(source, path, found, tree, going).map(Some),
            Shape::Stuck | Shape::Unsettled => {
                Err(io::Error::other("it cannot be read, or is not durable; `stepfs why` says why").into())
            }
        }
    }

    fn of_object(source: &dyn Source, found: &Found, id: Id, tree: &Tree, hold: Option<Hold>) -> Result<Work> {
        let (mut work, mut next) = (Work::new(found, Content::Object(id), hold), Some(id));
        // An open object stays readable, whatever takes its name.
        while let Some(id) = next.filter(|id| tree.chain(*id).is_none()) {
            let object = source.objects().open(id)?;
            let (parent, lossy, len) = (object.header().parent, object.header().lossy, object.file().size());
            work.add(len, Box::new(move |buf, at| object.file().read_exact_at(buf, at)), Some((id, parent, lossy)));
            next = parent;
            if work.bodies.len() > MAX_CHAIN as usize + 1 {
                return Err(Error::Wrong(format!("object {id}: its chain of parents is too long")));
            }
        }
        Ok(work)
    }

    fn of_whole(
        source: &dyn Source,
        path: &Path,
        found: &Found,
        tree: &Tree,
        going: &(dyn Fn() -> bool + Sync),
    ) -> Result<Work> {
        let store = source.store();
        // A write in the same tick of the clock for files would not show.
        if (0..A_TICK.as_nanos() as i64).contains(&(stamp_ns() - found.witness.changed_ns)) {
            std::thread::sleep(A_TICK);
        }
        // Only the owner may leave the access time alone.
        let open = |flags| store.io().open_beneath(&store.tree(), path, flags);
        let file = open(libc::O_NOATIME).or_else(|_| open(0))?;
        let check = || match witness_of(&file.metadata()?) == found.witness && file.size() == found.len {
            true => Ok(()),
            false => Err(io::Error::other("it changes while it is read")),
        };
        check()?;
        let mut work;
        if found.len < MIN_RELEASE_BYTES {
            let mut bytes = vec![0; found.len as usize];
            file.read_exact_at(&mut bytes, 0)?;
            let (blob, packed) = Blob::pack(&bytes)?;
            work = Work::new(found, Content::Small(blob), None);
            work.add(blob.len, Box::new(move |buf, at| packed.read_exact_at(buf, at)), None);
        } else {
            let original = whole::hash(&file, going)?;
            let id = whole::short(&original);
            work = Work::new(found, Content::Object(id), None);
            if !tree.objects.contains_key(&id) {
                let object = whole::encode(store, path, (&file, original), found.attributes.modified_ns, going)?;
                work.add(
                    object.size(),
                    Box::new(move |buf, at| object.read_exact_at(buf, at)),
                    Some((id, None, false)),
                );
            }
        }
        check()?;
        Ok(work)
    }

    /// The objects that it brings.
    pub(super) fn objects(&self) -> impl Iterator<Item = Id> {
        self.bodies.iter().filter_map(|body| Some(body.object.as_ref()?.id))
    }

    /// Those that have come whole.
    pub(super) fn whole_objects(&self) -> impl Iterator<Item = Encoding> {
        self.bodies.iter().filter_map(|body| {
            let pieces = body.pieces.iter().copied().collect::<Option<Vec<Id>>>()?;
            Some(Encoding { pieces, ..body.object.clone()? })
        })
    }

    /// The pieces that have not come, by numbers of their own.
    pub(super) fn missing(&self) -> impl Iterator<Item = (usize, usize)> {
        self.bodies.iter().enumerate().flat_map(|(body, of)| {
            let missing = of.pieces.iter().enumerate().filter(|(_, piece)| piece.is_none());
            missing.map(move |(piece, _)| (body, piece))
        })
    }

    /// The hashes of those that have.
    pub(super) fn pieces(&self) -> impl Iterator<Item = Id> {
        self.bodies.iter().flat_map(|body| body.pieces.iter().copied().flatten())
    }

    /// The bytes of a piece.
    ///
    /// # Errors
    /// Device errors.
    pub(super) fn bytes(&self, (body, piece): (usize, usize)) -> io::Result<Vec<u8>> {
        let (body, from) = (&self.bodies[body], piece as u64 * PIECE);
        let mut bytes = vec![0; (body.len - from).min(PIECE) as usize];
        (body.read)(&mut bytes, from)?;
        Ok(bytes)
    }

    /// A piece has come.
    pub(super) fn has_come(&mut self, (body, piece): (usize, usize), hash: Id) {
        self.bodies[body].pieces[piece] = Some(hash);
    }
}
