//! Opening, reading, writing, mapping, copying.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::super::judge::pattern;
use super::super::sys::{self, Map};
use super::talk::{Talk, content, mode, opens};

const RW: i32 = libc::O_RDWR | libc::O_CREAT;

pub(super) fn flags_of_open(t: &mut Talk) {
    t.file("f", b"0123456789", 0o644);
    t.directory("d", 0o755);
    let access = [("r", libc::O_RDONLY), ("w", libc::O_WRONLY), ("rw", libc::O_RDWR), ("none", 3)];
    let more = [
        ("plain", 0),
        ("creat", libc::O_CREAT),
        ("creat excl", libc::O_CREAT | libc::O_EXCL),
        ("excl", libc::O_EXCL),
        ("directory", libc::O_DIRECTORY),
        ("creat directory", libc::O_CREAT | libc::O_DIRECTORY),
        ("path", libc::O_PATH),
        ("path directory", libc::O_PATH | libc::O_DIRECTORY),
        ("noatime", libc::O_NOATIME),
        ("async", libc::O_ASYNC),
    ];
    for (how, access) in access {
        for (name, flags) in more {
            for file in ["f", "d", "none"] {
                t.say(&format!("{how} {name} {file}"), opens(&t.at(file), access | flags));
            }
            let _ = sys::unlink(&t.at("none"));
        }
        t.file("f", b"0123456789", 0o644);
        t.say(&format!("{how} trunc"), (opens(&t.at("f"), access | libc::O_TRUNC), content(&t.at("f"))));
        t.file("f", b"0123456789", 0o644);
    }
    let get = |fd: &OwnedFd| {
        // SAFETY: the descriptor is open.
        unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) }
    };
    for flags in [0, libc::O_APPEND, libc::O_SYNC, libc::O_DSYNC, libc::O_NOATIME, libc::O_NONBLOCK] {
        let fd = sys::open(&t.at("f"), libc::O_RDWR | flags, 0).unwrap();
        t.say("flags that stay", (get(&fd), sys::write(&fd, b"x"), sys::lseek(&fd, 0, libc::SEEK_CUR)));
        // SAFETY: the descriptor is open.
        let set = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_APPEND) };
        t.say("appending from now on", (set, get(&fd), sys::write(&fd, b"y"), sys::fstat(&fd).map(|stat| stat.size)));
    }
}

pub(super) fn a_handle_that_only_refers(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    let fd = sys::open(&t.at("f"), libc::O_PATH, 0).unwrap();
    t.say("bytes", (sys::read(&fd, 1), sys::write(&fd, b"y"), sys::ftruncate(&fd, 0), sys::fsync(&fd, false)));
    t.say("stat", (sys::fstat(&fd).map(|stat| (stat.size, stat.nlink)), sys::flock(&fd, libc::LOCK_SH)));
    // SAFETY: the descriptor is open.
    t.say("chmod", sys::done(unsafe { libc::fchmod(fd.as_raw_fd(), 0o600) }));
    sys::rename(&t.at("f"), &t.at("g"), 0).unwrap();
    sys::unlink(&t.at("g")).unwrap();
    t.say("opened again without a name", content(Path::new(&format!("/proc/self/fd/{}", fd.as_raw_fd()))));
    let directory = sys::open(&t.dir, libc::O_PATH | libc::O_DIRECTORY, 0).unwrap();
    // SAFETY: the descriptor is open, the name ends with NUL.
    let made = unsafe { libc::openat(directory.as_raw_fd(), c"n".as_ptr(), RW | libc::O_CLOEXEC, 0o640) };
    t.say("a directory to begin from", (made >= 0, mode(&t.at("n"))));
}

pub(super) fn a_file_that_never_has_a_name(t: &mut Talk) {
    t.say("O_TMPFILE", sys::open(&t.dir, libc::O_TMPFILE | libc::O_RDWR, 0o600).map(drop));
}

pub(super) fn offsets_beyond_two_gigabytes(t: &mut Talk) {
    let fd = sys::open(&t.at("f"), RW, 0o644).unwrap();
    for at in [1i64 << 31, (1 << 32) + 5, 1 << 40, (1 << 43) - 1] {
        t.say(
            &format!("at {at}"),
            (sys::pwrite(&fd, b"here", at), sys::pread(&fd, 8, at - 2), sys::fstat(&fd).map(|s| s.size)),
        );
    }
    t.say("wrong", (sys::pwrite(&fd, b"x", -1), sys::pread(&fd, 1, -1), sys::pread(&fd, 1, i64::MAX - 1)));
    t.say("too far", (sys::pwrite(&fd, b"x", 1 << 44), sys::pwrite(&fd, b"xy", i64::MAX - 1)));
    t.say("too long", (sys::ftruncate(&fd, -1), sys::ftruncate(&fd, 1 << 45), sys::truncate(&t.at("f"), i64::MAX)));
    t.say("allocated", (sys::fallocate(&fd, 0, 1 << 45, 5), sys::fallocate(&fd, 0, i64::MAX - 5, 100)));
    t.say(
        "places",
        (
            sys::lseek(&fd, -1, 0),
            sys::lseek(&fd, 10, libc::SEEK_END),
            sys::lseek(&fd, i64::MIN, 1),
            sys::lseek(&fd, 0, 99),
        ),
    );
    t.say("shorter again", (sys::ftruncate(&fd, 3), sys::fstat(&fd).map(|stat| stat.size)));
}

pub(super) fn places_beyond_what_a_file_can_be(t: &mut Talk) {
    let fd = sys::open(&t.at("f"), RW, 0o644).unwrap();
    t.say("lseek", (sys::lseek(&fd, 1 << 45, 0), sys::lseek(&fd, i64::MAX, 0)));
}

pub(super) fn the_limit_of_file_sizes(t: &mut Talk) {
    let code = t.forked(|t| {
        let limit = libc::rlimit { rlim_cur: 10_000, rlim_max: 10_000 };
        // SAFETY: a readable rlimit; a signal is ignored.
        unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit), 0);
        }
        let fd = sys::open(&t.at("f"), RW, 0o644).unwrap();
        t.say(
            "up to it",
            (sys::pwrite(&fd, &[1; 9000], 0), sys::pwrite(&fd, &[2; 5000], 9000), sys::fstat(&fd).map(|s| s.size)),
        );
        t.say(
            "beyond",
            (sys::pwrite(&fd, b"x", 10_000), sys::pwrite(&fd, b"x", 20_000), sys::pwrite(&fd, b"", 20_000)),
        );
        t.say("longer", (sys::ftruncate(&fd, 10_000), sys::ftruncate(&fd, 10_001), sys::truncate(&t.at("f"), 20_000)));
        t.say("allocated", (sys::fallocate(&fd, 0, 0, 10_000), sys::fallocate(&fd, 0, 5000, 6000)));
        let append = sys::open(&t.at("f"), libc::O_WRONLY | libc::O_APPEND, 0).unwrap();
        t.say("appended", (sys::write(&append, b"x"), sys::fstat(&fd).map(|stat| stat.size)));
        let from = sys::open(&t.at("f"), 0, 0).unwrap();
        let to = sys::open(&t.at("g"), RW, 0o644).unwrap();
        t.say(
            "copied",
            (sys::copy_file_range(&from, 0, &to, 5000, 9000), sys::copy_file_range(&from, 0, &to, 10_000, 10)),
        );
        // SAFETY: the default again.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_DFL) };
        let _ = sys::pwrite(&fd, b"x", 10_000);
        t.say("not reached", ());
    });
    t.say("by signal", code);
}

pub(super) fn appending_from_two_sides(t: &mut Talk) {
    let flags = RW | libc::O_APPEND;
    let (a, b) = (
        sys::open(&t.at("f"), flags, 0o644).unwrap(),
        sys::open(&t.at("f"), libc::O_WRONLY | libc::O_APPEND, 0).unwrap(),
    );
    for i in 0..4u8 {
        sys::write(&a, &[b'a' + i]).unwrap();
        sys::write(&b, &[b'A' + i]).unwrap();
    }
    t.say("in turn", content(&t.at("f")));
    t.say("at a place", (sys::pwrite(&a, b"!", 2), content(&t.at("f")), sys::lseek(&a, 0, libc::SEEK_CUR)));
    t.say("after a cut", (sys::ftruncate(&a, 2), sys::write(&b, b"z"), content(&t.at("f"))));
    sys::unlink(&t.at("f")).unwrap();
    // Six processes, 300 lines each: no line is lost or torn.
    let path = t.at("lines");
    let children: Vec<_> = (0..6)
        .map(|writer| {
            // SAFETY: the child only makes system calls, and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let fd = sys::open(&path, libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND, 0o644);
                let line = format!("{writer}").repeat(79) + "\n";
                let wrote = fd.is_ok_and(|fd| (0..300).all(|_| sys::write(&fd, line.as_bytes()) == Ok(80)));
                // SAFETY: ends this process.
                unsafe { libc::_exit(i32::from(!wrote)) };
            }
            child
        })
        .collect();
    for child in children {
        let mut status = 0;
        // SAFETY: our child, and room for its status.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        t.say("wrote", status);
    }
    let text = fs::read_to_string(&path).unwrap();
    let whole =
        text.lines().filter(|line| line.len() == 79 && line.bytes().all(|byte| byte == line.as_bytes()[0])).count();
    t.say("at once", (text.len(), whole));
}

pub(super) fn mappings_and_calls_see_each_other(t: &mut Talk) {
    let fd = sys::open(&t.at("f"), RW, 0o644).unwrap();
    sys::pwrite(&fd, &pattern(10_000, 3), 0).unwrap();
    let map = Map::new(&fd, 10_000, true).unwrap();
    sys::pwrite(&fd, b"written", 100).unwrap();
    t.say("what is written is seen", map.load(100, 7));
    map.store(5000, b"stored");
    t.say("what is stored is read", (sys::pread(&fd, 6, 5000), content(&t.at("f"))));
    let other = sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap();
    sys::pwrite(&other, b"elsewhere", 9000).unwrap();
    t.say("through another handle", (map.load(9000, 9), sys::pread(&other, 6, 5000)));
    sys::fallocate(&fd, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 4096, 4096).unwrap();
    t.say("a hole", map.load(5000, 6));
    sys::ftruncate(&fd, 4096).unwrap();
    sys::ftruncate(&fd, 10_000).unwrap();
    t.say("cut and grown", map.load(9000, 9));
    let copied = sys::copy_file_range(&fd, 0, &other, 8192, 1000);
    t.say("copied", (copied, map.load(8192 + 100, 7)));
    drop((fd, other));
    map.store(1, b"later");
    t.say("after the last close", (map.sync(), content(&t.at("f"))));
    drop(map);
    let fd = sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap();
    // SAFETY: a fresh mapping of an open file, checked.
    let private = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        libc::mmap(std::ptr::null_mut(), 4096, protection, libc::MAP_PRIVATE, fd.as_raw_fd(), 0)
    };
    assert_ne!(private, libc::MAP_FAILED);
    // SAFETY: within the mapping, which is taken away after.
    unsafe {
        std::ptr::copy_nonoverlapping(b"mine".as_ptr(), private.cast::<u8>(), 4);
        libc::munmap(private, 4096);
    }
    t.say("private", content(&t.at("f")));
    t.say(
        "may not",
        (
            Map::new(&sys::open(&t.at("f"), libc::O_WRONLY, 0).unwrap(), 10, false).map(drop),
            Map::new(&sys::open(&t.at("f"), libc::O_RDONLY, 0).unwrap(), 10, true).map(drop),
            Map::new(&sys::open(&t.dir, libc::O_RDONLY, 0).unwrap(), 10, false).map(drop),
            Map::new(&sys::open(&t.at("f"), libc::O_RDONLY, 0).unwrap(), 0, false).map(drop),
        ),
    );
    let beyond = t.forked(|t| {
        let fd = sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap();
        let map = Map::new(&fd, 100_000, false).unwrap();
        map.load(90_000, 1);
    });
    t.say("beyond the end", beyond);
}

pub(super) fn direct_io(t: &mut Talk) {
    #[repr(align(4096))]
    struct Aligned([u8; 8192]);
    let mut buffer = Box::new(Aligned([7; 8192]));
    let fd = sys::open(&t.at("f"), RW | libc::O_DIRECT, 0o644).unwrap();
    t.say("aligned", (sys::pwrite(&fd, &buffer.0, 4096), sys::fstat(&fd).map(|stat| stat.size)));
    buffer.0.fill(0);
    // SAFETY: the descriptor is open, the buffer has its length.
    let read = unsafe { libc::pread(fd.as_raw_fd(), buffer.0.as_mut_ptr().cast(), 8192, 4096) };
    t.say("read", (read, buffer.0.iter().all(|byte| *byte == 7), content(&t.at("f"))));
    // SAFETY: as above.
    let end = unsafe { libc::pread(fd.as_raw_fd(), buffer.0.as_mut_ptr().cast(), 8192, 12_288) };
    t.say("at the end", end);
    let cached = sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap();
    sys::pwrite(&cached, b"cached", 4096).unwrap();
    // SAFETY: as above.
    let read = unsafe { libc::pread(fd.as_raw_fd(), buffer.0.as_mut_ptr().cast(), 4096, 4096) };
    t.say("after a write through the cache", (read, &buffer.0[..6] == b"cached"));
}

pub(super) fn direct_io_that_is_not_aligned(t: &mut Talk) {
    let fd = sys::open(&t.at("f"), RW | libc::O_DIRECT, 0o644).unwrap();
    sys::ftruncate(&fd, 8192).unwrap();
    let buffer = vec![1u8; 10_000];
    let odd = buffer[usize::from((buffer.as_ptr() as usize).is_multiple_of(2))..].as_ptr();
    // SAFETY: within the buffer.
    let wrote = unsafe { libc::pwrite(fd.as_raw_fd(), odd.cast(), 1001, 3) };
    t.say("write", sys::count(wrote));
    t.say("read", sys::pread(&fd, 7, 1).map(|bytes| bytes.len()));
}

pub(super) fn fallocate_in_all_its_ways(t: &mut Talk) {
    let ways = [
        ("allocate", 0),
        ("keep", libc::FALLOC_FL_KEEP_SIZE),
        ("punch", libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE),
        ("punch and grow", libc::FALLOC_FL_PUNCH_HOLE),
        ("zero", libc::FALLOC_FL_ZERO_RANGE),
        ("zero and keep", libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE),
        ("unshare", libc::FALLOC_FL_UNSHARE_RANGE),
        ("unknown", 0x4000),
    ];
    for (name, way) in ways {
        for (at, len) in [(0, 10_000), (100, 50), (8000, 30_000), (20_000, 4096), (0, 0), (-1, 5), (5, -1)] {
            t.file("f", &pattern(16_384, 1), 0o644);
            let fd = sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap();
            t.say(&format!("{name} {at} {len}"), (sys::fallocate(&fd, way, at, len), content(&t.at("f"))));
        }
    }
    let only_reads = sys::open(&t.at("f"), 0, 0).unwrap();
    let directory = sys::open(&t.dir, 0, 0).unwrap();
    t.say("not", (sys::fallocate(&only_reads, 0, 0, 5), sys::fallocate(&directory, 0, 0, 5)));
    // SAFETY: the descriptors are open.
    let posix = unsafe {
        (libc::posix_fallocate(only_reads.as_raw_fd(), 0, 5), libc::posix_fadvise(only_reads.as_raw_fd(), 0, 0, 4))
    };
    t.say("posix", posix);
}

pub(super) fn ranges_that_move_others(t: &mut Talk) {
    for (name, way) in [("collapse", libc::FALLOC_FL_COLLAPSE_RANGE), ("insert", libc::FALLOC_FL_INSERT_RANGE)] {
        t.file("f", &pattern(16_384, 1), 0o644);
        let fd = sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap();
        t.say(name, (sys::fallocate(&fd, way, 4096, 4096), content(&t.at("f"))));
    }
}

pub(super) fn copying_in_the_kernel(t: &mut Talk) {
    t.file("a", &pattern(100_000, 5), 0o644);
    let (from, to) = (sys::open(&t.at("a"), 0, 0).unwrap(), sys::open(&t.at("b"), RW, 0o644).unwrap());
    t.say("range", (sys::copy_file_range(&from, 1000, &to, 5, 60_000), content(&t.at("b"))));
    t.say(
        "past the end",
        (sys::copy_file_range(&from, 100_000, &to, 0, 10), sys::copy_file_range(&from, 99_990, &to, 0, 50)),
    );
    t.say("wrong way", (sys::copy_file_range(&to, 0, &from, 0, 10), sys::copy_file_range(&from, -1, &to, 0, 10)));
    t.say("within", (sys::copy_file_range(&to, 0, &to, 100, 200), sys::copy_file_range(&to, 0, &to, 30_000, 200)));
    let directory = sys::open(&t.dir, 0, 0).unwrap();
    t.say(
        "directory",
        (sys::copy_file_range(&directory, 0, &to, 0, 5), sys::copy_file_range(&from, 0, &directory, 0, 5)),
    );
    let append = sys::open(&t.at("b"), libc::O_WRONLY | libc::O_APPEND, 0).unwrap();
    t.say("appending", sys::copy_file_range(&from, 0, &append, 0, 5));
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: just opened, and nobody else has them.
    let [out, into] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let (mut at, null) = (500i64, std::ptr::null_mut());
    // SAFETY: the descriptors are open, the offset outlives the calls.
    unsafe {
        let sent = libc::sendfile(to.as_raw_fd(), from.as_raw_fd(), &raw mut at, 20_000);
        t.say("sendfile", (sent, at, content(&t.at("b"))));
        let sent = libc::sendfile(into.as_raw_fd(), from.as_raw_fd(), null, 3000);
        t.say("sendfile into a pipe", (sent, sys::read(&out, 3000).map(|bytes| crc32fast::hash(&bytes))));
        let spliced = libc::splice(from.as_raw_fd(), &raw mut at, into.as_raw_fd(), null, 4096, 0);
        let mut to_at = 7i64;
        let back = libc::splice(out.as_raw_fd(), null, to.as_raw_fd(), &raw mut to_at, 4096, 0);
        t.say("splice", (spliced, back, content(&t.at("b"))));
        // FICLONE and FIDEDUPERANGE are left to the file systems.
        let clone = libc::ioctl(to.as_raw_fd(), 0x4004_9409, from.as_raw_fd());
        t.say("clone", sys::done(clone));
    }
    t.say("std", fs::copy(t.at("a"), t.at("c")).map_err(|error| error.raw_os_error()));
    t.say("the same", fs::read(t.at("c")).unwrap() == pattern(100_000, 5));
}

pub(super) fn vectors_and_hints(t: &mut Talk) {
    let fd = sys::open(&t.at("f"), RW, 0o644).unwrap();
    let part = |bytes: &'static [u8]| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let parts = [part(b"one"), part(b""), part(b"three")];
    let raw = fd.as_raw_fd();
    // SAFETY: the descriptor is open, each part has its length.
    unsafe {
        t.say("writev", libc::writev(raw, parts.as_ptr(), 3));
        t.say("pwritev2", libc::pwritev2(raw, parts.as_ptr(), 3, 2, libc::RWF_DSYNC));
        t.say("append", (libc::pwritev2(raw, parts.as_ptr(), 1, 0, libc::RWF_APPEND), content(&t.at("f"))));
        t.say("sync_file_range", libc::sync_file_range(raw, 0, 0, libc::SYNC_FILE_RANGE_WRITE));
        t.say("readahead", (libc::readahead(raw, 0, 4096), libc::syncfs(raw), libc::posix_fadvise(raw, 0, 0, 3)));
        t.say("no memory", (libc::write(raw, 8 as *const libc::c_void, 5), sys::last()));
        t.say("no memory", (libc::pread(raw, 8 as *mut libc::c_void, 5, 0), sys::last()));
        t.say("nothing", (libc::write(raw, parts[0].iov_base, 0), libc::read(raw, parts[0].iov_base, 0)));
    }
    let directory = sys::open(&t.dir, 0, 0).unwrap();
    t.say("a directory", (sys::read(&directory, 10), sys::fsync(&directory, false), sys::fsync(&directory, true)));
    let only_writes = sys::open(&t.at("f"), libc::O_WRONLY, 0).unwrap();
    let only_reads = sys::open(&t.at("f"), libc::O_RDONLY, 0).unwrap();
    t.say("wrong way", (sys::read(&only_writes, 5), sys::write(&only_reads, b"x"), sys::ftruncate(&only_reads, 0)));
    t.say("synced", (sys::fsync(&only_writes, false), sys::fsync(&only_reads, false), sys::fsync(&only_reads, true)));
}

pub(super) fn an_open_file_without_a_name(t: &mut Talk) {
    let fd = sys::open(&t.at("f"), RW, 0o644).unwrap();
    sys::write(&fd, b"before").unwrap();
    sys::link(&t.at("f"), &t.at("g")).unwrap();
    sys::unlink(&t.at("f")).unwrap();
    t.say("one left", sys::fstat(&fd).map(|stat| stat.nlink));
    sys::unlink(&t.at("g")).unwrap();
    let raw = fd.as_raw_fd();
    t.say(
        "none",
        (sys::fstat(&fd).map(|stat| (stat.nlink, stat.size)), sys::write(&fd, b" after"), sys::pread(&fd, 20, 0)),
    );
    let value = *b"v";
    // SAFETY: the descriptor is open, names end with NUL, the value has its length.
    unsafe {
        t.say(
            "changed",
            (libc::fchmod(raw, 0o4711), libc::fchown(raw, 3, 4), sys::fstat(&fd).map(|s| (s.mode, s.uid, s.gid))),
        );
        let times = [sys::Stamp::At(5, 6).spec(), sys::Stamp::At(7, 8).spec()];
        t.say("times", (libc::futimens(raw, times.as_ptr()), sys::fstat(&fd).map(|stat| (stat.atime, stat.mtime))));
        let set = libc::fsetxattr(raw, c"user.a".as_ptr(), value.as_ptr().cast(), 1, 0);
        let mut back = [0u8; 10];
        let got = libc::fgetxattr(raw, c"user.a".as_ptr(), back.as_mut_ptr().cast(), 10);
        t.say("attributes", (set, got, back[0], libc::fremovexattr(raw, c"user.a".as_ptr())));
    }
    t.say(
        "length",
        (sys::ftruncate(&fd, 100_000), sys::fstat(&fd).map(|stat| stat.size), sys::fallocate(&fd, 0, 0, 200_000)),
    );
    let again = sys::open(Path::new(&format!("/proc/self/fd/{raw}")), libc::O_RDWR, 0);
    t.say(
        "opened again",
        (again.as_ref().map(|fd| sys::pread(fd, 6, 0)).map_err(|code| *code), sys::fsync(&fd, false)),
    );
    let map = Map::new(&fd, 100, true).unwrap();
    map.store(0, b"MAPPED");
    t.say("mapped", sys::pread(&fd, 8, 0));
    fs::write(t.at("f"), "another").unwrap();
    t.say("another", (content(&t.at("f")), sys::pread(&fd, 6, 0), sys::fstat(&fd).map(|stat| stat.nlink)));
    // The same by a rename over it.
    let (old, new) = (sys::open(&t.at("f"), libc::O_RDWR, 0).unwrap(), t.file("n", b"new", 0o600));
    sys::rename(&new, &t.at("f"), 0).unwrap();
    t.say(
        "renamed over",
        (sys::pread(&old, 20, 0), sys::write(&old, b"X"), content(&t.at("f")), sys::fstat(&old).map(|s| s.nlink)),
    );
}

pub(super) fn programs_are_run(t: &mut Talk) {
    fs::copy("/bin/true", t.at("program")).unwrap();
    fs::set_permissions(t.at("program"), fs::Permissions::from_mode(0o755)).unwrap();
    t.file("script", b"#!/bin/sh\nexit 3\n", 0o755);
    let run = |path: &Path| std::process::Command::new(path).status().map(|s| s.code()).map_err(|e| e.raw_os_error());
    t.say("run", (run(&t.at("program")), run(&t.at("script"))));
    let writer = sys::open(&t.at("program"), libc::O_WRONLY, 0).unwrap();
    t.say("while it is open for writing", run(&t.at("program")));
    drop(writer);
    fs::copy("/bin/sleep", t.at("sleep")).unwrap();
    let mut asleep = std::process::Command::new(t.at("sleep")).arg("30").spawn().unwrap();
    let written = opens(&t.at("sleep"), libc::O_WRONLY);
    let cut = sys::truncate(&t.at("sleep"), 5);
    t.say("while it runs", (written, cut, sys::unlink(&t.at("sleep"))));
    asleep.kill().unwrap();
    asleep.wait().unwrap();
    t.file("plain", b"#!/bin/sh\n", 0o644);
    t.say("may not be run", (run(&t.at("plain")), run(&t.dir)));
    let file = File::open(t.at("script")).unwrap();
    t.say("by descriptor", run(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd()))).is_ok());
}
