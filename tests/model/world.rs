//! A real directory, on the mount or beside it, and the handles and mappings that a history holds there.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use super::model::BASE;
use super::op::{ALL_SLOTS, MAPS, Mode, Op, PATHS, Slot, TARGETS, XATTRS};
use super::sys::{self, Map, Stat, Sys};

/// The answer of a successful operation.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    Done,
    Number(u64),
    Bytes(Vec<u8>),
    Names(Vec<String>),
    Stat(Stat),
}

impl std::fmt::Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Answer::Done => write!(f, "done"),
            Answer::Number(number) => write!(f, "{number}"),
            Answer::Bytes(bytes) => {
                let shown = &bytes[..bytes.len().min(16)];
                write!(f, "{} bytes {shown:02x?}.. (crc {:08x})", bytes.len(), crc32fast::hash(bytes))
            }
            Answer::Names(names) => write!(f, "{names:?}"),
            Answer::Stat(stat) => write!(f, "{stat:?}"),
        }
    }
}

/// Runs a part that is as in POSIX in both worlds, with the errno if it fails.
pub(crate) type Said = Sys<Answer>;

pub(crate) struct World {
    /// The directory of the history; [`BASE`] in it is where paths begin.
    pub(crate) top: PathBuf,
    pub(crate) handles: [Option<OwnedFd>; ALL_SLOTS],
    maps: [Option<Map>; MAPS],
}

impl World {
    /// A new directory with the model's initial content.
    pub(crate) fn new(top: &Path) -> World {
        for path in [top.to_path_buf(), top.join(BASE), top.join(BASE).join("s"), top.join(BASE).join("t")] {
            sys::mkdir(&path, 0o755).unwrap_or_else(|code| panic!("{}: errno {code}", path.display()));
        }
        World { top: top.to_path_buf(), handles: std::array::from_fn(|_| None), maps: std::array::from_fn(|_| None) }
    }

    pub(crate) fn path(&self, at: u8) -> PathBuf {
        self.top.join(BASE).join(PATHS[usize::from(at)])
    }

    fn handle(&self, slot: Slot) -> Sys<&OwnedFd> {
        self.handles[usize::from(slot)].as_ref().ok_or(libc::EBADF)
    }

    pub(crate) fn close_all(&mut self) {
        self.handles = std::array::from_fn(|_| None);
        self.maps = std::array::from_fn(|_| None);
    }

    /// Does it. `bytes` are written or stored; those of mappings have been cut to the file's length.
    pub(crate) fn apply(&mut self, op: &Op, bytes: &[u8]) -> Said {
        let number = |result: Sys<u64>| result.map(Answer::Number);
        let plain = |result: Sys<()>| result.map(|()| Answer::Done);
        match *op {
            Op::Open(slot, at, flags, mode) => {
                // The old content goes first, as in the model.
                self.handles[usize::from(slot)] = None;
                let opened = sys::open(&self.path(at), flags, mode)?;
                self.handles[usize::from(slot)] = Some(opened);
                Ok(Answer::Done)
            }
            Op::Close(slot) => {
                let handle = self.handles[usize::from(slot)].take().ok_or(libc::EBADF)?;
                plain(sys::close(handle))
            }
            Op::Read(slot, len) => sys::read(self.handle(slot)?, len as usize).map(Answer::Bytes),
            Op::Pread(slot, len, at) => sys::pread(self.handle(slot)?, len as usize, at.into()).map(Answer::Bytes),
            Op::Write(slot, _) => number(sys::write(self.handle(slot)?, bytes)),
            Op::Pwrite(slot, at, _) => number(sys::pwrite(self.handle(slot)?, bytes, at.into())),
            Op::Seek(slot, at, whence) => {
                let handle = self.handle(slot)?;
                let found = sys::lseek(handle, at, whence);
                if whence == libc::SEEK_DATA || whence == libc::SEEK_HOLE {
                    // Each file system may have its own answer; the position should be the same.
                    sys::lseek(handle, 0, libc::SEEK_SET)?;
                }
                found.map(Answer::Number)
            }
            Op::Ftruncate(slot, len) => plain(sys::ftruncate(self.handle(slot)?, len.into())),
            Op::Truncate(at, len) => plain(sys::truncate(&self.path(at), len.into())),
            Op::Fallocate(slot, mode, at, len) => {
                plain(sys::fallocate(self.handle(slot)?, mode, at.into(), len.into()))
            }
            Op::Fsync(slot, data_only) => plain(sys::fsync(self.handle(slot)?, data_only)),
            Op::Fstat(slot) => sys::fstat(self.handle(slot)?).map(Answer::Stat),
            Op::Flock(slot, how) => plain(sys::flock(self.handle(slot)?, how | libc::LOCK_NB)),
            Op::CopyRange(from, at, to, to_at, len) => {
                let (from, to) = (self.handle(from)?, self.handle(to)?);
                // As far as there is something now: within one file it may grow by the copied bytes.
                let most = (sys::fstat(from)?.size as i64 - i64::from(at)).clamp(0, i64::from(len));
                let mut copied = 0;
                loop {
                    let (at, to_at) = (i64::from(at) + copied, i64::from(to_at) + copied);
                    let left = if copied == 0 { i64::from(len) } else { most - copied };
                    copied += sys::copy_file_range(from, at, to, to_at, left as usize)? as i64;
                    if copied >= most {
                        return Ok(Answer::Number(copied as u64));
                    }
                }
            }
            Op::MapRead(slot, at, len) => {
                let (at, len) = (at as usize, len as usize);
                Ok(Answer::Bytes(Map::new(self.handle(slot)?, (at + len).max(1), false)?.load(at, len)))
            }
            Op::MapWrite(slot, at, _) => {
                let map = Map::new(self.handle(slot)?, (at as usize + bytes.len()).max(1), true)?;
                map.store(at as usize, bytes);
                plain(map.sync())
            }
            Op::MapHold(map, slot) => {
                self.maps[usize::from(map)] = None;
                let handle = self.handle(slot)?;
                let len = sys::fstat(handle)?.size as usize;
                let held = Map::new(handle, len, true).or_else(|_| Map::new(handle, len, false))?;
                self.maps[usize::from(map)] = Some(held);
                Ok(Answer::Done)
            }
            Op::MapStore(map, at, _) => {
                self.maps[usize::from(map)].as_ref().ok_or(libc::EBADF)?.store(at as usize, bytes);
                Ok(Answer::Done)
            }
            Op::MapLoad(map, at, len) => {
                let map = self.maps[usize::from(map)].as_ref().ok_or(libc::EBADF)?;
                Ok(Answer::Bytes(map.load(at as usize, len as usize)))
            }
            Op::MapDrop(map) => self.maps[usize::from(map)].take().map(|_| Answer::Done).ok_or(libc::EBADF),
            Op::Rename(from, to, how) => {
                let flags = match how {
                    Mode::Plain => 0,
                    Mode::NoReplace => libc::RENAME_NOREPLACE,
                    Mode::Exchange => libc::RENAME_EXCHANGE,
                };
                plain(sys::rename(&self.path(from), &self.path(to), flags))
            }
            Op::Link(from, to) => plain(sys::link(&self.path(from), &self.path(to))),
            Op::Symlink(target, at) => plain(sys::symlink(Path::new(TARGETS[usize::from(target)]), &self.path(at))),
            Op::Readlink(at) => {
                let target = sys::readlink(&self.path(at))?;
                Ok(Answer::Names(vec![target.to_string_lossy().into_owned()]))
            }
            Op::Unlink(at) => plain(sys::unlink(&self.path(at))),
            Op::Mkdir(at, mode) => plain(sys::mkdir(&self.path(at), mode)),
            Op::Rmdir(at) => plain(sys::rmdir(&self.path(at))),
            Op::Mknod(at, mode) => plain(sys::mknod(&self.path(at), mode)),
            Op::List(at) => list(&self.path(at)).map(Answer::Names),
            Op::Lstat(at) => sys::lstat(&self.path(at)).map(Answer::Stat),
            Op::Chmod(at, mode) => plain(sys::chmod(&self.path(at), mode)),
            Op::Chown(at, uid, gid) => plain(sys::lchown(&self.path(at), uid, gid)),
            Op::Utimens(at, atime, mtime) => {
                plain(sys::utimens(&self.path(at), atime, mtime, libc::AT_SYMLINK_NOFOLLOW))
            }
            Op::SetXattr(at, name, _, flags) => {
                plain(sys::setxattr(&self.path(at), XATTRS[usize::from(name)], bytes, flags))
            }
            Op::GetXattr(at, name) => sys::getxattr(&self.path(at), XATTRS[usize::from(name)]).map(Answer::Bytes),
            Op::ListXattr(at) => sys::listxattr(&self.path(at)).map(Answer::Names),
            Op::RemoveXattr(at, name) => plain(sys::removexattr(&self.path(at), XATTRS[usize::from(name)])),
            Op::Save(..) | Op::Copy(..) => unreachable!("taken apart before"),
            Op::Sync | Op::Release(_) | Op::Recall(_) | Op::Pin(_) | Op::Unpin(_) | Op::Gc | Op::Remount => {
                unreachable!("only the mount has these")
            }
        }
    }
}

/// The content of a directory, sorted, with the type by readdir.
pub(crate) fn list(path: &Path) -> Sys<Vec<String>> {
    let code = |error: std::io::Error| error.raw_os_error().unwrap_or(-1);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(code)? {
        let entry = entry.map_err(code)?;
        let kind = match entry.file_type().map_err(code)? {
            kind if kind.is_dir() => '/',
            kind if kind.is_symlink() => '@',
            kind if kind.is_file() => ' ',
            _ => '=',
        };
        names.push(format!("{}{kind}", entry.file_name().to_string_lossy()));
    }
    names.sort();
    Ok(names)
}
