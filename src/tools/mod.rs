//! Tools on checkpoints, which the daemon does not need. [`compare`] and [`tune`] measure ways to keep a series. [`diff`],
//! [`merge`], [`convert`] and [`updates`] are for a run's history. [`reshard`] writes a checkpoint of ElasticDL for another number of
//! servers.
//!
//! Nothing else uses this module but the command line. It uses public functions of the others alone. A comparison and a
//! trial go through the archive's own code. So they measure what a mount would do.

mod checkpoint;
pub mod compare;
pub mod convert;
pub mod diff;
mod flow;
pub mod merge;
mod output;
pub mod reshard;
mod series;
pub mod tune;
pub mod updates;
mod values;

use std::fs::{File, Permissions};
use std::io;
use std::path::Path;

use anyhow::{Error, Result};

pub use output::{new_file, refuse_in_store};

/// A file or directory that a user named: in a mount, a store, on a mirror, or anywhere.
pub trait Place {
    /// As the user named it.
    fn name(&self) -> &str;

    /// Its path on disk. The names are there, but in a store not all bytes.
    fn at(&self) -> &Path;

    /// Opens the file at a path on disk, with the bytes and the permissions that programs see.
    ///
    /// # Errors
    /// Those of the device; damage.
    fn open(&self, path: &Path) -> io::Result<(File, Permissions)>;
}

/// Finds what a user named.
pub type Find = dyn Fn(&Path) -> Result<Box<dyn Place>>;

/// Names the file that an error is about.
fn of_file(path: &Path) -> impl Fn(io::Error) -> Error + use<> {
    let path = path.display().to_string();
    move |error| Error::new(error).context(path.clone())
}
