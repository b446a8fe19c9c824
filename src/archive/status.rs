//! What users are told: of the store as a whole, and of one file.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::store::{STUB_BYTES, Stub};

use super::catalog::{Entry, State};
use super::{Archive, ReadError, Reader};

/// What `stepfs status` shows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Regular files.
    pub files: u64,
    /// Files that a stub stands for.
    pub released: u64,
    /// Bytes that programs see.
    pub logical_bytes: u64,
    /// Bytes that the store occupies: resident files, stubs and objects; the cache is not counted.
    pub stored_bytes: u64,
    /// Bytes of files that are as they were written.
    pub resident_bytes: u64,
    /// Bytes of objects.
    pub object_bytes: u64,
    /// Bytes of those of them that no file names any more: kept because others are differences to them, or the next
    /// state will be.
    #[serde(default)]
    pub unnamed_bytes: u64,
    /// Bytes of decoded files in the cache.
    pub cache_bytes: u64,
    /// Steps that can be taken now or will be tried again.
    pub queued: u64,
    /// Files that wait for a handle to be closed.
    pub busy: u64,
    /// Why a queued step could not be taken, when it is being tried again.
    pub stalled: Option<String>,
    /// Files that could not be archived, each with the reason; they stay as they were written.
    pub failed: Vec<String>,
    /// Process number of the daemon; none when the store is not mounted.
    pub daemon: Option<u32>,
}

impl Archive {
    /// The state of the store as a whole. Looks at the size of every resident file: not for the file system's threads.
    pub fn status(&self) -> Status {
        let mut status = Status {
            object_bytes: self.objects.stored(),
            unnamed_bytes: self.objects.stored_unnamed(),
            cache_bytes: self.recall.cached_bytes(),
            ..Status::default()
        };
        let entries: Vec<_> = {
            let catalog = self.catalog();
            let (queued, stalled) = catalog.queued();
            (status.queued, status.stalled) = (queued as u64, stalled);
            catalog.entries().map(|(path, entry)| (path.clone(), entry.clone())).collect()
        };
        for (path, entry) in entries {
            let Ok(metadata) = fs::symlink_metadata(self.store.tree().join(&path)) else {
                continue;
            };
            status.files += 1;
            status.logical_bytes += metadata.len();
            status.busy += u64::from(entry.busy);
            if let Some(failed) = entry.failed.filter(|failed| failed.retry.is_none()) {
                status.failed.push(failed.why);
            }
            match entry.state {
                State::Released(_) => {
                    status.released += 1;
                    status.stored_bytes += STUB_BYTES as u64;
                }
                _ => status.resident_bytes += metadata.blocks() * 512,
            }
        }
        status.stored_bytes += status.resident_bytes + status.object_bytes;
        status.daemon = Some(std::process::id());
        status
    }

    /// The stub in `file`, if it is one. Reads one block. A damaged one is a stub of no object: it can be removed,
    /// renamed and overwritten, but reading it is an error.
    ///
    /// # Errors
    /// What the device reports.
    pub fn stub(&self, file: &fs::File) -> std::io::Result<Option<Stub>> {
        match Stub::read(file, self.store.id()) {
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                let logical_len = file.metadata()?.len();
                Ok(Some(Stub { store: self.store.id(), object: crate::store::Id::NONE, logical_len }))
            }
            stub => stub,
        }
    }

    /// Bytes that a stub's object occupies, for st_blocks.
    pub fn stored_bytes(&self, stub: &Stub) -> u64 {
        self.objects.get(stub.object).map_or(0, |(_, stored)| stored)
    }

    /// Opens a released file for reading. Blocks on the device: never on a thread that answers the kernel.
    ///
    /// # Errors
    /// [`ReadError`] names the object that is missing or damaged.
    pub fn reader(&self, stub: &Stub) -> Result<std::sync::Arc<Reader>, ReadError> {
        self.recall.reader(stub.object).and_then(|reader| {
            // A stub that promises another length than its object has is damaged, or from another time.
            match reader.len() == stub.logical_len {
                true => Ok(reader),
                false => {
                    Err(ReadError::object(stub.object, crate::store::Damage("it is not as long as its stub says")))
                }
            }
        })
    }

    /// The value of a `user.stepfs.*` attribute (name without the prefix) of the file or directory at `path`.
    /// On every path: `store`, `status` (JSON), `gc` (JSON: how far a run of retention has come). On files: `state`, and once archived `object`.
    pub fn attribute(&self, path: &Path, name: &str) -> Option<Vec<u8>> {
        match name {
            "store" => return Some(self.store.root().as_os_str().as_encoded_bytes().to_vec()),
            "status" => return serde_json::to_vec(&self.status()).ok(),
            "gc" => return serde_json::to_vec(&self.gc_report().0).ok(),
            _ => {}
        }
        let catalog = self.catalog();
        let entry = catalog.get(path)?;
        match name {
            "state" => Some(state_name(entry).into()),
            "profile" => Some(self.store.settings().profile(path).name().into()),
            "object" => match entry.state {
                State::Released(id) | State::Archived(_, id) => Some(id.to_string().into_bytes()),
                _ => None,
            },
            "why" => match (&entry.state, &entry.failed) {
                (_, Some(failed)) => Some(failed.why.clone().into_bytes()),
                (State::Resident(why), _) => Some(why.as_bytes().to_vec()),
                (_, None) => None,
            },
            _ => None,
        }
    }

    /// A user sets a `user.stepfs.*` attribute. `sync`, on anything, asks for everything to be done that can be; `gc` for
    /// the policy to be applied now.
    ///
    /// # Errors
    /// The errno `EPERM`: all other attributes are stepfs's own.
    pub fn set_attribute(&self, _path: &Path, name: &str, _value: &[u8]) -> Result<(), i32> {
        match name {
            "sync" => {
                self.retry();
                Ok(())
            }
            "gc" => {
                self.ask_gc();
                Ok(())
            }
            _ => Err(libc::EPERM),
        }
    }

    /// Brings a released file back for writing: decodes it into a new file in `tmp/` with the attributes of the file
    /// at `path` (absolute), durable; the caller renames it over. Blocks for as long as that takes.
    ///
    /// # Errors
    /// [`ReadError`] names the object that is missing or damaged, or the device's lack of room.
    pub fn recall(&self, stub: &Stub, path: &Path) -> Result<std::path::PathBuf, ReadError> {
        let fail = |error| ReadError::object(stub.object, error);
        let target = self.store.tmp().join(format!("recall-{}", crate::store::Id::random().map_err(fail)?));
        let decode = || -> Result<(), ReadError> {
            let file = crate::store::durable::create_new(&target).map_err(fail)?;
            self.recall.copy(stub.object, &file)?;
            let metadata = fs::symlink_metadata(path).map_err(fail)?;
            crate::store::copy_attributes(path, &metadata, &file).map_err(fail)?;
            crate::store::durable::sync_file(&file).map_err(fail)
        };
        decode().inspect_err(|_| {
            let _ = crate::store::durable::remove(&target);
        })?;
        Ok(target)
    }
}

/// The word for a file's state in `stepfs ls`.
fn state_name(entry: &Entry) -> &'static str {
    match entry.state {
        State::Staged | State::Closed => "staged",
        State::Sealed(_) | State::Resident(_) => "sealed",
        State::Archived(..) => "archived",
        State::Released(_) => "released",
    }
}
