//! Files whose bytes are in the archive: they look and behave as before.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::support::{Mounted, Reading, attribute, c, errno, state, wait_until};
use stepfs::mirror::Source;

/// Text that compresses, of a length that is no multiple of anything.
fn text(seed: usize) -> Vec<u8> {
    (0..).flat_map(|i: usize| format!("line {i} of {seed}\n").into_bytes()).take(300_001).collect()
}

/// A mount with `dir/step-1.txt` released, and its original bytes.
fn released(passthrough: bool) -> (Mounted, PathBuf, Vec<u8>) {
    let m = Mounted::new(passthrough);
    let dir = m.mnt().join("dir");
    fs::create_dir(&dir).unwrap();
    let path = dir.join("step-1.txt");
    fs::write(&path, text(1)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
    for step in 2..4 {
        fs::write(dir.join(format!("step-{step}.txt")), text(step)).unwrap();
    }
    wait_until("it is released", || state(&path) == "released");
    (m, path, text(1))
}

/// In both modes.
macro_rules! both {
    ($(fn $name:ident($args:pat) $body:block)*) => {
        mod passthrough { $( #[test] fn $name() { super::$name(super::released(true)); } )* }
        mod daemon { $( #[test] fn $name() { super::$name(super::released(false)); } )* }
        $( fn $name($args: (Mounted, PathBuf, Vec<u8>)) $body )*
    };
}

fn last_error() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(-1)
}

fn seen(path: &Path) -> (u64, u64, u32, u32, u32, i64, i64) {
    let m = fs::metadata(path).unwrap();
    (m.ino(), m.len(), m.mode(), m.uid(), m.gid(), m.mtime(), m.mtime_nsec())
}

both! {
    fn reads_give_the_bytes((_m, path, bytes)) {
        assert!(fs::read(&path).unwrap() == bytes);
        let file = File::open(&path).unwrap();
        let mut part = vec![0; 5000];
        file.read_exact_at(&mut part, 123_456).unwrap();
        assert!(part == bytes[123_456..128_456]);
        assert_eq!(file.read_at(&mut part, bytes.len() as u64).unwrap(), 0);
        assert_eq!(file.read_at(&mut part, bytes.len() as u64 - 3).unwrap(), 3);
        drop(file);
        // Again, after it was decoded as a whole.
        assert!(fs::read(&path).unwrap() == bytes);
        assert_eq!(state(&path), "released");
    }

    fn du_shows_what_is_stored((m, path, bytes)) {
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!(metadata.len(), bytes.len() as u64);
        // A thread of its own tells the kernel to ask for the attributes anew, a moment after the state says so.
        let stored = || fs::metadata(&path).unwrap().blocks() * 512;
        wait_until("its blocks are the object's", || stored() > 0 && stored() < bytes.len() as u64 / 2);
        assert_eq!(fs::metadata(m.tree().join("dir/step-1.txt")).unwrap().len(), metadata.len());
    }

    fn writing_recalls_it((_m, path, mut bytes)) {
        let (before, directory) = (seen(&path), seen(path.parent().unwrap()));
        let file = File::options().read(true).write(true).open(&path).unwrap();
        assert_eq!(state(&path), "staged");
        assert_eq!(seen(&path), before);
        assert_eq!(seen(path.parent().unwrap()), directory);
        file.write_all_at(b"HELLO", 1000).unwrap();
        drop(file);
        bytes[1000..1005].copy_from_slice(b"HELLO");
        assert!(fs::read(&path).unwrap() == bytes);
        assert_eq!(seen(&path).0, before.0);
    }

    fn appending_recalls_it((_m, path, mut bytes)) {
        use std::io::Write;
        File::options().append(true).open(&path).unwrap().write_all(b"more").unwrap();
        bytes.extend(b"more");
        assert!(fs::read(&path).unwrap() == bytes);
    }

    fn truncating_recalls_what_is_left((_m, path, bytes)) {
        let name = c(&path);
        // SAFETY: the path ends with NUL.
        assert_eq!(unsafe { libc::truncate(name.as_ptr(), 100_000) }, 0);
        assert!(fs::read(&path).unwrap() == bytes[..100_000]);
        let before = seen(&path);
        // SAFETY: the path ends with NUL.
        assert_eq!(unsafe { libc::truncate(name.as_ptr(), 0) }, 0);
        assert_eq!(fs::metadata(&path).unwrap().len(), 0);
        assert_eq!((seen(&path).0, seen(&path).2), (before.0, before.2));
    }

    fn overwriting_needs_no_recall((_m, path, _)) {
        let before = seen(&path);
        fs::write(&path, "short").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"short");
        let after = seen(&path);
        assert_eq!((after.0, after.2, after.3), (before.0, before.2, before.3));
    }

    // Decoded whole before, so that the kernel serves the readers from the decoded file.
    fn a_reader_sees_what_a_writer_writes((_m, path, bytes)) {
        assert!(fs::read(&path).unwrap() == bytes);
        let reader = File::open(&path).unwrap();
        let mapping = Reading::new(&reader);
        let mut buf = vec![0; 4096];
        reader.read_exact_at(&mut buf, 0).unwrap();
        assert!(*mapping.bytes() == bytes);
        let writer = File::options().write(true).open(&path).unwrap();
        writer.write_all_at(b"CHANGED", 0).unwrap();
        let mut changed = bytes.clone();
        changed[..7].copy_from_slice(b"CHANGED");
        reader.read_exact_at(&mut buf, 0).unwrap();
        assert!(buf == changed[..4096] && *mapping.bytes() == changed);
        reader.read_exact_at(&mut buf, 200_000).unwrap();
        assert!(buf == bytes[200_000..204_096]);
        drop(writer);
        assert!(fs::read(&path).unwrap() == changed);
        drop((reader, mapping));
        assert!(fs::read(&path).unwrap() == changed);
    }

    fn a_reader_and_a_writer_have_one_file((_m, path, bytes)) {
        assert!(fs::read(&path).unwrap() == bytes);
        let before = seen(&path);
        let reader = File::open(&path).unwrap();
        let lock = |file: &File, kind: libc::c_int| {
            // SAFETY: no memory is passed; the descriptor is open.
            if unsafe { libc::flock(file.as_raw_fd(), kind | libc::LOCK_NB) } == 0 { 0 } else { last_error() }
        };
        let lock_range = |file: &File, kind: libc::c_int| {
            // SAFETY: all zeros are a valid value; 0 bytes from 0 on mean the whole file.
            let mut range: libc::flock = unsafe { std::mem::zeroed() };
            range.l_type = kind as libc::c_short;
            // SAFETY: `range` outlives the call; the descriptor is open.
            if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &range) } == 0 { 0 } else { last_error() }
        };
        assert_eq!((lock(&reader, libc::LOCK_EX), lock_range(&reader, libc::F_RDLCK)), (0, 0));
        let writer = File::options().read(true).write(true).open(&path).unwrap();
        assert_eq!(lock(&writer, libc::LOCK_EX), libc::EWOULDBLOCK);
        assert_eq!(lock_range(&writer, libc::F_WRLCK), libc::EAGAIN);
        assert_eq!(seen(&path), before);
        for file in [&reader, &writer] {
            let metadata = file.metadata().unwrap();
            assert_eq!((metadata.ino(), metadata.nlink()), (before.0, 1));
        }
        // What is said of the reader's descriptor is said of the file.
        reader.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
        reader.set_times(fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH)).unwrap();
        xattr::FileExt::set_xattr(&reader, "user.note", b"x").unwrap();
        reader.sync_all().unwrap();
        let after = seen(&path);
        assert_eq!((after.0, after.2 & 0o777, after.5), (before.0, 0o600, 0));
        assert_eq!(attribute(&path, "user.note").as_deref(), Some("x"));
        let again = File::open(format!("/proc/self/fd/{}", reader.as_raw_fd())).unwrap();
        writer.set_len(100).unwrap();
        assert_eq!((reader.metadata().unwrap().len(), again.metadata().unwrap().len()), (100, 100));
    }

    // A program empties it, which needs none of its bytes.
    fn a_reader_survives_truncation_and_removal((_m, path, bytes)) {
        assert!(fs::read(&path).unwrap() == bytes);
        let reader = File::open(&path).unwrap();
        fs::write(&path, "new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        let mut buf = vec![0; 100];
        let len = reader.read_at(&mut buf, 0).unwrap();
        assert_eq!(&buf[..len], b"new");
        fs::remove_file(&path).unwrap();
        assert_eq!(errno(File::open(&path)), libc::ENOENT);
        assert!(reader.metadata().is_ok());
    }

    fn what_is_recalled_while_it_is_read_stays_that_file((_m, path, bytes)) {
        assert!(fs::read(&path).unwrap() == bytes);
        let (reader, before) = (File::open(&path).unwrap(), seen(&path));
        xattr::set(&path, "user.stepfs.recall", b"1").unwrap();
        assert_eq!((seen(&path), reader.metadata().unwrap().ino()), (before, before.0));
        assert!(fs::read(&path).unwrap() == bytes);
    }

    fn a_released_file_without_a_name_is_written((_m, path, mut bytes)) {
        assert!(fs::read(&path).unwrap() == bytes);
        let reader = File::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let writer = File::options().write(true).open(format!("/proc/self/fd/{}", reader.as_raw_fd())).unwrap();
        writer.write_all_at(b"CHANGED", 1000).unwrap();
        bytes[1000..1007].copy_from_slice(b"CHANGED");
        let mut all = vec![0; bytes.len()];
        reader.read_exact_at(&mut all, 0).unwrap();
        assert!(all == bytes);
        assert_eq!(reader.metadata().unwrap().nlink(), 0);
    }

    // Both have one object, and must not have one decoded file.
    fn a_copy_keeps_its_bytes_when_the_other_is_written((_m, path, bytes)) {
        let copy = path.with_file_name("copy.txt");
        fs::write(&copy, &bytes).unwrap();
        wait_until("the copy is released", || state(&copy) == "released");
        let read = |path: &Path| assert!(fs::read(path).unwrap() == bytes);
        (0..2).for_each(|_| [&path, &copy].into_iter().for_each(|path| read(path)));
        // A mapping may outlive all descriptors.
        let (held, mapping) = (File::open(&path).unwrap(), Reading::new(&File::open(&copy).unwrap()));
        let writer = File::options().read(true).write(true).open(&path).unwrap();
        writer.write_all_at(&vec![b'#'; bytes.len()], 0).unwrap();
        read(&copy);
        assert!(*mapping.bytes() == bytes);
        let mut all = vec![0; bytes.len()];
        held.read_exact_at(&mut all, 0).unwrap();
        assert!(all.iter().all(|byte| *byte == b'#'));
    }

    fn an_unlinked_released_file_is_read_to_its_end((_m, path, bytes)) {
        let reader = File::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let mut all = vec![0; bytes.len()];
        reader.read_exact_at(&mut all, 0).unwrap();
        assert!(all == bytes);
        let metadata = reader.metadata().unwrap();
        assert_eq!((metadata.nlink(), metadata.len()), (0, bytes.len() as u64));
    }

    fn names_and_attributes_change_without_a_recall((_m, path, bytes)) {
        let (ino, new) = (seen(&path).0, path.with_file_name("renamed.txt"));
        fs::rename(&path, &new).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).unwrap();
        File::open(&new).unwrap().set_times(fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH)).unwrap();
        let name = c(&new);
        // SAFETY: all strings end with NUL, the value has its length.
        let set = unsafe { libc::setxattr(name.as_ptr(), c"user.note".as_ptr(), c"x".as_ptr().cast(), 1, 0) };
        assert_eq!(set, 0);
        assert_eq!(state(&new), "released");
        let after = seen(&new);
        assert_eq!((after.0, after.2 & 0o777, after.5), (ino, 0o600, 0));
        assert!(fs::read(&new).unwrap() == bytes);
        // And a recall keeps them.
        drop(File::options().append(true).open(&new).unwrap());
        let recalled = seen(&new);
        assert_eq!((recalled.0, recalled.2 & 0o777, recalled.5), (ino, 0o600, 0));
        assert_eq!(attribute(&new, "user.note").as_deref(), Some("x"));
    }

    fn all_names_of_a_released_file_stay_one_file((_m, path, mut bytes)) {
        let second = path.parent().unwrap().parent().unwrap().join("second.txt");
        fs::hard_link(&path, &second).unwrap();
        assert_eq!(seen(&path).0, seen(&second).0);
        File::options().write(true).open(&second).unwrap().write_all_at(b"BOTH", 5).unwrap();
        bytes[5..9].copy_from_slice(b"BOTH");
        assert!(fs::read(&path).unwrap() == bytes);
        assert_eq!(fs::metadata(&path).unwrap().nlink(), 2);
        assert_eq!(seen(&path).0, seen(&second).0);
    }

    fn many_open_it_at_once((_m, path, bytes)) {
        std::thread::scope(|scope| {
            for thread in 0..12 {
                let (path, bytes) = (&path, &bytes);
                scope.spawn(move || match thread % 3 {
                    0 => assert!(fs::read(path).unwrap() == *bytes),
                    1 => drop(File::options().write(true).open(path).unwrap()),
                    _ => drop(File::options().append(true).open(path).unwrap()),
                });
            }
        });
        assert!(fs::read(&path).unwrap() == bytes);
    }

    fn an_open_file_is_not_released((m, path, bytes)) {
        let second = path.with_file_name("step-3.txt");
        let reader = File::open(&second).unwrap();
        fs::write(path.with_file_name("step-4.txt"), text(4)).unwrap();
        fs::write(path.with_file_name("step-5.txt"), text(5)).unwrap();
        wait_until("the next one is released", || state(&path.with_file_name("step-4.txt")) == "released");
        std::thread::sleep(Duration::from_millis(100));
        assert_ne!(state(&second), "released");
        let ino = seen(&second).0;
        drop(reader);
        wait_until("it is released too", || state(&second) == "released");
        assert_eq!(seen(&second).0, ino);
        assert!(fs::read(&second).unwrap() == text(3));
        assert!(fs::read(&path).unwrap() == bytes);
        drop(m);
    }

    // `tar` fails if the ctime of a directory changes while it reads the files.
    fn a_release_does_not_show_in_the_directorys_times((m, path, _)) {
        let dir = path.parent().unwrap();
        let times = |dir: &Path| {
            let m = fs::metadata(dir).unwrap();
            (m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec())
        };
        let next = dir.join("step-3.txt");
        // The next state is saved and renamed; until then nothing may be released.
        let held = File::open(&next).unwrap();
        fs::write(dir.join("step-4.txt"), text(4)).unwrap();
        fs::write(dir.join("step-5.txt"), text(5)).unwrap();
        let before = times(dir);
        drop(held);
        wait_until("it is released", || state(&next) == "released");
        // Longer than the kernel keeps what it was told.
        std::thread::sleep(Duration::from_millis(1100));
        assert_eq!(times(dir), before);
        assert_ne!(times(&m.tree().join("dir")), before, "this file system does not tell");
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(times(dir) > before);
    }

    // They are empty most of the time, so programs that clean up remove them.
    fn directories_that_somebody_removes_are_made_again((m, path, mut bytes)) {
        let step = |step: usize| path.with_file_name(format!("step-{step}.txt"));
        wait_until("all is done", || m.archive.queue().queued == 0);
        for name in ["tmp", "cache"] {
            fs::remove_dir_all(m.dir.path().join("store").join(name)).unwrap();
        }
        assert!(fs::read(&path).unwrap() == bytes);
        wait_until("what was read is kept", || m.archive.status().cache_bytes > 0);
        File::options().write(true).open(&path).unwrap().write_all_at(b"HELLO", 9).unwrap();
        bytes[9..14].copy_from_slice(b"HELLO");
        assert!(fs::read(&path).unwrap() == bytes);
        wait_until("all is done", || m.archive.queue().queued == 0);
        fs::remove_dir_all(m.dir.path().join("store/tmp")).unwrap();
        (4..6).for_each(|number| fs::write(step(number), text(number)).unwrap());
        wait_until("it is released", || state(&step(4)) == "released");
    }

    // Found by the table of system calls: the archive opened it as the former directory, and waited for ever.
    fn a_fifo_in_the_place_of_a_directory_does_not_stop_the_archive((m, path, _)) {
        // While a file is open for writing no object goes, so that nobody looks at the names before the fifo is there.
        let held = File::create(m.mnt().join("held")).unwrap();
        let dir = path.parent().unwrap();
        fs::remove_dir_all(dir).unwrap();
        let name = c(dir);
        // SAFETY: the path ends with NUL.
        assert_eq!(unsafe { libc::mknod(name.as_ptr(), libc::S_IFIFO | 0o644, 0) }, 0);
        drop(held);
        wait_until("the objects are gone", || m.archive.status().object_bytes == 0);
        // And the next saved file is sealed.
        fs::write(m.mnt().join("step-9.txt"), text(9)).unwrap();
        wait_until("it is sealed", || state(&m.mnt().join("step-9.txt")) == "sealed");
    }
}

/// A device that returns a page of zeros for a stub makes the file unreadable, and does no other harm. Its bytes no
/// longer say that it was a stub, but its object does. The kernel forgets an unused file, and its next lookup finds
/// another content than the daemon released.
#[test]
fn a_stub_that_becomes_zeros_below_a_daemon_is_noticed_when_it_is_looked_at() {
    let (m, _, bytes) = released(true);
    let path = Path::new("dir/step-1.txt");
    let stub = File::options().read(true).write(true).open(m.tree().join(path)).unwrap();
    assert_ne!(m.archive.stub(path, &stub).unwrap().unwrap().object, stepfs::store::Id::NONE);
    stub.write_all_at(&[0; 4096], 0).unwrap();
    let seen = m.archive.stub(path, &stub).unwrap().expect("it is not the zeros that it seems");
    assert_eq!((seen.object, seen.logical_len), (stepfs::store::Id::NONE, bytes.len() as u64));
    // A program's own zeros never count as a lost stub.
    fs::write(m.mnt().join("zeros.txt"), vec![0; bytes.len()]).unwrap();
    let zeros = File::open(m.tree().join("zeros.txt")).unwrap();
    assert_eq!(m.archive.stub(Path::new("zeros.txt"), &zeros).unwrap(), None);
}

#[test]
fn a_stub_that_became_zeros_is_an_error_to_read() {
    for passthrough in [true, false] {
        let (m, path, bytes) = released(passthrough);
        let stub = m.tree().join("dir/step-1.txt");
        let time = fs::metadata(&path).unwrap().modified().unwrap();
        let dir = m.unmount_keeping();
        let file = File::options().write(true).open(&stub).unwrap();
        file.write_all_at(&[0; 4096], 0).unwrap();
        file.set_modified(time).unwrap();
        drop(file);
        let m = Mounted::on(dir, passthrough);
        let path = m.mnt().join("dir/step-1.txt");
        assert_eq!(fs::metadata(&path).unwrap().len(), bytes.len() as u64);
        assert_eq!(errno(fs::read(&path)), libc::EIO);
        assert_eq!(errno(File::options().append(true).open(&path)), libc::EIO);
        // Not by another name either.
        let moved = m.mnt().join("moved.txt");
        fs::rename(&path, &moved).unwrap();
        assert_eq!(errno(fs::read(&moved)), libc::EIO);
        // A newly written file can be read, and so could the others all the time.
        fs::write(&moved, &bytes[..5000]).unwrap();
        assert!(fs::read(&moved).unwrap() == bytes[..5000]);
        assert!(fs::read(m.mnt().join("dir/step-2.txt")).unwrap() == text(2));
    }
}

/// `cp -p`, `rsync` and `tar` set a file's time after the last close, when it may be sealed already.
#[test]
fn a_time_that_is_set_after_the_last_close_counts() {
    for passthrough in [true, false] {
        let m = Mounted::new(passthrough);
        let path = |step: u64| m.mnt().join(format!("step-{step}.txt"));
        let long_ago = |step: u64| std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + step);
        fs::write(path(1), text(1)).unwrap();
        wait_until("it is sealed", || state(&path(1)) == "sealed");
        File::open(path(1)).unwrap().set_modified(long_ago(1)).unwrap();
        let mut newer = File::create(path(2)).unwrap();
        std::io::Write::write_all(&mut newer, &text(2)).unwrap();
        newer.set_modified(long_ago(2)).unwrap();
        drop(newer);
        wait_until("the older one is released", || state(&path(1)) == "released");
        assert!(fs::read(path(1)).unwrap() == text(1));
        assert_eq!(state(&path(2)), "sealed");
    }
}

/// A mirror or a reader holds an object for a moment. Afterwards the housekeeper looks whether it is garbage; the queue counts that.
#[test]
fn an_object_that_is_let_go_leaves_nothing_to_wait_for() {
    let (m, _path, _bytes) = released(true);
    let objects = m.archive.mirror().objects();
    let is_done = || m.archive.queue().queued == 0;
    wait_until("nothing is left to be done", is_done);
    let newest = objects.all().into_iter().max_by_key(|header| header.modified_ns).unwrap();
    // With a name, and without one: the next state becomes a difference to it, so it stays.
    for removed in [false, true] {
        if removed {
            fs::remove_file(m.mnt().join("dir/step-2.txt")).unwrap();
            wait_until("the name is gone", || objects.stored_unnamed() > 0);
            wait_until("nothing is left to be done", is_done);
        }
        // The housekeeper sleeps.
        std::thread::sleep(Duration::from_millis(300));
        drop(objects.hold(newest.id).expect("it stays"));
        assert!(objects.get(newest.id).is_some());
        wait_until("nothing is left to be done", is_done);
    }
    m.unmount();
}
