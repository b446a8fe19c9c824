use std::os::unix::fs::{FileExt, MetadataExt};

use std::ffi::OsStr;
use std::sync::Arc;

use super::*;
use crate::store::durable::{Device, Disk};
use crate::store::engine::Engine;
use crate::store::fence::{Fence, Taken, leads_to};
use crate::store::object::path_of;
use crate::store::{Committed, Id, MIN_RELEASE_BYTES, Objects, Prepared, Store, Stub, replace_taken};

const NAME: &str = "step_1.pt";

/// How many epochs have a directory.
fn epochs(root: &Path) -> usize {
    fs::read_dir(root.join(KEEPER)).unwrap().filter(|entry| number(entry.as_ref().unwrap()).is_some()).count()
}

/// A shared store with a file, and the seats of two daemons.
struct World {
    dir: tempfile::TempDir,
    ours: Store,
    theirs: Store,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("store");
        Store::create_shared(&root).unwrap();
        let join = |point: &str| Store::join(&root, Path::new(point)).unwrap();
        let (ours, theirs) = (join("/a"), join("/b"));
        fs::write(ours.tree().join(NAME), vec![1; MIN_RELEASE_BYTES as usize]).unwrap();
        World { dir, ours, theirs }
    }

    fn path(&self) -> PathBuf {
        self.ours.tree().join(NAME)
    }

    fn ino(&self) -> u64 {
        fs::metadata(self.path()).unwrap().ino()
    }

    fn take(&self) -> io::Result<Taken> {
        Taken::of(Engine::Coherent, &File::open(self.ours.tree()).unwrap(), OsStr::new(NAME), None)
    }

    fn taken(&self) -> Taken {
        self.take().unwrap()
    }

    fn is_busy(&self) -> bool {
        self.take().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
    }

    fn open(&self) -> File {
        File::options().read(true).write(true).open(self.path()).unwrap()
    }

    /// A replacement behind a fence.
    fn ready(&self) -> (Fence, PathBuf) {
        let fence = self.ours.fences().raise(self.ino()).unwrap();
        let ready = fence.dir().join("new");
        fs::write(&ready, "new").unwrap();
        (fence, ready)
    }
}

#[test]
fn nobody_replaces_a_file_that_is_open() {
    let world = World::new();
    let reader = world.open();
    assert!(locks::open(&reader, false).unwrap());
    assert!(world.is_busy());
    drop(reader);
    // A program whose daemon was killed has no lock.
    let orphan = File::open(world.path()).unwrap();
    assert!(world.is_busy());
    drop(orphan);
    let taken = world.taken();
    assert!(!locks::open(&world.open(), false).unwrap());
    drop(taken);
    assert!(locks::open(&world.open(), true).unwrap());
}

#[test]
fn a_name_is_looked_up_again_after_the_lock() {
    let world = World::new();
    let tree = File::open(world.ours.tree()).unwrap();
    let file = world.open();
    assert!(leads_to(Engine::Coherent, &tree, OsStr::new(NAME), &file).unwrap());
    let new = world.dir.path().join("new");
    fs::write(&new, "new").unwrap();
    fs::rename(new, world.path()).unwrap();
    assert!(!leads_to(Engine::Coherent, &tree, OsStr::new(NAME), &file).unwrap());
    fs::rename(world.path(), world.dir.path().join("away")).unwrap();
    assert!(!leads_to(Engine::Coherent, &tree, OsStr::new(NAME), &file).unwrap());
}

#[test]
fn a_rename_that_comes_late_finds_no_source() {
    let world = World::new();
    let (fence, ready) = world.ready();
    let taken = world.taken();
    // The machine is suspended, and the server gives its locks to others.
    taken.lose_lock();
    let at = taken.path();
    let theirs = world.open();
    assert!(locks::open(&theirs, true).unwrap());
    world.theirs.fences().revoke(world.ino()).unwrap();
    theirs.write_all_at(b"theirs", 0).unwrap();
    theirs.sync_all().unwrap();
    let error = fs::rename(&ready, &at).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    assert!(fs::read(world.path()).unwrap().starts_with(b"theirs"));
    drop(fence);
    assert_eq!(fs::read_dir(world.ours.root().join(Fences::DIRECTORY)).unwrap().count(), 0);
}

#[test]
fn a_removal_that_comes_late_finds_no_place() {
    let world = World::new();
    let fence = world.ours.fences().raise(world.ino()).unwrap();
    let taken = world.taken();
    taken.lose_lock();
    world.theirs.fences().revoke(world.ino()).unwrap();
    assert_eq!(taken.remove(&fence).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert!(world.path().exists());
    let fence = world.ours.fences().raise(world.ino()).unwrap();
    assert!(taken.remove(&fence).unwrap());
    assert!(!world.path().exists());
}

#[test]
fn a_file_that_takes_the_name_at_the_last_moment_keeps_it() {
    let world = World::new();
    let fence = world.ours.fences().raise(world.ino()).unwrap();
    let taken = world.taken();
    let new = world.dir.path().join("store/tree/new");
    fs::write(&new, "small").unwrap();
    fs::rename(new, world.path()).unwrap();
    assert!(!taken.remove(&fence).unwrap());
    drop(fence);
    assert_eq!(fs::read(world.path()).unwrap(), b"small");
}

#[test]
fn a_fence_does_not_take_down_others_of_its_file() {
    let world = World::new();
    let (fence, ready) = world.ready();
    let (other, late) = world.ready();
    fence.stand_alone().unwrap();
    assert!(ready.exists() && !late.exists());
    drop(other);
    assert!(ready.exists());
}

#[test]
fn a_keeper_ends_when_another_is_elected() {
    let world = World::new();
    let keeper = world.ours.elect().unwrap().unwrap();
    assert!(world.theirs.elect().unwrap().is_none());
    assert!(keeper.is_keepers());
    let ready = keeper.tmp().join("object");
    fs::write(&ready, "object").unwrap();
    let (_fence, stub) = world.ready();
    // It is suspended, and its machine's locks end.
    let lock = world.ours.root().join("keeper/lock");
    fs::rename(&lock, world.dir.path().join("lost")).unwrap();
    let next = world.theirs.elect().unwrap().unwrap();
    assert!(next.is_keepers() && !keeper.is_keepers());
    assert!(!ready.exists() && !stub.exists(), "what was made ready in the former time is gone");
    let objects = keeper.objects();
    let path = objects.join("object");
    fs::write(&path, "object").unwrap();
    assert!(fs::rename(&path, keeper.tmp().join("gone")).is_err(), "a former keeper removes nothing");
    assert_eq!(keeper.fence(7).unwrap_err().kind(), io::ErrorKind::NotFound, "nor does it replace anything");
    assert!(next.fence(7).is_ok());
    drop(next);
    assert!(world.theirs.elect().unwrap().unwrap().is_keepers());
}

#[test]
fn locks_that_hold_on_one_machine_only_are_noticed() {
    let world = World::new();
    let root = world.ours.root();
    // A daemon on another machine, whose lock is not seen here.
    let seat = root.join(SEATS).join("elsewhere+mnt");
    fs::create_dir(&seat).unwrap();
    let lock = locks::file(&seat.join(LOCK)).unwrap();
    stamp(&lock).unwrap();
    // One that was killed just now does no harm.
    assert!(Store::join(root, Path::new("/c")).is_ok());
    stamp(&lock).unwrap();
    let (done, beats) = std::sync::mpsc::channel::<()>();
    let beating = std::thread::spawn(move || {
        while beats
            .recv_timeout(Duration::from_millis(200))
            .is_err_and(|e| e == std::sync::mpsc::RecvTimeoutError::Timeout)
        {
            stamp(&lock).unwrap();
        }
    });
    let refused = Store::join(root, Path::new("/c")).unwrap_err();
    assert!(matches!(refused, Error::LocalLocks { .. }), "{refused}");
    drop(done);
    beating.join().unwrap();
}

#[test]
fn a_store_at_rest_is_no_store_of_daemons() {
    let world = World::new();
    let root = world.ours.root().to_path_buf();
    assert!(matches!(Store::open(&root), Err(Error::Busy { .. })));
    assert!(matches!(Store::join(&root, Path::new("/a")), Err(Error::Busy { .. })), "the seat is taken");
    drop(world.ours.elect().unwrap().unwrap());
    let World { dir: _dir, ours, theirs } = world;
    drop((ours, theirs));
    let alone = Store::open(&root).unwrap();
    assert!(matches!(Store::join(&root, Path::new("/a")), Err(Error::Busy { .. })));
    assert_eq!(epochs(alone.root()), 0);
}

#[test]
fn nothing_outside_a_store_is_removed() {
    let world = World::new();
    let outside = world.dir.path().join("outside");
    let kept = outside.join("times-kept");
    fs::create_dir_all(outside.join("tmp")).unwrap();
    fs::write(&kept, "kept").unwrap();
    let root = world.ours.root().to_path_buf();
    let link = |at: &str| std::os::unix::fs::symlink(&outside, root.join(at)).unwrap();
    link("keeper/0000000000000007");
    link("replacing/7");
    let keeper = world.theirs.elect().unwrap().unwrap();
    assert!(keeper.tmp().ends_with("0000000000000008") && !root.join("replacing/7").is_symlink());
    // Where each daemon empties directories of its own.
    link(&format!("{SEATS}/{}", seat_name(Path::new("/c"))));
    assert!(matches!(Store::join(&root, Path::new("/c")), Err(Error::NotReal(..))));
    let seat = root.join(SEATS).join(seat_name(Path::new("/d")));
    fs::create_dir(&seat).unwrap();
    std::os::unix::fs::symlink(&outside, seat.join("tmp")).unwrap();
    assert!(matches!(Store::join(&root, Path::new("/d")), Err(Error::NotReal(..))));
    fs::remove_dir(root.join("replacing")).unwrap();
    link("replacing");
    assert!(matches!(Store::join(&root, Path::new("/e")), Err(Error::NotReal(..))));
    assert_eq!(fs::read(&kept).unwrap(), b"kept");
}

/// A disk on which another keeper makes each directory a moment earlier.
#[derive(Debug)]
struct Late;

impl Device for Late {
    fn make_dir(&self, path: &Path, mode: u32, at: CrashPoint) -> io::Result<()> {
        Disk.make_dir(path, mode, at)?;
        Disk.make_dir(path, mode, at)
    }
}

#[test]
fn no_two_keepers_have_one_epoch() {
    let world = World::new();
    let elected = Epoch::begin(&Io::new(Arc::new(Late)), world.ours.root(), &|_| Ok(()));
    assert!(elected.unwrap().is_none(), "it was suspended before it made its directory");
    let next = world.theirs.elect().unwrap().unwrap();
    assert!(next.is_keepers() && epochs(next.root()) == 1);
}

#[test]
fn a_copy_without_empty_directories_is_a_shared_store() {
    let World { dir, ours, theirs } = World::new();
    let root = ours.root().to_path_buf();
    drop((ours, theirs));
    for name in DIRECTORIES {
        fs::remove_dir_all(root.join(name)).unwrap();
    }
    let again = Store::join(&root, Path::new("/a")).unwrap();
    assert!(again.elect().unwrap().unwrap().fence(7).is_ok());
    drop(dir);
}

#[test]
fn each_mount_point_has_a_seat_of_its_own() {
    let long = |end: &str| format!("/{}/{end}", "x".repeat(120));
    let points = ["/a/b", "/a+b", "/a/b+", &long("a"), &format!("/y{}", long("a")), &"/é".repeat(99)];
    let names: std::collections::HashSet<_> = points.iter().map(|point| seat_name(Path::new(point))).collect();
    assert_eq!(names.len(), points.len());
    assert!(names.iter().all(|name| name.starts_with(&node()) && name.len() < 255), "{names:?}");
    assert!(seat_name(Path::new("/mnt/ckpts")).ends_with("+mnt+ckpts"));
}

#[test]
fn what_is_no_file_is_removed_behind_a_fence_too() {
    let world = World::new();
    let at = world.ours.tree().join("latest");
    let directory = File::open(world.ours.tree()).unwrap();
    std::os::unix::fs::symlink(NAME, &at).unwrap();
    let ino = fs::symlink_metadata(&at).unwrap().ino();
    let take = || Taken::of(Engine::Coherent, &directory, OsStr::new("latest"), None).unwrap();
    let (fence, taken) = (world.ours.fences().raise(ino).unwrap(), take());
    // Another file takes the name meanwhile.
    fs::remove_file(&at).unwrap();
    fs::write(&at, "new").unwrap();
    assert!(!taken.remove(&fence).unwrap());
    assert_eq!(fs::read(&at).unwrap(), b"new");
    fs::remove_file(&at).unwrap();
    std::os::unix::fs::symlink(NAME, &at).unwrap();
    let taken = take();
    drop(fence);
    let late = world.ours.fences().raise(ino).unwrap();
    world.theirs.fences().revoke(ino).unwrap();
    assert_eq!(taken.remove(&late).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert!(taken.remove(&world.ours.fences().raise(ino).unwrap()).unwrap() && !at.is_symlink());
}

/// A disk on which another daemon makes a file beside each that is replaced, some time after that.
#[derive(Debug)]
struct Busy;

impl Device for Busy {
    fn rename(&self, from: &Path, to: &Path, at: CrashPoint) -> io::Result<()> {
        Disk.rename(from, to, at)?;
        if matches!(at, CrashPoint::StubInPlace | CrashPoint::RecallInPlace) {
            std::thread::sleep(Duration::from_millis(50));
            fs::write(to.with_file_name(format!("beside-{at:?}")), "")?;
        }
        Ok(())
    }
}

#[test]
fn a_directory_that_others_change_keeps_its_time() {
    let world = World::new();
    let root = world.ours.root();
    let (tree, old) = (world.ours.tree(), fs::File::open(world.ours.tree()).unwrap());
    let time = || fs::metadata(&tree).unwrap().modified().unwrap();
    let former = std::time::SystemTime::now() - Duration::from_secs(1000);
    for (point, io, others) in [("/c", Io::disk(), false), ("/d", Io::new(Arc::new(Busy)), true)] {
        let store = Store::join_on(io, root, Path::new(point)).unwrap();
        let source = fs::metadata(world.path()).unwrap();
        old.set_modified(former).unwrap();
        let stub = Stub { store: store.id(), object: Id::random().unwrap(), logical_len: MIN_RELEASE_BYTES };
        let ready = Prepared::new(&store, Path::new(NAME), &source, &stub).unwrap().unwrap();
        assert_eq!(ready.commit(&world.taken().path()).unwrap(), Committed::Done);
        assert_eq!(time() > former + Duration::from_secs(500), others, "after a release");
        old.set_modified(former).unwrap();
        let (_fence, new) = world.ready();
        replace_taken(store.io(), &new, &world.taken()).unwrap();
        assert_eq!(time() > former + Duration::from_secs(500), others, "after a recall");
        fs::write(world.path(), vec![1; MIN_RELEASE_BYTES as usize]).unwrap();
    }
}

#[test]
fn whoever_takes_a_file_has_the_one_at_the_name() {
    let world = World::new();
    let tree = File::open(world.ours.tree()).unwrap();
    let (path, new) = (world.path(), world.dir.path().join("new"));
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let order = std::sync::atomic::Ordering::Relaxed;
    std::thread::scope(|scope| {
        // A program renames over the file, as another daemon lets it: with the lock of the file that goes.
        scope.spawn(|| {
            while !is_over.load(order) {
                let there = world.open();
                if locks::open(&there, false).unwrap()
                    && leads_to(Engine::Coherent, &tree, OsStr::new(NAME), &there).unwrap()
                {
                    fs::write(&new, "new").unwrap();
                    fs::rename(&new, &path).unwrap();
                }
            }
        });
        let (mut taken, mut others) = (0, 0);
        for _ in 0..20_000 {
            if let Ok(file) = Taken::of(Engine::Coherent, &tree, OsStr::new(NAME), None) {
                taken += 1;
                others += u32::from(file.metadata().ino() != world.ino());
            }
        }
        is_over.store(true, order);
        assert!(taken > 0);
        assert_eq!(others, 0, "names that lead to other files, of {taken}");
    });
}

#[test]
fn a_stub_that_comes_late_finds_no_way() {
    let world = World::new();
    let source = fs::metadata(world.path()).unwrap();
    let stub = Stub { store: world.ours.id(), object: Id::random().unwrap(), logical_len: MIN_RELEASE_BYTES };
    let ready = Prepared::new(&world.ours, Path::new(NAME), &source, &stub).unwrap().unwrap();
    let taken = world.taken();
    taken.lose_lock();
    // The bytes and the times stay: only the fence tells.
    world.theirs.fences().revoke(world.ino()).unwrap();
    assert_eq!(ready.commit(&taken.path()).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(world.ino(), source.ino());
}

#[test]
fn no_stub_is_made_while_somebody_changes_attributes() {
    let world = World::new();
    let stub = Stub { store: world.ours.id(), object: Id::random().unwrap(), logical_len: MIN_RELEASE_BYTES };
    let prepare = || Prepared::new(&world.ours, Path::new(NAME), &fs::metadata(world.path()).unwrap(), &stub);
    // The other daemon has the lock, and has taken down all fences. It changes the mode next.
    let theirs = world.open();
    assert!(locks::open(&theirs, false).unwrap());
    world.theirs.fences().revoke(world.ino()).unwrap();
    assert_eq!(prepare().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    drop(theirs);
    assert!(prepare().unwrap().is_some());
}

#[test]
fn a_former_keeper_removes_no_object() {
    let world = World::new();
    let keeper = world.ours.elect().unwrap().unwrap();
    let objects = Objects::none(Io::disk(), &keeper.objects()).removed_through(keeper.tmp());
    let id = Id::random().unwrap();
    let path = path_of(&keeper.objects(), id);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, "object").unwrap();
    fs::rename(world.ours.root().join("keeper/lock"), world.dir.path().join("lost")).unwrap();
    let _next = world.theirs.elect().unwrap().unwrap();
    objects.remove(&[id]);
    assert!(path.exists());
}
