//! An object on a remote that is read piece by piece: a program that reads one tensor of a large checkpoint brings that
//! tensor, not the checkpoint.
//!
//! The pieces lie in a file without a name, at their offsets. Once a program has read much of a chain, the whole chain
//! comes into the store, and all further reads go there. So such files take at most a part of the chain.
//! Nothing is trusted: the reader verifies each header, index and tile by its own checksum, as on a disk.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::journal::Encoding;
use super::place::{Error, Place, Result};
use crate::store::durable::scratch;
use crate::store::object::{FOOTER_BYTES, HEADER_BYTES, Object};
use crate::store::{Id, Objects};
use formats::ReadAt;

/// Chains up to this many bytes come whole: their requests cost more than their bytes.
pub(super) const SMALL: u64 = 16 << 20;
/// Bytes asked for at least: a few tiles of a difference. A request costs as much time as some 100 KB.
const BLOCK: u64 = 128 << 10;
/// Blocks asked for at most, while a program reads one after another.
const MOST_BLOCKS: u64 = 64;
/// The whole chain comes once a program has read more than this part of its bytes, and more than the ends of all
/// objects and the tiles that are decoded ahead.
const PART: u64 = 8;
const FEW: u64 = 8 << 20;

/// Shared by the objects of one chain.
pub(super) struct Share {
    objects: Arc<Objects>,
    leaf: Id,
    /// Bytes that may come before the chain comes whole, and bytes that came.
    most: u64,
    came: AtomicU64,
    /// The chain could not come whole, or its objects have another encoding here: it is read in pieces to the end.
    in_pieces: AtomicBool,
}

impl Share {
    /// Of the chain of `leaf`, with `total` bytes that are not in the store.
    pub(super) fn new(objects: &Arc<Objects>, leaf: Id, total: u64) -> Share {
        let (came, in_pieces) = (AtomicU64::new(0), AtomicBool::new(false));
        Share { objects: Arc::clone(objects), leaf, most: (total / PART).max(FEW), came, in_pieces }
    }
}

/// The blocks that are here.
struct Pieces {
    file: File,
    here: HashSet<u64>,
    /// The block after the last request, and how many that one asked for.
    next: u64,
    asked: u64,
}

/// The object.
pub(super) struct Far {
    place: Arc<dyn Place>,
    name: String,
    id: Id,
    len: u64,
    share: Arc<Share>,
    /// Held during a request: two readers of one block ask for it once.
    pieces: Mutex<Pieces>,
    /// The object in the store, once it has come.
    here: OnceLock<Arc<Object>>,
}

impl Far {
    /// An object of `owner`. Its pieces lie in `tmp`.
    pub(super) fn new(
        place: &Arc<dyn Place>,
        owner: &str,
        encoding: &Encoding,
        share: &Arc<Share>,
        tmp: &Path,
    ) -> io::Result<Far> {
        let pieces = Pieces { file: tempfile::tempfile_in(tmp)?, here: HashSet::new(), next: u64::MAX, asked: 1 };
        Ok(Far {
            place: Arc::clone(place),
            name: encoding.name(owner),
            id: encoding.id,
            len: encoding.len,
            share: Arc::clone(share),
            pieces: Mutex::new(pieces),
            here: OnceLock::new(),
        })
    }

    /// Asks for the blocks of a range that are not here.
    fn fetch(&self, pieces: &mut Pieces, range: Range<u64>) -> Result<()> {
        let (mut block, end) = (range.start / BLOCK, range.end.div_ceil(BLOCK));
        while block < end {
            if pieces.here.contains(&block) {
                block += 1;
                continue;
            }
            // A program that goes on where it was gets more at once.
            let ahead = if block == pieces.next { (pieces.asked * 2).min(MOST_BLOCKS) } else { 1 };
            let most = (end - block).max(ahead).min(MOST_BLOCKS);
            let until = (block..block + most).find(|next| pieces.here.contains(next)).unwrap_or(block + most);
            let wanted = block * BLOCK..(until * BLOCK).min(self.len);
            let bytes = self.place.get(&self.name, wanted.clone())?;
            if bytes.len() as u64 != wanted.end - wanted.start {
                return Err(Error::Wrong(format!("{} is cut short", self.name)));
            }
            scratch::write_all_at(&pieces.file, &bytes, wanted.start)?;
            self.share.came.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            pieces.here.extend(block..until);
            (pieces.next, pieces.asked, block) = (until, until - block, until);
        }
        Ok(())
    }

    /// Brings the whole chain, and hands over the object of the store if it is this very encoding.
    fn bring(&self, pieces: &mut Pieces) -> io::Result<Option<&Arc<Object>>> {
        self.share.objects.bring(self.share.leaf)?;
        let object = self.share.objects.open(self.id)?;
        // The footer has the hash of the index, which has those of all tiles.
        let ends = [0..HEADER_BYTES as u64, self.len.saturating_sub(FOOTER_BYTES as u64)..self.len];
        for range in ends {
            let mut bytes = [vec![0; (range.end - range.start) as usize], vec![0; (range.end - range.start) as usize]];
            self.fetch(pieces, range.clone()).map_err(Error::into_io)?;
            ReadAt::read_exact_at(&pieces.file, &mut bytes[0], range.start)?;
            object.file().read_exact_at(&mut bytes[1], range.start)?;
            if object.file().size() != self.len || bytes[0] != bytes[1] {
                return Ok(None);
            }
        }
        Ok(Some(self.here.get_or_init(|| object)))
    }
}

impl ReadAt for Far {
    fn size(&self) -> u64 {
        self.len
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.len);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        if let Some(object) = self.here.get() {
            return object.file().read_exact_at(buf, offset);
        }
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let share = &self.share;
        if share.came.load(Ordering::Relaxed) > share.most && !share.in_pieces.load(Ordering::Relaxed) {
            match self.bring(&mut pieces) {
                Ok(Some(object)) => return object.file().read_exact_at(buf, offset),
                Ok(None) => {}
                Err(error) => log::warn!("remote: {} is read in pieces: {error}", self.name),
            }
            share.in_pieces.store(true, Ordering::Relaxed);
        }
        match self.fetch(&mut pieces, offset..end) {
            // Its owner has replaced it. It is here if it came before that.
            Err(Error::Missing(name)) => match self.bring(&mut pieces)? {
                Some(object) => return object.file().read_exact_at(buf, offset),
                None => return Err(Error::Missing(name).into_io()),
            },
            fetched => fetched.map_err(Error::into_io)?,
        }
        ReadAt::read_exact_at(&pieces.file, buf, offset)
    }
}
