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
        self.look_at(Look { now_ns, gently: false })
    }

    fn look_at(&mut self, look: Look) -> usize {
        self.eyes.look(&self.archive.shared, look, Duration::ZERO).unwrap();
        self.eyes.unsettled()
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
    assert!(world.is(|state| matches!(state, State::Resident(why) if why.hides_an_object())));
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
    // A program whose daemon was killed has no lock.
    let orphan = File::options().write(true).open(world.path()).unwrap();
    world.look(2 * QUIET_NS);
    assert!(world.is(|state| matches!(state, State::Staged)));
    drop(orphan);
    assert_eq!(world.look(2 * QUIET_NS), 0);
    assert!(world.is(|state| matches!(state, State::Closed)));
}

/// On CephFS an open would take the cache of whoever writes it.
#[test]
fn a_file_that_is_being_saved_is_opened_only_for_those_who_wait() {
    let mut world = World::new();
    fs::write(world.path(), vec![1; MIN_RELEASE_BYTES as usize]).unwrap();
    world.device.0.store(true, Ordering::Relaxed);
    // Writers have other clocks.
    for later_ns in [-QUIET_NS / 2, QUIET_NS / 2] {
        let now_ns = crate::clock::wall_ns() + later_ns;
        assert_eq!(world.look_at(Look { now_ns, gently: true }), 1, "it is given in a moment");
        assert!(world.is(|state| matches!(state, State::Staged)));
    }
    let now_ns = crate::clock::wall_ns();
    world.look_at(Look { now_ns, gently: false });
    assert!(world.is(|state| matches!(state, State::Resident(why) if why.hides_an_object())));
    world.device.0.store(false, Ordering::Relaxed);
    assert_eq!(world.look_at(Look { now_ns: now_ns + 2 * QUIET_NS, gently: true }), 0);
    assert!(world.is(|state| matches!(state, State::Closed)));
}

/// A stub has an old time, unless somebody gives it another one.
#[test]
fn a_stub_that_somebody_touched_needs_its_object() {
    let mut world = World::new();
    let (file, object) = world.release();
    world.look(0);
    file.set_modified(std::time::SystemTime::now()).unwrap();
    let now_ns = crate::clock::wall_ns();
    world.look_at(Look { now_ns, gently: true });
    let known = world.archive.shared.catalog().get(Path::new(NAME)).unwrap().clone();
    assert!(known.keeps == Some(object) || matches!(known.state, State::Released(id) if id == object));
    world.look_at(Look { now_ns: now_ns + 2 * QUIET_NS, gently: true });
    assert!(world.is(|state| matches!(state, State::Released(id) if *id == object)));
}

#[test]
fn a_look_is_complete_if_no_directory_changed() {
    let world = World::new();
    let tree = world.archive.store().tree();
    fs::create_dir(tree.join("run")).unwrap();
    let list = |later_ns: i64| {
        let look = Look { now_ns: crate::clock::wall_ns() + later_ns, gently: true };
        Listing::of(world.archive.store(), look).unwrap()
    };
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
