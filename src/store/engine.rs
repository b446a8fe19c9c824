//! The file system of a store: whether several daemons may share it, and how names and attributes stay fresh on it.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{AtFlags, Statx, StatxFlags};

use super::{Error, Fingerprint};

const NFS: i64 = 0x6969;
const CEPH: i64 = 0x00C3_6400;
/// `MAX_HANDLE_SZ` (linux/exportfs.h).
const LONGEST_HANDLE: usize = 128;

/// A kind of file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    /// The kernel keeps names, attributes and bytes alike on all nodes.
    Coherent,
    /// NFS caches names and attributes, and gives inode numbers to later files. Before a file takes the name by which this node has
    /// another one open, the client renames that one away. For a moment nothing is there, and after a crash nothing stays there.
    Nfs,
}

impl Engine {
    /// That of the file system with this file or directory.
    pub fn of(at: &Path) -> io::Result<Engine> {
        Ok(if rustix::fs::statfs(at)?.f_type == NFS { Engine::Nfs } else { Engine::Coherent })
    }

    /// Makes sure that the kernel's attributes of a name in a directory are those of the server. Without a name: those of a file, or
    /// the names of a directory.
    pub fn refresh(self, at: &File, name: impl AsRef<OsStr>) -> io::Result<()> {
        if self == Engine::Nfs {
            self.ask(at, name, StatxFlags::BASIC_STATS)?;
        }
        Ok(())
    }

    /// Some attributes of a file or a name, as the server has them. An NFS client writes a file's bytes out before it asks for the
    /// times, and CephFS asks those who write a file for its length.
    pub(super) fn ask(self, at: &File, name: impl AsRef<OsStr>, mask: StatxFlags) -> rustix::io::Result<Statx> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
        let anew = if self == Engine::Nfs { AtFlags::STATX_FORCE_SYNC } else { AtFlags::empty() };
        rustix::fs::statx(at, name.as_ref(), flags | anew, mask)
    }

    /// A file as this kernel knows it, which may be late: CephFS asks those who write a file for its length. `None`: no file, or
    /// on NFS, where a question does not disturb writers on other machines.
    pub(crate) fn glance(self, directory: &File, name: impl AsRef<OsStr>) -> Option<Fingerprint> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_DONT_SYNC;
        let known = || rustix::fs::statx(directory, name.as_ref(), flags, StatxFlags::BASIC_STATS);
        Fingerprint::known(&(self == Engine::Coherent).then(known)?.ok()?)
    }

    /// Whether a directory has only files that were removed while this node has them open: NFS keeps these under names of its
    /// own until they are closed.
    pub fn has_only_removed(self, directory: &Path) -> bool {
        let is_removed =
            |entry: io::Result<fs::DirEntry>| entry.is_ok_and(|entry| Engine::keeps_removed(&entry.file_name()));
        self == Engine::Nfs && fs::read_dir(directory).is_ok_and(|mut entries| entries.all(is_removed))
    }

    /// Whether this is such a name.
    pub(super) fn keeps_removed(name: &OsStr) -> bool {
        name.as_encoded_bytes().starts_with(b".nfs")
    }
}

/// Tells a file from others that get its inode number once it is gone.
pub fn identity(file: &File) -> io::Result<Vec<u32>> {
    // `struct file_handle`: the number of its bytes, their kind, and room for the longest.
    let mut handle = [0; 2 + LONGEST_HANDLE / size_of::<u32>()];
    handle[0] = LONGEST_HANDLE as u32;
    let (at, mut mount) = (handle.as_mut_ptr().cast(), 0);
    // SAFETY: the name is a C string; `handle` is laid out as the kernel wants it and says how much room it has.
    match unsafe { libc::name_to_handle_at(file.as_raw_fd(), c"".as_ptr(), at, &raw mut mount, libc::AT_EMPTY_PATH) } {
        0 => Ok(handle.into_iter().take(2 + (handle[0] as usize).div_ceil(size_of::<u32>())).collect()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Why a store at this place cannot be shared. `None`: it can. Only what was tried is admitted.
///
/// # Errors
/// The file system does not say what it is.
pub fn refusal(at: &Path) -> io::Result<Option<(&'static str, &'static str)>> {
    Ok(refused(rustix::fs::statfs(at)?.f_type, &options(at)?))
}

/// The same of a file system by its number, and its options.
fn refused(number: i64, options: &str) -> Option<(&'static str, &'static str)> {
    const LOCAL_LOCKS: &str = "its locks may hold on one machine only";
    const UNTRIED: &str = "this version was not tried on it";
    Some(match number {
        0xEF53 | 0x5846_5342 => return None,
        NFS if is_tried_nfs(options) => return None,
        NFS => ("NFS of another version or with other options", "only vers=4.2,hard,local_lock=none was tried"),
        // ceph-fuse is a FUSE file system.
        CEPH if !options.contains("recover_session=clean") => return None,
        CEPH => ("CephFS with recover_session=clean", "a machine that was cut off writes again after its locks went"),
        0x0BD0_0BD0 => ("Lustre", UNTRIED),
        0x4750_4653 => ("GPFS", UNTRIED),
        0x1983_0326 => ("BeeGFS", LOCAL_LOCKS),
        0x6573_5546 => (
            "a FUSE file system",
            "ceph-fuse reads stale pages, Gluster has no fence for a machine that was cut off, and JuiceFS has no locks of open \
             file descriptions",
        ),
        0x0102_1994 => ("tmpfs", "it is gone after a restart"),
        _ => ("another file system", UNTRIED),
    })
}

/// Checks that the file system of a store can be shared.
pub(super) fn admit(root: &Path) -> Result<(), Error> {
    let there = root.ancestors().find(|above| above.is_dir()).unwrap_or(Path::new("/"));
    match refusal(there).map_err(Error::io(there))? {
        None => Ok(()),
        Some((engine, why)) => Err(Error::Engine { root: root.to_path_buf(), engine, why }),
    }
}

/// NFS 4.2, whose locks the server keeps.
fn is_tried_nfs(options: &str) -> bool {
    let has = |wanted: &[&str]| options.split(',').any(|option| wanted.contains(&option));
    has(&["vers=4.2"]) && !has(&["local_lock=all", "local_lock=flock", "local_lock=posix", "nolock", "soft"])
}

/// Options of the file system that has this place.
fn options(at: &Path) -> io::Result<String> {
    use std::os::unix::fs::MetadataExt;
    let dev = fs::metadata(at)?.dev();
    let wanted = format!("{}:{}", libc::major(dev), libc::minor(dev));
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let mut found = mounts
        .lines()
        .filter(|line| line.split(' ').nth(2) == Some(&wanted))
        .filter_map(|line| line.rsplit(' ').next());
    Ok(found.next_back().unwrap_or_default().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_glance_tells_all_that_a_look_does() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(&file, "x").unwrap();
        let directory = File::open(file.path().parent().unwrap()).unwrap();
        let glance = |engine: Engine| engine.glance(&directory, file.path().file_name().unwrap());
        assert_eq!(glance(Engine::Coherent), Some(Fingerprint::of(&fs::metadata(&file).unwrap())));
        assert_eq!(glance(Engine::Nfs), None);
        assert_eq!(Engine::Coherent.glance(&directory, "."), None);
    }

    #[test]
    fn options_of_nfs_decide() {
        let options = "rw,vers=4.2,rsize=65536,namlen=255,hard,proto=tcp,sec=sys,local_lock=none,addr=10.0.0.1";
        assert!(is_tried_nfs(options));
        for (good, bad) in
            [("vers=4.2", "vers=4.1"), ("vers=4.2", "vers=3"), ("local_lock=none", "local_lock=all"), ("hard", "soft")]
        {
            assert!(!is_tried_nfs(&options.replace(good, bad)), "{bad}");
        }
    }

    #[test]
    fn file_systems_that_were_not_tried_are_refused() {
        assert!(refusal(Path::new("/dev/shm")).unwrap().is_some_and(|(engine, _)| engine == "tmpfs"));
        assert!(refusal(Path::new("/proc")).unwrap().is_some_and(|(engine, _)| engine == "another file system"));
        let ceph = |options| refused(CEPH, options).map(|(engine, _)| engine);
        assert_eq!(ceph("rw,name=admin,acl,mds_namespace=a"), None);
        assert_eq!(ceph("rw,name=admin,recover_session=clean"), Some("CephFS with recover_session=clean"));
        // As the kernel names ceph-fuse, Gluster and JuiceFS.
        assert!(refused(0x6573_5546, "rw,user_id=0,default_permissions").is_some());
    }
}
