//! Times, extended attributes, locks, notifications, and other questions about a file.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use super::super::sys::{self, Map, Stamp};
use super::super::world::list;
use super::talk::{Talk, opens};

const RW: i32 = libc::O_RDWR | libc::O_CREAT;

pub(super) fn times_are_set(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    t.directory("d", 0o755);
    sys::symlink(Path::new("f"), &t.at("l")).unwrap();
    let stamps = [
        Stamp::At(0, 0),
        Stamp::At(1, 999_999_999),
        Stamp::At(-1, 1),
        Stamp::At(-2_000_000_000, 7),
        Stamp::At(-2_147_483_648, 5),
        Stamp::At(-9_000_000_000, 5),
        Stamp::At(4_000_000_000, 123),
        Stamp::At(14_000_000_000, 1),
        Stamp::At(15_032_385_535, 1),
        Stamp::At(99_000_000_000, 1),
        Stamp::At(i64::MAX, 0),
        Stamp::At(5, 1_000_000_000),
        Stamp::At(5, u32::MAX),
    ];
    for name in ["f", "d", "l"] {
        for stamp in stamps {
            let path = t.at(name);
            let set = sys::utimens(&path, stamp, stamp, libc::AT_SYMLINK_NOFOLLOW);
            t.say(&format!("{name} {stamp:?}"), (set, sys::lstat(&path).map(|stat| (stat.atime, stat.mtime))));
        }
    }
    let path = t.at("f");
    sys::utimens(&path, Stamp::At(5, 5), Stamp::At(6, 6), 0).unwrap();
    let seen = || sys::lstat(&path).map(|stat| ((stat.atime, stat.atime > sys::now() - 1_000_000_000), stat.mtime));
    t.say("one", (sys::utimens(&path, Stamp::Omit, Stamp::At(8, 8), 0), seen()));
    t.say("none", (sys::utimens(&path, Stamp::Omit, Stamp::Omit, 0), seen()));
    t.say("now", (sys::utimens(&path, Stamp::Now, Stamp::Omit, 0), seen().map(|((_, now), mtime)| (now, mtime))));
    t.say("through a link", (sys::utimens(&t.at("l"), Stamp::At(1, 2), Stamp::At(3, 4), 0), seen()));
    t.say(
        "nothing there",
        (
            sys::utimens(&t.at("none"), Stamp::Omit, Stamp::Omit, 0),
            sys::utimens(&t.at("none"), Stamp::Now, Stamp::Now, 0),
        ),
    );
}

/// Which of mtime and ctime an operation moves.
pub(super) fn times_that_move(t: &mut Talk) {
    t.directory("d", 0o755);
    t.directory("e", 0o755);
    t.file("d/f", &[1; 10_000], 0o644);
    let fd = sys::open(&t.at("d/f"), libc::O_RDWR, 0).unwrap();
    let append = sys::open(&t.at("d/f"), libc::O_WRONLY | libc::O_APPEND, 0).unwrap();
    type Deed<'a> = (&'a str, Box<dyn Fn(&Talk) -> sys::Sys<()> + 'a>);
    let deeds: Vec<Deed<'_>> = vec![
        ("write", Box::new(|_| sys::pwrite(&fd, b"x", 0).map(drop))),
        ("write nothing", Box::new(|_| sys::pwrite(&fd, b"", 0).map(drop))),
        ("append", Box::new(|_| sys::write(&append, b"x").map(drop))),
        ("truncate", Box::new(|t| sys::truncate(&t.at("d/f"), 9000))),
        ("truncate to the same", Box::new(|t| sys::truncate(&t.at("d/f"), 9000))),
        ("ftruncate", Box::new(|_| sys::ftruncate(&fd, 9500))),
        ("ftruncate to the same", Box::new(|_| sys::ftruncate(&fd, 9500))),
        ("O_TRUNC", Box::new(|t| opens(&t.at("d/f"), libc::O_WRONLY | libc::O_TRUNC))),
        ("O_TRUNC again", Box::new(|t| opens(&t.at("d/f"), libc::O_WRONLY | libc::O_TRUNC))),
        ("allocate", Box::new(|_| sys::fallocate(&fd, 0, 0, 20_000))),
        ("punch", Box::new(|_| sys::fallocate(&fd, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 0, 4096))),
        ("chmod", Box::new(|t| sys::chmod(&t.at("d/f"), 0o640))),
        ("chmod to the same", Box::new(|t| sys::chmod(&t.at("d/f"), 0o640))),
        ("chown", Box::new(|t| sys::lchown(&t.at("d/f"), 1, 1))),
        ("chown to nobody", Box::new(|t| sys::lchown(&t.at("d/f"), u32::MAX, u32::MAX))),
        ("setxattr", Box::new(|t| sys::setxattr(&t.at("d/f"), "user.a", b"1", 0))),
        ("removexattr", Box::new(|t| sys::removexattr(&t.at("d/f"), "user.a"))),
        ("getxattr", Box::new(|t| sys::getxattr(&t.at("d/f"), "user.a").map(drop))),
        ("link", Box::new(|t| sys::link(&t.at("d/f"), &t.at("e/g")))),
        ("link gone", Box::new(|t| sys::unlink(&t.at("e/g")))),
        ("rename", Box::new(|t| sys::rename(&t.at("d/f"), &t.at("d/g"), 0))),
        ("rename away", Box::new(|t| sys::rename(&t.at("d/g"), &t.at("e/f"), 0))),
        ("rename back", Box::new(|t| sys::rename(&t.at("e/f"), &t.at("d/f"), 0))),
        ("read", Box::new(|_| sys::pread(&fd, 10, 0).map(drop))),
        ("open", Box::new(|t| opens(&t.at("d/f"), libc::O_RDWR))),
        ("list", Box::new(|t| list(&t.at("d")).map(drop))),
        ("new file", Box::new(|t| opens(&t.at("d/n"), libc::O_CREAT | libc::O_WRONLY))),
        ("old file", Box::new(|t| opens(&t.at("d/n"), libc::O_CREAT | libc::O_WRONLY))),
        ("mkdir", Box::new(|t| sys::mkdir(&t.at("d/s"), 0o755))),
        ("mkdir again", Box::new(|t| sys::mkdir(&t.at("d/s"), 0o755))),
        ("below", Box::new(|t| sys::mkdir(&t.at("d/s/x"), 0o755))),
        ("rename over", Box::new(|t| sys::rename(&t.at("d/n"), &t.at("d/f"), 0))),
        (
            "mapped",
            Box::new(|_| {
                let map = Map::new(&fd, 100, true)?;
                map.store(0, b"x");
                map.sync()
            }),
        ),
        ("fsync", Box::new(|_| sys::fsync(&fd, false))),
    ];
    for (what, deed) in &deeds {
        let look = |t: &Talk| {
            let times = |metadata: fs::Metadata| {
                let at = |seconds, part| i128::from(seconds) * 1_000_000_000 + i128::from(part);
                (at(metadata.mtime(), metadata.mtime_nsec()), at(metadata.ctime(), metadata.ctime_nsec()))
            };
            let of = |name: &str| fs::symlink_metadata(t.at(name)).ok().map(times);
            let open = File::from(fd.try_clone().unwrap()).metadata().map(times).unwrap();
            [Some(open), of("d"), of("e")]
        };
        let before = look(t);
        std::thread::sleep(Duration::from_millis(12));
        let done = deed(t);
        let after = look(t);
        let moved: Vec<String> = ["file", "d", "e"]
            .iter()
            .zip(before.iter().zip(&after))
            .filter_map(|(name, (a, b))| {
                let ((am, ac), (bm, bc)) = ((*a)?, (*b)?);
                (am != bm || ac != bc)
                    .then(|| format!("{name}{}{}", if am != bm { " m" } else { "" }, if ac != bc { " c" } else { "" }))
            })
            .collect();
        t.say(what, (done, moved));
    }
}

/// As with relatime: the first read after a write moves it, the second does not.
pub(super) fn access_times(t: &mut Talk) {
    t.file("f", b"bytes", 0o644);
    sys::utimens(&t.at("f"), Stamp::At(5, 5), Stamp::At(6, 6), 0).unwrap();
    let seen = |t: &Talk| {
        let time = statx(&t.at("f"), libc::STATX_ATIME).unwrap().stx_atime;
        (time.tv_sec, time.tv_nsec)
    };
    let read = |t: &Talk, flags| {
        let before = seen(t);
        std::thread::sleep(Duration::from_millis(30));
        let fd = sys::open(&t.at("f"), flags, 0).unwrap();
        sys::read(&fd, 5).unwrap();
        drop(fd);
        std::thread::sleep(Duration::from_millis(30));
        seen(t) != before
    };
    let aside = read(t, libc::O_NOATIME);
    let first = read(t, 0);
    let second = read(t, 0);
    t.say("moved by O_NOATIME, by a read, and by the next", (aside, first, second));
}

fn statx(path: &Path, mask: u32) -> sys::Sys<libc::statx> {
    let name = sys::c(path);
    let mut found = std::mem::MaybeUninit::<libc::statx>::zeroed();
    // Not the kernel's cached answer.
    let flags = libc::AT_SYMLINK_NOFOLLOW | libc::AT_STATX_FORCE_SYNC;
    // SAFETY: the path ends with NUL, the answer is a writable statx; zeroed is a valid one.
    unsafe {
        sys::done(libc::statx(libc::AT_FDCWD, name.as_ptr(), flags, mask, found.as_mut_ptr()))?;
        Ok(found.assume_init())
    }
}

pub(super) fn attributes_of_all_kinds(t: &mut Talk) {
    t.file("f", &[7; 10_000], 0o644);
    sys::symlink(Path::new("f"), &t.at("l")).unwrap();
    t.directory("d", 0o755);
    for name in ["f", "l", "d"] {
        let found = statx(&t.at(name), libc::STATX_BASIC_STATS).unwrap();
        t.say(
            name,
            (
                found.stx_mode,
                found.stx_nlink,
                found.stx_size,
                found.stx_blksize,
                found.stx_mask & libc::STATX_BASIC_STATS,
            ),
        );
    }
    let fd = sys::open(&t.at("f"), 0, 0).unwrap();
    sys::fsync(&fd, false).unwrap();
    t.say("blocks", statx(&t.at("f"), libc::STATX_BLOCKS).map(|found| found.stx_blocks));
    let mut space = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    let name = sys::c(&t.dir);
    // SAFETY: the path ends with NUL, the answer is a writable statfs; zeroed is a valid one.
    let space = unsafe {
        sys::done(libc::statfs(name.as_ptr(), space.as_mut_ptr())).unwrap();
        space.assume_init()
    };
    t.say("statfs", (space.f_bsize, space.f_blocks, space.f_namelen, space.f_files, space.f_frsize));
}

pub(super) fn the_time_of_birth(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    t.say("shown", statx(&t.at("f"), libc::STATX_BTIME).map(|found| found.stx_mask & libc::STATX_BTIME != 0));
}

pub(super) fn extended_attributes(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    t.directory("d", 0o755);
    sys::symlink(Path::new("f"), &t.at("l")).unwrap();
    let long = format!("user.{}", "n".repeat(250));
    let longer = format!("user.{}", "n".repeat(251));
    for name in ["user.a", "trusted.a", "security.a", "system.a", "other.a", "user", "user.", "a", "", &long, &longer] {
        for file in ["f", "d", "l", "none"] {
            let path = t.at(file);
            t.say(
                &format!("{name:.12} {file}"),
                (
                    sys::setxattr(&path, name, b"v", 0),
                    sys::getxattr(&path, name),
                    sys::listxattr(&path).map(|names| names.len()),
                    sys::removexattr(&path, name),
                ),
            );
        }
    }
    for len in [0, 1, 255, 1000, 3000] {
        let value = vec![b'v'; len];
        t.say(
            &format!("{len} bytes"),
            (
                sys::setxattr(&t.at("f"), "user.v", &value, 0),
                sys::getxattr(&t.at("f"), "user.v").map(|value| value.len()),
            ),
        );
    }
    t.say("too large for anybody", sys::setxattr(&t.at("f"), "user.v", &vec![0; 65_537], 0));
    t.say("too large for the store", sys::setxattr(&t.at("f"), "user.w", &vec![0; 65_536], 0));
    let flags = [0, libc::XATTR_CREATE, libc::XATTR_REPLACE, libc::XATTR_CREATE | libc::XATTR_REPLACE, 99];
    for flag in flags {
        t.say(
            &format!("flag {flag}"),
            (
                sys::setxattr(&t.at("f"), "user.v", b"", flag),
                sys::setxattr(&t.at("f"), "user.n", b"", flag),
                sys::removexattr(&t.at("f"), "user.n"),
            ),
        );
    }
    let (path, name) = (sys::c(&t.at("f")), c"user.v");
    let mut little = [0u8; 1];
    sys::setxattr(&t.at("f"), "user.v", b"four", 0).unwrap();
    // SAFETY: both strings end with NUL, the buffer has its length.
    unsafe {
        t.say("no room", sys::count(libc::getxattr(path.as_ptr(), name.as_ptr(), little.as_mut_ptr().cast(), 1)));
        t.say("no room", sys::count(libc::listxattr(path.as_ptr(), little.as_mut_ptr().cast(), 1)));
        t.say(
            "how long",
            (
                libc::getxattr(path.as_ptr(), name.as_ptr(), std::ptr::null_mut(), 0),
                libc::listxattr(path.as_ptr(), std::ptr::null_mut(), 0),
            ),
        );
    }
}

pub(super) fn access_control_lists(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, permissions) in [(1u16, 6u16), (4, 4), (0x20, 4)] {
        list.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
        list.extend(u32::MAX.to_le_bytes());
    }
    t.say("set", sys::setxattr(&t.at("f"), "system.posix_acl_access", &list, 0));
}

/// `FS_IOC_GETFLAGS`, `FS_IOC_FSGETXATTR`, `FS_IOC_GETVERSION`.
pub(super) fn flags_of_files(t: &mut Talk) {
    let fd = sys::open(&t.at("f"), RW, 0o644).unwrap();
    let mut answer = [0u8; 64];
    for (name, request) in [("flags", 0x8008_6601u64), ("xattr", 0x801c_581f), ("version", 0x8008_7601)] {
        // SAFETY: the descriptor is open, the answer has room for each.
        t.say(name, sys::done(unsafe { libc::ioctl(fd.as_raw_fd(), request, answer.as_mut_ptr()) }));
    }
}

pub(super) fn other_requests(t: &mut Talk) {
    let fd = sys::open(&t.at("f"), RW, 0o644).unwrap();
    sys::write(&fd, b"ten bytes!").unwrap();
    sys::lseek(&fd, 3, 0).unwrap();
    let mut answer = 0i64;
    // FIONREAD, FIGETBSZ, TCGETS, and an unknown one.
    for (name, request) in [("left", 0x541bu64), ("block", 2), ("terminal", 0x5401), ("unknown", 0x1234)] {
        // SAFETY: the descriptor is open; a terminal's attributes would be more than that, but it is none.
        let done = sys::done(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut answer) });
        t.say(name, (done, answer));
    }
    // SAFETY: the descriptor is open.
    unsafe {
        t.say("seals", (libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS), sys::last()));
        t.say("pipe", (libc::fcntl(fd.as_raw_fd(), libc::F_GETPIPE_SZ), sys::last()));
        t.say(
            "pathconf",
            (libc::fpathconf(fd.as_raw_fd(), libc::_PC_NAME_MAX), libc::fpathconf(fd.as_raw_fd(), libc::_PC_PATH_MAX)),
        );
    }
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN | libc::POLLOUT, revents: 0 };
    // SAFETY: one element.
    t.say("poll", (unsafe { libc::poll(&raw mut poll, 1, 0) }, poll.revents));
    // SAFETY: plain numbers; the descriptors are open.
    unsafe {
        let watch = libc::epoll_create1(libc::EPOLL_CLOEXEC);
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
        t.say("epoll", sys::done(libc::epoll_ctl(watch, libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event)));
        libc::close(watch);
    }
}

pub(super) fn handles_without_names(t: &mut Talk) {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        rest: [u8; 128],
    }
    t.file("f", b"by handle", 0o644);
    let mut handle = Handle { bytes: 128, kind: 0, rest: [0; 128] };
    let (path, mut mount) = (sys::c(&t.at("f")), 0i32);
    // SAFETY: the path ends with NUL, the handle has the room that it says.
    let named = unsafe {
        libc::syscall(libc::SYS_name_to_handle_at, libc::AT_FDCWD, path.as_ptr(), &raw mut handle, &raw mut mount, 0)
    };
    t.say("name_to_handle_at", sys::done(named as i32));
    let directory = sys::open(&t.dir, 0, 0).unwrap();
    let open = |handle: &mut Handle| {
        // SAFETY: the descriptor is open, the handle was filled before.
        let fd = unsafe { libc::syscall(libc::SYS_open_by_handle_at, directory.as_raw_fd(), &raw mut *handle, 0) };
        sys::done(fd as i32).map(|()| {
            // SAFETY: just opened, and nobody else has it.
            sys::read(&unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd as i32) }, 20)
        })
    };
    t.say("open_by_handle_at", open(&mut handle));
    sys::rename(&t.at("f"), &t.at("g"), 0).unwrap();
    t.say("after a rename", open(&mut handle));
    sys::unlink(&t.at("g")).unwrap();
    // The kernel reports a close later, and knows the file until then.
    let mut last = open(&mut handle);
    for _ in 0..100 {
        if last.is_err() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        last = open(&mut handle);
    }
    t.say("after its end", last);
}

pub(super) fn notifications(t: &mut Talk) {
    // SAFETY: plain numbers.
    let raw = unsafe { libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC) };
    // SAFETY: just opened, and nobody else has it.
    let fd = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(raw) };
    let path = sys::c(&t.dir);
    // SAFETY: the path ends with NUL.
    t.say("watched", unsafe { libc::inotify_add_watch(raw, path.as_ptr(), libc::IN_ALL_EVENTS) } > 0);
    fs::write(t.at("f"), "x").unwrap();
    fs::read(t.at("f")).unwrap();
    sys::chmod(&t.at("f"), 0o600).unwrap();
    sys::link(&t.at("f"), &t.at("g")).unwrap();
    sys::rename(&t.at("f"), &t.at("h"), 0).unwrap();
    sys::truncate(&t.at("h"), 0).unwrap();
    sys::mkdir(&t.at("d"), 0o755).unwrap();
    sys::rename(&t.at("d"), &t.at("e"), 0).unwrap();
    sys::unlink(&t.at("h")).unwrap();
    sys::rmdir(&t.at("e")).unwrap();
    let bytes = sys::read(&fd, 10_000).unwrap();
    let mut events = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let number = |from: usize| u32::from_le_bytes(bytes[from..from + 4].try_into().unwrap());
        let (mask, len) = (number(at + 4), number(at + 12) as usize);
        let name = String::from_utf8_lossy(&bytes[at + 16..at + 16 + len]).trim_end_matches('\0').to_string();
        events.push(format!("{mask:x} {name}"));
        at += 16 + len;
    }
    t.say("events", events);
}

fn lock(fd: &OwnedFd, command: i32, kind: i32, start: i64, len: i64) -> sys::Sys<i32> {
    // SAFETY: all zeros are a valid flock.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    (range.l_type, range.l_whence, range.l_start, range.l_len) = (kind as i16, libc::SEEK_SET as i16, start, len);
    // SAFETY: the descriptor is open, the range outlives the call.
    sys::done(unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut range) })?;
    Ok(range.l_type.into())
}

pub(super) fn locks(t: &mut Talk) {
    let fd = sys::open(&t.at("f"), RW, 0o644).unwrap();
    let other = sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap();
    let (set, get, write, read, un) = (libc::F_SETLK, libc::F_GETLK, libc::F_WRLCK, libc::F_RDLCK, libc::F_UNLCK);
    t.say("own", (lock(&fd, set, write, 0, 100), lock(&other, set, write, 50, 100), lock(&fd, set, un, 20, 10)));
    t.forked(|t| {
        let fd = sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap();
        t.say(
            "theirs",
            (
                lock(&fd, get, write, 0, 5),
                lock(&fd, set, read, 0, 5),
                lock(&fd, set, write, 22, 3),
                lock(&fd, get, read, 500, 0),
            ),
        );
    });
    drop(other);
    t.forked(|t| {
        let fd = sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap();
        t.say("any close gives all back", lock(&fd, set, write, 0, 0));
    });
    let only_reads = sys::open(&t.at("f"), 0, 0).unwrap();
    t.say(
        "not for writing",
        (lock(&only_reads, set, write, 0, 0), lock(&only_reads, set, read, 0, 0), lock(&only_reads, set, un, 0, 0)),
    );
    let other = sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap();
    let set = libc::F_OFD_SETLK;
    t.say(
        "of the handle",
        (
            lock(&fd, set, write, 0, 10),
            lock(&other, set, read, 5, 10),
            lock(&other, set, write, 10, 10),
            lock(&other, libc::F_OFD_GETLK, read, 0, 5),
        ),
    );
    t.say(
        "whole files",
        (
            sys::flock(&fd, libc::LOCK_EX | libc::LOCK_NB),
            sys::flock(&other, libc::LOCK_SH | libc::LOCK_NB),
            sys::flock(&fd, libc::LOCK_SH),
            sys::flock(&other, libc::LOCK_SH | libc::LOCK_NB),
        ),
    );
    drop(fd);
    t.say("the other's is gone", (lock(&other, set, write, 0, 10), sys::flock(&other, libc::LOCK_EX | libc::LOCK_NB)));
    let directory = sys::open(&t.dir, 0, 0).unwrap();
    t.say("a directory", sys::flock(&directory, libc::LOCK_EX | libc::LOCK_NB));
}

pub(super) fn leases(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    let fd = sys::open(&t.at("f"), 0, 0).unwrap();
    let lease = |fd: &OwnedFd, kind: i32| {
        // SAFETY: the descriptor is open.
        sys::done(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, kind) })
    };
    // SAFETY: the descriptor is open.
    t.say(
        "read",
        (
            lease(&fd, libc::F_RDLCK),
            unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETLEASE) },
            lease(&fd, libc::F_UNLCK),
        ),
    );
    let writer = sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap();
    t.say("with a writer", lease(&fd, libc::F_RDLCK));
    drop(fd);
    t.say("write", (lease(&writer, libc::F_WRLCK), lease(&writer, libc::F_UNLCK)));
    // SAFETY: the descriptor is open.
    let directory = sys::open(&t.dir, 0, 0).unwrap();
    // SAFETY: the descriptor is open.
    // DN_CREATE.
    t.say("a directory is watched", sys::done(unsafe { libc::fcntl(directory.as_raw_fd(), libc::F_NOTIFY, 4) }));
}

pub(super) fn holes(t: &mut Talk) {
    let fd = sys::open(&t.at("f"), RW, 0o644).unwrap();
    sys::ftruncate(&fd, 1 << 20).unwrap();
    sys::pwrite(&fd, &[1; 8192], 256 << 10).unwrap();
    sys::fsync(&fd, false).unwrap();
    let seek = |at: i64, whence| sys::lseek(&fd, at, whence);
    for at in [0, 5000, 256 << 10, (256 << 10) + 8191, (256 << 10) + 8192, (1 << 20) - 1, 1 << 20, -1] {
        t.say(&format!("from {at}"), (seek(at, libc::SEEK_DATA), seek(at, libc::SEEK_HOLE)));
    }
}
