//! A store mounted in this process, with a plain directory beside it to compare with.

#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use stepfs::archive::Archive;
use stepfs::fs::{MountError, MountOptions, serve, unmount};

/// Unmounts when dropped.
pub struct Mounted {
    pub dir: tempfile::TempDir,
    pub archive: Arc<Archive>,
    served: Option<JoinHandle<Result<(), MountError>>>,
}

impl Mounted {
    /// Mounts a new store.
    pub fn new(passthrough: bool) -> Self {
        Self::on(tempfile::tempdir().unwrap(), passthrough)
    }

    /// Mounts a new store in `dir`, which decides the file system it lies on.
    pub fn on(dir: tempfile::TempDir, passthrough: bool) -> Self {
        for name in ["store/tree", "store/tmp", "mnt", "plain"] {
            std::fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        let archive = Arc::new(Archive::sketch(&dir.path().join("store")));
        let options = MountOptions { no_passthrough: !passthrough, signals: false, ..MountOptions::default() };
        let (ready, is_ready) = mpsc::channel();
        let (served, point) = (Arc::clone(&archive), dir.path().join("mnt"));
        let served = std::thread::spawn(move || serve(served, &point, &options, || ready.send(()).unwrap()));
        if is_ready.recv().is_err() {
            panic!("cannot mount: {}", served.join().unwrap().unwrap_err());
        }
        Self { dir, archive, served: Some(served) }
    }

    pub fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    pub fn plain(&self) -> PathBuf {
        self.dir.path().join("plain")
    }

    pub fn tree(&self) -> PathBuf {
        self.dir.path().join("store/tree")
    }

    /// Runs the same on the mount and on a plain directory; both must say the same.
    pub fn same<T: PartialEq + std::fmt::Debug>(&self, run: impl Fn(&Path) -> T) -> T {
        let (mounted, plain) = (run(&self.mnt()), run(&self.plain()));
        assert_eq!(mounted, plain, "on the mount (left) and on a plain directory (right)");
        mounted
    }

    pub fn unmount(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(served) = self.served.take() else {
            return;
        };
        // The release of what a test closed last is on its way.
        for attempt in 0.. {
            match unmount(&self.mnt()) {
                Ok(()) => break,
                Err(MountError::Busy(..)) if attempt < 100 => std::thread::sleep(std::time::Duration::from_millis(20)),
                Err(error) if std::thread::panicking() => {
                    eprintln!("{error}");
                    return;
                }
                Err(error) => panic!("{error}"),
            }
        }
        served.join().unwrap().unwrap();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.end();
    }
}

/// The errno of a failure, 0 of a success.
pub fn errno<T>(result: std::io::Result<T>) -> i32 {
    result.err().map_or(0, |error| error.raw_os_error().unwrap_or(-1))
}
