//! Names, links, renames, special files, directories.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use super::super::sys;
use super::super::world::list;
use super::talk::{Talk, content, opens};

pub(super) fn every_byte_may_be_in_a_name(t: &mut Talk) {
    let name = |bytes: Vec<u8>| PathBuf::from(OsString::from_vec(bytes));
    for byte in (1..=255u8).filter(|byte| *byte != b'/') {
        let made = opens(&t.dir.join(name(vec![b'n', byte, b'x'])), libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY);
        if made.is_err() {
            t.say(&format!("byte {byte}"), made);
        }
    }
    let mut names: Vec<Vec<u8>> =
        fs::read_dir(&t.dir).unwrap().map(|entry| entry.unwrap().file_name().into_vec()).collect();
    names.sort();
    t.say("listed", names);
    for odd in [&b"\xff\xfe"[..], b" ", b"...", b"-rf", b"\n", b"a\\b", b"\xe2\x82", b".fuse_hidden01", b"C:"] {
        let path = t.dir.join(name(odd.to_vec()));
        t.say("made, listed, removed", (sys::mkdir(&path, 0o755), path.exists(), sys::rmdir(&path)));
    }
}

pub(super) fn long_names(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    for len in [254, 255, 256, 300] {
        let (path, other) = (t.at(&"n".repeat(len)), t.at(&"m".repeat(len)));
        let what = format!("{len} bytes");
        t.say(&what, ("mkdir", sys::mkdir(&path, 0o755), sys::rename(&path, &other, 0), sys::rmdir(&other)));
        t.say(&what, ("symlink", sys::symlink(Path::new("f"), &path), sys::readlink(&path), sys::unlink(&path)));
        t.say(&what, ("link", sys::link(&t.at("f"), &path), sys::unlink(&path)));
        t.say(&what, ("mknod", sys::mknod(&path, libc::S_IFIFO | 0o600), sys::unlink(&path)));
        t.say(&what, ("open", opens(&path, libc::O_CREAT | libc::O_RDWR), sys::unlink(&path)));
        t.say(&what, ("look", sys::lstat(&path).map(drop), sys::rmdir(&path), sys::truncate(&path, 0)));
        // In characters of more than one byte.
        let wide = t.at(&"ü".repeat(len / 2));
        t.say(&what, ("wide", opens(&wide, libc::O_CREAT | libc::O_RDWR), sys::unlink(&wide)));
    }
}

pub(super) fn long_paths(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    let base = t.dir.as_os_str().len();
    for len in [4094, 4095, 4096] {
        let fill = len - base - 3;
        let path = t.dir.join(format!("{}{}f", "./".repeat(fill / 2), if fill % 2 == 1 { "/" } else { "" }));
        t.say("path", (len - path.as_os_str().len() <= 2, sys::lstat(&path).map(drop)));
    }
    for len in [1, 59, 60, 4000, 4095] {
        let target = PathBuf::from("t".repeat(len));
        let link = t.at("link");
        let made = sys::symlink(&target, &link);
        t.say(&format!("target of {len}"), (made, sys::readlink(&link) == Ok(target), sys::unlink(&link)));
    }
    t.say("empty", (sys::symlink(Path::new(""), &t.at("l")), sys::mkdir(Path::new(""), 0), opens(Path::new(""), 0)));
    // Deeper than a path can say, step by step.
    let mut here = File::open(&t.dir).unwrap();
    let name = std::ffi::CString::new("d".repeat(200)).unwrap();
    let mut depth = 0;
    let failed = loop {
        // SAFETY: the descriptor is open, the name ends with NUL.
        if let Err(code) = sys::done(unsafe { libc::mkdirat(here.as_raw_fd(), name.as_ptr(), 0o755) }) {
            break Some(code);
        }
        let next = format!("/proc/self/fd/{}/{}", here.as_raw_fd(), name.to_str().unwrap());
        match File::open(&next) {
            Ok(next) => here = next,
            Err(error) => break error.raw_os_error(),
        }
        depth += 1;
        if depth == 30 {
            break None;
        }
    };
    t.say("30 directories with names of 200 bytes", failed);
    drop(here);
}

pub(super) fn dots_and_slashes(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    t.directory("d", 0o755);
    t.directory("e", 0o755);
    sys::symlink(Path::new("d"), &t.at("l")).unwrap();
    for name in [".", "..", "d/.", "d/..", "f/", "d/", "l/", "f/.", "none/", "none/..", "l/.", "d//x", "//f"] {
        let path = PathBuf::from(format!("{}/{name}", t.dir.display()));
        let create = libc::O_CREAT | libc::O_RDWR;
        t.say(name, ("open", opens(&path, 0), opens(&path, create), opens(&path, libc::O_DIRECTORY)));
        t.say(name, ("make", sys::mkdir(&path, 0o755), sys::mknod(&path, libc::S_IFIFO | 0o644)));
        t.say(name, ("links", sys::link(&t.at("f"), &path), sys::symlink(Path::new("f"), &path)));
        t.say(name, ("rename from", sys::rename(&path, &t.at("e/moved"), 0), sys::rename(&t.at("e/moved"), &path, 0)));
        t.say(name, ("rename to", sys::rename(&t.at("f"), &path, 0), sys::rename(&t.at("e"), &path, 0)));
        t.say(name, ("remove", sys::unlink(&path), sys::rmdir(&path)));
        let kind = sys::lstat(&path).map(|stat| stat.mode & libc::S_IFMT);
        t.say(name, (kind, sys::truncate(&path, 1), sys::chmod(&path, 0o755), sys::readlink(&path)));
        let _ = (fs::create_dir(t.at("d")), fs::create_dir(t.at("e")), fs::write(t.at("f"), "x"));
        let _ = sys::symlink(Path::new("d"), &t.at("l"));
        t.say("there is", list(&t.dir));
    }
}

pub(super) fn links_of_both_kinds(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    t.directory("d", 0o755);
    for (link, target) in [("loop", "loop"), ("a", "b"), ("b", "a"), ("gone", "none"), ("to_f", "f"), ("to_d", "d")] {
        t.say("made", sys::symlink(Path::new(target), &t.at(link)));
    }
    for i in 0..45 {
        let target = if i == 0 { "f".into() } else { format!("chain{}", i - 1) };
        sys::symlink(Path::new(&target), &t.at(&format!("chain{i}"))).unwrap();
    }
    for name in ["loop", "a", "gone", "to_f", "to_d", "chain39", "chain40", "chain44"] {
        let path = t.at(name);
        t.say(
            name,
            ("open", opens(&path, 0), opens(&path, libc::O_NOFOLLOW), opens(&path, libc::O_PATH | libc::O_NOFOLLOW)),
        );
        t.say(name, ("new", opens(&path, libc::O_CREAT | libc::O_EXCL), sys::mkdir(&path, 0o755)));
        t.say(name, ("change", sys::truncate(&path, 5), sys::chmod(&path, 0o600), sys::lchown(&path, 1, 1)));
        t.say(name, ("list", list(&path), list(&path.join("x"))));
        t.say(name, ("attribute", sys::setxattr(&path, "user.x", b"1", 0), sys::setxattr(&path, "trusted.x", b"1", 0)));
        t.say(name, ("length", sys::lstat(&path).map(|stat| (stat.size, stat.uid, stat.mode, stat.nlink))));
    }
    t.say("through what leads nowhere", (opens(&t.at("gone"), libc::O_CREAT | libc::O_WRONLY), content(&t.at("none"))));
    t.say("hard links", (sys::link(&t.at("to_f"), &t.at("hard")), sys::link(&t.at("d"), &t.at("hard_d"))));
    t.say("of the link", (sys::readlink(&t.at("hard")), sys::lstat(&t.at("to_f")).map(|stat| stat.nlink)));
    let follow = |from: &str, to: &str, flags| {
        let (from, to) = (sys::c(&t.at(from)), sys::c(&t.at(to)));
        // SAFETY: both paths end with NUL.
        sys::done(unsafe { libc::linkat(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags) })
    };
    let (one, two, three) = (
        follow("to_f", "second", libc::AT_SYMLINK_FOLLOW),
        follow("gone", "third", libc::AT_SYMLINK_FOLLOW),
        follow("f", "f", 0),
    );
    t.say("linkat", (one, two, three, sys::lstat(&t.at("f")).map(|stat| stat.nlink)));
    let unlinked = File::create(t.at("u")).unwrap();
    fs::remove_file(t.at("u")).unwrap();
    let by_fd = PathBuf::from(format!("/proc/self/fd/{}", unlinked.as_raw_fd()));
    let (by_fd, to) = (sys::c(&by_fd), sys::c(&t.at("back")));
    // SAFETY: both paths end with NUL.
    let back =
        unsafe { libc::linkat(libc::AT_FDCWD, by_fd.as_ptr(), libc::AT_FDCWD, to.as_ptr(), libc::AT_SYMLINK_FOLLOW) };
    t.say("a file that was removed gets no name", sys::done(back));
}

pub(super) fn many_hard_links(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    for i in 0..300 {
        sys::link(&t.at("f"), &t.at(&format!("l{i}"))).unwrap();
    }
    fs::write(t.at("l250"), "through one").unwrap();
    t.say("others see it", (content(&t.at("f")), sys::lstat(&t.at("l7")).map(|stat| (stat.nlink, stat.size))));
    for i in 0..299 {
        sys::unlink(&t.at(&format!("l{i}"))).unwrap();
    }
    t.say("two are left", (sys::lstat(&t.at("l299")).map(|stat| stat.nlink), content(&t.at("l299"))));
}

pub(super) fn renames_of_everything_over_everything(t: &mut Talk) {
    let kinds = ["none", "file", "empty", "full", "link", "fifo", "same"];
    let make = |t: &Talk, name: &str, kind: &str| match kind {
        "file" | "same" => drop(t.file(name, name.as_bytes(), 0o644)),
        "empty" => drop(t.directory(name, 0o755)),
        "full" => {
            t.directory(name, 0o755);
            t.file(&format!("{name}/x"), b"x", 0o644);
        }
        "link" => sys::symlink(Path::new("elsewhere"), &t.at(name)).unwrap(),
        "fifo" => sys::mknod(&t.at(name), libc::S_IFIFO | 0o644).unwrap(),
        _ => {}
    };
    let clear = |t: &Talk| {
        for name in ["from", "to"] {
            let path = t.at(name);
            let _ =
                if path.is_dir() && !path.is_symlink() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
        }
    };
    for flags in [0, libc::RENAME_NOREPLACE, libc::RENAME_EXCHANGE, 8, libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE] {
        for from in &kinds[..6] {
            for to in kinds {
                make(t, "from", from);
                match to {
                    "same" => drop(sys::link(&t.at("from"), &t.at("to"))),
                    _ => make(t, "to", to),
                }
                let done = sys::rename(&t.at("from"), &t.at("to"), flags);
                t.say(&format!("{flags} {from} over {to}"), (done, list(&t.dir), list(&t.at("to")).is_ok()));
                clear(t);
            }
        }
    }
    t.directory("up", 0o755);
    t.directory("up/down", 0o755);
    let (up, down) = (t.at("up"), t.at("up/down"));
    t.say("into itself", (sys::rename(&up, &down, 0), sys::rename(&up, &down.join("x"), 0), sys::rename(&up, &up, 0)));
    t.say("over its parent", (sys::rename(&down, &up, 0), sys::rename(&down, &up, libc::RENAME_EXCHANGE)));
    t.say("away", sys::rename(&t.at("up"), Path::new("/proc/x"), 0));
}

pub(super) fn a_whiteout(t: &mut Talk) {
    t.file("f", b"x", 0o644);
    t.say("RENAME_WHITEOUT", sys::rename(&t.at("f"), &t.at("g"), libc::RENAME_WHITEOUT));
}

pub(super) fn directories_in_use(t: &mut Talk) {
    t.directory("d", 0o755);
    let before = std::env::current_dir().unwrap();
    std::env::set_current_dir(t.at("d")).unwrap();
    t.say("renamed", sys::rename(&t.at("d"), &t.at("e"), 0));
    t.say("where", std::env::current_dir().is_ok_and(|dir| dir.ends_with("e")));
    t.say(
        "from within",
        (opens(Path::new("f"), libc::O_CREAT | libc::O_WRONLY), sys::rename(Path::new("f"), Path::new("../g"), 0)),
    );
    t.say("removed", sys::rmdir(&t.at("e")));
    t.say("where", std::env::current_dir().map_err(|error| error.raw_os_error()).map(drop));
    t.say("new", (opens(Path::new("f"), libc::O_CREAT | libc::O_WRONLY), sys::mkdir(Path::new("x"), 0o755)));
    t.say("new", (sys::symlink(Path::new("a"), Path::new("b")), sys::rename(&t.at("g"), Path::new("g"), 0)));
    t.say(
        "look",
        (list(Path::new(".")), sys::lstat(Path::new(".")).map(|stat| stat.nlink), sys::lstat(Path::new("..")).is_ok()),
    );
    std::env::set_current_dir(before).unwrap();
}

pub(super) fn special_files(t: &mut Talk) {
    for (name, kind) in [("fifo", libc::S_IFIFO), ("socket", libc::S_IFSOCK), ("file", libc::S_IFREG), ("zero", 0)] {
        t.say(name, sys::mknod(&t.at(name), kind | 0o644));
    }
    t.say("wrong", (sys::mknod(&t.at("x"), libc::S_IFDIR | 0o644), sys::mknod(&t.at("x"), libc::S_IFLNK | 0o644)));
    t.say("open", (opens(&t.at("fifo"), libc::O_WRONLY), opens(&t.at("socket"), 0), opens(&t.at("fifo"), 0)));
    t.say(
        "attributes",
        (sys::setxattr(&t.at("fifo"), "user.a", b"1", 0), sys::setxattr(&t.at("fifo"), "trusted.a", b"1", 0)),
    );
    // A pipe between two handles.
    let both = sys::open(&t.at("fifo"), libc::O_RDWR | libc::O_NONBLOCK, 0).unwrap();
    t.say("pipe", (sys::write(&both, b"through"), sys::read(&both, 20), sys::read(&both, 20), sys::lseek(&both, 0, 0)));
    t.say("pipe", (sys::ftruncate(&both, 0), sys::fsync(&both, false), sys::fallocate(&both, 0, 0, 10)));
    // A socket that is bound and connected to.
    let listening = std::os::unix::net::UnixListener::bind(t.at("bound"));
    t.say("bound", (listening.is_ok(), fs::metadata(t.at("bound")).map(|found| found.file_type().is_socket()).ok()));
    t.say("connected", std::os::unix::net::UnixStream::connect(t.at("bound")).map(drop).map_err(|e| e.raw_os_error()));
    t.say(
        "not connected",
        std::os::unix::net::UnixStream::connect(t.at("socket")).map(drop).map_err(|e| e.raw_os_error()),
    );
    t.say("listed", list(&t.dir));
}

pub(super) fn a_device_is_opened(t: &mut Talk) {
    let path = sys::c(&t.at("null"));
    // SAFETY: the path ends with NUL.
    let made = sys::done(unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(1, 3)) });
    t.say("made", (made, sys::lstat(&t.at("null")).map(|stat| (stat.mode, stat.rdev))));
    t.say("opened", opens(&t.at("null"), libc::O_RDWR));
}

fn names_of(stream: *mut libc::DIR, most: usize) -> Vec<String> {
    let mut names = Vec::new();
    while names.len() < most {
        // SAFETY: the stream is open, and only used here.
        let entry = unsafe { libc::readdir(stream) };
        if entry.is_null() {
            break;
        }
        // SAFETY: valid until the next readdir; the name ends with NUL.
        names.push(unsafe { std::ffi::CStr::from_ptr((*entry).d_name.as_ptr()) }.to_string_lossy().into_owned());
    }
    names
}

pub(super) fn listing_while_it_changes(t: &mut Talk) {
    for i in 0..3000 {
        fs::write(t.at(&format!("file-{i:04}")), "").unwrap();
    }
    let path = sys::c(&t.dir);
    // SAFETY: the path ends with NUL.
    let stream = unsafe { libc::opendir(path.as_ptr()) };
    assert!(!stream.is_null());
    let mut seen = names_of(stream, 1000);
    // SAFETY: the stream is open.
    let place = unsafe { libc::telldir(stream) };
    let next = names_of(stream, 5);
    // SAFETY: the stream is open, the place is one of its own.
    unsafe { libc::seekdir(stream, place) };
    t.say("back to a place", names_of(stream, 5) == next);
    seen.extend(next);
    // Half of the unseen entries go. The others must be listed once, and no seen entry may come again.
    let unseen: Vec<_> = (0..3000).map(|i| format!("file-{i:04}")).filter(|name| !seen.contains(name)).collect();
    for name in unseen.iter().step_by(2) {
        fs::remove_file(t.at(name)).unwrap();
    }
    for i in 0..50 {
        fs::write(t.at(&format!("new-{i}")), "").unwrap();
    }
    let rest = names_of(stream, usize::MAX);
    let count = |name: &String| seen.iter().chain(&rest).filter(|other| *other == name).count();
    t.say("what stayed is listed once", unseen.iter().skip(1).step_by(2).all(|name| count(name) == 1));
    t.say("nothing is listed twice", seen.iter().all(|name| count(name) == 1));
    t.say("dots", (count(&".".into()), count(&"..".into())));
    // SAFETY: the stream is open.
    unsafe { libc::rewinddir(stream) };
    let again = names_of(stream, usize::MAX);
    t.say("from the beginning", (again.len() == 3052 - unseen.len().div_ceil(2), again.contains(&"new-7".to_string())));
    // SAFETY: the stream is open, and not used after.
    unsafe { libc::closedir(stream) };
    let fd = File::open(&t.dir).unwrap();
    let mut small = [0u8; 20];
    // SAFETY: the descriptor is open, the buffer has its length.
    let got = unsafe { libc::syscall(libc::SYS_getdents64, fd.as_raw_fd(), small.as_mut_ptr(), small.len()) };
    t.say("no room for one entry", sys::count(got as isize));
}

pub(super) fn numbers_of_the_list_are_those_of_stat(t: &mut Talk) {
    use std::os::unix::fs::{DirEntryExt, MetadataExt};
    t.directory("d", 0o755);
    t.file("d/f", b"x", 0o644);
    sys::link(&t.at("d/f"), &t.at("d/g")).unwrap();
    sys::symlink(Path::new("f"), &t.at("d/l")).unwrap();
    sys::mknod(&t.at("d/p"), libc::S_IFIFO | 0o600).unwrap();
    let same = fs::read_dir(t.at("d")).unwrap().all(|entry| {
        let entry = entry.unwrap();
        entry.ino() == fs::symlink_metadata(entry.path()).unwrap().ino()
    });
    t.say("same", same);
    let number = |path: &Path| sys::lstat(path).map(|stat| stat.ino);
    t.say("up", number(&t.at("d/..")) == number(&t.dir));
    let (before, held) = (number(&t.at("d/f")), File::open(t.at("d/f")).unwrap());
    sys::rename(&t.at("d/f"), &t.at("moved"), 0).unwrap();
    t.say("after a rename", (number(&t.at("moved")) == before, held.metadata().unwrap().ino() == before.unwrap()));
}
