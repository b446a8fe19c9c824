//! Puts a recalled file in the place of its stub.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::durable::{CrashPoint, Io, Times, parent};

/// Renames the durable file `new` over each of `names`, which are all names of one stub, and puts the times of their
/// directories back. `temporary` makes up paths on the same device. Answers the directories: the caller makes them
/// durable before anything relies on the stub being gone, with [`sync_replaced`].
///
/// # Errors
/// What the device reports. Some names may have been replaced then; those that were not are still the stub, whose object is
/// there as long as one of them is.
pub fn replace_stub(
    io: &Io,
    new: &Path,
    names: &[impl AsRef<Path>],
    temporary: &mut dyn FnMut() -> PathBuf,
) -> io::Result<Vec<PathBuf>> {
    let mut directories: Vec<PathBuf> = Vec::new();
    for (i, name) in names.iter().map(AsRef::as_ref).enumerate() {
        let directory = parent(name);
        let times = Times::of(&fs::symlink_metadata(directory)?);
        if i + 1 == names.len() {
            io.device().rename(new, name, CrashPoint::RecallInPlace)?;
        } else {
            let link = temporary();
            io.device().link(new, &link, CrashPoint::RecallInPlace)?;
            io.device().rename(&link, name, CrashPoint::RecallInPlace).inspect_err(|_| {
                io.discard(&link, CrashPoint::RecallInPlace);
            })?;
        }
        // The stub is gone by now: an error would say that it is still there.
        if let Err(error) = io.set_times(directory, times, CrashPoint::RecallTimes) {
            log::warn!("{}: cannot put its times back: {error}", directory.display());
        }
        if !directories.iter().any(|known| known == directory) {
            directories.push(directory.to_path_buf());
        }
    }
    Ok(directories)
}

/// Makes durable that stubs were replaced in these directories. The archive is told of the change afterwards and may then
/// drop the object: the stub must not come back.
///
/// # Errors
/// What the device reports.
pub fn sync_replaced(io: &Io, directories: &[PathBuf]) -> io::Result<()> {
    directories.iter().try_for_each(|directory| io.sync_dir(directory, CrashPoint::RecallSynced))
}
