//! Tools on checkpoints, which the daemon does not need: [`compare`] and [`tune`] measure ways to keep a series, [`diff`]
//! and [`merge`] are for a run's history, [`reshard`] writes a checkpoint of ElasticDL for another number of servers.
//!
//! Nothing else uses this module but the command line. It uses public functions of the others alone. A comparison and a
//! trial go through the archive's own code. So they measure what a mount would do.

mod checkpoint;
pub mod compare;
pub mod diff;
pub mod merge;
pub mod reshard;
mod series;
pub mod tune;
mod values;

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Error, Result, anyhow};

use series::Series;

/// The caller's watch: it may end the work, and hears of its progress.
struct Watch<'a> {
    /// Set to end it: soon after, an error says so.
    stop: &'a AtomicBool,
    /// The current work, and the number of finished steps.
    progress: &'a dyn Fn(&str, u64),
}

impl Watch<'_> {
    fn check(&self) -> Result<()> {
        if self.stop.load(Ordering::Relaxed) { Err(anyhow!("interrupted")) } else { Ok(()) }
    }
}

/// Names the file that an error is about.
fn of_file(path: &Path) -> impl Fn(io::Error) -> Error + use<> {
    let path = path.display().to_string();
    move |error| Error::new(error).context(path.clone())
}
