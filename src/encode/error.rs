//! Why a step of a file's life ended without its result.

use std::fmt;
use std::io;

use crate::recall::ReadError;

/// What a step came to.
pub(crate) type StepResult<T> = Result<T, StepError>;

/// Why a step of a file's life ended without its result. The file stays as it was.
#[derive(Debug)]
pub(crate) enum StepError {
    /// The file, or a state that the step goes by, changed meanwhile. The catalog says what the next step is.
    Superseded,
    /// The archive stops, or the user gave up.
    Cancelled,
    /// The device has no room.
    NoRoom(io::Error),
    /// An object cannot be read or decoded.
    Object(ReadError),
    /// What the device reports, or `InvalidData` with what is wrong.
    Device(io::Error),
}

impl StepError {
    /// Whether an object is damaged, as opposed to a device that cannot read it just now.
    pub(crate) fn is_damage(&self) -> bool {
        matches!(self, StepError::Object(error) if error.is_damage())
    }
}

impl From<io::Error> for StepError {
    fn from(error: io::Error) -> StepError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StepError::NoRoom(error),
            // Calls that the system interrupts are repeated below (`store::durable`): only a reader that was told to stop
            // says so.
            io::ErrorKind::Interrupted => StepError::Cancelled,
            _ => error.downcast::<ReadError>().map_or_else(StepError::Device, StepError::Object),
        }
    }
}

impl From<ReadError> for StepError {
    fn from(error: ReadError) -> StepError {
        StepError::Object(error)
    }
}

impl From<StepError> for io::Error {
    fn from(error: StepError) -> io::Error {
        match error {
            StepError::Superseded | StepError::Cancelled => io::ErrorKind::Interrupted.into(),
            StepError::NoRoom(error) | StepError::Device(error) => error,
            StepError::Object(error) => error.into(),
        }
    }
}

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StepError::Superseded => f.write_str("it changed meanwhile"),
            StepError::Cancelled => f.write_str("stepfs stops"),
            StepError::NoRoom(error) | StepError::Device(error) => error.fmt(f),
            StepError::Object(error) => error.fmt(f),
        }
    }
}
