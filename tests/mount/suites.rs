//! Findings of other POSIX suites in a mount, each in a few lines: long paths, times of mappings, file handles.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::support::{Mapping, Mounted, attribute, c, errno, state, wait_until};

fn sys(result: libc::c_int) -> std::io::Result<libc::c_int> {
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(result) }
}

/// A directory so far below `dir` that no call can name it from there. Each is made in the one before it.
fn far_below(dir: &Path) -> File {
    let mut here = File::open(dir).unwrap();
    for level in 0..45 {
        let next = inside(&here).join(format!("{level:0>200}"));
        fs::create_dir(&next).unwrap();
        here = File::open(&next).unwrap();
    }
    here
}

/// The way into an open directory, however deep it lies.
fn inside(directory: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()))
}

fn listed(dir: &Path) -> Vec<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = fs::read_dir(dir).unwrap().map(name).collect();
    names.sort();
    names
}

/// In both modes.
macro_rules! both {
    ($($(#[$doc:meta])* fn $name:ident($m:ident: &Mounted) $body:block)*) => {
        mod passthrough { $( #[test] fn $name() { super::$name(&super::Mounted::new(true)); } )* }
        mod daemon { $( #[test] fn $name() { super::$name(&super::Mounted::new(false)); } )* }
        $( $(#[$doc])* fn $name($m: &Mounted) $body )*
    };
}

both! {
    fn every_call_works_at_any_depth(m: &Mounted) {
        m.same(|dir| {
            let held = far_below(dir);
            let (far, near) = (inside(&held), dir.join("near"));
            let at = |name: &str| far.join(name);
            let mut said = Vec::new();
            let mut say = |what: &str, code: i32| said.push(format!("{what}: {code}"));
            fs::write(&near, "near").unwrap();
            say("create", errno(fs::write(at("f"), "hello")));
            say("append", errno(File::options().append(true).open(at("f")).and_then(|mut f| f.write_all(b"!"))));
            say("sync", errno(File::open(at("f")).and_then(|f| f.sync_all())));
            say("sync directory", errno(held.sync_all()));
            say("mkdir", errno(fs::create_dir(at("d"))));
            say("again", errno(fs::create_dir(at("d"))));
            say("symlink", errno(symlink("f", at("s"))));
            say("link", errno(fs::hard_link(at("f"), at("l"))));
            say("link up", errno(fs::hard_link(at("f"), dir.join("up"))));
            say("link down", errno(fs::hard_link(&near, at("down"))));
            let (fifo, device) = (c(&at("fifo")), c(&at("null")));
            // SAFETY: the paths end with NUL and outlive the calls.
            let made = unsafe {
                let null = libc::makedev(1, 3);
                [libc::mknod(fifo.as_ptr(), libc::S_IFIFO | 0o600, 0), libc::mknod(device.as_ptr(), libc::S_IFCHR | 0o600, null)]
            };
            say("mknod", made[0] + made[1]);
            say("chmod", errno(fs::set_permissions(at("f"), fs::Permissions::from_mode(0o640))));
            say("chown", errno(std::os::unix::fs::chown(at("f"), Some(5), Some(6))));
            say("chown a link", errno(std::os::unix::fs::lchown(at("s"), Some(7), Some(8))));
            let then = std::time::UNIX_EPOCH + Duration::from_secs(1000);
            say("utimens", errno(File::open(at("f")).and_then(|f| f.set_modified(then))));
            let (short, times) = (c(&at("f")), [libc::timespec { tv_sec: 77, tv_nsec: 0 }; 2]);
            // SAFETY: the path ends with NUL, and `times` is an array of two; both outlive the calls.
            unsafe {
                say("utimensat", errno(sys(libc::utimensat(libc::AT_FDCWD, short.as_ptr(), times.as_ptr(), 0))));
                say("truncate", errno(sys(libc::truncate(short.as_ptr(), 3))));
            }
            say("setxattr", errno(xattr::set(at("f"), "user.a", b"1")));
            say("setxattr of a directory", errno(xattr::set(at("d"), "user.b", b"2")));
            let value = xattr::get(at("f"), "user.a").unwrap();
            let names: Vec<_> = xattr::list(at("f")).unwrap().filter(|name| name.as_encoded_bytes().starts_with(b"user.")).collect();
            say("removexattr", errno(xattr::remove(at("f"), "user.a")));
            say("empty", errno(File::options().write(true).truncate(true).open(at("l"))));
            say("rename", errno(fs::rename(at("d"), at("e"))));
            say("rename down", errno(fs::rename(&near, at("near"))));
            say("rename up", errno(fs::rename(at("near"), dir.join("back"))));
            let (a, b) = (c(&at("e")), c(&at("f")));
            // SAFETY: both paths end with NUL and outlive the call.
            let exchanged = unsafe {
                libc::renameat2(libc::AT_FDCWD, a.as_ptr(), libc::AT_FDCWD, b.as_ptr(), libc::RENAME_EXCHANGE)
            };
            say("exchange", errno(sys(exchanged)));
            say("a file where a directory was", errno(fs::read(at("e"))));
            say("a full directory", errno(fs::write(at("f/x"), "x")));
            say("is not removed", errno(fs::remove_dir(at("f"))));
            say("unlink", errno(fs::remove_file(at("f/x"))));
            say("rmdir", errno(fs::remove_dir(at("f"))));
            say("not there", errno(fs::metadata(at("f"))));
            let seen = ["e", "l", "s", "fifo", "null", "down"].map(|name| {
                let m = fs::symlink_metadata(at(name)).unwrap();
                let kind = m.file_type();
                (m.mode(), m.len() * u64::from(!m.is_dir()), m.nlink(), m.uid(), m.rdev(), kind.is_fifo() || kind.is_char_device())
            });
            let open = File::options().read(true).write(true).open(at("e")).unwrap();
            fs::remove_file(at("e")).unwrap();
            say("unlinked", errno(open.set_permissions(fs::Permissions::from_mode(0o600))));
            let read = (fs::read_link(at("s")).unwrap(), fs::read(at("down")).unwrap(), fs::read(dir.join("back")).unwrap());
            (said, value, names, seen, read, listed(&far), open.metadata().unwrap().nlink())
        });
    }

    /// The longest path that a call can pass, counted from the mount: the store's own is longer.
    fn a_path_may_be_as_long_as_the_kernel_takes_it(m: &Mounted) {
        let mut dir = m.mnt();
        while dir.as_os_str().len() + 210 < 4090 {
            dir.push("p".repeat(200));
            fs::create_dir(&dir).unwrap();
        }
        let file = dir.join("f".repeat(4095 - dir.as_os_str().len() - 1));
        assert_eq!(file.as_os_str().len(), 4095);
        fs::write(&file, "as far as it goes").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"as far as it goes");
        assert_eq!(listed(&dir).len(), 1);
        wait_until("it is sealed", || state(&file) != "staged");
        let why = || attribute(&file, "user.stepfs.why").unwrap_or_default();
        wait_until("it is known why it stays", || why().starts_with("it is small"));
    }

    /// The archive's work on files succeeds at any depth.
    fn a_file_far_below_is_released_and_read(m: &Mounted) {
        let held = far_below(&m.mnt());
        let far = inside(&held);
        let text = |step: usize| -> Vec<u8> {
            (0..).flat_map(|i: usize| format!("line {i} of {step}\n").into_bytes()).take(300_001).collect()
        };
        let path = |step: usize| far.join(format!("step-{step}.txt"));
        (1..4).for_each(|step| fs::write(path(step), text(step)).unwrap());
        wait_until("it is released", || state(&path(1)) == "released");
        assert!(fs::read(path(1)).unwrap() == text(1));
        // Written to, it is recalled.
        File::options().append(true).open(path(1)).unwrap().write_all(b"and more").unwrap();
        assert!(fs::read(path(1)).unwrap() == [text(1), b"and more".to_vec()].concat());
        xattr::set(path(2), "user.stepfs.pin", b"1").unwrap();
        assert_eq!(attribute(&path(2), "user.stepfs.pin").as_deref(), Some("1"));
        fs::rename(path(2), m.mnt().join("up.txt")).unwrap();
        assert!(fs::read(m.mnt().join("up.txt")).unwrap() == text(2));
    }
}

/// With passthrough the daemon does not see the store; the kernel must not use attributes from before the open.
#[test]
fn a_store_through_a_mapping_shows_in_the_times_at_once() {
    let m = Mounted::new(true);
    let path = m.mnt().join("f");
    fs::write(&path, vec![1; 4096]).unwrap();
    wait_until("it is at rest", || state(&path) != "staged");
    let times = || {
        let m = fs::metadata(&path).unwrap();
        ((m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec()))
    };
    // Longer than a tick of the clock that stamps files.
    let wait = || std::thread::sleep(Duration::from_millis(30));
    // The kernel learns the attributes, and may believe them for a second.
    let looked_up = times();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let mut mapping = Mapping::new(&file);
    wait();
    mapping.bytes()[0] = 2;
    let stored = times();
    assert!(stored.0 > looked_up.0 && stored.1 > looked_up.1, "{looked_up:?}, then {stored:?}");
    // The mapping outlives the descriptor. After a page was written out, the next store to it is noticed.
    drop(file);
    File::open(m.tree().join("f")).unwrap().sync_all().unwrap();
    let closed = times();
    wait();
    mapping.bytes()[0] = 3;
    let after = times();
    assert!(after.0 > closed.0 && after.1 > closed.1, "{closed:?}, then {after:?}");
}

/// A handle of a file, as a program keeps it.
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    data: [u8; 128],
}

fn handle(path: &Path) -> Handle {
    let (path, mut handle, mut mount) = (c(path), Handle { bytes: 128, kind: 0, data: [0; 128] }, 0);
    let at = (&raw mut handle).cast();
    // SAFETY: the path ends with NUL; `handle` is laid out as the kernel's, with room for as many bytes as it says.
    sys(unsafe { libc::name_to_handle_at(libc::AT_FDCWD, path.as_ptr(), at, &raw mut mount, 0) }).unwrap();
    handle
}

fn open_by_handle(mount: &Path, handle: &Handle, flags: libc::c_int) -> std::io::Result<File> {
    let mount = File::open(mount).unwrap();
    let mut handle = Handle { ..*handle };
    // SAFETY: the descriptor is open; `handle` is laid out as the kernel's, which reads as many bytes as it says.
    let fd = sys(unsafe { libc::open_by_handle_at(mount.as_raw_fd(), (&raw mut handle).cast(), flags) })?;
    // SAFETY: just opened, and nobody else has it.
    Ok(unsafe { File::from_raw_fd(fd) })
}

fn read_by_handle(mount: &Path, handle: &Handle) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut open_by_handle(mount, handle, libc::O_RDONLY)?, &mut bytes)?;
    Ok(bytes)
}

/// For as long as the kernel knows the file, under any name. Afterwards it leads nowhere, and never to another file.
fn a_handle_is_good_while_the_file_is_known(passthrough: bool) {
    let m = Mounted::new(passthrough);
    let d = m.mnt().join("d");
    fs::create_dir(&d).unwrap();
    fs::write(d.join("f"), "by handle").unwrap();
    fs::write(d.join("gone"), "soon").unwrap();
    let known = File::open(d.join("f")).unwrap();
    let (file, gone, dir) = (handle(&d.join("f")), handle(&d.join("gone")), handle(&d));
    fs::remove_file(d.join("gone")).unwrap();
    fs::write(m.mnt().join("other"), "whoever gets its number").unwrap();
    assert_eq!(errno(read_by_handle(&m.mnt(), &gone)), libc::ESTALE);
    assert_eq!(listed(&inside(&open_by_handle(&m.mnt(), &dir, libc::O_RDONLY).unwrap())), ["f"]);
    fs::rename(&d, m.mnt().join("e")).unwrap();
    open_by_handle(&m.mnt(), &file, libc::O_WRONLY).unwrap().write_all(b"BY").unwrap();
    assert_eq!(read_by_handle(&m.mnt(), &file).unwrap(), b"BY handle");
    drop(known);
    let m = m.remounted(passthrough);
    assert_eq!(fs::read(m.mnt().join("e/f")).unwrap(), b"BY handle");
    assert_eq!(errno(read_by_handle(&m.mnt(), &file)), libc::ESTALE);
}

#[test]
fn handles_with_passthrough() {
    a_handle_is_good_while_the_file_is_known(true);
}

#[test]
fn handles_without_passthrough() {
    a_handle_is_good_while_the_file_is_known(false);
}

/// A release replaces a file whose handle a program has. The kernel does not forget it here.
#[test]
fn a_handle_outlives_a_release() {
    let m = Mounted::new(true);
    let text = |step: usize| -> Vec<u8> {
        (0..).flat_map(|i: usize| format!("line {i} of {step}\n").into_bytes()).take(300_001).collect()
    };
    let path = |step: usize| m.mnt().join(format!("step-{step}.txt"));
    fs::write(path(1), text(1)).unwrap();
    let kept = handle(&path(1));
    (2..4).for_each(|step| fs::write(path(step), text(step)).unwrap());
    wait_until("it is released", || state(&path(1)) == "released");
    assert!(read_by_handle(&m.mnt(), &kept).unwrap() == text(1));
    assert_eq!(handle(&path(1)).data, kept.data);
}
