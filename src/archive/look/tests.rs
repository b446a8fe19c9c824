use std::time::SystemTime;

use super::*;
use crate::archive::{Archive, AtRest, keeping};
use crate::store::durable::{CrashPoint, Device, Disk, Io};
use crate::store::{Store, Stub};
use crate::sync::AtomicBool;

const NAME: &str = "step_1.pt";

/// A disk of which some files cannot be opened for a while.
#[derive(Debug, Default)]
struct Away(AtomicBool);

impl Device for Away {
    fn open(&self, path: &Path, flags: i32) -> io::Result<File> {
        match self.0.load(Ordering::Relaxed) && fs::canonicalize(path)?.ends_with(NAME) {
            true => Err(io::Error::from_raw_os_error(libc::EIO)),
            false => Disk.open(path, flags),
        }
    }
}

struct World {
    _dir: tempfile::TempDir,
    device: Arc<Away>,
    archive: Arc<Archive>,
    eyes: Eyes,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("store");
        Store::create_shared(&root).unwrap();
        let device = Arc::<Away>::default();
        let store = Store::join_on(Io::new(device.clone()), &root, Path::new("/a")).unwrap();
        let keeper = store.elect().unwrap().unwrap();
        let archive = keeping(keeper, 0).unwrap();
        World { _dir: dir, device, archive, eyes: Eyes::default() }
    }

    fn path(&self) -> PathBuf {
        self.archive.store().tree().join(NAME)
    }

    /// A look as late as this after all changes.
    fn look(&mut self, later_ns: i64) -> usize {
        let now_ns = crate::clock::wall_ns().saturating_add(later_ns);
        self.look_at(now_ns, false)
    }

    fn look_at(&mut self, now_ns: i64, gently: bool) -> usize {
        self.eyes.look(&self.archive.shared, now_ns, Duration::ZERO, gently).unwrap();
        self.eyes.unsettled()
    }

    /// Puts a file there that a program writes.
    fn write(&self) -> File {
        fs::write(self.path(), vec![1; MIN_RELEASE_BYTES as usize]).unwrap();
        let writer = File::options().read(true).write(true).open(self.path()).unwrap();
        assert!(locks::open(&writer, true).unwrap());
        writer
    }

    /// Puts a stub there.
    fn release(&self) -> (File, Id) {
        let (store, object) = (self.archive.store(), Id::random().unwrap());
        let stub = Stub { store: store.id(), object, logical_len: MIN_RELEASE_BYTES };
        let file = store.io().create(&self.path(), CrashPoint::StubWritten).unwrap();
        stub.write(&file).unwrap();
        (File::options().write(true).open(self.path()).unwrap(), object)
    }

    fn is(&self, state: impl Fn(&State) -> bool) -> bool {
        self.archive.shared.catalog().get(Path::new(NAME)).is_some_and(|entry| state(&entry.state))
    }
}

#[test]
fn a_stub_that_cannot_be_read_keeps_all_objects() {
    let mut world = World::new();
    let (_, object) = world.release();
    world.device.0.store(true, Ordering::Relaxed);
    world.look(0);
    assert!(world.archive.shared.objects.frozen().is_some());
    assert!(world.is(|state| state.hides_an_object()));
    world.device.0.store(false, Ordering::Relaxed);
    world.look(0);
    assert!(world.is(|state| matches!(state, State::Released(id) if *id == object)));
}

/// A sync may not answer that all is done.
#[test]
fn without_a_look_something_is_left() {
    let world = World::new();
    let looks = Looks::of(&world.archive.shared);
    assert_eq!(looks.look(Duration::ZERO, false), 0);
    let tree = world.archive.store().tree();
    fs::rename(&tree, tree.with_file_name("away")).unwrap();
    assert_eq!(looks.look(FRESH, false), 0, "a look is fresh");
    assert_eq!(looks.look(Duration::ZERO, false), 1);
}

#[test]
fn a_file_counts_once_it_is_old_enough_and_nobody_writes_it() {
    let mut world = World::new();
    fs::write(world.path(), vec![1; MIN_RELEASE_BYTES as usize]).unwrap();
    assert_eq!(world.look(QUIET_NS - 1_000_000_000), 1, "another change may have the same time");
    assert!(world.is(|state| matches!(state, State::Staged)));
    let writer = File::options().read(true).write(true).open(world.path()).unwrap();
    assert!(locks::open(&writer, true).unwrap());
    assert_eq!(world.look(2 * QUIET_NS), 0, "nobody knows how long");
    assert!(world.is(|state| matches!(state, State::Staged)));
    locks::closing(&writer, false).unwrap();
    assert_eq!(world.look(2 * QUIET_NS), 1, "it becomes durable soon");
    assert!(world.is(|state| matches!(state, State::Staged)));
    locks::closing(&writer, true).unwrap();
    assert_eq!(world.look(2 * QUIET_NS), 0, "it could not be made durable");
    drop(writer);
    let other = File::options().read(true).write(true).open(world.path()).unwrap();
    assert!(locks::unwritten(&other).unwrap());
    assert_eq!(world.look(2 * QUIET_NS), 1, "a daemon has it for a moment");
    assert!(world.is(|state| matches!(state, State::Staged)));
    drop(other);
    // A program whose daemon was killed has no lock.
    let orphan = File::options().write(true).open(world.path()).unwrap();
    world.look(2 * QUIET_NS);
    assert!(world.is(|state| matches!(state, State::Staged)));
    drop(orphan);
    assert_eq!(world.look(2 * QUIET_NS), 0);
    assert!(world.is(|state| matches!(state, State::Closed)));
}

/// On CephFS the keeper's open would take the writer's cache.
#[test]
fn a_file_that_is_being_saved_is_opened_only_for_those_who_wait() {
    let mut world = World::new();
    fs::write(world.path(), vec![1; MIN_RELEASE_BYTES as usize]).unwrap();
    world.device.0.store(true, Ordering::Relaxed);
    // Writers have other clocks.
    for later_ns in [-QUIET_NS / 2, QUIET_NS / 2] {
        let now_ns = crate::clock::wall_ns() + later_ns;
        assert_eq!(world.look_at(now_ns, true), 1, "it is given in a moment");
        assert!(world.is(|state| matches!(state, State::Staged)));
    }
    let now_ns = crate::clock::wall_ns();
    world.look_at(now_ns, false);
    assert!(world.is(|state| state.hides_an_object()));
    world.device.0.store(false, Ordering::Relaxed);
    assert_eq!(world.look_at(now_ns + 2 * QUIET_NS, true), 0);
    assert!(world.is(|state| matches!(state, State::Closed)));
}

/// A stub has an old time, unless somebody gives it another one.
#[test]
fn a_stub_that_somebody_touched_needs_its_object() {
    let mut world = World::new();
    let (file, object) = world.release();
    world.look(0);
    file.set_modified(SystemTime::now()).unwrap();
    world.look_at(crate::clock::wall_ns(), true);
    assert!(world.is(|state| matches!(state, State::Released(id) if *id == object)));
    // Under a new name, until a look that spares nothing.
    fs::rename(world.path(), world.path().with_file_name("away")).unwrap();
    fs::rename(world.path().with_file_name("away"), world.path()).unwrap();
    world.eyes.seen.clear();
    world.look_at(crate::clock::wall_ns(), true);
    assert!(world.is(|state| matches!(state, State::Staged)));
    world.look(0);
    assert!(world.is(|state| matches!(state, State::Released(id) if *id == object)));
}

#[test]
fn a_keeper_spares_no_file_at_first_or_once_in_half_a_grace_or_while_a_stub_is_unreadable() {
    let world = World::new();
    let _writer = world.write();
    let looks = |grace| Looks { grace, ..Looks::of(&world.archive.shared) };
    let seen = |looks: &Looks| {
        looks.look(Duration::ZERO, true);
        looks.eyes.lock().unwrap().seen[Path::new(NAME)].stage
    };
    let first = looks(GRACE);
    assert_eq!([seen(&first), seen(&first)], [Stage::Written, Stage::Young]);
    world.archive.shared.objects.freeze(true);
    assert_eq!(seen(&first), Stage::Written);
    world.archive.shared.objects.freeze(false);
    assert_eq!(seen(&first), Stage::Young);
    let all = looks(Duration::ZERO);
    assert_eq!([seen(&all), seen(&all)], [Stage::Written; 2]);
}

/// A wait for all steps would not end while a program writes.
#[test]
fn those_who_wait_know_what_is_written() {
    let world = World::new();
    let _writer = world.write();
    let looks = world.archive.looks.as_ref().unwrap();
    let queued = || world.archive.queue().queued;
    let before = queued();
    assert_eq!(looks.look(Duration::ZERO, true), 1);
    std::thread::sleep(FRESH);
    assert_eq!(queued(), before);
    assert_eq!(looks.look(Duration::ZERO, true), 1);
    world.archive.set_attribute(Path::new(NAME), "sync").unwrap();
    assert_eq!(queued(), before);
}

#[test]
fn a_look_is_complete_if_no_directory_changed() {
    let world = World::new();
    let tree = world.archive.store().tree();
    fs::create_dir(tree.join("run")).unwrap();
    let store = world.archive.store();
    let list = |later_ns: i64| Listing::of(store, crate::clock::wall_ns() + later_ns, Some(&|_, _| true)).unwrap();
    assert!(!list(0).is_complete, "another name may have come at the same time");
    assert!(list(2 * DIRECTORY_NS).is_complete);
    fs::write(tree.join("run/x"), "").unwrap();
    assert!(!list(0).is_complete);
}

#[test]
fn a_file_that_changed_since_the_look_is_not_sealed() {
    let mut world = World::new();
    fs::write(world.path(), vec![1; MIN_RELEASE_BYTES as usize]).unwrap();
    assert_eq!(world.look(2 * QUIET_NS), 0);
    // The server's clock, as it is.
    world.archive.shared.quiet_ns.store(crate::clock::wall_ns() - QUIET_NS, Ordering::Relaxed);
    // No look tells of it.
    let eyes = world.archive.looks.as_ref().unwrap().eyes.lock().unwrap();
    world.archive.start(Arc::new(AtRest::of(world.archive.store())));
    let began = Instant::now();
    while world.is(|state| matches!(state, State::Closed)) && began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let is_staged = world.is(|state| matches!(state, State::Staged));
    drop(eyes);
    world.archive.stop();
    assert!(is_staged);
}
