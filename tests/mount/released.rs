//! Files whose bytes are in the archive: they look and behave as before.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::support::{Mounted, attribute, c, errno, state, wait_until};
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

    fn a_reader_keeps_its_bytes_or_sees_the_writers((_m, path, bytes)) {
        // Decoded whole first, so that passthrough can serve the decoded file.
        assert!(fs::read(&path).unwrap() == bytes);
        let reader = File::open(&path).unwrap();
        let mut buf = vec![0; 4096];
        reader.read_exact_at(&mut buf, 0).unwrap();
        let writer = File::options().write(true).open(&path).unwrap();
        writer.write_all_at(b"CHANGED", 0).unwrap();
        reader.read_exact_at(&mut buf, 0).unwrap();
        let mut changed = bytes.clone();
        changed[..7].copy_from_slice(b"CHANGED");
        assert!(buf == bytes[..4096] || buf == changed[..4096]);
        reader.read_exact_at(&mut buf, 200_000).unwrap();
        assert!(buf == bytes[200_000..204_096]);
        drop(writer);
        assert!(fs::read(&path).unwrap() == changed);
        drop(reader);
        assert!(fs::read(&path).unwrap() == changed);
    }

    fn a_reader_survives_truncation_and_removal((_m, path, bytes)) {
        assert!(fs::read(&path).unwrap() == bytes);
        let reader = File::open(&path).unwrap();
        fs::write(&path, "new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        let mut buf = vec![0; 100];
        let len = reader.read_at(&mut buf, 0).unwrap();
        assert!(buf[..len] == bytes[..len] || &buf[..len] == b"new");
        fs::remove_file(&path).unwrap();
        assert_eq!(errno(File::open(&path)), libc::ENOENT);
        assert!(reader.metadata().is_ok());
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
    let objects = Source::objects(&*m.archive);
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
