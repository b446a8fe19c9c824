//! A directory on a shared file system as a remote (`file://`).
//!
//! It relies on little: a file is written under a name that nobody reads, made durable, and renamed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::place::{Error, Listed, Pacer, Place, Result};
use crate::store::Id;
use formats::ReadAt;

/// Bytes copied at once.
const PIECE: usize = 1 << 20;
/// Files with this beginning are unfinished. Nobody lists them.
const UNFINISHED: &str = ".part-";
/// Nobody writes to an unfinished file any more that has not changed for so long: clocks of machines differ by less.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 3600);

/// The directory.
#[derive(Debug)]
pub(super) struct Directory {
    root: PathBuf,
}

impl Directory {
    /// Uses `root`, which is created if it is missing.
    pub(super) fn open(root: &Path) -> Result<Directory> {
        fs::create_dir_all(root).map_err(|error| told(error, &root.display().to_string()))?;
        Ok(Directory { root: fs::canonicalize(root).map_err(|error| told(error, &root.display().to_string()))? })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    fn walk(&self, prefix: &str, found: &mut Vec<Listed>) -> io::Result<()> {
        let entries = match fs::read_dir(self.path(prefix)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with(UNFINISHED) {
                continue;
            }
            let metadata = match entry.metadata() {
                // Deleted since its name was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                metadata => metadata?,
            };
            if metadata.is_dir() {
                self.walk(&format!("{prefix}{name}/"), found)?;
            } else if metadata.is_file() {
                let put_ns = metadata.mtime().saturating_mul(1_000_000_000).saturating_add(metadata.mtime_nsec());
                found.push(Listed { name: format!("{prefix}{name}"), len: metadata.len(), put_ns });
            }
        }
        Ok(())
    }

    fn sweep_below(&self, directory: &Path) -> io::Result<()> {
        let entries = match fs::read_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                self.sweep_below(&entry.path())?;
            } else if entry.file_name().as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
                // Its put may end, or another process may delete it, in this moment.
                let age = entry.metadata().and_then(|of| of.modified()).map(|at| at.elapsed().unwrap_or_default());
                if age.is_ok_and(|age| age > ABANDONED_AFTER) {
                    let _ = fs::remove_file(entry.path());
                }
            }
        }
        Ok(())
    }
}

/// Sorts an error of the file system.
fn told(error: io::Error, name: &str) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOENT) => Error::Missing(name.to_string()),
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => {
            Error::Denied(format!("{name}: this user may not read and write there: {error}"))
        }
        Some(libc::ENOSPC | libc::EDQUOT) => Error::Away(format!("{name}: the remote has no room: {error}")),
        _ => Error::Away(format!("{name}: {error}")),
    }
}

impl Place for Directory {
    fn put(&self, name: &str, body: &(dyn ReadAt + Sync), len: u64, pace: &Pacer) -> Result<()> {
        let path = self.path(name);
        let above = path.parent().unwrap_or(&self.root);
        let part = above.join(format!("{UNFINISHED}{}", Id::random()?));
        let mut buf = vec![0; PIECE.min(len as usize)];
        let mut write = || -> Result<()> {
            // A file system that is not mounted any more: the bytes must not go to the disk below it.
            if !self.root.is_dir() {
                return Err(Error::Away(format!("{} is missing", self.root.display())));
            }
            fs::create_dir_all(above).map_err(|error| told(error, name))?;
            let mut file = File::create_new(&part).map_err(|error| told(error, name))?;
            let mut at = 0;
            while at < len {
                let count = buf.len().min((len - at) as usize);
                body.read_exact_at(&mut buf[..count], at)?;
                pace(count as u64)?;
                file.write_all(&buf[..count]).map_err(|error| told(error, name))?;
                at += count as u64;
            }
            let publish = || -> io::Result<()> {
                file.sync_all()?;
                fs::rename(&part, &path)?;
                // New directories need their own names to be durable too.
                for directory in above.ancestors().take_while(|directory| directory.starts_with(&self.root)) {
                    File::open(directory)?.sync_all()?;
                }
                Ok(())
            };
            publish().map_err(|error| told(error, name))
        };
        write().inspect_err(|_| {
            let _ = fs::remove_file(&part);
        })
    }

    fn get(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let path = self.path(name);
        let open = || match File::open(&path) {
            // A client may remember that the name was missing; listing its directory makes it look again.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let _ = path.parent().map(fs::read_dir);
                File::open(&path)
            }
            file => file,
        };
        let read = || -> io::Result<Vec<u8>> {
            let file = open()?;
            let end = file.metadata()?.len().min(range.end);
            let mut bytes = vec![0; end.saturating_sub(range.start) as usize];
            ReadAt::read_exact_at(&file, &mut bytes, range.start)?;
            Ok(bytes)
        };
        read().map_err(|error| told(error, name))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Listed>> {
        let mut found = Vec::new();
        self.walk(prefix, &mut found).map_err(|error| told(error, prefix))?;
        Ok(found)
    }

    fn folders(&self, prefix: &str) -> Result<Vec<String>> {
        let read = || -> io::Result<Vec<String>> {
            let entries = match fs::read_dir(self.path(prefix)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                entries => entries?,
            };
            let mut names = Vec::new();
            for entry in entries {
                let entry = entry?;
                names.extend(entry.file_type()?.is_dir().then(|| entry.file_name().to_string_lossy().into_owned()));
            }
            Ok(names)
        };
        read().map_err(|error| told(error, prefix))
    }

    fn delete(&self, name: &str) -> Result<()> {
        match fs::remove_file(self.path(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(told(error, name)),
            _ => Ok(()),
        }
    }

    fn sweep(&self, prefix: &str) -> Result<()> {
        self.sweep_below(&self.path(prefix)).map_err(|error| told(error, prefix))
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::super::place::put_bytes;
    use super::*;

    #[test]
    fn what_a_killed_put_left_goes_once_it_is_old() {
        let temp = tempfile::tempdir().unwrap();
        let remote = Directory::open(temp.path()).unwrap();
        put_bytes(&remote, "nodes/a/objects/x", vec![1]).unwrap();
        let (old, young) = (remote.path("nodes/a/objects/.part-1"), remote.path("nodes/a/objects/.part-2"));
        fs::write(&young, [2]).unwrap();
        File::create(&old).unwrap().set_modified(SystemTime::now() - 2 * ABANDONED_AFTER).unwrap();
        remote.sweep("nodes/a/").unwrap();
        assert!(!old.exists() && young.exists());
        assert_eq!(remote.list("nodes/").unwrap().len(), 1);
        remote.sweep("nodes/b/").unwrap();
    }
}
