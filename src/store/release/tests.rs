use super::*;
use std::fs::{File, FileTimes, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::time::{Duration, SystemTime};

use xattr::FileExt as _;

const PATH: &str = "run/f.pt";
static CONTENT: [u8; 70_000] = [7; 70_000];

type Change = fn(&Fixture);

struct Fixture {
    dir: tempfile::TempDir,
    store: Option<Store>,
    object: Id,
}

impl Fixture {
    /// A store with one file, with unusual attributes, in a directory that is an hour old.
    fn new() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        let path = store.tree().join(PATH);
        fs::create_dir(path.parent().unwrap()).unwrap();
        fs::write(&path, CONTENT).unwrap();
        let fixture = Fixture { dir, store: Some(store), object: Id([9; 16]) };
        fixture.age(&path, 7200);
        fixture.age(path.parent().unwrap(), 3600);
        fixture
    }

    fn age(&self, path: &Path, seconds: u64) {
        let time = SystemTime::now() - Duration::from_secs(seconds) + Duration::from_nanos(123_456_789);
        let times = FileTimes::new().set_accessed(time + Duration::from_secs(5)).set_modified(time);
        File::open(path).unwrap().set_times(times).unwrap();
    }

    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("store/tree").join(PATH)
    }

    fn times(&self) -> Times {
        Times::of(&fs::metadata(self.path().parent().unwrap()).unwrap())
    }

    fn prepare(&self) -> Prepared {
        let metadata = fs::symlink_metadata(self.path()).unwrap();
        let stub = Stub { store: self.store().id(), object: self.object, logical_len: metadata.len() };
        Prepared::new(self.store(), Path::new(PATH), &metadata, &stub).unwrap().unwrap()
    }

    /// As after a crash: files in `tmp/` stay there.
    fn crash(&mut self, prepared: Prepared) {
        std::mem::forget(prepared);
        self.store = None;
    }

    fn reopen(&mut self) {
        self.store = None;
        self.store = Some(Store::open(&self.dir.path().join("store")).unwrap());
        assert_eq!(fs::read_dir(self.store().tmp()).unwrap().count(), 0, "tmp/ is empty");
    }

    fn stub(&self) -> Option<Stub> {
        Stub::read(&File::open(self.path()).unwrap(), self.store().id()).unwrap()
    }

    /// Changes the directory like a program.
    fn stir(&self) {
        let path = self.path().with_file_name("other");
        fs::write(&path, "x").unwrap();
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_stub_has_the_attributes_of_its_file_and_the_directory_its_times() {
    let fixture = Fixture::new();
    let path = fixture.path();
    let file = File::open(&path).unwrap();
    // SAFETY: geteuid takes nothing and cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        std::os::unix::fs::fchown(&file, Some(1234), Some(2345)).unwrap();
    }
    file.set_permissions(Permissions::from_mode(0o4640)).unwrap();
    let with_xattr = file.set_xattr("user.step", b"\x00value").is_ok();
    let directory = fixture.times();
    let before = fs::metadata(&path).unwrap();
    let prepared = fixture.prepare();
    assert_eq!(prepared.commit(&path).unwrap(), Committed::Done);
    drop(prepared);
    let after = fs::metadata(&path).unwrap();
    assert_ne!(after.ino(), before.ino());
    assert_eq!((after.mode(), after.uid(), after.gid()), (before.mode(), before.uid(), before.gid()));
    assert_eq!(after.len(), before.len());
    assert_eq!(Times::of(&after), Times::of(&before));
    assert_eq!(fixture.times(), directory);
    if with_xattr {
        assert_eq!(xattr::get(&path, "user.step").unwrap().unwrap(), b"\x00value");
    }
    assert_eq!(fixture.stub().unwrap().object, fixture.object);
    assert_eq!(fs::read_dir(fixture.store().tmp()).unwrap().count(), 0);
}

#[test]
fn nothing_happens_once_the_file_or_its_directory_changed() {
    let changes: [(&str, Change); 8] = [
        ("content", |f| {
            OpenOptions::new().write(true).open(f.path()).unwrap().set_len(80_000).unwrap();
        }),
        ("content of the same length and time", |f| {
            let times = Times::of(&fs::metadata(f.path()).unwrap());
            let file = OpenOptions::new().write(true).open(f.path()).unwrap();
            file.write_all_at(b"new", 0).unwrap();
            Io::disk().set_times(&f.path(), times, CrashPoint::Fsync).unwrap();
        }),
        ("mode", |f| fs::set_permissions(f.path(), Permissions::from_mode(0o600)).unwrap()),
        ("times", |f| f.age(&f.path(), 10)),
        ("a second name elsewhere", |f| fs::hard_link(f.path(), f.store().tree().join("second")).unwrap()),
        ("another file", |f| {
            fs::write(f.path().with_extension("new"), CONTENT).unwrap();
            fs::rename(f.path().with_extension("new"), f.path()).unwrap();
        }),
        ("a name in the directory", |f| f.stir()),
        ("the directory's times", |f| f.age(f.path().parent().unwrap(), 10)),
    ];
    for (what, change) in changes {
        let fixture = Fixture::new();
        let prepared = fixture.prepare();
        change(&fixture);
        let (directory, content) = (fixture.times(), fs::read(fixture.path()).unwrap());
        assert_ne!(prepared.commit(&fixture.path()).unwrap(), Committed::Done, "{what}");
        drop(prepared);
        assert_eq!(fs::read(fixture.path()).unwrap(), content, "{what}");
        assert_eq!(fixture.times().modified, directory.modified, "{what}");
        assert_eq!(fs::read_dir(fixture.store().tmp()).unwrap().count(), 0, "{what}");
    }
    let fixture = Fixture::new();
    let prepared = fixture.prepare();
    fs::remove_file(fixture.path()).unwrap();
    assert!(prepared.commit(&fixture.path()).is_err());
    assert!(!fixture.path().exists());
}

#[test]
fn a_crash_before_the_rename_undoes() {
    let mut fixture = Fixture::new();
    let prepared = fixture.prepare();
    fixture.crash(prepared);
    fixture.stir();
    let directory = fixture.times();
    fixture.reopen();
    assert_eq!(fixture.stub(), None);
    assert_eq!(fs::read(fixture.path()).unwrap(), CONTENT);
    assert_eq!(fixture.times().modified, directory.modified, "the note was void");
}

#[test]
fn a_crash_after_the_rename_gives_the_directory_its_times() {
    let mut fixture = Fixture::new();
    let before = fixture.times();
    let prepared = fixture.prepare();
    fs::rename(&prepared.stub, fixture.path()).unwrap();
    fixture.crash(prepared);
    assert_ne!(fixture.times().modified, before.modified);
    fixture.reopen();
    assert_eq!(fixture.times(), before);
    assert_eq!(fixture.stub().unwrap().object, fixture.object);
    // A second opening finds nothing more to do.
    fixture.stir();
    let now = fixture.times();
    fixture.reopen();
    assert_eq!(fixture.times().modified, now.modified);
}

#[test]
fn a_directory_that_changes_all_the_time_keeps_its_own_times() {
    let mut fixture = Fixture::new();
    let mut prepared = fixture.prepare();
    fixture.stir();
    assert_eq!(prepared.commit(&fixture.path()).unwrap(), Committed::DirectoryChanged);
    prepared.without_note().unwrap();
    fixture.stir();
    let present = fixture.times();
    assert_eq!(prepared.commit(&fixture.path()).unwrap(), Committed::Done);
    assert_eq!(fixture.times(), present);
    // No note moves the directory's times back after a crash.
    fixture.crash(prepared);
    fixture.reopen();
    assert!(fixture.stub().is_some());
    assert_eq!(fixture.times(), present);
}

#[test]
fn a_note_is_void_for_another_stub_and_for_no_file() {
    for gone in [false, true] {
        let mut fixture = Fixture::new();
        let prepared = fixture.prepare();
        fs::rename(&prepared.stub, fixture.path()).unwrap();
        fixture.crash(prepared);
        fixture.reopen();
        // The same stub is there, but this note has another object.
        let note =
            StubNote { path: PATH.into(), object: Id([8; 16]), times: Times { accessed: (1, 2), modified: (3, 4) } };
        fs::write(fixture.store().tmp().join("times-a"), note.encode()).unwrap();
        if gone {
            fs::remove_file(fixture.path()).unwrap();
        }
        let before = fixture.times();
        fixture.reopen();
        assert_eq!(fixture.times().modified, before.modified);
    }
}

#[test]
fn rubbish_in_tmp_goes_and_does_no_harm() {
    let mut fixture = Fixture::new();
    let before = fixture.times();
    let tmp = fixture.store().tmp();
    fs::write(tmp.join("object-00"), "half").unwrap();
    fs::write(tmp.join("stub-00"), "half").unwrap();
    fs::write(tmp.join("times-empty"), "").unwrap();
    fs::write(tmp.join("times-short"), "stepfsDT").unwrap();
    fs::write(tmp.join("times-long"), vec![1; 70_000]).unwrap();
    fs::create_dir_all(tmp.join("times-dir/below")).unwrap();
    fs::write(tmp.join("times-dir/below/file"), "x").unwrap();
    std::os::unix::fs::symlink("/nowhere", tmp.join("times-link")).unwrap();
    let pipe = std::ffi::CString::new(tmp.join("times-pipe").as_os_str().as_bytes()).unwrap();
    // SAFETY: `pipe` is a string with a zero at its end that outlives the call.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    fixture.reopen();
    assert_eq!(fixture.times(), before);
    assert_eq!(fs::read(fixture.path()).unwrap(), CONTENT);
}

#[test]
fn a_note_comes_back_and_no_changed_one_does() {
    let path = PathBuf::from(OsStr::from_bytes(b"a/\xff\n.pt"));
    let times = Times { accessed: (-5, 999_999_999), modified: (i64::MAX, 0) };
    let note = StubNote { path, object: Id([3; 16]), times };
    let bytes = note.encode();
    assert_eq!(StubNote::decode(&bytes), Ok(note));
    for at in 0..bytes.len() {
        assert!(StubNote::decode(&bytes[..at]).is_err(), "{at} bytes");
        for mask in [1, 0x80, 0xff] {
            let mut changed = bytes.clone();
            changed[at] ^= mask;
            assert!(StubNote::decode(&changed).is_err(), "byte {at}");
        }
    }
}

/// A stub of the store outside its tree, in a directory whose times must not change.
#[test]
fn a_note_reaches_nothing_outside_of_the_tree() {
    let mut fixture = Fixture::new();
    let outside = fixture.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let stub = Stub { store: fixture.store().id(), object: fixture.object, logical_len: 70_000 };
    stub.write(&Io::disk().create(&outside.join("f.pt"), CrashPoint::StubWritten).unwrap()).unwrap();
    std::os::unix::fs::symlink(&outside, fixture.store().tree().join("link")).unwrap();
    let before = Times::of(&fs::metadata(&outside).unwrap());
    let absolute = outside.join("f.pt");
    for path in [Path::new("../../outside/f.pt"), &absolute, Path::new("link/f.pt"), Path::new("run/../link/f.pt")] {
        let times = Times { accessed: (1, 0), modified: (1, 0) };
        let note = StubNote { path: path.to_path_buf(), object: fixture.object, times };
        fs::write(fixture.store().tmp().join("times-crafted"), note.encode()).unwrap();
        fixture.reopen();
        assert_eq!(Times::of(&fs::metadata(&outside).unwrap()), before, "{}", path.display());
    }
}
