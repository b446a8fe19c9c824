//! Access rights: permissions, owners, sticky and setgid directories, umask.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;

use super::super::sys::{self, Stamp};
use super::super::world::list;
use super::talk::{GROUP, STRANGER, Talk, content, mode, opens, owners};

const ALL: [i32; 3] = [libc::O_RDONLY, libc::O_WRONLY, libc::O_RDWR];

/// Every operation on a file, its outcome in one line.
fn everything(t: &mut Talk, what: &str, path: &Path) {
    let open = ALL.map(|flags| opens(path, flags));
    t.say(
        what,
        ("open", open, opens(path, libc::O_RDONLY | libc::O_TRUNC), opens(path, libc::O_CREAT | libc::O_RDONLY)),
    );
    t.say(what, ("change", sys::truncate(path, 3), sys::chmod(path, 0o640), sys::lchown(path, STRANGER, STRANGER)));
    t.say(
        what,
        ("group", sys::lchown(path, u32::MAX, GROUP), sys::lchown(path, u32::MAX, 0), owners(path), mode(path)),
    );
    t.say(
        what,
        ("times", sys::utimens(path, Stamp::At(1, 1), Stamp::Omit, 0), sys::utimens(path, Stamp::Now, Stamp::Now, 0)),
    );
    t.say(
        what,
        ("times", sys::utimens(path, Stamp::Now, Stamp::Omit, 0), sys::utimens(path, Stamp::Omit, Stamp::Omit, 0)),
    );
    t.say(
        what,
        (
            "user.",
            sys::setxattr(path, "user.a", b"1", 0),
            sys::getxattr(path, "user.b"),
            sys::removexattr(path, "user.b"),
        ),
    );
    t.say(
        what,
        ("trusted.", sys::setxattr(path, "trusted.a", b"1", 0), sys::getxattr(path, "trusted.b"), sys::listxattr(path)),
    );
    t.say(what, ("security.", sys::setxattr(path, "security.a", b"1", 0), sys::getxattr(path, "security.b")));
    t.say(what, ("noatime", opens(path, libc::O_NOATIME)));
    let name = sys::c(path);
    let access = [libc::F_OK, libc::R_OK, libc::W_OK, libc::X_OK, libc::R_OK | libc::W_OK].map(|how| {
        // SAFETY: the path ends with NUL.
        sys::done(unsafe { libc::access(name.as_ptr(), how) })
    });
    t.say(what, ("access", access));
}

pub(super) fn files_of_others(t: &mut Talk) {
    sys::chmod(&t.dir, 0o777).unwrap();
    for bits in [0o000, 0o400, 0o004, 0o002, 0o006, 0o007, 0o060, 0o640, 0o644, 0o666, 0o777] {
        for (who, in_group) in [("alone", false), ("in the group", true)] {
            let path = t.file("f", b"of root", bits);
            chown(&path, Some(0), Some(GROUP)).unwrap();
            sys::chmod(&path, bits).unwrap();
            sys::setxattr(&path, "user.b", b"there", 0).unwrap();
            sys::setxattr(&path, "trusted.b", b"there", 0).unwrap();
            t.stranger(in_group, |t| everything(t, &format!("{bits:o} {who}"), &path));
            t.say(&format!("{bits:o} {who} then"), (mode(&path), owners(&path), content(&path)));
            let _ = sys::unlink(&path);
        }
    }
}

pub(super) fn files_of_their_own(t: &mut Talk) {
    sys::chmod(&t.dir, 0o777).unwrap();
    for bits in [0o000, 0o200, 0o444, 0o600, 0o644, 0o4755, 0o2755, 0o6777, 0o2644] {
        for (who, in_group) in [("alone", false), ("in the group", true)] {
            let path = t.file("f", b"of theirs", 0o600);
            chown(&path, Some(STRANGER), Some(STRANGER)).unwrap();
            sys::chmod(&path, bits).unwrap();
            sys::setxattr(&path, "user.b", b"there", 0).unwrap();
            t.stranger(in_group, |t| everything(t, &format!("{bits:o} {who}"), &path));
            t.say(&format!("{bits:o} {who} then"), (mode(&path), owners(&path), content(&path)));
            let _ = sys::unlink(&path);
        }
    }
}

pub(super) fn what_strangers_make_is_theirs(t: &mut Talk) {
    sys::chmod(&t.dir, 0o755).unwrap();
    t.directory("open", 0o777);
    t.directory("setgid", 0o777);
    chown(t.at("setgid"), None, Some(GROUP)).unwrap();
    sys::chmod(&t.at("setgid"), 0o2777).unwrap();
    for (who, in_group) in [("alone", false), ("in the group", true)] {
        t.stranger(in_group, |t| {
            for directory in [".", "open", "setgid"] {
                for mask in [0o000, 0o022, 0o077, 0o777] {
                    // SAFETY: a number.
                    unsafe { libc::umask(mask) };
                    let own = t.at(directory);
                    let at = |name: &str| own.join(name);
                    let made = (
                        sys::open(&at("f"), libc::O_CREAT | libc::O_RDWR, 0o6777).map(|fd| sys::write(&fd, b"x")),
                        sys::mkdir(&at("d"), 0o7777),
                        sys::mknod(&at("p"), libc::S_IFIFO | 0o666),
                        sys::mknod(&at("n"), libc::S_IFREG | 0o2666),
                        sys::symlink(Path::new("f"), &at("l")),
                    );
                    let seen = ["f", "d", "p", "n", "l"].map(|name| (mode(&at(name)), owners(&at(name))));
                    t.say(&format!("{who} in {directory} with {mask:o}"), (made, seen));
                    let gone = (
                        sys::unlink(&at("f")),
                        sys::rmdir(&at("d")),
                        sys::unlink(&at("p")),
                        sys::unlink(&at("n")),
                        sys::unlink(&at("l")),
                    );
                    t.say(&format!("{who} in {directory}"), gone);
                }
            }
            let device = sys::c(&t.at("open/device"));
            // SAFETY: the path ends with NUL.
            let made = unsafe { libc::mknod(device.as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(1, 3)) };
            t.say("a device", sys::done(made));
        });
    }
}

pub(super) fn directories_of_others(t: &mut Talk) {
    sys::chmod(&t.dir, 0o755).unwrap();
    for bits in [0o700, 0o701, 0o702, 0o704, 0o703, 0o705, 0o706, 0o707, 0o1707] {
        t.directory("d", 0o755);
        t.directory("d/in", 0o777);
        t.file("d/f", b"root's", 0o666);
        let own = t.file("d/own", b"theirs", 0o600);
        chown(&own, Some(STRANGER), Some(STRANGER)).unwrap();
        sys::chmod(&t.at("d"), bits).unwrap();
        t.stranger(false, |t| {
            let what = format!("{bits:o}");
            let own = t.at("d");
            let at = |name: &str| own.join(name);
            let look = (list(&t.at("d")), mode(&at("f")), content(&at("f")), opens(&at("none"), 0));
            let make = (opens(&at("new"), libc::O_CREAT | libc::O_WRONLY), sys::mkdir(&at("newd"), 0o755));
            let link = (sys::link(&at("own"), &at("second")), sys::symlink(Path::new("f"), &at("l")));
            let link = (link, sys::link(&at("f"), &at("third")));
            let rename = (
                sys::rename(&at("f"), &at("g"), 0),
                sys::rename(&at("own"), &at("own2"), 0),
                sys::rename(&at("own2"), &at("f"), 0),
                sys::rename(&at("own"), &at("f"), libc::RENAME_EXCHANGE),
                sys::rename(&at("in"), &at("in2"), 0),
            );
            let remove = ["f", "g", "own", "own2", "second", "l", "new", "third"].map(|name| sys::unlink(&at(name)));
            let directories = (sys::rmdir(&at("in")), sys::rmdir(&at("in2")), sys::rmdir(&at("newd")));
            let enter = std::env::set_current_dir(t.at("d")).map_err(|error| error.raw_os_error());
            let marks = sys::setxattr(&t.at("d"), "user.a", b"1", 0);
            for said in [format!("{look:?}"), format!("{make:?} {link:?}"), format!("{rename:?}")] {
                t.say(&what, said);
            }
            t.say(&what, (remove, directories, enter, marks));
        });
        fs::remove_dir_all(t.at("d")).unwrap();
    }
}

pub(super) fn sticky_directories(t: &mut Talk) {
    sys::chmod(&t.dir, 0o755).unwrap();
    for owner in [0, STRANGER] {
        t.directory("d", 0o755);
        chown(t.at("d"), Some(owner), None).unwrap();
        sys::chmod(&t.at("d"), 0o1777).unwrap();
        for (name, whose) in [("root", 0), ("theirs", STRANGER), ("third", 3)] {
            let path = t.file(&format!("d/{name}"), b"x", 0o666);
            chown(&path, Some(whose), None).unwrap();
            t.directory(&format!("d/{name}.d"), 0o755);
            chown(t.at(&format!("d/{name}.d")), Some(whose), None).unwrap();
        }
        t.stranger(false, |t| {
            let own = t.at("d");
            let at = |name: &str| own.join(name);
            let lines = ["root", "theirs", "third"].map(|name| {
                let other = at("moved");
                (
                    sys::rename(&at(name), &other, 0),
                    sys::rename(&other, &at(name), 0),
                    sys::rename(&at("theirs"), &at("root"), 0),
                    sys::rmdir(&at(&format!("{name}.d"))),
                    sys::unlink(&at(name)),
                )
            });
            t.say(&format!("of {owner}"), (lines, list(&t.at("d"))));
        });
        fs::remove_dir_all(t.at("d")).unwrap();
    }
}

pub(super) fn privileges_go_with_a_change(t: &mut Talk) {
    sys::chmod(&t.dir, 0o777).unwrap();
    // VFS capabilities of version 2: cap_net_raw.
    let mut capability = [0u8; 20];
    capability[..4].copy_from_slice(&0x0200_0001u32.to_le_bytes());
    capability[4..8].copy_from_slice(&(1u32 << 13).to_le_bytes());
    type Change = fn(&Path) -> sys::Sys<()>;
    let changes: [(&str, Change); 9] = [
        ("written", |path| sys::open(path, libc::O_WRONLY, 0).and_then(|fd| sys::write(&fd, b"x")).map(drop)),
        ("truncated", |path| sys::truncate(path, 1)),
        ("opened with O_TRUNC", |path| opens(path, libc::O_WRONLY | libc::O_TRUNC)),
        ("cut", |path| sys::open(path, libc::O_WRONLY, 0).and_then(|fd| sys::ftruncate(&fd, 2))),
        ("allocated", |path| sys::open(path, libc::O_WRONLY, 0).and_then(|fd| sys::fallocate(&fd, 0, 0, 100))),
        ("given to the same", |path| sys::lchown(path, u32::MAX, STRANGER)),
        ("given to nobody", |path| sys::lchown(path, u32::MAX, u32::MAX)),
        ("read", |path| sys::open(path, libc::O_RDONLY, 0).and_then(|fd| sys::read(&fd, 5)).map(drop)),
        ("renamed", |path| {
            sys::rename(path, &path.with_extension("x"), 0)
                .and_then(|()| sys::rename(&path.with_extension("x"), path, 0))
        }),
    ];
    for (what, change) in changes {
        for bits in [0o6777, 0o4755, 0o2755, 0o2745, 0o6666] {
            for root in [true, false] {
                let path = t.file("f", b"bytes", 0o600);
                chown(&path, Some(STRANGER), Some(STRANGER)).unwrap();
                sys::chmod(&path, bits).unwrap();
                sys::setxattr(&path, "security.capability", &capability, 0).unwrap();
                let done = |t: &mut Talk| t.say(&format!("{what} {bits:o} by root {root}"), change(&path));
                if root {
                    done(t);
                } else {
                    t.stranger(false, done);
                }
                let left = sys::getxattr(&path, "security.capability").map(|value| value.len());
                t.say(&format!("{what} {bits:o} by root {root}: then"), (mode(&path), left));
                sys::unlink(&path).unwrap();
            }
        }
    }
}

pub(super) fn opened_for_writing_and_not_written(t: &mut Talk) {
    sys::chmod(&t.dir, 0o777).unwrap();
    let path = t.file("f", b"bytes", 0o600);
    chown(&path, Some(STRANGER), Some(STRANGER)).unwrap();
    sys::chmod(&path, 0o6755).unwrap();
    t.stranger(false, |t| t.say("opened", opens(&path, libc::O_RDWR)));
    // The kernel gets the news.
    std::thread::sleep(std::time::Duration::from_millis(300));
    t.say("then", mode(&path));
}

pub(super) fn a_set_user_id_program_is_run(t: &mut Talk) {
    sys::chmod(&t.dir, 0o777).unwrap();
    fs::copy("/usr/bin/id", t.at("id")).unwrap();
    sys::chmod(&t.at("id"), 0o4755).unwrap();
    t.stranger(false, |t| {
        let output = std::process::Command::new(t.at("id")).arg("-u").output();
        t.say(
            "as",
            output
                .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_string())
                .map_err(|e| e.raw_os_error()),
        );
    });
}

pub(super) fn real_and_effective_users(t: &mut Talk) {
    sys::chmod(&t.dir, 0o755).unwrap();
    let path = t.file("f", b"x", 0o600);
    let code = t.forked(|t| {
        // SAFETY: plain numbers.
        unsafe { assert_eq!(libc::setresuid(STRANGER, 0, 0), 0) };
        let name = sys::c(&path);
        for (what, flags) in [("real", 0), ("effective", libc::AT_EACCESS)] {
            // SAFETY: the path ends with NUL.
            let may = unsafe { libc::faccessat(libc::AT_FDCWD, name.as_ptr(), libc::R_OK, flags) };
            t.say(what, sys::done(may));
        }
        // SAFETY: plain numbers.
        unsafe { assert_eq!(libc::setfsuid(STRANGER), 0) };
        t.say("by fsuid", (opens(&path, 0), opens(&t.at("new"), libc::O_CREAT | libc::O_WRONLY)));
    });
    t.say("code", code);
}
