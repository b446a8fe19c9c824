//! Errors of a store.

use std::io;
use std::path::{Path, PathBuf};

use super::store::SETTINGS;
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
    #[error("there is no stepfs store at {0}; check the path, or create one: stepfs mount {0} DIR")]
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
        "{root}: the store has format {found}, this stepfs reads format {FORMAT} only; {}",
        if *found > FORMAT {
            "use a newer stepfs; without one, the store's own read_store.py reads it (see its README)"
        } else {
            "export the files with a former stepfs, and save them to a new store"
        }
    )]
    Format {
        /// The store.
        root: PathBuf,
        /// The store's format.
        found: u32,
    },
    /// `stepfs.toml` cannot be parsed; begins with its path once the store is known.
    #[error("{0}")]
    Settings(String),
    /// Another process holds the lock.
    #[error("{path} is in use by {}, and a store serves one process at a time", process(.holder))]
    Busy {
        /// The store.
        path: PathBuf,
        /// Process id of the holder, or "another machine".
        holder: String,
    },
    /// A store on this file system cannot be shared.
    #[error(
        "{root} lies on {engine}, and a store there cannot be shared: {why}; docs/MACHINES.md names the file systems that can"
    )]
    Engine {
        /// The store.
        root: PathBuf,
        /// The file system.
        engine: &'static str,
        /// What it lacks.
        why: &'static str,
    },
    /// The locks of a daemon on another machine are not seen here.
    #[error(
        "{root}: the daemon of {} works, and its lock is free here: this file system's locks hold on one machine only, so the \
         store cannot be shared; mount the file system with locks for all machines (NFS: without nolock or local_lock; Lustre: \
         -o flock)",
        seat.display()
    )]
    LocalLocks {
        /// The store.
        root: PathBuf,
        /// The other daemon's place in it.
        seat: PathBuf,
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

fn process(holder: &str) -> String {
    if holder.bytes().all(|byte| byte.is_ascii_digit()) { format!("process {holder}") } else { holder.to_string() }
}

impl Error {
    /// Names the store whose settings are wrong.
    pub(super) fn of_store(self, root: &Path) -> Error {
        match self {
            Error::Settings(why) => Error::Settings(format!("{}: {why}", root.join(SETTINGS).display())),
            Error::Format { found, .. } => Error::Format { root: root.to_path_buf(), found },
            error => error,
        }
    }

    /// Adds the path to a device error.
    pub(crate) fn io(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
        let path = path.into();
        move |source| Error::Io { path, source }
    }
}
