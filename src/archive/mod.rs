//! After the last close: find the tensors, choose the base, encode, verify, commit, release.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::recall::Reader;
use crate::store::{Store, Stub};

/// Which file of the store's tree is meant: a path may be given to another file meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileId {
    /// Device of the file in the store.
    pub dev: u64,
    /// Inode number of the file in the store.
    pub ino: u64,
}

/// How an attempt to replace a file ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The file was replaced.
    Done,
    /// A handle or mapping is open; `Archive::closed` or `Archive::sealed` tells when it is worth another try.
    Busy,
    /// That path is no longer that file.
    Changed,
}

/// Whoever serves the tree while the archive works on it: the mount, or nobody (`import` into a store at rest).
pub trait Namespace: Send + Sync {
    /// Runs `commit` with the file's absolute path while no handle is open on it and none can be opened, and no
    /// name in its directory can change. `commit` replaces the file by another with the same attributes (one rename).
    fn exclusively(
        &self,
        path: &Path,
        expect: FileId,
        commit: &mut dyn FnMut(&Path) -> io::Result<()>,
    ) -> io::Result<Outcome>;
}

/// The archive of one store: its catalog, queue and workers. Paths are relative to the tree.
pub struct Archive {
    store: Store,
}

/// Why a read failed.
#[derive(Debug)]
pub struct ReadError;

/// What `stepfs status` shows.
#[derive(Clone, Debug, Default)]
pub struct Status;

#[allow(unused_variables, missing_docs)]
impl Archive {
    /// Starts the workers. `namespace` is asked before any file is replaced.
    pub fn start(self: &Arc<Self>, namespace: Arc<dyn Namespace>) {}
    /// Ends the workers after the step under way; everything else is picked up by the next mount.
    pub fn stop(&self) {}
    pub fn store(&self) -> &Store {
        &self.store
    }
    #[doc(hidden)]
    pub fn sketch(root: &Path) -> Self {
        Self {
            store: Store::sketch(root),
        }
    }

    // Notes from the file system, made while it holds its own lock: each only touches the catalog and the queue.

    /// A handle that can write was opened (or the file was truncated): what was queued for the file is void.
    pub fn opened_for_writing(&self, path: &Path) {}
    /// The last handle of a file that was written is gone.
    pub fn sealed(&self, path: &Path) {}
    /// The last handle of a file that was only read is gone: a release that found it busy may go on.
    pub fn closed(&self, path: &Path) {}
    /// A file or directory has a new name; whatever had that name is gone.
    pub fn renamed(&self, from: &Path, to: &Path) {}
    /// Two names were exchanged (files or directories).
    pub fn exchanged(&self, a: &Path, b: &Path) {}
    /// A name of a file is gone (rmdir needs no note).
    pub fn removed(&self, path: &Path) {}
    /// A file got a second name.
    pub fn linked(&self, from: &Path, to: &Path) {}

    /// The stub in `file`, if it is one. Reads one block.
    pub fn stub(&self, file: &File) -> io::Result<Option<Stub>> {
        Ok(None)
    }
    /// Bytes that a stub's object occupies, for st_blocks.
    pub fn stored_bytes(&self, stub: &Stub) -> u64 {
        0
    }
    /// Opens a released file for reading. Blocks on disk: never on a thread that answers the kernel.
    pub fn reader(&self, stub: &Stub) -> Result<Arc<Reader>, ReadError> {
        Err(ReadError)
    }
    /// Brings a released file back for writing: decodes it into a new file in `tmp/` with the attributes of the file
    /// at `path` (absolute), made durable; the caller renames it over. Blocks for as long as that takes.
    pub fn recall(&self, stub: &Stub, path: &Path) -> Result<std::path::PathBuf, ReadError> {
        Err(ReadError)
    }
    /// The value of a `user.stepfs.*` attribute (name without the prefix) of the file or directory at `path`.
    /// On every path: `store`, `status` (JSON). On files: `state`, `profile`, `logical_bytes`, `stored_bytes`, ....
    pub fn attribute(&self, path: &Path, name: &str) -> Option<Vec<u8>> {
        None
    }
    /// A user sets a `user.stepfs.*` attribute (`sync` on the root asks for everything to be archived that can be).
    /// # Errors
    /// An errno.
    pub fn set_attribute(&self, path: &Path, name: &str, value: &[u8]) -> Result<(), i32> {
        Err(libc::EPERM)
    }
}
