//! A directory as a mirror (`file://`).
//!
//! It relies on little: a file is written under a name that nobody reads, made durable, and renamed. The mark in the
//! directory shows that its file system is mounted: nothing is read or written without it. Each request looks at the
//! mark and works through one descriptor of the directory, so no bytes go below a mount point.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::manifest::MARK;
use super::place::{Error, Place, Result};
use crate::store::{beneath, modified_ns};

/// Files with this beginning are unfinished. Nobody lists them.
const UNFINISHED: &str = ".part-";
/// Nobody writes to an unfinished file any more that has not changed for so long: clocks of machines differ by less.
const ABANDONED_AFTER: Duration = Duration::from_secs(24 * 3600);

/// Bytes that are read at once: they stay in the processor's cache until they are hashed and written.
const READ: u64 = 1 << 19;

/// The directory.
#[derive(Debug)]
pub(super) struct Directory {
    root: PathBuf,
}

impl Directory {
    pub(super) fn open(root: &Path) -> Directory {
        Directory { root: root.to_path_buf() }
    }

    /// Runs `act` with a path that leads into the directory.
    fn with<T>(&self, name: &str, act: impl FnOnce(&Path) -> io::Result<T>) -> Result<T> {
        let root = File::open(&self.root).map_err(|error| self.told(error, name))?;
        let inside = beneath::by_descriptor(&root);
        if name != MARK && !inside.join(MARK).exists() {
            return Err(Error::Away(format!(
                "{} is no mirror of stepfs, or its file system is not mounted: it has no file {MARK}",
                self.root.display()
            )));
        }
        act(&inside).map_err(|error| self.told(error, name))
    }

    /// Sorts an error of the file system.
    fn told(&self, error: io::Error, name: &str) -> Error {
        let at = self.root.join(name);
        let at = at.display();
        match error.kind() {
            ErrorKind::NotFound => Error::Missing(at.to_string()),
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
                Error::Denied(format!("{at}: this user may not read and write there: {error}"))
            }
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
                Error::Away(format!("{at}: the mirror has no room: {error}"))
            }
            _ => Error::Away(format!("{at}: {error}")),
        }
    }
}

/// `None` of a name that is missing.
fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        result => result.map(Some),
    }
}

fn walk(root: &Path, prefix: &str, all: &mut Vec<(String, i64)>) -> io::Result<()> {
    for entry in found(fs::read_dir(root.join(prefix)))?.into_iter().flatten() {
        let entry = entry?;
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        // It may be deleted since its name was read.
        let Some(metadata) = found(entry.metadata())? else { continue };
        if metadata.is_dir() {
            walk(root, &format!("{name}/"), all)?;
        } else if !entry.file_name().as_encoded_bytes().starts_with(UNFINISHED.as_bytes()) {
            all.push((name, modified_ns(&metadata)));
        } else if metadata.modified()?.elapsed().unwrap_or_default() > ABANDONED_AFTER {
            // A killed put left it. Another process may delete it in this moment.
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

impl Place for Directory {
    fn put(&self, name: &str, bytes: &[u8]) -> Result<()> {
        if name == MARK {
            let made = fs::create_dir(&self.root);
            made.or_else(|error| if self.root.is_dir() { Ok(()) } else { Err(self.told(error, name)) })?;
        }
        self.with(name, |root| {
            let path = root.join(name);
            let above = path.parent().unwrap_or(root);
            fs::create_dir_all(above)?;
            // Others may read a mirror, as far as the user's mask lets them.
            let mode = fs::Permissions::from_mode(0o666);
            let mut file = tempfile::Builder::new().prefix(UNFINISHED).permissions(mode).tempfile_in(above)?;
            file.write_all(bytes)?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            // New directories need their own names to be durable too.
            let mut above = above.ancestors().take_while(|directory| directory.starts_with(root));
            above.try_for_each(|directory| File::open(directory)?.sync_all())
        })
    }

    fn read(&self, name: &str, most: u64, each: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let opened = self.with(name, |root| {
            let path = root.join(name);
            // A client may remember that the name was missing; listing its directory makes it look again.
            let again = || {
                let _ = path.parent().map(fs::read_dir);
                File::open(&path)
            };
            found(File::open(&path))?.map_or_else(again, Ok)
        })?;
        let (mut rest, mut buf) = (opened.take(most), vec![0; most.min(READ) as usize]);
        loop {
            match rest.read(&mut buf).map_err(|error| self.told(error, name))? {
                0 => return Ok(()),
                count => each(&buf[..count])?,
            }
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<(String, i64)>> {
        let mut all = Vec::new();
        self.with(prefix, |root| walk(root, prefix, &mut all))?;
        Ok(all)
    }

    fn delete(&self, name: &str) -> Result<()> {
        self.with(name, |root| found(fs::remove_file(root.join(name))).map(drop))
    }

    fn sync(&self, prefix: &str) -> Result<()> {
        self.with(prefix, |root| found(File::open(root.join(prefix)))?.map_or(Ok(()), |directory| directory.sync_all()))
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::mirror::place::get_all;

    #[test]
    fn what_a_killed_put_left_goes_once_it_is_old() {
        let temp = tempfile::tempdir().unwrap();
        let mirror = Directory::open(&temp.path().join("new"));
        mirror.put(MARK, &[]).unwrap();
        mirror.put("blobs/ab/x", &[1]).unwrap();
        let at = |name: &str| temp.path().join("new/blobs/ab").join(name);
        fs::write(at(".part-2"), [2]).unwrap();
        File::create(at(".part-1")).unwrap().set_modified(SystemTime::now() - 2 * ABANDONED_AFTER).unwrap();
        assert_eq!(mirror.list("blobs/").unwrap().len(), 1);
        assert!(!at(".part-1").exists() && at(".part-2").exists());
        assert_eq!(mirror.list("none/").unwrap(), []);
        ["blobs/ab/", "none/"].into_iter().for_each(|prefix| mirror.sync(prefix).unwrap());
    }

    #[test]
    fn without_its_mark_it_is_away() {
        let temp = tempfile::tempdir().unwrap();
        let mirror = Directory::open(temp.path());
        assert!(matches!(mirror.put("blobs/ab/x", &[1]), Err(Error::Away(_))));
        assert!(matches!(mirror.list("blobs/"), Err(Error::Away(_))));
        assert!(matches!(get_all(&mirror, "x", 1), Err(Error::Away(_))));
        assert!(matches!(get_all(&mirror, MARK, 1), Err(Error::Missing(_))));
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0);
    }
}
