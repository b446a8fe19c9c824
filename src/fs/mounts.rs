//! Finds mounts, and takes them down.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, UnmountFlags, fsconfig_create, fsmount, fsopen};

use super::error::MountError;
use super::sys;

/// Type of the mount in `/proc/self/mountinfo`.
const KIND: &str = "fuse.stepfs";

/// Most programs to name when a mount is busy; enough to find the culprit.
const HOLDERS_MOST: usize = 8;

/// How long an unmount waits for a user that is gone before /proc shows it: `df` or `stepfs status` in a lookup, or a file
/// that is just being closed. A person hardly notices it.
const GLANCE: Duration = Duration::from_secs(1);

/// A mount, as a line of `/proc/PID/mountinfo` describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// No other mount has it, in whatever namespace.
    id: u64,
    /// `major:minor`.
    device: String,
    /// Where it is mounted.
    pub point: PathBuf,
    kind: String,
    /// The store of a stepfs, as its daemon names it.
    pub store: PathBuf,
    /// The user of the daemon.
    user: Option<u32>,
    /// The kernel lets other users in, root among them.
    admits_others: bool,
}

/// Why the daemon of a mount does not answer a question about its store.
#[derive(Debug, thiserror::Error)]
pub enum Unanswered {
    /// Nobody but the daemon's user may enter.
    #[error(
        "the mount {0} belongs to {1}, and no other user may enter it; work as that user, or mount it with --allow-other"
    )]
    Private(PathBuf, String),
    /// Others may enter, but only the daemon's user and root may ask about the whole store.
    #[error("the mount {0} belongs to {1}; only that user and root may ask stepfs about it, but you may use its files")]
    Reserved(PathBuf, String),
    /// The daemon ended without unmounting.
    #[error("the daemon of the mount {0} is gone; start it again: stepfs mount {1} {0}")]
    Dead(PathBuf, PathBuf),
    /// The daemon serves, but its store has gone, or this container has the mount alone.
    #[error(
        "the store of the mount {0} is not at {1}: it was moved or removed, or this container lacks it; bring it there, \
             or `stepfs umount {0}` and mount it from its new place"
    )]
    Moved(PathBuf, PathBuf),
    /// Another error.
    #[error("the mount {0} does not answer: {1}")]
    Other(PathBuf, #[source] io::Error),
}

impl Mounted {
    /// Why the daemon did not answer, after this error.
    pub fn unanswered(self, error: io::Error) -> Unanswered {
        let user = self.user.map_or_else(|| "another user".into(), |user| format!("user {user}"));
        match error.raw_os_error() {
            Some(libc::EACCES) => Unanswered::Private(self.point, user),
            Some(libc::EPERM) => Unanswered::Reserved(self.point, user),
            _ if dead(&error) => Unanswered::Dead(self.point, self.store),
            _ => Unanswered::Other(self.point, error),
        }
    }

    /// The mount at `dir`, or of the store at `dir`. If no mount is left here: one that another namespace has.
    ///
    /// # Errors
    /// There is none.
    pub fn to_unmount(dir: &Path) -> Result<Mounted, MountError> {
        // A place that is missing here may be a mount elsewhere.
        let point = absolute(dir).or_else(|_| std::path::absolute(dir)).map_err(MountError::Mount)?;
        let here = || all().into_iter().rfind(|mounted| mounted.store == point);
        let found = find(&point).map_err(MountError::Mount)?.or_else(here).or_else(|| left_of(&point));
        found.ok_or_else(|| MountError::NotMounted(dir.to_path_buf()))
    }

    /// Takes it down. `force`: also if programs use it, or another namespace has it. They get errors from then on.
    ///
    /// # Errors
    /// Programs use it, or another namespace has it; they are named.
    pub fn unmount(&self, force: bool) -> Result<(), MountError> {
        let how = if force { Detach::Lazily } else { Detach::IfIdle };
        // As long as it is open no other mount gets its device number, by which the connection is aborted.
        let _pinned = force.then(|| sys::open_path(&self.point));
        let taken = match all().contains(self) {
            true => self.once_idle(|| take_down(&self.point, how)),
            false if force => Ok(()),
            false => return Err(self.held()),
        };
        match taken {
            Ok(()) if force => self.abort().map_err(MountError::Abort),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                Err(MountError::Busy(self.point.clone(), self.users_in_words()))
            }
            Err(_) if !self.is_ours() => Err(MountError::Foreign(self.point.clone(), self.user.unwrap_or_default())),
            taken => taken.map_err(MountError::Mount),
        }
    }

    /// Tries again while the mount is busy and nobody is seen to use it, for up to [`GLANCE`].
    fn once_idle(&self, take: impl Fn() -> io::Result<()>) -> io::Result<()> {
        let end = Instant::now() + GLANCE;
        loop {
            match take() {
                Err(error)
                    if error.raw_os_error() == Some(libc::EBUSY) && self.users().is_empty() && Instant::now() < end =>
                {
                    std::thread::sleep(GLANCE / 20);
                }
                taken => return taken,
            }
        }
    }

    /// Whether this user may take it down.
    pub fn is_ours(&self) -> bool {
        rustix::process::geteuid().is_root() || self.is_own()
    }

    /// Whether this user may ask about it. Root may only if the kernel lets root in. In a user namespace the numbers of
    /// users are others than the kernel's.
    pub fn may_be_asked(&self) -> bool {
        self.is_own() || self.is_ours() && (self.admits_others || !super::everywhere())
    }

    fn is_own(&self) -> bool {
        self.user.is_none_or(|user| user == rustix::process::geteuid().as_raw())
    }

    /// The error for a file system that is mounted here no more, but held.
    pub fn held(&self) -> MountError {
        MountError::Held(self.point.clone(), self.held_by().join(", "))
    }

    /// The holders of the file system: other mounts of it, in this or another namespace, as far as we may look.
    pub fn held_by(&self) -> Vec<String> {
        let (mut found, mut seen) = (Vec::new(), HashSet::new());
        let own = Path::new("/proc/self").to_path_buf();
        let processes = std::iter::once((None, own)).chain(processes().map(|(pid, path)| (Some(pid), path)));
        for (pid, process) in processes {
            for mounted in table(&process).unwrap_or_default() {
                if mounted.device != self.device || !seen.insert(mounted.id) || found.len() == HOLDERS_MOST {
                    continue;
                }
                let point = mounted.point.display();
                found.push(match &pid {
                    None => format!("another mount of it at {point}"),
                    Some(pid) => format!("{} in another mount namespace, at {point}", named(pid, &process)),
                });
            }
        }
        found
    }

    /// Ends the connection to the daemon. Programs that use the mount get errors from now on.
    ///
    /// # Errors
    /// We may not.
    pub fn abort(&self) -> io::Result<()> {
        let minor = self.device.split_once(':').map_or("", |(_, minor)| minor);
        let name = format!("{minor}/abort");
        match std::fs::write(Path::new("/sys/fs/fuse/connections").join(&name), "1") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // No service has mounted fusectl. This mount of it has no place in the tree, and ends with its descriptor.
                let opened = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
                fsconfig_create(&opened)?;
                let root = fsmount(&opened, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())?;
                let file = rustix::fs::openat(root, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
                rustix::io::write(file, b"1").map(drop).map_err(io::Error::from)
            }
            written => written,
        }
    }

    /// Name of the block device that the kernel counts its pages by.
    pub(super) fn device(&self) -> &str {
        &self.device
    }
}

/// `\040` and the like are octal bytes.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = tail.get(..3).filter(|digits| byte == b'\\' && digits.iter().all(|d| (b'0'..=b'7').contains(d)));
        match octal {
            Some(digits) => {
                let value = digits.iter().fold(0u32, |value, digit| value * 8 + u32::from(digit - b'0'));
                bytes.push(value as u8);
                rest = &tail[3..];
            }
            None => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    OsString::from_vec(bytes)
}

fn parse(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|&byte| byte == b' ');
    let text = |field: Option<&[u8]>| String::from_utf8(field?.to_vec()).ok();
    let id = text(fields.next())?.parse().ok()?;
    let device = text(fields.nth(1))?;
    let point = PathBuf::from(unescape(fields.nth(1)?));
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let kind = text(fields.next())?;
    let store = PathBuf::from(unescape(fields.next()?));
    let options = text(fields.next()).unwrap_or_default();
    let user = options.split(',').find_map(|option| option.strip_prefix("user_id=")?.parse().ok());
    let admits_others = options.split(',').any(|option| option == "allow_other");
    Some(Mounted { id, device, point, kind, store, user, admits_others })
}

/// The mounts that a process sees; a later one at the same point hides the earlier ones.
fn table(process: &Path) -> io::Result<Vec<Mounted>> {
    let table = std::fs::read(process.join("mountinfo"))?;
    Ok(table.split(|&byte| byte == b'\n').filter_map(parse).collect())
}

fn own_table() -> io::Result<Vec<Mounted>> {
    table(Path::new("/proc/self"))
}

/// The mount at `point` (absolute), if it is of stepfs.
pub fn find(point: &Path) -> io::Result<Option<Mounted>> {
    let top = own_table()?.into_iter().rfind(|mounted| mounted.point == point);
    Ok(top.filter(|mounted| mounted.kind == KIND))
}

/// All mounts of stepfs that this process sees.
pub fn all() -> Vec<Mounted> {
    let seen = own_table().unwrap_or_default();
    seen.into_iter().filter(|mounted| mounted.kind == KIND).collect()
}

/// A mount of stepfs that other namespaces have: of the store at `path`, or at this point.
pub fn left_of(path: &Path) -> Option<Mounted> {
    let is_it = |mounted: &Mounted| mounted.kind == KIND && (mounted.store == path || mounted.point == path);
    processes().find_map(|(_, process)| table(&process).ok()?.into_iter().find(is_it))
}

/// Whether process `daemon` sees a mount of `store`. A daemon that holds a store without a mount is about to end.
/// `None` if we may not look.
pub fn is_served(store: &Path, daemon: u32) -> Option<bool> {
    let process = PathBuf::from(format!("/proc/{daemon}"));
    let table = table(&process).ok()?;
    // By number: the daemon may know the store by another path than we do.
    let number = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let wanted = number(store)?;
    let mut mounts = table.iter().filter(|mounted| mounted.kind == KIND);
    Some(mounts.any(|mounted| {
        let inside = mounted.store.strip_prefix("/").unwrap_or(&mounted.store);
        number(&process.join("root").join(inside)) == Some(wanted)
    }))
}

/// Absolute path without links, of a directory that may be a dead mount and then cannot be asked for anything.
pub fn absolute(dir: &Path) -> io::Result<PathBuf> {
    match dir.canonicalize() {
        Err(error) if dead(&error) => {
            let full = std::path::absolute(dir)?;
            match (full.parent(), full.file_name()) {
                (Some(parent), Some(name)) => Ok(parent.canonicalize()?.join(name)),
                _ => Err(error),
            }
        }
        other => other,
    }
}

/// Whether the error is that of a mount without a daemon.
fn dead(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED))
}

/// How hard to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Detach {
    /// Only if no program uses it.
    IfIdle,
    /// Now. Programs that use it keep it until they are done.
    Lazily,
}

/// Takes down the mount at `point`, with `fusermount3` if we may not ourselves.
pub(super) fn take_down(point: &Path, how: Detach) -> io::Result<()> {
    let lazily = if how == Detach::Lazily { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(point, lazily | UnmountFlags::NOFOLLOW) {
        Err(Errno::PERM) => {
            let lazily = if how == Detach::Lazily { Some("-z") } else { None };
            let output = Command::new("fusermount3").arg("-u").args(lazily).arg("--").arg(point).output()?;
            if output.status.success() {
                return Ok(());
            }
            let said = String::from_utf8_lossy(&output.stderr).trim().to_string();
            if said.contains("busy") {
                Err(io::Error::from_raw_os_error(libc::EBUSY))
            } else {
                Err(io::Error::other(said))
            }
        }
        other => Ok(other?),
    }
}

/// Takes down the mount of stepfs at `dir`.
///
/// # Errors
/// When there is none, or programs use it (they are named).
pub fn unmount(dir: &Path) -> Result<(), MountError> {
    Mounted::to_unmount(dir)?.unmount(false)
}

/// Whether `dir` is in a mount whose daemon is gone.
pub fn is_dead(dir: &Path) -> bool {
    // Not by the directory's attributes: the kernel knows those for a second more.
    rustix::fs::statfs(dir).is_err_and(|error| dead(&error.into()))
}

/// The type of the file system that `dir` (absolute, without links) lies on.
pub fn kind_of(dir: &Path) -> Option<String> {
    over(dir).map(|mounted| mounted.kind)
}

/// The mount that `path` (absolute, without links) lies in.
fn over(path: &Path) -> Option<Mounted> {
    let above = own_table().ok()?.into_iter().filter(|mounted| path.starts_with(&mounted.point));
    // Of several at one point the last is on top.
    above.max_by_key(|mounted| mounted.point.as_os_str().len())
}

/// The stepfs mount that `path` (absolute, without links) lies in.
pub fn mount_of(path: &Path) -> Option<Mounted> {
    let ours = all().into_iter().filter(|mounted| path.starts_with(&mounted.point));
    ours.max_by_key(|mounted| mounted.point.as_os_str().len())
}

/// Takes down the mount that a killed daemon left at `dir`, which answers nothing but ENOTCONN. Returns whether there
/// was one. Leaves live mounts and those of other file systems alone.
///
/// # Errors
/// When there is a dead mount of stepfs and it cannot be taken down.
pub fn clear_dead_mount(dir: &Path) -> Result<bool, MountError> {
    if !is_dead(dir) {
        return Ok(false);
    }
    let point = absolute(dir).map_err(|error| MountError::Directory(dir.to_path_buf(), error))?;
    if find(&point).map_err(MountError::Mount)?.is_none() {
        return Ok(false);
    }
    take_down(&point, Detach::Lazily).map_err(MountError::Mount)?;
    log::info!("cleared the mount that a killed daemon had left at {}", dir.display());
    Ok(true)
}

/// The processes of this machine, with their directories in `/proc`.
fn processes() -> impl Iterator<Item = (String, PathBuf)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let pid = entry.file_name().into_string().ok()?;
        pid.bytes().all(|byte| byte.is_ascii_digit()).then(|| (pid, entry.path()))
    })
}

/// A process for people: `name (pid)`.
fn named(pid: &str, process: &Path) -> String {
    let command = std::fs::read_to_string(process.join("comm")).unwrap_or_default();
    format!("{} ({pid})", command.trim_end())
}

impl Mounted {
    /// Programs that keep the mount busy, and mounts inside it. As far as we may look.
    fn users(&self) -> Vec<String> {
        let own = std::process::id().to_string();
        let busy = processes().filter(|(pid, process)| *pid != own && holds(process, &self.device));
        let inside =
            all().into_iter().filter(|other| other.point != self.point && other.point.starts_with(&self.point));
        let inside = inside.map(|other| format!("a mount at {}", other.point.display()));
        inside.chain(busy.map(|(pid, process)| named(&pid, &process))).take(HOLDERS_MOST).collect()
    }

    /// The users for people.
    pub(super) fn users_in_words(&self) -> String {
        match self.users() {
            none if none.is_empty() && rustix::process::geteuid().is_root() => {
                "something that no process has open, such as a loop device".into()
            }
            none if none.is_empty() => "a program of another user; root can see which".into(),
            users => users.join(", "),
        }
    }
}

/// Compares without asking the file system itself anything that its daemon would have to answer: the daemon may be us.
fn holds(process: &Path, device: &str) -> bool {
    // The mount id of an open file leads to the device, by way of mountinfo.
    let Ok(table) = std::fs::read(process.join("mountinfo")) else {
        return false;
    };
    let mut points = Vec::new();
    let mut ids = Vec::new();
    for line in table.split(|&byte| byte == b'\n') {
        if let Some(mounted) = parse(line).filter(|mounted| mounted.device == device) {
            points.push(mounted.point);
            if let Some(id) = line.split(|&byte| byte == b' ').next() {
                ids.push(String::from_utf8_lossy(id).into_owned());
            }
        }
    }
    let below = |link: &Path| {
        let target = std::fs::read_link(link).unwrap_or_default();
        points.iter().any(|point| target.starts_with(point))
    };
    if below(&process.join("cwd")) || below(&process.join("root")) {
        return true;
    }
    let open = |entry: std::fs::DirEntry| {
        let info = std::fs::read_to_string(entry.path()).unwrap_or_default();
        let id = info.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(str::trim);
        id.is_some_and(|id| ids.iter().any(|known| known == id))
    };
    if std::fs::read_dir(process.join("fdinfo")).is_ok_and(|entries| entries.flatten().any(open)) {
        return true;
    }
    // Mappings name the device, in hexadecimal.
    let Some((major, minor)) = device.split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)))
    else {
        return false;
    };
    let (major, minor): (u32, u32) = (major, minor);
    let wanted = format!(" {major:02x}:{minor:02x} ");
    std::fs::read(process.join("maps")).is_ok_and(|maps| String::from_utf8_lossy(&maps).contains(&wanted))
}

/// Whether a daemon that mounts `point` from the store at `root` would stand in its own way.
pub(super) fn overlap(point: &Path, root: &Path) -> bool {
    root.starts_with(point) || point.starts_with(root)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use super::*;

    #[test]
    fn mountinfo_is_understood() {
        let line =
            b"36 35 0:51 / /mnt/my\\040ckpts rw,nosuid shared:7 master:1 - fuse.stepfs /my\\040store rw,user_id=0";
        let mounted = parse(line).unwrap();
        assert_eq!(mounted.device, "0:51");
        assert_eq!(mounted.point, Path::new("/mnt/my ckpts"));
        assert_eq!(mounted.kind, KIND);
        assert_eq!((mounted.id, mounted.user), (36, Some(0)));
        assert_eq!(mounted.store, Path::new("/my store"));
        assert_eq!(parse(b""), None);
        assert_eq!(parse(b"36 35 0:51 / /mnt rw"), None);
        assert_eq!(unescape(b"a\\134b\\9"), OsStr::new("a\\b\\9"));
    }

    #[test]
    fn a_plain_directory_is_neither_dead_nor_mounted() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!clear_dead_mount(dir.path()).unwrap());
        assert!(matches!(unmount(dir.path()), Err(MountError::NotMounted(_))));
    }
}
