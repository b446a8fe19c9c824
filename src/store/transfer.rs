//! Imports files into an unmounted store, and exports copies of files.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::durable::{CrashPoint, DeviceFile, parent};
use super::{Store, Stub, beneath, copy_attributes, copy_but_owner};

/// Copies a file to a new path inside the tree; it is durable on return. Calls `progress` with the number of bytes
/// after each write.
///
/// # Errors
/// `AlreadyExists`; device errors. The path then does not exist.
pub fn import_file(store: &Store, from: &Path, to: &Path, progress: impl Fn(u64)) -> io::Result<()> {
    const WRITTEN: CrashPoint = CrashPoint::ImportWritten;
    let (io, target) = (store.io(), store.tree().join(to));
    if fs::symlink_metadata(&target).is_ok() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is one by this name in the store"));
    }
    make_dirs(store, to.parent().unwrap_or(Path::new("")))?;
    let source = File::open(from)?;
    let part = store.tmp().join("import");
    io.remove(&part, WRITTEN)?;
    let file = io.create(&part, WRITTEN)?;
    let copy = || -> io::Result<()> {
        let mut buf = vec![0; 1 << 20];
        let mut at = 0;
        loop {
            let count = source.read_at(&mut buf, at)?;
            if count == 0 {
                break;
            }
            file.write_all_at(&buf[..count], at, WRITTEN)?;
            at += count as u64;
            progress(count as u64);
        }
        // Without root, another user's file becomes the caller's, as with cp.
        let metadata = source.metadata()?;
        copy_attributes(&source, &metadata, &file, WRITTEN)
            .or_else(|_| copy_but_owner(&source, &metadata, &file, WRITTEN))?;
        Stub::disown_if_possible(&file, WRITTEN)?;
        file.sync(WRITTEN)?;
        io.publish(&part, &target, CrashPoint::ImportInPlace)?;
        // Its directories may be as new as the file.
        let above = to.ancestors().skip(2).map(|above| store.tree().join(above));
        above.into_iter().try_for_each(|above| io.sync_dir(&above, CrashPoint::ImportInPlace))
    };
    copy().inspect_err(|_| {
        io.discard(&part, WRITTEN);
    })
}

/// Creates a directory of the tree and its missing parents. Never follows symlinks.
fn make_dirs(store: &Store, path: &Path) -> io::Result<()> {
    let tree = store.tree();
    let above: Vec<&Path> = path.ancestors().filter(|above| !above.as_os_str().is_empty()).collect();
    for directory in above.into_iter().rev() {
        if beneath::metadata(&tree, directory).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            store.io().make_dir(&tree.join(directory), 0o777, CrashPoint::ImportWritten)?;
        }
        beneath::open(&tree, directory, libc::O_PATH | libc::O_DIRECTORY)?;
    }
    Ok(())
}

/// Copies a file of the tree to any path, over an existing file, with its attributes as far as permitted. `write` gets
/// an empty file for the bytes. The copy is durable on return; an interrupted export leaves no half file under that
/// name.
///
/// # Errors
/// Those of `write`; device errors. An existing file then stays as it was.
pub fn export_file<E: From<io::Error>>(
    store: &Store,
    path: &Path,
    target: &Path,
    write: impl FnOnce(&DeviceFile) -> Result<(), E>,
) -> Result<(), E> {
    write_beside(store, target, |file| {
        write(file)?;
        let source = beneath::hold(&store.tree(), path)?;
        let metadata = source.metadata()?;
        Ok(copy_attributes(&source, &metadata, file, CrashPoint::ExportWritten)
            .or_else(|_| copy_but_owner(&source, &metadata, file, CrashPoint::ExportWritten))?)
    })
}

/// Writes a file from a store to any path, over an existing file. `write` gets an empty file beside it. It is as
/// durable and as whole as with [`export_file`].
pub fn write_beside<T, E: From<io::Error>>(
    store: &Store,
    target: &Path,
    write: impl FnOnce(&DeviceFile) -> Result<T, E>,
) -> Result<T, E> {
    const WRITTEN: CrashPoint = CrashPoint::ExportWritten;
    let io = store.io();
    io.make_dirs(parent(target), 0o777, WRITTEN)?;
    remove_part(store, target)?;
    let part = part_of(target);
    let copy = || -> Result<T, E> {
        let file = io.create(&part, WRITTEN)?;
        let written = write(&file)?;
        file.sync(WRITTEN)?;
        io.publish(&part, target, CrashPoint::ExportInPlace)?;
        Ok(written)
    };
    copy().inspect_err(|_| {
        let _ = io.remove(&part, WRITTEN);
    })
}

/// The unfinished copy beside `target` while [`export_file`] or [`write_beside`] writes it.
pub fn part_of(target: &Path) -> PathBuf {
    let mut name = target.file_name().unwrap_or_default().to_os_string();
    name.push(".stepfs-export");
    parent(target).join(name)
}

/// Removes the unfinished copy that a killed export left beside `target`.
///
/// # Errors
/// Something of that name is no regular file, so no export made it; device errors.
pub fn remove_part(store: &Store, target: &Path) -> io::Result<()> {
    let part = part_of(target);
    match fs::symlink_metadata(&part) {
        Ok(found) if found.is_file() => store.io().remove(&part, CrashPoint::ExportWritten),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{} is in the way", part.display()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}
