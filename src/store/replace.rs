//! Replaces a stub by the recalled file.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::durable::{CrashPoint, Io, Times, parent};

/// Renames the durable file `new` over each of `names`, which are all names of one stub, and restores the times of
/// their directories. `temporary` makes up paths on the same device. Returns the directories. The caller makes them
/// durable with [`sync_replaced`] before anything relies on the stub being gone.
///
/// # Errors
/// Device errors. Some names may be replaced then; the others are still the stub, whose object exists as long as one of
/// them does.
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
        // The stub is gone by now: an error would say that it still exists.
        if let Err(error) = io.set_times(directory, times, CrashPoint::RecallTimes) {
            log::warn!("{}: cannot restore its times: {error}", directory.display());
        }
        if !directories.iter().any(|known| known == directory) {
            directories.push(directory.to_path_buf());
        }
    }
    Ok(directories)
}

/// Makes replaced stubs in these directories durable. Afterwards the archive learns of the change and may drop the
/// object: the stub must not come back.
pub fn sync_replaced(io: &Io, directories: &[PathBuf]) -> io::Result<()> {
    directories.iter().try_for_each(|directory| io.sync_dir(directory, CrashPoint::RecallSynced))
}
