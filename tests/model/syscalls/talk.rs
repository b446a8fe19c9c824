//! The output of one case, line by line, so that the same case on another directory can be compared.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use super::super::sys::{self, Sys};

/// Lines of one case, in a directory of its own.
pub(super) struct Talk {
    pub(super) dir: PathBuf,
    case: &'static str,
    pub(super) lines: Vec<String>,
}

/// A user who is not root and owns nothing.
pub(super) const STRANGER: u32 = 65_534;
/// A group of [`STRANGER`], on request.
pub(super) const GROUP: u32 = 1234;

impl Talk {
    pub(super) fn new(dir: PathBuf, case: &'static str) -> Talk {
        Talk { dir, case, lines: Vec::new() }
    }

    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Prints the outcome of an operation. Values that differ between directories (numbers, times) have no place here.
    pub(super) fn say(&mut self, what: &str, found: impl std::fmt::Debug) {
        self.lines.push(format!("{}: {what}: {found:?}", self.case));
    }

    /// Writes a file, and gives it the stated owner and mode.
    pub(super) fn file(&self, name: &str, bytes: &[u8], mode: u32) -> PathBuf {
        let path = self.at(name);
        std::fs::write(&path, bytes).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        sys::chmod(&path, mode).expect("own file");
        path
    }

    pub(super) fn directory(&self, name: &str, mode: u32) -> PathBuf {
        let path = self.at(name);
        sys::mkdir(&path, 0o700).unwrap_or_else(|code| panic!("{}: errno {code}", path.display()));
        sys::chmod(&path, mode).expect("own directory");
        path
    }

    /// Runs it in a process of its own; returns its exit code, or minus the signal that ended it.
    pub(super) fn forked(&mut self, run: impl FnOnce(&mut Talk)) -> i32 {
        let mut ends = [0; 2];
        // SAFETY: room for two descriptors.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        let [mut from, mut to] = ends.map(|fd| {
            use std::os::fd::FromRawFd;
            // SAFETY: just opened, and nobody else has it.
            unsafe { std::fs::File::from_raw_fd(fd) }
        });
        // SAFETY: the child runs code that needs no other thread, and ends without returning.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            drop(from);
            let before = self.lines.len();
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(self)));
            let text: String = self.lines[before..].iter().map(|line| format!("{line}\n")).collect();
            let _ = to.write_all(text.as_bytes());
            // SAFETY: ends this process without running the parent's code.
            unsafe { libc::_exit(i32::from(ran.is_err())) };
        }
        drop(to);
        let mut text = String::new();
        from.read_to_string(&mut text).expect("text");
        self.lines.extend(text.lines().map(String::from));
        let mut status = 0;
        // SAFETY: our child, and room for its status.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        if libc::WIFSIGNALED(status) { -libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) }
    }

    /// Runs it as [`STRANGER`], in [`GROUP`] or in no other group than their own.
    pub(super) fn stranger(&mut self, in_group: bool, run: impl FnOnce(&mut Talk)) {
        let code = self.forked(|talk| {
            let groups = [GROUP];
            let count = usize::from(in_group);
            // SAFETY: plain numbers; the list has as many elements as said.
            unsafe {
                assert_eq!(libc::setgroups(count, groups.as_ptr()), 0);
                assert_eq!(libc::setresgid(STRANGER, STRANGER, STRANGER), 0);
                assert_eq!(libc::setresuid(STRANGER, STRANGER, STRANGER), 0);
            }
            run(talk);
        });
        assert_eq!(code, 0, "{}", self.case);
    }
}

/// The permission bits, or the errno.
pub(super) fn mode(path: &Path) -> Sys<String> {
    sys::lstat(path).map(|stat| format!("{:o}", stat.mode))
}

/// Owner and group.
pub(super) fn owners(path: &Path) -> Sys<(u32, u32)> {
    sys::lstat(path).map(|stat| (stat.uid, stat.gid))
}

/// Opens and closes.
pub(super) fn opens(path: &Path, flags: i32) -> Sys<()> {
    sys::open(path, flags | libc::O_NONBLOCK, 0o666).map(drop)
}

/// The content of a file.
pub(super) fn content(path: &Path) -> Sys<String> {
    let bytes = std::fs::read(path).map_err(|error| error.raw_os_error().unwrap_or(-1))?;
    match std::str::from_utf8(&bytes) {
        Ok(text) if bytes.len() <= 40 => Ok(text.replace('\0', "0")),
        _ => Ok(format!("{} bytes, crc {:08x}", bytes.len(), crc32fast::hash(&bytes))),
    }
}
