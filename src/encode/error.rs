//! Why a step of a file's life ended without its result.

use std::io;

use crate::recall::ReadError;

pub(crate) type StepResult<T> = Result<T, StepError>;

/// Why a step of a file's life ended without its result. The file stays as it was.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepError {
    /// The file, or a state that the step depends on, changed meanwhile. The catalog knows the next step.
    #[error("it changed meanwhile")]
    Superseded,
    /// The archive stops, or the user gave up.
    #[error("stepfs stops")]
    Cancelled,
    /// The device has no room.
    #[error("{0}")]
    NoRoom(io::Error),
    /// An object cannot be read or decoded.
    #[error("{0}")]
    Object(#[from] ReadError),
    /// An error of the device, or `InvalidData` with the reason.
    #[error("{0}")]
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

impl From<StepError> for io::Error {
    fn from(error: StepError) -> io::Error {
        match error {
            StepError::Superseded | StepError::Cancelled => io::ErrorKind::Interrupted.into(),
            StepError::NoRoom(error) | StepError::Device(error) => error,
            StepError::Object(error) => error.into(),
        }
    }
}
