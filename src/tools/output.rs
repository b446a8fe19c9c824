//! A new file or directory of a command, which appears when it is complete and durable, or not at all.

use std::collections::BTreeSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf, absolute};

use anyhow::{Result, bail};
use rustix::fs::{CWD, Mode, RenameFlags, renameat_with};
use rustix::io::Errno;
use rustix::process::umask;

use crate::store::durable::{CrashPoint, DeviceFile, Io, parent};
use crate::store::{part_of, real, store_around};
use crate::terminal::interrupt::Temporary;

use super::checkpoint::Checkpoint;
use super::of_file;

const STEP: CrashPoint = CrashPoint::ExportWritten;

/// The new file or directory while a command writes it, under another name.
pub(super) struct Output<'a> {
    io: &'a Io,
    is_directory: bool,
    at: PathBuf,
    /// The name that it gets, for errors.
    out: &'a Path,
    /// The directories below it that hold its files.
    directories: BTreeSet<PathBuf>,
}

/// A file of the output. Its errors name it, as it is called in the end.
pub(super) struct NewFile {
    file: DeviceFile,
    shown: PathBuf,
}

impl NewFile {
    /// Writes all bytes at a place.
    pub(super) fn write_all_at(&self, bytes: &[u8], at: u64) -> Result<()> {
        self.file.write_all_at(bytes, at, STEP).map_err(of_file(&self.shown))
    }

    /// Makes the bytes durable.
    pub(super) fn sync(&self) -> Result<()> {
        self.file.sync(STEP).map_err(of_file(&self.shown))
    }
}

impl<'a> Output<'a> {
    /// Refuses a name that something has, or that would be inside of an input or of a store.
    pub(super) fn refuse(out: &Path, inputs: &[Checkpoint]) -> Result<()> {
        if fs::symlink_metadata(out).is_ok() {
            bail!("{} exists; name a new file or directory", out.display());
        }
        refuse_in_store(out)?;
        let above = real(&absolute(out)?);
        for input in inputs.iter().filter(|input| input.is_directory) {
            if fs::canonicalize(&input.at).is_ok_and(|at| above.starts_with(at)) {
                bail!("{} lies inside {}; name a place outside of it", out.display(), input.name);
            }
        }
        Ok(())
    }

    /// Lets `write` fill a file, or a directory, and names it `out` then. Leaves nothing behind if that fails, or if a signal
    /// ends the command.
    ///
    /// # Errors
    /// Those of `write` and of the device.
    pub(super) fn whole<T>(
        io: &'a Io,
        (out, is_directory): (&'a Path, bool),
        write: impl FnOnce(&mut Output) -> Result<T>,
    ) -> Result<T> {
        let at = part_of(out);
        if fs::symlink_metadata(&at).is_ok() {
            bail!("{} is in the way: another command writes it, or was killed; remove it then", at.display());
        }
        io.make_dirs(parent(out), 0o777, STEP).map_err(of_file(out))?;
        let temporary = match is_directory {
            true => Temporary::directory_at(&at, |at| fs::create_dir(at)),
            false => Temporary::file(at.clone()),
        };
        let _temporary = temporary.map_err(of_file(&at))?;
        let mut output = Output { io, is_directory, at, out, directories: BTreeSet::new() };
        let written = write(&mut output).and_then(|done| {
            output.directories.iter().try_for_each(|directory| io.sync_dir(directory, STEP)).map_err(of_file(out))?;
            output.publish()?;
            Ok(done)
        });
        written.inspect_err(|_| {
            let _ = if is_directory { fs::remove_dir_all(&output.at) } else { fs::remove_file(&output.at) };
        })
    }

    /// Gives it its name, unless something has got that meanwhile.
    fn publish(&self) -> Result<()> {
        match renameat_with(CWD, &self.at, CWD, self.out, RenameFlags::NOREPLACE) {
            Ok(()) => self.io.sync_dir(parent(self.out), CrashPoint::ExportInPlace),
            // Not every file system, nor every kernel, has this flag.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                Output::refuse(self.out, &[])?;
                self.io.publish(&self.at, self.out, CrashPoint::ExportInPlace)
            }
            Err(error) => {
                Output::refuse(self.out, &[])?;
                Err(error.into())
            }
        }
        .map_err(of_file(self.out))
    }

    /// A new file at a path inside of the directory, or the file itself.
    pub(super) fn create(&mut self, path: &Path, mode: u32) -> Result<NewFile> {
        let (at, shown) = match self.is_directory {
            true => (self.at.join(path), self.out.join(path)),
            false => (self.at.clone(), self.out.to_path_buf()),
        };
        if self.is_directory {
            self.io.make_dirs(parent(&at), 0o777, STEP).map_err(of_file(&shown))?;
            let above = parent(&at).ancestors().take_while(|above| above.starts_with(&self.at));
            self.directories.extend(above.map(Path::to_path_buf));
        }
        let file = self.io.create(&at, STEP).map_err(of_file(&shown))?;
        fs::set_permissions(&at, Permissions::from_mode(mode)).map_err(of_file(&shown))?;
        Ok(NewFile { file, shown })
    }
}

/// Refuses a new name inside a store: a file that no mount shows is lost there, or in the way.
///
/// # Errors
/// It lies in one.
pub fn refuse_in_store(out: &Path) -> Result<()> {
    let above = real(&absolute(out)?);
    let Some(store) = store_around(parent(&above)) else { return Ok(()) };
    bail!("{} lies inside the store {}; name a place outside, or in its mount", out.display(), store.display())
}

/// Makes a new file of the bytes that `make` answers. `make` runs while the file has its other name.
///
/// # Errors
/// Something has the name; those of `make` and of the device.
pub fn new_file(out: &Path, make: impl FnOnce() -> Result<Vec<u8>>) -> Result<()> {
    Output::refuse(out, &[])?;
    // The mask can only be read by a change of it.
    let mask = umask(Mode::empty());
    umask(mask);
    let mode = 0o666 & !mask.as_raw_mode();
    Output::whole(&Io::disk(), (out, false), |output| {
        let bytes = make()?;
        let file = output.create(Path::new(""), mode)?;
        file.write_all_at(&bytes, 0)?;
        file.sync()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_came_meanwhile_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out.pt");
        let done = Output::whole(&Io::disk(), (&out, false), |output| {
            output.create(Path::new(""), 0o644)?.write_all_at(b"ours", 0)?;
            Ok(fs::write(&out, "theirs")?)
        });
        assert!(done.unwrap_err().to_string().contains("exists; name a new file"));
        assert_eq!(fs::read(&out).unwrap(), b"theirs");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
