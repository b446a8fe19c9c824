//! What a `stepfs mount` creates, so that it goes again if the mount fails.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::store::Store;

/// The places that are missing before a mount.
pub(super) struct Created {
    /// The mount point and the directories above it, the deepest first.
    directories: Vec<PathBuf>,
    /// The store, if it is new.
    store: Option<PathBuf>,
}

impl Created {
    /// Call this before anything is created.
    pub(super) fn before(store: &Path, dir: &Path) -> Created {
        let above = dir.ancestors().filter(|above| !above.as_os_str().is_empty());
        Created {
            directories: above.take_while(|above| is_missing(above)).map(Path::to_path_buf).collect(),
            store: is_missing(store).then(|| store.to_path_buf()),
        }
    }

    /// Removes what is still empty. Another program may have come to use it.
    pub(super) fn remove(self) {
        // The daemon or another process may have the store: then it stays.
        if let Some(store) = self.store.filter(|store| store.exists()).and_then(|store| Store::open(&store).ok()) {
            let root = store.root().to_path_buf();
            if let Err(error) = store.remove_if_empty() {
                log::warn!("{}: cannot be removed: {error}", root.display());
            }
        }
        for directory in self.directories {
            if fs::remove_dir(directory).is_err() {
                break;
            }
        }
    }
}

fn is_missing(path: &Path) -> bool {
    fs::symlink_metadata(path).is_err_and(|error| error.kind() == ErrorKind::NotFound)
}
