//! Why a series cannot be compared.

use std::io;
use std::path::{Path, PathBuf};

use super::Codec;

/// An error, in words for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The device's error.
        source: io::Error,
    },
    /// The content of a file is unknown.
    #[error("{}: not a checkpoint that stepfs understands: {why}", path.display())]
    NotACheckpoint {
        /// The path.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A profile cannot be tried on a file.
    #[error("{}: {why}", path.display())]
    Unfit {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// There is no update without a second checkpoint.
    #[error("{}: only one checkpoint; name at least two of one run, oldest first", .0.display())]
    One(PathBuf),
    /// The files are of different runs or models.
    #[error("{} is not of the same model as {}: {why}", path.display(), first.display())]
    Different {
        /// The first of the series.
        first: PathBuf,
        /// The file that does not belong to it.
        path: PathBuf,
        /// The difference.
        why: String,
    },
    /// A codec is not made for such files.
    #[error("{}: more than {codec} can have; leave it out (--codecs)", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The codec.
        codec: Codec,
    },
    /// The archive of a temporary store could not do its work.
    #[error("{codec}: {why}")]
    Archive {
        /// The profile.
        codec: String,
        /// Why.
        why: String,
    },
    /// A lossless codec did not return its input.
    #[error("{codec}: {} does not come back as it was", path.display())]
    Wrong {
        /// The codec.
        codec: Codec,
        /// The file.
        path: PathBuf,
    },
    /// The caller ended it.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// Names the file that an error is about.
    pub(super) fn io(path: &Path) -> impl Fn(io::Error) -> Error + use<> {
        let path = path.to_path_buf();
        move |source| Error::Io { path: path.clone(), source }
    }
}
