//! A POSIX program's expectations of a directory, with kernel passthrough and without. Most tests run the same on a
//! plain directory beside the mount and compare.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::support::{Mapping, Mounted, c, errno, state, wait_until};

/// Each test, in both modes.
macro_rules! both {
    ($($(#[$doc:meta])* fn $name:ident($m:ident: &Mounted) $body:block)*) => {
        mod passthrough { $( #[test] fn $name() { super::$name(&super::Mounted::new(true)); } )* }
        mod daemon { $( #[test] fn $name() { super::$name(&super::Mounted::new(false)); } )* }
        $( $(#[$doc])* fn $name($m: &Mounted) $body )*
    };
}

fn sys(result: libc::c_int) -> std::io::Result<()> {
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

fn rename2(from: &Path, to: &Path, flags: libc::c_uint) -> std::io::Result<()> {
    let (from, to) = (c(from), c(to));
    // SAFETY: both paths end with NUL and outlive the call.
    sys(unsafe { libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags) })
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u32).wrapping_mul(2_654_435_761).to_le_bytes()[3] ^ seed).collect()
}

both! {
    fn written_bytes_are_read_back_and_lie_in_the_tree(m: &Mounted) {
        let data = pattern(3_000_001, 1);
        fs::write(m.mnt().join("f"), &data).unwrap();
        assert!(fs::read(m.mnt().join("f")).unwrap() == data);
        assert!(fs::read(m.tree().join("f")).unwrap() == data);
        m.same(|dir| {
            let path = dir.join("g");
            let mut file = File::create(&path).unwrap();
            file.write_all(b"hello").unwrap();
            file.seek(SeekFrom::Start(10)).unwrap();
            file.write_all(b"world").unwrap();
            let len = file.metadata().unwrap().len();
            drop(file);
            let mut appending = File::options().append(true).open(&path).unwrap();
            appending.write_all(b"!").unwrap();
            (len, appending.metadata().unwrap().len(), fs::read(&path).unwrap())
        });
    }

    fn create_obeys_its_flags(m: &Mounted) {
        m.same(|dir| {
            let path = dir.join("f");
            fs::write(&path, "abc").unwrap();
            let again = errno(File::create_new(&path));
            let missing = errno(File::open(dir.join("none")));
            let directory = errno(File::options().write(true).open(dir));
            let below_a_file = errno(File::open(path.join("x")));
            let long = errno(File::create(dir.join("n".repeat(256))));
            File::create(&path).unwrap();
            (again, missing, directory, below_a_file, long, fs::metadata(&path).unwrap().len())
        });
    }

    fn modes_and_owners_of_what_is_created(m: &Mounted) {
        m.same(|dir| {
            let file = File::options().write(true).create(true).truncate(true).mode(0o640).open(dir.join("f")).unwrap();
            let read_only = File::options().write(true).create(true).truncate(true).mode(0o400).open(dir.join("r"));
            (&read_only.unwrap()).write_all(b"through the open handle").unwrap();
            fs::create_dir(dir.join("d")).unwrap();
            std::os::unix::fs::symlink("target", dir.join("l")).unwrap();
            drop(file);
            ["f", "r", "d", "l"].map(|name| {
                let metadata = fs::symlink_metadata(dir.join(name)).unwrap();
                (metadata.mode(), metadata.uid(), metadata.gid(), metadata.nlink(), metadata.len())
            })[..2].to_vec()
        });
    }

    fn setgid_directories_hand_down_their_group(m: &Mounted) {
        m.same(|dir| {
            let d = dir.join("d");
            fs::create_dir(&d).unwrap();
            std::os::unix::fs::chown(&d, None, Some(1234)).unwrap();
            fs::set_permissions(&d, fs::Permissions::from_mode(0o2775)).unwrap();
            fs::write(d.join("f"), "x").unwrap();
            fs::create_dir(d.join("e")).unwrap();
            let seen = |name: &str| {
                let metadata = fs::metadata(d.join(name)).unwrap();
                (metadata.gid(), metadata.mode() & 0o7000)
            };
            (seen("f"), seen("e"))
        });
    }

    fn rename_replaces_refuses_and_exchanges(m: &Mounted) {
        m.same(|dir| {
            let (a, b, d, e) = (dir.join("a"), dir.join("b"), dir.join("d"), dir.join("e"));
            fs::write(&a, "A").unwrap();
            fs::write(&b, "B").unwrap();
            fs::create_dir(&d).unwrap();
            fs::create_dir(&e).unwrap();
            fs::write(e.join("x"), "X").unwrap();
            let refused = errno(rename2(&a, &b, libc::RENAME_NOREPLACE));
            rename2(&a, &b, libc::RENAME_EXCHANGE).unwrap();
            let exchanged = (fs::read(&a).unwrap(), fs::read(&b).unwrap());
            rename2(&a, &e, libc::RENAME_EXCHANGE).unwrap();
            let crossed = (fs::read(a.join("x")).unwrap(), fs::read(&e).unwrap());
            rename2(&a, &e, libc::RENAME_EXCHANGE).unwrap();
            let with_nothing = errno(rename2(&a, &dir.join("none"), libc::RENAME_EXCHANGE));
            rename2(&a, &dir.join("new"), libc::RENAME_NOREPLACE).unwrap();
            let over_a_directory = errno(fs::rename(&b, &d));
            let over_a_full_one = errno(fs::rename(&d, &e));
            let into_itself = errno(fs::rename(&e, e.join("inner")));
            fs::rename(dir.join("new"), &b).unwrap();
            fs::rename(&e, &d).unwrap();
            let found = (fs::read(&b).unwrap(), fs::read(d.join("x")).unwrap(), a.exists(), e.exists());
            (refused, exchanged, crossed, with_nothing, over_a_directory, over_a_full_one, into_itself, found)
        });
    }

    fn links_share_bytes_and_number(m: &Mounted) {
        m.same(|dir| {
            let (a, b, s) = (dir.join("a"), dir.join("b"), dir.join("s"));
            fs::write(&a, "one").unwrap();
            fs::hard_link(&a, &b).unwrap();
            let again = errno(fs::hard_link(&a, &b));
            fs::write(&b, "two!").unwrap();
            let (first, second) = (fs::metadata(&a).unwrap(), fs::metadata(&b).unwrap());
            assert_eq!(first.ino(), second.ino());
            fs::rename(&a, &b).unwrap();
            let both_stay = (a.exists(), b.exists());
            fs::remove_file(&a).unwrap();
            std::os::unix::fs::symlink("b", &s).unwrap();
            let through = fs::read(&s).unwrap();
            let target = fs::read_link(&s).unwrap();
            (again, first.nlink(), second.len(), both_stay, fs::metadata(&b).unwrap().nlink(), through, target)
        });
    }

    fn an_unlinked_file_lives_while_it_is_open(m: &Mounted) {
        m.same(|dir| {
            let path = dir.join("f");
            let mut file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
            file.write_all(b"before").unwrap();
            fs::remove_file(&path).unwrap();
            file.write_all(b" and after").unwrap();
            fs::write(&path, "another").unwrap();
            file.set_len(12).unwrap();
            file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
            let mut text = String::new();
            file.seek(SeekFrom::Start(0)).unwrap();
            file.read_to_string(&mut text).unwrap();
            file.sync_all().unwrap();
            let metadata = file.metadata().unwrap();
            (text, metadata.nlink(), metadata.len(), metadata.mode(), fs::read(&path).unwrap())
        });
        m.same(|dir| {
            // The same by renaming over it.
            let (a, b) = (dir.join("over"), dir.join("under"));
            fs::write(&a, "new").unwrap();
            fs::write(&b, "old").unwrap();
            let mut old = File::open(&b).unwrap();
            fs::rename(&a, &b).unwrap();
            let mut text = String::new();
            old.read_to_string(&mut text).unwrap();
            (text, old.metadata().unwrap().nlink(), fs::read(&b).unwrap())
        });
    }

    fn directories_are_made_listed_and_removed(m: &Mounted) {
        m.same(|dir| {
            let d = dir.join("d");
            fs::create_dir(&d).unwrap();
            let again = errno(fs::create_dir(&d));
            for i in 0..1000 {
                fs::write(d.join(format!("file-{i:04}")), "x").unwrap();
            }
            let full = errno(fs::remove_dir(&d));
            let mut names: Vec<_> = fs::read_dir(&d).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            // Removing while listing loses nothing.
            let mut removed = 0;
            for entry in fs::read_dir(&d).unwrap() {
                fs::remove_file(entry.unwrap().path()).unwrap();
                removed += 1;
            }
            let a_file = errno(fs::remove_dir(dir.join("none")));
            let unlinked = errno(fs::remove_file(&d)) != 0;
            fs::remove_dir(&d).unwrap();
            (again, full, names.len(), names[0].clone(), names[999].clone(), removed, a_file, unlinked)
        });
    }

    fn listed_numbers_are_those_of_stat(m: &Mounted) {
        use std::os::unix::fs::DirEntryExt;
        for name in ["a", "b", "c"] {
            fs::write(m.mnt().join(name), name).unwrap();
        }
        fs::create_dir(m.mnt().join("d")).unwrap();
        let mut count = 0;
        for entry in fs::read_dir(m.mnt()).unwrap() {
            let entry = entry.unwrap();
            assert_eq!(entry.ino(), fs::metadata(entry.path()).unwrap().ino());
            count += 1;
        }
        assert_eq!(count, 4);
    }

    fn truncate_shortens_and_lengthens(m: &Mounted) {
        m.same(|dir| {
            let path = dir.join("f");
            fs::write(&path, pattern(200_000, 3)).unwrap();
            let short = c(&path);
            // SAFETY: the path ends with NUL.
            sys(unsafe { libc::truncate(short.as_ptr(), 70_000) }).unwrap();
            let first = fs::read(&path).unwrap();
            let file = File::options().write(true).open(&path).unwrap();
            file.set_len(300_000).unwrap();
            let second = fs::read(&path).unwrap();
            drop(File::options().write(true).truncate(true).open(&path).unwrap());
            (first, second, fs::metadata(&path).unwrap().len(), errno(File::open(&path).unwrap().set_len(1)))
        });
    }

    fn writes_through_a_shared_mapping_arrive(m: &Mounted) {
        m.same(|dir| {
            let path = dir.join("f");
            fs::write(&path, pattern(100_000, 4)).unwrap();
            let file = File::options().read(true).write(true).open(&path).unwrap();
            let mut mapping = Mapping::new(&file);
            mapping.bytes()[50_000..50_005].copy_from_slice(b"hello");
            assert_eq!(&fs::read(&path).unwrap()[50_000..50_005], b"hello");
            drop((mapping, file));
            let back = fs::read(&path).unwrap();
            (back[49_999], back[50_000..50_005].to_vec(), back.len())
        });
        let at = |path: &Path| fs::read(path).unwrap()[50_000..50_005].to_vec();
        assert_eq!(at(&m.tree().join("f")), b"hello");
    }

    /// A file is sealed when the last handle *and mapping* is gone. With passthrough the kernel does not report that.
    fn a_mapping_keeps_a_file_from_being_sealed(m: &Mounted) {
        let path = m.mnt().join("f");
        fs::write(&path, pattern(100_000, 4)).unwrap();
        wait_until("the file is sealed", || state(&path) != "staged");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut mapping = Mapping::new(&file);
        drop(file);
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(state(&path), "staged");
        // Neither does opening and closing it again.
        drop(File::open(&path).unwrap());
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(state(&path), "staged");
        mapping.bytes()[7] = 1;
        drop(mapping);
        wait_until("the file is sealed again", || state(&path) != "staged");
        assert_eq!(fs::read(&path).unwrap()[7], 1);
    }

    fn a_stranger_who_writes_takes_the_set_user_id_bit(m: &Mounted) {
        // Another user needs a mount that lets others in; this tests only root's part.
        m.same(|dir| {
            let path = dir.join("f");
            fs::write(&path, "x").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o6755)).unwrap();
            fs::write(&path, "root may").unwrap();
            let kept = fs::metadata(&path).unwrap().mode();
            std::os::unix::fs::chown(&path, Some(5), Some(6)).unwrap();
            (kept, fs::metadata(&path).unwrap().mode())
        });
    }

    fn handles_of_all_kinds_go_together(m: &Mounted) {
        let open = |path: &Path, kind: usize| match kind {
            0 => File::open(path),
            1 => File::options().write(true).open(path),
            2 => File::options().read(true).write(true).open(path),
            3 => File::options().append(true).open(path),
            4 => File::options().read(true).custom_flags(libc::O_DIRECT).open(path),
            _ => File::options().write(true).truncate(true).open(path),
        };
        let path = m.mnt().join("f");
        for first in 0..6 {
            for second in 0..6 {
                fs::write(&path, pattern(8192, 5)).unwrap();
                let a = open(&path, first).unwrap_or_else(|error| panic!("{first}: {error}"));
                let b = open(&path, second).unwrap_or_else(|error| panic!("{first} then {second}: {error}"));
                drop(a);
                let third = open(&path, first).unwrap_or_else(|error| panic!("{first}, {second}, {first}: {error}"));
                drop((b, third));
            }
        }
    }

    fn what_one_handle_writes_others_read(m: &Mounted) {
        m.same(|dir| {
            let path = dir.join("f");
            let before = pattern(64 * 1024, 6);
            fs::write(&path, &before).unwrap();
            let reader = File::open(&path).unwrap();
            let mut buf = vec![0; before.len()];
            reader.read_exact_at(&mut buf, 0).unwrap();
            let only_writes = File::options().write(true).open(&path).unwrap();
            only_writes.write_all_at(b"first", 4096).unwrap();
            let mut first = [0; 5];
            reader.read_exact_at(&mut first, 4096).unwrap();
            let both = File::options().read(true).write(true).open(&path).unwrap();
            both.write_all_at(b"other", 8192).unwrap();
            let mut second = [0; 5];
            reader.read_exact_at(&mut second, 8192).unwrap();
            drop((only_writes, both, reader));
            let read_again = fs::read(&path).unwrap();
            (first, second, read_again)
        });
    }

    fn direct_io_works(m: &Mounted) {
        #[repr(align(4096))]
        struct Aligned([u8; 8192]);
        let path = m.mnt().join("f");
        let mut data = Box::new(Aligned([7; 8192]));
        data.0[4096] = 8;
        let file = File::options().read(true).write(true).create_new(true).custom_flags(libc::O_DIRECT).open(&path).unwrap();
        file.write_all_at(&data.0, 4096).unwrap();
        let mut back = Box::new(Aligned([0; 8192]));
        file.read_exact_at(&mut back.0, 4096).unwrap();
        assert!(back.0 == data.0);
        assert_eq!(fs::read(m.tree().join("f")).unwrap()[4096..], data.0);
    }

    fn holes_are_made_and_found(m: &Mounted) {
        m.same(|dir| {
            let path = dir.join("f");
            let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
            let fallocate = |mode, offset, len| {
                // SAFETY: the descriptor is open.
                sys(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) })
            };
            file.write_all_at(&pattern(1 << 20, 8), 0).unwrap();
            let punched = errno(fallocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, 256 << 10, 256 << 10));
            let beyond = errno(fallocate(libc::FALLOC_FL_KEEP_SIZE, 1 << 20, 1 << 20));
            let grown = errno(fallocate(0, 1 << 20, 4096));
            file.sync_all().unwrap();
            // SAFETY: the descriptor is open.
            let seek = |at, whence| unsafe { libc::lseek(file.as_raw_fd(), at, whence) };
            let hole = seek(0, libc::SEEK_HOLE);
            let data = seek(300 << 10, libc::SEEK_DATA);
            let past = (seek(2 << 20, libc::SEEK_DATA), std::io::Error::last_os_error().raw_os_error());
            (punched, beyond, grown, hole, data, past, fs::read(&path).unwrap())
        });
    }

    fn copy_file_range_copies(m: &Mounted) {
        m.same(|dir| {
            fs::write(dir.join("a"), pattern(500_000, 9)).unwrap();
            let (from, to) = (File::open(dir.join("a")).unwrap(), File::create(dir.join("b")).unwrap());
            let (mut at, mut to_at) = (1000_i64, 50_i64);
            let mut total = 0;
            while total < 400_000 {
                // SAFETY: both descriptors are open, both offsets outlive the call.
                let copied = unsafe {
                    libc::copy_file_range(from.as_raw_fd(), &mut at, to.as_raw_fd(), &mut to_at, 400_000 - total, 0)
                };
                assert!(copied > 0, "{}", std::io::Error::last_os_error());
                total += copied as usize;
            }
            (fs::read(dir.join("b")).unwrap(), fs::copy(dir.join("a"), dir.join("c")).unwrap())
        });
    }

    fn extended_attributes_are_kept(m: &Mounted) {
        m.same(|dir| {
            let path = dir.join("f");
            fs::write(&path, "x").unwrap();
            let path = c(&path);
            let set = |name: &std::ffi::CStr, value: &[u8], flags| {
                // SAFETY: both strings end with NUL, the value has its length.
                errno(sys(unsafe {
                    libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags)
                }))
            };
            let get = |name: &std::ffi::CStr, room: usize| {
                let mut value = vec![0u8; room];
                // SAFETY: both strings end with NUL, the buffer has its length.
                let len = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), room) };
                if len < 0 { Err(std::io::Error::last_os_error().raw_os_error()) } else { Ok((len, value)) }
            };
            let results = (
                set(c"user.a", b"first", 0),
                set(c"user.a", b"second", libc::XATTR_CREATE),
                set(c"user.b", b"", libc::XATTR_REPLACE),
                set(c"user.b", b"", 0),
                get(c"user.a", 100),
                get(c"user.a", 0),
                get(c"user.a", 2),
                get(c"user.none", 100),
            );
            let mut names = vec![0u8; 100];
            // SAFETY: the path ends with NUL, the buffer has its length.
            let len = unsafe { libc::listxattr(path.as_ptr(), names.as_mut_ptr().cast(), 100) };
            // SAFETY: both strings end with NUL.
            let removed = errno(sys(unsafe { libc::removexattr(path.as_ptr(), c"user.a".as_ptr()) }));
            (results, len, names, removed, get(c"user.a", 10))
        });
    }

    fn stepfs_attributes_are_not_the_files(m: &Mounted) {
        let path = m.mnt().join("f");
        fs::write(&path, "x").unwrap();
        let path = c(&path);
        // SAFETY: both strings end with NUL.
        let removed = errno(sys(unsafe { libc::removexattr(path.as_ptr(), c"user.stepfs.state".as_ptr()) }));
        assert_eq!(removed, libc::EPERM);
        // Version 2; owner, group and others, each with their tag, permissions and no id.
        let mut list = 2u32.to_le_bytes().to_vec();
        for (tag, permissions) in [(1u16, 6u16), (4, 4), (0x20, 4)] {
            list.extend([tag.to_le_bytes(), permissions.to_le_bytes()].concat());
            list.extend(u32::MAX.to_le_bytes());
        }
        let (name, value) = (c"system.posix_acl_access".as_ptr(), list.as_ptr().cast());
        // SAFETY: both strings end with NUL, the value has its length.
        let acl = errno(sys(unsafe { libc::setxattr(path.as_ptr(), name, value, list.len(), 0) }));
        assert_eq!(acl, libc::EOPNOTSUPP);
    }

    fn times_modes_and_owners_are_set(m: &Mounted) {
        m.same(|dir| {
            let path = dir.join("f");
            fs::write(&path, "x").unwrap();
            let old = SystemTime::UNIX_EPOCH + Duration::new(1_000_000_000, 123_456_789);
            let ancient = SystemTime::UNIX_EPOCH - Duration::new(1_000, 250_000_000);
            let file = File::options().write(true).open(&path).unwrap();
            file.set_times(fs::FileTimes::new().set_accessed(ancient).set_modified(old)).unwrap();
            drop(file);
            let first = fs::metadata(&path).unwrap();
            // Only one of the two, and now.
            let spec = [libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_OMIT }, libc::timespec { tv_sec: 0, tv_nsec: libc::UTIME_NOW }];
            let name = c(&path);
            // SAFETY: the path ends with NUL, the array has two elements.
            sys(unsafe { libc::utimensat(libc::AT_FDCWD, name.as_ptr(), spec.as_ptr(), 0) }).unwrap();
            let second = fs::metadata(&path).unwrap();
            let recent = second.modified().unwrap().elapsed().unwrap() < Duration::from_secs(60);
            fs::set_permissions(&path, fs::Permissions::from_mode(0o4751)).unwrap();
            let mode = fs::metadata(&path).unwrap().mode();
            std::os::unix::fs::chown(&path, Some(1000), Some(1001)).unwrap();
            let last = fs::metadata(&path).unwrap();
            (
                (first.atime(), first.atime_nsec(), first.mtime(), first.mtime_nsec()),
                (second.atime(), second.atime_nsec(), recent),
                (mode, last.mode(), last.uid(), last.gid()),
            )
        });
    }

    fn a_file_keeps_its_times_in_its_directory(m: &Mounted) {
        m.same(|dir| {
            let d = dir.join("d");
            fs::create_dir(&d).unwrap();
            fs::write(d.join("f"), "x").unwrap();
            let before = fs::metadata(&d).unwrap().modified().unwrap();
            std::thread::sleep(Duration::from_millis(100));
            fs::write(d.join("f"), "longer").unwrap();
            let same = fs::metadata(&d).unwrap().modified().unwrap() == before;
            fs::remove_file(d.join("f")).unwrap();
            (same, fs::metadata(&d).unwrap().modified().unwrap() > before)
        });
    }

    fn special_files_are_made(m: &Mounted) {
        m.same(|dir| {
            let make = |name: &str, mode, dev| {
                let path = c(&dir.join(name));
                // SAFETY: the path ends with NUL.
                errno(sys(unsafe { libc::mknod(path.as_ptr(), mode, dev) }))
            };
            let made = (
                make("fifo", libc::S_IFIFO | 0o644, 0),
                make("socket", libc::S_IFSOCK | 0o600, 0),
                make("null", libc::S_IFCHR | 0o666, libc::makedev(1, 3)),
                make("file", libc::S_IFREG | 0o600, 0),
                make("fifo", libc::S_IFIFO | 0o644, 0),
            );
            let seen = ["fifo", "socket", "null", "file"].map(|name| {
                let metadata = fs::symlink_metadata(dir.join(name)).unwrap();
                (metadata.mode() & libc::S_IFMT, metadata.rdev())
            });
            (made, seen)
        });
    }

    fn locks_lock(m: &Mounted) {
        m.same(|dir| {
            let path = dir.join("f");
            fs::write(&path, "x").unwrap();
            let (a, b) = (File::open(&path).unwrap(), File::open(&path).unwrap());
            // SAFETY: the descriptors are open.
            let lock = |file: &File, how| errno(sys(unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) }));
            (lock(&a, libc::LOCK_EX), lock(&b, libc::LOCK_SH), lock(&a, libc::LOCK_UN), lock(&b, libc::LOCK_EX))
        });
    }

    fn syncing_says_yes(m: &Mounted) {
        m.same(|dir| {
            let d = dir.join("d");
            fs::create_dir(&d).unwrap();
            let file = File::create(d.join("f")).unwrap();
            (&file).write_all(b"x").unwrap();
            let synced = (errno(file.sync_data()), errno(file.sync_all()));
            let written = File::options().write(true).custom_flags(libc::O_SYNC).open(d.join("f")).unwrap();
            (synced, errno((&written).write_all(b"yy")), errno(File::open(&d).unwrap().sync_all()))
        });
    }

    fn the_file_system_describes_itself(m: &Mounted) {
        let space = |path: &Path| {
            let path = c(path);
            let mut answer = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
            // SAFETY: the path ends with NUL; the answer is a writable statvfs, and zeroed is a valid one.
            unsafe {
                sys(libc::statvfs(path.as_ptr(), answer.as_mut_ptr())).unwrap();
                answer.assume_init()
            }
        };
        let (mounted, plain) = (space(&m.mnt()), space(&m.plain()));
        assert_eq!((mounted.f_blocks, mounted.f_bsize, mounted.f_namemax), (plain.f_blocks, plain.f_bsize, plain.f_namemax));
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = table.lines().find(|line| line.contains(m.mnt().to_str().unwrap())).unwrap();
        let source = m.mnt().with_file_name("store");
        let words = format!("- fuse.stepfs {} ", source.display());
        assert!(line.contains(&words) && line.contains("default_permissions"), "{line}");
    }

    fn a_removed_working_directory_is_harmless(m: &Mounted) {
        m.same(|dir| {
            let d = dir.join("d");
            fs::create_dir(&d).unwrap();
            let held = File::open(&d).unwrap();
            fs::remove_dir(&d).unwrap();
            fs::create_dir(&d).unwrap();
            fs::write(d.join("f"), "x").unwrap();
            // SAFETY: the descriptor is open, the name ends with NUL.
            let fd = unsafe { libc::openat(held.as_raw_fd(), c"f".as_ptr(), libc::O_RDONLY) };
            let error = std::io::Error::last_os_error().raw_os_error();
            assert!(fd < 0);
            (error, held.metadata().unwrap().is_dir())
        });
    }

    fn many_threads_at_once(m: &Mounted) {
        let mnt = m.mnt();
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let mnt = &mnt;
                scope.spawn(move || {
                    for round in 0..40 {
                        let (temporary, last) = (mnt.join(format!("t{thread}.tmp")), mnt.join(format!("shared{}", round % 4)));
                        let data = pattern(20_000 + round, thread);
                        fs::write(&temporary, &data).unwrap();
                        fs::rename(&temporary, &last).unwrap();
                        // The last writer wins: one whole file of one of them.
                        let read = fs::read(&last).unwrap();
                        assert!((0..8).any(|seed| read == pattern(read.len(), seed)));
                        fs::read_dir(mnt).unwrap().for_each(drop);
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(&mnt).unwrap().count(), 4);
    }
}

#[test]
fn a_tmpfile_like_open_by_descriptor_works() {
    let m = Mounted::new(true);
    let path = m.mnt().join("f");
    fs::write(&path, "by descriptor").unwrap();
    let name = c(&path);
    // SAFETY: the path ends with NUL.
    let fd = unsafe { libc::open(name.as_ptr(), libc::O_PATH) };
    assert!(fd >= 0);
    // SAFETY: just opened, and nobody else has it.
    let held = unsafe { File::from_raw_fd(fd) };
    fs::remove_file(&path).unwrap();
    let again = fs::read(format!("/proc/self/fd/{}", held.as_raw_fd())).unwrap();
    assert_eq!(again, b"by descriptor");
    assert_eq!(held.metadata().unwrap().nlink(), 0);
}
