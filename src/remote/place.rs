//! What stepfs asks of a remote: put under a new name, get, list, delete. Nothing conditional, because servers differ.

use std::io;
use std::ops::Range;

use formats::ReadAt;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No such name.
    #[error("{0} is not on the remote")]
    Missing(String),
    /// Waiting may help: the remote is away, busy or throttles.
    #[error("{0}")]
    Away(String),
    /// The remote refuses the request; names the missing permission.
    #[error("{0}")]
    Denied(String),
    /// The bytes on the remote are not what their name says, or a newer stepfs wrote them.
    #[error("{0}")]
    Wrong(String),
    /// The store's own device failed.
    #[error("{0}")]
    Local(#[from] io::Error),
}

/// The result of a request.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The error of a file, for callers that read the remote's objects like files.
    pub fn into_io(self) -> io::Error {
        match self {
            Error::Local(error) => error,
            Error::Missing(_) => io::Error::new(io::ErrorKind::NotFound, self.to_string()),
            Error::Away(_) => io::Error::new(io::ErrorKind::TimedOut, self.to_string()),
            Error::Denied(_) => io::Error::new(io::ErrorKind::PermissionDenied, self.to_string()),
            Error::Wrong(_) => io::Error::new(io::ErrorKind::InvalidData, self.to_string()),
        }
    }
}

/// A name on a remote.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listed {
    /// The name, relative to the remote's URL.
    pub name: String,
    /// Bytes.
    pub len: u64,
    /// When it was put, in nanoseconds since 1970, by the remote's own clock.
    pub put_ns: i64,
}

/// Is told the number of bytes before they go, waits as long as the bandwidth asks, and refuses once the daemon stops.
pub type Pacer<'a> = dyn Fn(u64) -> Result<()> + 'a;

/// A remote. Requests block; all threads may make them at once.
pub trait Place: Send + Sync {
    /// Puts `len` bytes of `body` under a name. Names are written once; putting the same bytes again changes nothing.
    /// On return the bytes are durable. After an error the name has all bytes or does not exist. `pace` is told the
    /// number of bytes before they go, and its error ends the put.
    ///
    /// # Errors
    /// [`Error`].
    fn put(&self, name: &str, body: &(dyn ReadAt + Sync), len: u64, pace: &Pacer) -> Result<()>;

    /// A range of a name's bytes; fewer where the name ends before.
    ///
    /// # Errors
    /// [`Error::Missing`] and others.
    fn get(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>>;

    /// All names below a prefix that ends in a slash, in no order.
    ///
    /// # Errors
    /// [`Error`]; a missing prefix has no names.
    fn list(&self, prefix: &str) -> Result<Vec<Listed>>;

    /// The first components of the names below a prefix that ends in a slash.
    ///
    /// # Errors
    /// As of [`Place::list`].
    fn folders(&self, prefix: &str) -> Result<Vec<String>>;

    /// Deletes a name that may be gone already.
    ///
    /// # Errors
    /// [`Error`].
    fn delete(&self, name: &str) -> Result<()>;

    /// Deletes what puts of killed processes left below a prefix, where a remote cannot do that by itself.
    ///
    /// # Errors
    /// [`Error`].
    fn sweep(&self, _prefix: &str) -> Result<()> {
        Ok(())
    }
}

/// Puts a few bytes.
///
/// # Errors
/// As of [`Place::put`].
pub fn put_bytes(place: &dyn Place, name: &str, bytes: Vec<u8>) -> Result<()> {
    place.put(name, &bytes, bytes.len() as u64, &|_| Ok(()))
}

/// All bytes of a name, if they are at most `most`.
///
/// # Errors
/// [`Error::Wrong`] for a longer one; those of [`Place::get`].
pub fn get_all(place: &dyn Place, name: &str, most: u64) -> Result<Vec<u8>> {
    let bytes = place.get(name, 0..most + 1)?;
    match bytes.len() as u64 > most {
        true => Err(Error::Wrong(format!("{name} is longer than {most} bytes"))),
        false => Ok(bytes),
    }
}
