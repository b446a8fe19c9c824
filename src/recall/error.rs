//! Why a released file cannot be read.

use std::io;

use crate::store::{Damage, Id, Stub};

/// A failed read: the kernel gets EIO, and the log names object and tensor.
#[derive(Debug, thiserror::Error)]
#[error("object {object}{}: {source}", place(.tensor))]
pub struct ReadError {
    /// The object that could not be read or decoded.
    pub object: Id,
    /// Path of the tensor, if one is concerned.
    pub tensor: Option<String>,
    /// The device's error, or `InvalidData` with the damage.
    pub source: io::Error,
}

fn place(tensor: &Option<String>) -> String {
    tensor.as_ref().map(|path| format!(", tensor {path}")).unwrap_or_default()
}

impl ReadError {
    /// The object itself (header, index or skeleton).
    pub fn object(object: Id, source: impl Into<io::Error>) -> ReadError {
        ReadError { object, tensor: None, source: source.into() }
    }

    /// One tensor in it.
    pub fn tensor(object: Id, path: &str, source: impl Into<io::Error>) -> ReadError {
        ReadError { object, tensor: Some(path.to_string()), source: source.into() }
    }

    /// Checks the length of a stub's object. If they differ, the stub is damaged, or from another time.
    pub fn unless_as_long(stub: &Stub, len: u64) -> Result<(), ReadError> {
        let wrong = || ReadError::object(stub.object, Damage("it is not as long as its stub says"));
        if len == stub.logical_len { Ok(()) } else { Err(wrong()) }
    }

    /// True if bytes are missing or wrong; false if the device is only unable to read them now.
    pub fn is_damage(&self) -> bool {
        matches!(
            self.source.kind(),
            io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof | io::ErrorKind::NotFound
        )
    }
}

impl From<ReadError> for io::Error {
    fn from(error: ReadError) -> io::Error {
        io::Error::new(error.source.kind(), error)
    }
}
