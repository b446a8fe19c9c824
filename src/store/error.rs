//! Errors of a store.

use std::io;
use std::path::PathBuf;

use super::{FORMAT, Id};

/// Bytes on the device differ from the written ones; names the broken rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Damage(pub &'static str);

impl From<Damage> for io::Error {
    fn from(damage: Damage) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, damage)
    }
}

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directory holds other files.
    #[error("{0} is not a stepfs store and not empty; name an empty or new directory to create one")]
    NotAStore(PathBuf),
    /// There is no store at the path.
    #[error("there is no stepfs store at {0}; `stepfs mount STORE DIR` creates one")]
    Missing(PathBuf),
    /// A store that was used has no `stepfs.toml`.
    #[error(
        "{root} is a stepfs store without stepfs.toml; restore that file from a backup, or write it with these lines:\n\
         format = {FORMAT}\nstore = \"{}\"\ndefault_profile = \"exact\"\ncache_mib = 10240",
        id.or_else(|| Id::random().ok()).map_or_else(|| "32 hexadecimal digits".into(), |id| id.to_string())
    )]
    NoSettings {
        /// The store.
        root: PathBuf,
        /// Its id, as its stubs have it. Without stubs any id will do.
        id: Option<Id>,
    },
    /// Another version of stepfs made it.
    #[error(
        "the store has format {found}, this stepfs reads format {FORMAT} only; {}",
        if *found > FORMAT {
            "use a newer stepfs; without one, the store's own read_store.py reads it (see its README)"
        } else {
            "export the files with a former stepfs, and save them to a new store"
        }
    )]
    Format {
        /// The store's format.
        found: u32,
    },
    /// `stepfs.toml` cannot be parsed.
    #[error("stepfs.toml: {0}")]
    Settings(String),
    /// Another process holds the lock.
    #[error("{path} is in use by process {holder}; one daemon at a time may use a store (`stepfs umount` ends it)")]
    Busy {
        /// The store.
        path: PathBuf,
        /// Process id of the holder, or "another machine".
        holder: String,
    },
    /// A directory or file of the store has another type, such as a symlink.
    #[error("{0} is a symlink or no {1}; a store's files and directories must be real ones")]
    NotReal(PathBuf, &'static str),
    /// The device reports an error.
    #[error("{path}: {source}")]
    Io {
        /// The path of the failed call.
        path: PathBuf,
        /// The device's error.
        source: io::Error,
    },
}

impl Error {
    /// Adds the path to a device error.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { path, source }
    }
}
