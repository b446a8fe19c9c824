//! What stepfs asks of a mirror: put under a new name, get, list, delete. Nothing conditional, because servers differ.

use std::io::{self, Write};

use crate::store::Damage;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No such name.
    #[error("{0} is not on the mirror")]
    Missing(String),
    /// The mirror throttles: everybody waits a little.
    #[error("{0}")]
    Busy(String),
    /// Waiting may help: the mirror is away, or has no room.
    #[error("{0}")]
    Away(String),
    /// The mirror refuses the request; names the missing permission.
    #[error("{0}")]
    Denied(String),
    /// The bytes on the mirror are not what their name says, or another version of stepfs wrote them.
    #[error("{0}")]
    Wrong(String),
    /// The store's own device failed.
    #[error("{0}")]
    Local(#[from] io::Error),
}

/// The result of a request.
pub type Result<T> = std::result::Result<T, Error>;

impl From<Damage> for Error {
    fn from(damage: Damage) -> Error {
        Error::Wrong(damage.to_string())
    }
}

/// A bucket or directory. Requests block; all threads may make them at once.
pub trait Place: Send + Sync {
    /// Puts bytes under a name. Names are written once; putting the same bytes again changes nothing. On return the
    /// bytes are durable. After an error the name has all bytes or does not exist.
    ///
    /// # Errors
    /// [`Error`].
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()>;

    /// Passes the first `most` bytes of a name to `each`, in order; fewer where the name ends before.
    ///
    /// # Errors
    /// [`Error::Missing`] and others; those of `each`.
    fn read(&self, name: &str, most: u64, each: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>;

    /// All names below a prefix that ends in a slash, in no order. Each comes with the time when it was put, in nanoseconds
    /// since 1970, by the mirror's own clock.
    ///
    /// # Errors
    /// [`Error`]; a missing prefix has no names.
    fn list(&self, prefix: &str) -> Result<Vec<(String, i64)>>;

    /// Deletes a name that may be gone already. A crash may bring it back before [`Place::sync`].
    ///
    /// # Errors
    /// [`Error`].
    fn delete(&self, name: &str) -> Result<()>;

    /// Makes all deletions of names right below a prefix durable.
    ///
    /// # Errors
    /// [`Error`].
    fn sync(&self, _prefix: &str) -> Result<()> {
        // A bucket's are.
        Ok(())
    }
}

/// All bytes of a name, if they are at most `most`.
///
/// # Errors
/// [`Error::Wrong`] for a longer one; those of [`Place::read`].
pub fn get_all(place: &dyn Place, name: &str, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    place.read(name, most + 1, &mut |some| Ok(bytes.write_all(some)?))?;
    let is_whole = bytes.len() as u64 <= most;
    is_whole.then_some(bytes).ok_or_else(|| Error::Wrong(format!("{name} is longer than {most} bytes")))
}
