//! Access rights in a mount, and content that must do no harm. Tests of several users need root (they become users 1001
//! and 1002); otherwise they are skipped with a message.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::support::{Mounted, attribute, errno, state, wait_until};
use stepfs::archive::Archive;
use stepfs::fs::{MountError, MountOptions, serve};
use stepfs::store::Store;

fn is_root() -> bool {
    // SAFETY: no arguments, cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        eprintln!("skipped: several users take root");
    }
    root
}

/// Text that compresses, of a length that is no multiple of anything.
fn text(seed: usize) -> Vec<u8> {
    (0..).flat_map(|i: usize| format!("line {i} of {seed}\n").into_bytes()).take(300_001).collect()
}

/// Runs a script in a directory as another user, who is in these groups too: its output, and its exit.
fn as_user(uid: u32, groups: &str, dir: &Path, script: &str) -> String {
    let mut command = Command::new("setpriv");
    command.args([format!("--reuid={uid}"), format!("--regid={uid}"), format!("--groups={groups}")]);
    command.args(["sh", "-c", script]).current_dir(dir).env("LC_ALL", "C").stdin(Stdio::null());
    let done = command.output().expect("setpriv (util-linux)");
    let words = String::from_utf8_lossy(&done.stdout).into_owned() + &String::from_utf8_lossy(&done.stderr);
    format!("{words}{:?}", done.status.code())
}

/// Runs the same script in the mount and on a plain directory: both outputs must be the same.
#[track_caller]
fn same_as_user(m: &Mounted, uid: u32, script: &str) -> String {
    let [mounted, plain] = [m.mnt(), m.plain()].map(|dir| as_user(uid, "2000", &dir, script));
    assert_eq!(mounted, plain, "{script}: on the mount (left) and on a plain directory (right)");
    mounted
}

fn give(path: &Path, uid: u32, gid: u32, mode: u32) {
    std::os::unix::fs::chown(path, Some(uid), Some(gid)).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Root's files for others, in the mount and beside it.
fn furnished(passthrough: bool) -> Mounted {
    let m = Mounted::shared(passthrough);
    for dir in [m.mnt(), m.plain()] {
        for (name, uid, gid, mode) in [
            ("open", 0, 0, 0o777),
            ("shared", 0, 2000, 0o2775),
            ("theirs", 1002, 1002, 0o700),
            ("sticky", 0, 0, 0o1777),
        ] {
            fs::create_dir(dir.join(name)).unwrap();
            give(&dir.join(name), uid, gid, mode);
        }
        for (name, uid, gid, mode) in [
            ("theirs/secret", 1002, 1002, 0o666),
            ("secret", 1002, 1002, 0o600),
            ("group", 0, 2000, 0o640),
            ("sticky/theirs", 1002, 1002, 0o666),
            ("open/suid", 1002, 2000, 0o6777),
            ("open/suid2", 1002, 2000, 0o6777),
            ("open/trusted", 0, 0, 0o666),
        ] {
            fs::write(dir.join(name), "words\n").unwrap();
            give(&dir.join(name), uid, gid, mode);
        }
        xattr(&dir.join("open/trusted"), "trusted.stepfs-test");
        symlink("theirs", dir.join("sticky/link")).unwrap();
        std::os::unix::fs::lchown(dir.join("sticky/link"), Some(1002), Some(1002)).unwrap();
    }
    m
}

fn xattr(path: &Path, name: &str) {
    let (path, name) = (super::support::c(path), std::ffi::CString::new(name).unwrap());
    // SAFETY: both strings end with NUL, the value is one byte.
    let done = unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), b"1".as_ptr().cast(), 1, 0) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

/// Another user's rights are those of ext4: files are read, written, made, linked, renamed and given away by the same
/// rules.
fn others_may_what_ext4_lets_them(passthrough: bool) {
    if !is_root() {
        return;
    }
    let m = furnished(passthrough);
    let show = "stat -c '%n %F %u:%g %a %h'";
    for script in [
        &format!("umask 022; echo a > open/new; mkdir open/dir; ln -s x open/l; {show} open/new open/dir open/l"),
        &format!(
            "umask 0; echo a > shared/new; mkdir shared/dir; mkdir shared/dir/in; {show} shared/new shared/dir shared/dir/in"
        ),
        "cat secret theirs/secret group; ls theirs; echo x >> group; echo x > theirs/new; rm -f theirs/secret; rmdir theirs",
        "mv sticky/theirs sticky/other; rm -f sticky/theirs; echo x > sticky/theirs; cat sticky/link; ls sticky",
        &format!("ln group open/hard; ln secret open/hard2; ln open/new open/hard3; {show} open/new"),
        &format!("chown 1002 open/new; chgrp 3000 open/new; {show} open/new; chgrp 2000 open/new; {show} open/new"),
        &format!(
            "chmod 2755 open/new; {show} open/new; chgrp 1001 open/new; {show} open/new; chmod 777 group; chmod 4755 open/new; {show} open/new"
        ),
        &format!("echo x >> open/suid; {show} open/suid; truncate -s 3 open/suid2; {show} open/suid2"),
        "touch -d 2001-01-01 group; touch group; touch open/suid && echo touched; touch -d 2001-01-01 open/suid",
        "for n in security.x trusted.x user.x system.x; do setfattr -n $n -v 1 open/new && echo set $n; done; \
         getfattr -d -m - open/new open/trusted; getfattr -n trusted.stepfs-test open/trusted",
        &format!("mknod open/null c 1 3; mknod open/disk b 8 0; mkfifo open/fifo; {show} open/fifo; ls open"),
        "cd open; mkdir a a/b; mv a/b ../theirs/; mv a ../shared/; ls ../shared; rm -r ../shared/a; mv suid ../sticky/ && ls ../sticky",
    ] {
        same_as_user(&m, 1001, script);
    }
    // And the owner sees it so.
    same_as_user(
        &m,
        1002,
        &format!("cat secret theirs/secret; rm sticky/theirs && echo gone; {show} open/* sticky/* shared/*"),
    );
    m.unmount();
}

#[test]
fn others_may_what_ext4_lets_them_with_passthrough() {
    others_may_what_ext4_lets_them(true);
}

#[test]
fn others_may_what_ext4_lets_them_by_the_daemon() {
    others_may_what_ext4_lets_them(false);
}

/// The next write clears bits that a file got while it was open. With passthrough the daemon does not see that.
#[test]
fn bits_that_an_open_file_gets_go_with_a_write() {
    if !is_root() {
        return;
    }
    let m = furnished(false);
    let script = "exec 3>> open/k; echo a >&3; chmod 6775 open/k; stat -c %a open/k; echo b >&3; stat -c %a open/k";
    let said = same_as_user(&m, 1001, script);
    assert!(said.contains("6775\n775"), "{said}");
    m.unmount();
}

/// Without execution by the group, the bit goes with a write by another user, unless that is in the group.
#[test]
fn set_group_id_without_execution_goes_with_a_write_of_no_member() {
    if !is_root() {
        return;
    }
    for passthrough in [true, false] {
        let m = furnished(passthrough);
        for dir in [m.mnt(), m.plain()] {
            for (name, gid) in [("member", 2000), ("other", 3000), ("none", 0)] {
                for way in ["append", "cut", "empty", "allocated"] {
                    let path = dir.join(format!("open/{name}-{way}"));
                    fs::write(&path, "words\n").unwrap();
                    give(&path, 1002, gid, 0o6666);
                }
            }
        }
        let said = same_as_user(
            &m,
            1001,
            "cd open; for f in member other none; do stat -c %a $f-append; echo x >> $f-append; truncate -s 3 $f-cut; \
             : > $f-empty; fallocate -l 100 $f-allocated; stat -c '%a %n' $f-*; done",
        );
        assert!(said.contains("2666 member-append") && said.contains("666 other-cut"), "{said}");
        // Root's writes take nothing away.
        m.same(|dir| {
            let path = dir.join("open/root");
            fs::write(&path, "words\n").unwrap();
            give(&path, 1002, 3000, 0o6666);
            File::options().append(true).open(&path).unwrap().write_all_at(b"x", 0).unwrap_or_default();
            fs::metadata(&path).unwrap().mode()
        });
        m.unmount();
    }
}

#[test]
fn nothing_in_a_mount_gives_privileges() {
    if !is_root() {
        return;
    }
    let m = furnished(true);
    let program = m.mnt().join("open/id");
    fs::copy("/usr/bin/id", &program).unwrap();
    give(&program, 0, 0, 0o4755);
    let said = as_user(1001, "1001", &m.mnt(), "open/id -u");
    assert_eq!(said, "1001\nSome(0)", "it ran as root");
    let null = m.mnt().join("open/null");
    let path = super::support::c(&null);
    // SAFETY: the path ends with NUL and outlives the call.
    assert_eq!(unsafe { libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o666, libc::makedev(1, 3)) }, 0);
    assert_eq!(errno(File::open(&null)), libc::EACCES);
    m.unmount();
}

/// Without `allow_other` nobody else gets in, not even root under another name.
#[test]
fn by_default_a_mount_is_its_users_alone() {
    if !is_root() {
        return;
    }
    let m = Mounted::new(true);
    fs::set_permissions(m.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(m.mnt().join("f"), "words").unwrap();
    fs::set_permissions(m.mnt().join("f"), fs::Permissions::from_mode(0o666)).unwrap();
    let said = as_user(1001, "1001", m.dir.path(), "cat mnt/f; ls mnt; echo x > mnt/new; cat store/tree/f; ls store");
    assert!(!said.contains("words") && said.matches("ermission denied").count() == 5, "{said}");
    assert_eq!(fs::read_dir(m.mnt()).unwrap().count(), 1);
    m.unmount();
}

/// Answers about the whole store, and requests to it, are not for users who may see some of its files only.
#[test]
fn others_learn_nothing_of_the_whole_store() {
    if !is_root() {
        return;
    }
    let m = furnished(true);
    for name in ["status", "queue", "gc", "store"] {
        assert!(attribute(&m.mnt(), &format!("user.stepfs.{name}")).is_some(), "{name}");
        let said = as_user(1001, "1001", &m.mnt(), &format!("getfattr --only-values -n user.stepfs.{name} ."));
        assert!(said.contains("not permitted") && !said.contains('{'), "{name}: {said}");
    }
    for name in ["sync", "gc"] {
        let said = as_user(1001, "1001", &m.mnt(), &format!("setfattr -n user.stepfs.{name} -v 1 open"));
        assert!(said.contains("not permitted"), "{name}: {said}");
    }
    // Their own files give them answers.
    let said =
        as_user(1001, "1001", &m.mnt(), "echo x > open/own; getfattr --only-values -n user.stepfs.state open/own");
    assert!(said.contains("s") && said.ends_with("Some(0)"), "{said}");
    let set = "for n in state object why store status generations recalled plain; do setfattr -n user.stepfs.$n -v 1 open/own; done";
    let said = as_user(1001, "1001", &m.mnt(), set);
    assert_eq!(said.matches("not permitted").count(), 8, "{said}");
    m.unmount();
}

/// A pin or a release of somebody else's file needs the right to write to it.
#[test]
fn others_pin_and_release_only_what_they_may_write() {
    if !is_root() {
        return;
    }
    let m = furnished(true);
    for name in ["pin", "release", "recall", "profile"] {
        let said = as_user(1001, "2000", &m.mnt(), &format!("setfattr -n user.stepfs.{name} -v exact group"));
        assert!(said.contains("ermission denied"), "{name}: {said}");
    }
    assert_eq!(attribute(&m.mnt().join("group"), "user.stepfs.pin"), None);
    m.unmount();
}

/// With `allow_other`, a store that others can exchange behind the mount's back would show them any file of the
/// machine.
#[test]
fn others_are_not_let_in_where_they_could_exchange_the_store() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (above, point) = (dir.path().join("above"), dir.path().join("mnt"));
    fs::create_dir(&above).unwrap();
    fs::create_dir(&point).unwrap();
    let refused = |allow_other| {
        let archive = Archive::open(Store::open(&above.join("store")).unwrap()).unwrap();
        let options = MountOptions { allow_other, signals: false, ..MountOptions::default() };
        let at = point.clone();
        let unmount = move || {
            std::thread::spawn(move || {
                while stepfs::fs::unmount(&at).is_err() {
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
        };
        serve(archive, &point, &options, unmount)
    };
    for (uid, mode) in [(1001, 0o755), (0, 0o777), (0, 0o775)] {
        give(&above, uid, 0, mode);
        let result = refused(true);
        assert!(
            matches!(&result, Err(MountError::Exposed(path)) if *path == above.canonicalize().unwrap()),
            "{result:?}"
        );
    }
    refused(false).unwrap();
    give(&above, 0, 0, 0o755);
    give(&above.join("store"), 1001, 0, 0o700);
    assert!(matches!(refused(true), Err(MountError::Exposed(_))));
    give(&above.join("store"), 0, 0, 0o700);
    refused(true).unwrap();
}

/// The log goes into the store, and nowhere else.
#[test]
fn a_log_that_is_a_link_is_not_written() {
    let dir = tempfile::tempdir().unwrap();
    let (store, point, victim) = (dir.path().join("store"), dir.path().join("mnt"), dir.path().join("victim"));
    drop(Store::open(&store).unwrap());
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, store.join("daemon.log")).unwrap();
    let mounted = Command::new(env!("CARGO_BIN_EXE_stepfs")).arg("mount").arg(&store).arg(&point).output().unwrap();
    if mounted.status.success() {
        let _ = Command::new(env!("CARGO_BIN_EXE_stepfs")).arg("umount").arg(&point).status();
    }
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    assert!(!mounted.status.success());
}

/// Files that look like stubs, damaged ones among them, and one that is the stub of a file in the store.
fn stubs(m: &Mounted) -> Vec<(&'static str, Vec<u8>)> {
    let dir = m.mnt().join("run");
    fs::create_dir(&dir).unwrap();
    for step in 1..4 {
        fs::write(dir.join(format!("step-{step}.txt")), text(step)).unwrap();
    }
    wait_until("it is released", || state(&dir.join("step-1.txt")) == "released");
    let stub = fs::read(m.tree().join("run/step-1.txt")).unwrap();
    assert_eq!((stub.len(), &stub[..8]), (300_001, &b"stepfsST"[..]));
    let mut magic = text(7);
    magic[..8].copy_from_slice(b"stepfsST");
    let mut words = text(8);
    words[56..4096].copy_from_slice(&stub[56..4096]);
    let mut damaged = stub.clone();
    damaged[40] ^= 1;
    let mut elsewhere = stub.clone();
    elsewhere[20] ^= 1;
    vec![("stub", stub), ("magic", magic), ("words", words), ("damaged", damaged), ("elsewhere", elsewhere)]
}

/// The kernel forgets its knowledge of files, so that they are looked up anew.
fn forget(m: &Mounted) {
    // For a moment nobody's lookups are cached. If not permitted, only the next mount tells.
    let _ = fs::write("/proc/sys/vm/drop_caches", "2");
    let _ = fs::metadata(m.mnt());
}

fn bytes_that_look_like_a_stub_are_bytes(passthrough: bool) {
    let m = Mounted::new(passthrough);
    let written = stubs(&m);
    let check = |m: &Mounted, when: &str| {
        for (name, bytes) in &written {
            let path = m.mnt().join(name);
            assert!(fs::read(&path).is_ok_and(|read| read == *bytes), "{name}, {when}");
            assert_ne!(state(&path), "released", "{name}, {when}");
        }
        assert!(fs::read(m.mnt().join("run/step-1.txt")).unwrap() == text(1), "{when}");
    };
    for (name, bytes) in &written {
        fs::write(m.mnt().join(name), bytes).unwrap();
    }
    forget(&m);
    check(&m, "at once");
    wait_until("all is sealed", || written.iter().all(|(name, _)| state(&m.mnt().join(name)) == "sealed"));
    forget(&m);
    check(&m, "once sealed");
    // The mark is never shown, and cannot be set.
    let names =
        Command::new("getfattr").args(["-d", "-m", "-", "stub", "magic"]).current_dir(m.mnt()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&names.stdout), "");
    // Under other names, and overwritten with one another.
    fs::rename(m.mnt().join("stub"), m.mnt().join("run/moved")).unwrap();
    fs::rename(m.mnt().join("run/moved"), m.mnt().join("stub")).unwrap();
    let m = Mounted::on(m.unmount_keeping(), passthrough);
    check(&m, "after another mount");
    assert_eq!(m.archive.status().frozen, None, "nothing is taken for damage");
    // As states of a run they are released, and come back.
    let run = m.mnt().join("other");
    fs::create_dir(&run).unwrap();
    let state_of = |at: usize| {
        let mut bytes = text(20 + at);
        bytes[..8].copy_from_slice(b"stepfsST");
        bytes
    };
    for step in 1..4 {
        fs::write(run.join(format!("step-{step}.txt")), state_of(step)).unwrap();
    }
    wait_until("it is released", || state(&run.join("step-1.txt")) == "released");
    assert!(fs::read(run.join("step-1.txt")).unwrap() == state_of(1));
    // Recalled for writing: its bytes look like a stub again.
    let file = File::options().read(true).write(true).open(run.join("step-1.txt")).unwrap();
    file.write_all_at(b"!", 100_000).unwrap();
    drop(file);
    let mut changed = state_of(1);
    changed[100_000] = b'!';
    assert!(fs::read(run.join("step-1.txt")).unwrap() == changed);
    wait_until("it is sealed", || state(&run.join("step-1.txt")) == "sealed");
    let m = Mounted::on(m.unmount_keeping(), passthrough);
    check(&m, "after a third mount");
    assert!(fs::read(m.mnt().join("other/step-1.txt")).unwrap() == changed);
    assert!(fs::read(m.mnt().join("other/step-2.txt")).unwrap() == state_of(2));
    m.unmount();
}

/// A damaged stub is one under every name, and its block is never handed out as content.
#[test]
fn a_damaged_stub_stays_one_under_other_names() {
    let m = Mounted::new(true);
    stubs(&m);
    let dir = m.unmount_keeping();
    let stub = File::options().write(true).open(dir.path().join("store/tree/run/step-1.txt")).unwrap();
    stub.write_all_at(b"?", 40).unwrap();
    drop(stub);
    let m = Mounted::on(dir, true);
    let (first, second) = (m.mnt().join("run/step-1.txt"), m.mnt().join("elsewhere"));
    assert_eq!(errno(fs::read(&first)), libc::EIO);
    fs::rename(&first, &second).unwrap();
    fs::hard_link(&second, &first).unwrap();
    wait_until("the archive is done", || m.archive.status().queued == 0);
    forget(&m);
    for path in [&first, &second] {
        assert_eq!(errno(fs::read(path)), libc::EIO);
    }
    assert!(m.archive.status().frozen.is_some(), "its needs cannot be known");
    let m = Mounted::on(m.unmount_keeping(), true);
    assert_eq!(errno(fs::read(&second)), libc::EIO);
    fs::remove_file(&first).unwrap();
    fs::remove_file(&second).unwrap();
    wait_until("all is known again", || m.archive.status().frozen.is_none());
    m.unmount();
}

#[test]
fn bytes_that_look_like_a_stub_are_bytes_with_passthrough() {
    bytes_that_look_like_a_stub_are_bytes(true);
}

#[test]
fn bytes_that_look_like_a_stub_are_bytes_by_the_daemon() {
    bytes_that_look_like_a_stub_are_bytes(false);
}

/// A link replaces a directory again and again while the archive works below it: nothing is read, changed or removed
/// outside of the mount.
#[test]
fn a_directory_that_becomes_a_link_leads_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let victim = dir.path().join("victim");
    fs::create_dir(&victim).unwrap();
    drop(Store::open(&dir.path().join("store")).unwrap());
    let settings = dir.path().join("store/stepfs.toml");
    let rules =
        fs::read_to_string(&settings).unwrap() + "\n[[retention]]\nglob = \"run/checkpoint-*\"\nkeep_last = 1\n";
    fs::write(&settings, rules.replace("settle_seconds = 600", "settle_seconds = 0")).unwrap();
    let bytes = |at: usize| text(at);
    for at in 0..12 {
        fs::create_dir_all(victim.join(format!("in-{at}"))).unwrap();
        fs::write(victim.join(format!("in-{at}/step-1.txt")), bytes(at)).unwrap();
        fs::write(victim.join(format!("in-{at}/step-2.txt")), bytes(at + 100)).unwrap();
    }
    let picture = || -> Vec<(std::path::PathBuf, u64, i64, i64, Vec<u8>)> {
        let mut found: Vec<_> = (0..12)
            .flat_map(|at| ["step-1.txt", "step-2.txt"].map(|name| victim.join(format!("in-{at}/{name}"))))
            .map(|path| {
                let metadata = fs::metadata(&path).expect("the file is still there");
                let read = fs::read(&path).unwrap();
                (path, metadata.ino(), metadata.mtime_nsec(), metadata.ctime_nsec(), read)
            })
            .collect();
        found.sort();
        found
    };
    let before = picture();
    let m = Mounted::on(dir, true);
    fs::create_dir(m.mnt().join("run")).unwrap();
    for at in 0..12 {
        let checkpoint = m.mnt().join(format!("run/checkpoint-{at}"));
        let (inner, aside) = (checkpoint.join(format!("in-{at}")), checkpoint.join("aside"));
        fs::create_dir_all(&inner).unwrap();
        for step in 1..3 {
            fs::write(inner.join(format!("step-{step}.txt")), bytes(at + 100 * (step - 1))).unwrap();
        }
        let link = checkpoint.join("link");
        symlink(m.dir.path().join(format!("victim/in-{at}")), &link).unwrap();
        for _ in 0..20 {
            // The archive is between closing, sealing, archiving and removing.
            if fs::rename(&inner, &aside).and_then(|()| fs::rename(&link, &inner)).is_err() {
                break;
            }
            let _ = fs::metadata(&inner);
            std::thread::sleep(Duration::from_millis(3));
            if fs::rename(&inner, &link).and_then(|()| fs::rename(&aside, &inner)).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    wait_until("the archive is done", || m.archive.status().queued == 0);
    let after = {
        let victim = m.dir.path().join("victim");
        assert!(victim.is_dir());
        picture()
    };
    assert!(before == after, "something outside of the mount was changed");
    m.unmount();
}

/// A removed file may come from a directory that others may not enter, and its mode may let them read it.
#[test]
fn each_user_has_a_trash_that_others_do_not_enter() {
    if !is_root() {
        return;
    }
    let m = Mounted::shared_on(super::trash::store("1h"), true);
    give(&m.mnt(), 0, 0, 0o1777);
    assert_eq!(
        as_user(1001, "2000", &m.mnt(), "umask 022; mkdir -m 700 own && echo secret >own/a && rm own/a"),
        "Some(0)"
    );
    assert_eq!(as_user(1001, "2000", &m.mnt(), "cat .stepfs-trash/1001/*/own/a"), "secret\nSome(0)");
    let other = as_user(1002, "2000", &m.mnt(), "ls .stepfs-trash; cat .stepfs-trash/1001/*/own/a");
    assert!(
        other.starts_with("1001\n") && other.contains("Permission denied") && other.ends_with("Some(1)"),
        "{other}"
    );
    assert!(!other.contains("secret"));
    // The owner brings it back, and empties the rest.
    let back = "mv .stepfs-trash/1001/*/own/a own/b && cat own/b && rm -r .stepfs-trash/1001/*";
    assert_eq!(as_user(1001, "2000", &m.mnt(), back), "secret\nSome(0)");
    // A directory that another user has made in its place gets nothing. The housekeeper removes an empty trash whenever it looks.
    assert_eq!(as_user(1001, "2000", &m.mnt(), "echo mine >c"), "Some(0)");
    if let Err(error) = fs::remove_dir_all(m.mnt().join(".stepfs-trash")) {
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    }
    let taken = "mkdir -m 777 .stepfs-trash .stepfs-trash/1001 && echo >.stepfs-trash/1001/theirs";
    assert_eq!(as_user(1002, "2000", &m.mnt(), taken), "Some(0)");
    assert_eq!(as_user(1001, "2000", &m.mnt(), "rm c"), "Some(0)");
    assert_eq!(as_user(1002, "2000", &m.mnt(), "find .stepfs-trash -type f"), ".stepfs-trash/1001/theirs\nSome(0)");
}
