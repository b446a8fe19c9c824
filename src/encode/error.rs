//! Why a step of a file's life ended without its result.

use std::fmt;
use std::io;

use crate::recall::ReadError;

pub(crate) type StepResult<T> = Result<T, StepError>;

/// Why a step of a file's life ended without its result. The file stays as it was.
#[derive(Debug)]
pub(crate) enum StepError {
    /// The file, or a state that the step depends on, changed meanwhile. The catalog knows the next step.
    Superseded,
    /// The archive stops, or the user gave up.
    Cancelled,
    /// The device has no room.
    NoRoom(io::Error),
    /// An object cannot be read or decoded.
    Object(ReadError),
    /// An error of the device, or `InvalidData` with the reason.
    Device(io::Error),
}

impl StepError {
    /// Whether an object is damaged. Otherwise the device cannot read it now.
    pub(crate) fn is_damage(&self) -> bool {
        matches!(self, StepError::Object(error) if error.is_damage())
    }
}

impl From<io::Error> for StepError {
    fn from(error: io::Error) -> StepError {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StepError::NoRoom(error),
            // `store::durable` repeats interrupted calls. Only a stopped reader reports an interruption.
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
