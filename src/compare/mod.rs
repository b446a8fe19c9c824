//! Compares ways to keep a series of checkpoints: size, loss and cost, measured on the user's own files.
//!
//! stepfs's profiles and the published systems go through the archive of a store of their own, exactly as in a mount
//! ([`kept`]). A user's first ideas run beside them ([`plain`]). Errors are measured on decoded files, element by
//! element, never taken from an object's own statement. All work is done below one directory, which the caller
//! removes.

mod codec;
mod kept;
pub(crate) mod natural;
mod plain;
mod report;
mod series;
mod trial;
mod values;

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Error, Result, anyhow};

pub use codec::Codec;
pub use report::{Chain, Errors, Kept, Relative, Report, RoleKept};
pub use series::Series;
pub(crate) use series::open_aside;
pub use trial::Trial;

use report::Measured;

/// The caller's watch: it may end the work, and hears of its progress.
pub struct Watch<'a> {
    /// Set to end it: soon after, an error says so.
    pub stop: &'a AtomicBool,
    /// The current work, and the number of finished [`steps`].
    pub progress: &'a dyn Fn(&str, u64),
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

/// How far one codec is.
struct Steps<'a> {
    watch: &'a Watch<'a>,
    /// Steps of the codecs before.
    done: u64,
    name: String,
}

impl Steps<'_> {
    fn check(&self) -> Result<()> {
        self.watch.check()
    }

    fn at(&self, step: u64) {
        (self.watch.progress)(&self.name, self.done + step);
    }
}

/// Steps of a comparison: each file is encoded and decoded by each codec.
pub fn steps(series: &Series, codecs: usize) -> u64 {
    (2 * series.len() * codecs) as u64
}

/// Keeps the series by each of the codecs, and measures. All files that it writes are below `dir`, and gone when it
/// returns. Takes room for the series twice there, and for the decoded states of one file in memory.
pub fn compare(series: &Series, codecs: &[Codec], dir: &Path, watch: &Watch) -> Result<Report> {
    codecs.iter().try_for_each(|codec| codec.is_for(series))?;
    (watch.progress)("updates", 0);
    let scale = series.scale(watch)?;
    let mut kept = Vec::new();
    for (number, codec) in codecs.iter().enumerate() {
        let steps = Steps { watch, done: steps(series, number), name: codec.to_string() };
        // One directory each, so that the room of one is free before the next begins.
        let dir = tempfile::Builder::new().prefix("codec-").tempdir_in(dir).map_err(of_file(dir))?;
        let measured: Measured = match *codec {
            Codec::Profile(profile) => kept::measure(series, profile, dir.path(), &steps)?,
            Codec::Zstd(level) => plain::zstd(series, level, false, dir.path(), &steps)?,
            Codec::ZstdPatch(level) => plain::zstd(series, level, true, dir.path(), &steps)?,
            Codec::Planes => plain::planes(series, &steps)?,
        };
        kept.push(measured.report(*codec, series, &scale));
    }
    Ok(Report::new(series, &scale, kept))
}
