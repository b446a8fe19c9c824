//! A store mounted in this process, with a plain directory beside it to compare with.

#![allow(dead_code, unreachable_pub)]

use std::ffi::CString;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use stepfs::archive::Archive;
use stepfs::fs::{MountError, MountOptions, serve, unmount};
use stepfs::store::Store;
use stepfs::store::durable::Io;

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

    /// Mounts a new store into which other users are let in (root only).
    pub fn shared(passthrough: bool) -> Self {
        Self::shared_on(tempfile::tempdir().unwrap(), passthrough)
    }

    /// The same of the store in `dir`.
    pub fn shared_on(dir: tempfile::TempDir, passthrough: bool) -> Self {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let options = MountOptions { allow_other: true, no_passthrough: !passthrough, ..MountOptions::default() };
        Self::with(dir, &Io::disk(), options)
    }

    /// Mounts a new store in `dir`, on that directory's file system.
    pub fn on(dir: tempfile::TempDir, passthrough: bool) -> Self {
        Self::with_io(dir, &Io::disk(), passthrough)
    }

    /// The same, on the test's device.
    pub fn with_io(dir: tempfile::TempDir, io: &Io, passthrough: bool) -> Self {
        Self::with(dir, io, MountOptions { no_passthrough: !passthrough, ..MountOptions::default() })
    }

    fn with(dir: tempfile::TempDir, io: &Io, options: MountOptions) -> Self {
        for name in ["mnt", "plain"] {
            std::fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        let archive = Archive::open(Store::open_on(io.clone(), &dir.path().join("store")).unwrap()).unwrap();
        // The scripts' mode `helper` names one (scripts/common.sh).
        let helper = std::env::var_os("STEPFS_PASSTHROUGH")
            .map(PathBuf::from)
            .filter(|program| !stepfs::fs::is_admin() && program.exists());
        let helper = helper.map(|program| Arc::new(passthrough::Client::start(&program).unwrap()));
        let options = MountOptions { signals: false, helper, ..options };
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

    /// Runs the same on the mount and on a plain directory; both outputs must be the same.
    pub fn same<T: PartialEq + std::fmt::Debug>(&self, run: impl Fn(&Path) -> T) {
        let (mounted, plain) = (run(&self.mnt()), run(&self.plain()));
        assert_eq!(mounted, plain, "on the mount (left) and on a plain directory (right)");
    }

    /// Unmounts and mounts again: the kernel forgets all that it knew.
    pub fn remounted(self, passthrough: bool) -> Self {
        Self::on(self.unmount_keeping(), passthrough)
    }

    pub fn unmount(self) {
        drop(self.unmount_keeping());
    }

    /// Unmounts and returns the directory with the store, to be mounted again.
    pub fn unmount_keeping(mut self) -> tempfile::TempDir {
        self.end();
        std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap())
    }

    /// Ends the mount although programs use it, as a second signal does. `meanwhile`: after the kernel's answer to them, and
    /// before the daemon's end.
    pub fn cut_off(mut self, meanwhile: impl FnOnce()) {
        stepfs::fs::mount_at(&self.mnt()).unwrap().unwrap().unmount(true).unwrap();
        meanwhile();
        let _ = self.served.take().unwrap().join().unwrap();
    }

    fn end(&mut self) {
        let Some(served) = self.served.take() else {
            return;
        };
        // The release of the file that a test closed last is on its way.
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

/// An extended attribute as text; none if there is none.
pub fn attribute(path: &Path, name: &str) -> Option<String> {
    let (path, name) = (c(path), CString::new(name).unwrap());
    let mut value = vec![0u8; 4096];
    // SAFETY: both strings end with NUL, the buffer has its length.
    let len = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    value.truncate(usize::try_from(len).ok()?);
    String::from_utf8(value).ok()
}

/// The state of a file by stepfs.
pub fn state(path: &Path) -> String {
    attribute(path, "user.stepfs.state").unwrap_or_default()
}

/// Waits until `done`, at most two minutes.
pub fn wait_until(what: &str, done: impl Fn() -> bool) {
    // Long: on a busy machine giving up finds nothing out.
    let began = std::time::Instant::now();
    while began.elapsed() < std::time::Duration::from_secs(120) {
        if done() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("waited in vain until {what}");
}

/// A path for system calls.
pub fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

/// A shared, writable mapping of a whole file.
pub struct Mapping {
    at: *mut libc::c_void,
    len: usize,
}

impl Mapping {
    pub fn new(file: &File) -> Self {
        Self::with(file, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn with(file: &File, protection: libc::c_int) -> Self {
        let len = file.metadata().unwrap().len() as usize;
        // SAFETY: a fresh mapping of an open file; checked below.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Self { at, len }
    }

    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is `len` bytes, as long as its file, and borrowed as long as the slice.
        unsafe { std::slice::from_raw_parts_mut(self.at.cast(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, not used after.
        assert_eq!(unsafe { libc::munmap(self.at, self.len) }, 0);
    }
}

/// A shared mapping of a whole file, to read.
pub struct Reading(Mapping);

impl Reading {
    pub fn new(file: &File) -> Self {
        Self(Mapping::with(file, libc::PROT_READ))
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `len` bytes, as long as its file was, and borrowed as long as the slice.
        unsafe { std::slice::from_raw_parts(self.0.at.cast(), self.0.len) }
    }
}

/// The errno of a failure, 0 of a success.
pub fn errno<T>(result: std::io::Result<T>) -> i32 {
    result.err().map_or(0, |error| error.raw_os_error().unwrap_or(-1))
}
