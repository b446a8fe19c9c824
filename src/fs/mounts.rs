//! Finds mounts, and takes them down.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use super::error::MountError;

/// Type of the mount in `/proc/self/mountinfo`.
const KIND: &str = "fuse.stepfs";

/// Most programs to name when a mount is busy; enough to find the culprit.
const HOLDERS_MOST: usize = 8;

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounted {
    /// `major:minor`.
    pub(super) device: String,
    point: PathBuf,
    kind: String,
    /// The store of a stepfs, as its daemon names it.
    source: PathBuf,
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
    let device = String::from_utf8(fields.nth(2)?.to_vec()).ok()?;
    let point = PathBuf::from(unescape(fields.nth(1)?));
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let kind = String::from_utf8(fields.next()?.to_vec()).ok()?;
    Some(Mounted { device, point, kind, source: PathBuf::from(unescape(fields.next()?)) })
}

/// The topmost mount at `point` (absolute), of any kind.
fn top(point: &Path) -> io::Result<Option<Mounted>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(table.split(|&byte| byte == b'\n').filter_map(parse).rfind(|mounted| mounted.point == point))
}

/// The mount at `point` (absolute), if it is of stepfs.
pub(super) fn find(point: &Path) -> io::Result<Option<Mounted>> {
    Ok(top(point)?.filter(|mounted| mounted.kind == KIND))
}

/// Whether process `daemon` sees a mount of `store`. A daemon that holds a store without a mount is about to end.
/// `None` if we may not look.
pub fn is_served(store: &Path, daemon: u32) -> Option<bool> {
    let process = PathBuf::from(format!("/proc/{daemon}"));
    let table = std::fs::read(process.join("mountinfo")).ok()?;
    // By number: the daemon may know the store by another path than we do.
    let number = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let wanted = number(store)?;
    let mut mounts = table.split(|&byte| byte == b'\n').filter_map(parse).filter(|mounted| mounted.kind == KIND);
    Some(mounts.any(|mounted| {
        let inside = mounted.source.strip_prefix("/").unwrap_or(&mounted.source);
        number(&process.join("root").join(inside)) == Some(wanted)
    }))
}

/// Absolute path without links, of a directory that may be a dead mount and then cannot be asked for anything.
pub(super) fn absolute(dir: &Path) -> io::Result<PathBuf> {
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
    let point = absolute(dir).map_err(|error| MountError::Directory(dir.to_path_buf(), error))?;
    let Some(mounted) = find(&point).map_err(MountError::Mount)? else {
        return Err(MountError::NotMounted(dir.to_path_buf()));
    };
    take_down(&point, Detach::IfIdle).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => MountError::Busy(dir.to_path_buf(), holders(&mounted.device).join(", ")),
        _ => MountError::Mount(error),
    })
}

/// Whether `dir` is in a mount whose daemon is gone.
pub fn is_dead(dir: &Path) -> bool {
    // Not by the directory's attributes: the kernel knows those for a second more.
    rustix::fs::statfs(dir).is_err_and(|error| dead(&error.into()))
}

/// The type of the file system that `dir` (absolute, without links) lies on.
pub fn kind_of(dir: &Path) -> Option<String> {
    let table = std::fs::read("/proc/self/mountinfo").ok()?;
    let above = table.split(|&byte| byte == b'\n').filter_map(parse).filter(|mounted| dir.starts_with(&mounted.point));
    // Of several at one point the last is on top.
    above.max_by_key(|mounted| mounted.point.as_os_str().len()).map(|mounted| mounted.kind)
}

/// The root of the stepfs mount that `path` (absolute, without links) lies in.
pub fn mount_of(path: &Path) -> Option<PathBuf> {
    let table = std::fs::read("/proc/self/mountinfo").ok()?;
    let all = table.split(|&byte| byte == b'\n').filter_map(parse);
    let ours = all.filter(|mounted| mounted.kind == KIND && path.starts_with(&mounted.point));
    ours.max_by_key(|mounted| mounted.point.as_os_str().len()).map(|mounted| mounted.point)
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

/// Programs that keep the file system `device` (`major:minor`) busy, as `name (pid)`. As far as we may look.
pub(super) fn holders(device: &str) -> Vec<String> {
    let mut found = Vec::new();
    let Ok(processes) = std::fs::read_dir("/proc") else {
        return found;
    };
    for process in processes.flatten() {
        let name = process.file_name();
        let Some(pid) = name.to_str().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) else {
            continue;
        };
        if pid != std::process::id().to_string() && holds(&process.path(), device) {
            let command = std::fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            found.push(format!("{} ({pid})", command.trim_end()));
            if found.len() == HOLDERS_MOST {
                break;
            }
        }
    }
    found
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
        assert_eq!(mounted.source, Path::new("/my store"));
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
