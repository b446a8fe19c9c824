//! Faults of single files, of stepfs itself, and of the order in which two processes do things.

use super::*;
use crate::remote::Daemon;
use crate::remote::shared::FILES;

/// Waits until something holds.
fn until(what: &str, holds: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what} after {:?}", begun.elapsed());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn show(
    machine: &Machine,
    path: &Path,
    found: Option<&crate::remote::local::Found>,
    (stamp, shown): (&crate::remote::view::Stamp, &crate::remote::journal::Shown),
) -> io::Result<bool> {
    let directory =
        tree::directory(&machine.store, path.parent().unwrap(), (shown.uid, shown.gid), &mut Default::default())?;
    tree::show(machine, (path, &directory), found, shown, &tree::make_ready(&machine.store, path, stamp, shown)?)
}

/// Pushes once, with nothing known of former rounds. Returns whether all is done, and the files' failures in words.
fn round(machine: &Machine, place: &Arc<Memory>, newest: Newest) -> (bool, Option<String>) {
    let shared = Shared::new(Settings { newest, ..settings("a") }, BTreeMap::new());
    let place: Arc<dyn Place> = Arc::clone(place) as _;
    let mut writer = Writer::claim(place, Arc::clone(&shared.view), "a", machine.store.id(), false).unwrap();
    let done = Pusher::default().round(machine, &mut writer, &shared).unwrap();
    let failing = shared.failing.lock().unwrap()[FILES].clone();
    (done, failing)
}

#[test]
fn one_file_that_cannot_be_read_does_not_stop_the_others() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.write(UNREADABLE, &noise(200_000, 9));
    machine.shapes.lock().unwrap().insert(UNREADABLE.into(), Shape::Newest);
    let (done, failing) = round(&machine, &place, Newest::Quantized);
    assert!(!done && failing.as_ref().is_some_and(|why| why.contains(UNREADABLE)), "{failing:?}");
    assert_eq!(check(&place), NAMES);
    // As soon as it can be read, it travels.
    machine.shapes.lock().unwrap().insert(UNREADABLE.into(), Shape::Whole);
    assert_eq!(round(&machine, &place, Newest::Quantized), (true, None));
    assert_eq!(check(&place).len(), NAMES.len() + 1);
}

#[test]
fn a_file_that_never_settles_does_not_count_as_pushed() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.write("run/stuck.pt", &noise(200_000, 9));
    machine.shapes.lock().unwrap().insert("run/stuck.pt".into(), Shape::Stuck);
    let (done, failing) = round(&machine, &place, Newest::Exact);
    assert!(!done && failing.as_ref().is_some_and(|why| why.contains("run/stuck.pt")), "{failing:?}");
    assert_eq!(check(&place), NAMES);
}

#[test]
fn a_damaged_object_does_not_count_as_pushed() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    let id = machine.release("run/damaged.pt", &noise(100_000, 8), None);
    let path = crate::store::object::path_of(&machine.store.objects(), id);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let (done, failing) = round(&machine, &place, Newest::Exact);
    assert!(!done && failing.as_ref().is_some_and(|why| why.contains("run/damaged.pt")), "{failing:?}");
    assert_eq!(check(&place), NAMES);
    fs::write(&path, &bytes).unwrap();
    assert_eq!(round(&machine, &place, Newest::Exact), (true, None));
}

#[test]
fn a_read_before_the_names_are_read_waits_for_them() {
    let (machine, other, place) = (run(), Machine::new(), Arc::new(Memory::default()));
    machine.session(&place, "a", false).unwrap();
    other.session(&place, "b", false).unwrap();
    let file = fs::File::open(other.store.tree().join("run/step_2.pt")).unwrap();
    let id = Stub::read(&file, other.store.id()).unwrap().unwrap().object;
    // After a start: the tree has the name, and no journal is read yet.
    let view = Arc::default();
    let fetcher = Fetcher::new(Arc::clone(&place) as _, Arc::clone(&view), other.store.tmp());
    other.objects.look_elsewhere(Arc::new(fetcher));
    assert!(other.objects.is_elsewhere(id), "the read belongs to the threads that may wait");
    assert!(other.objects.frozen().is_some(), "nothing is collected before it is known");
    place.fail_after(Some(0), false);
    assert!(other.objects.bring(id).is_err());
    place.fail_after(None, false);
    other.objects.bring(id).unwrap();
    other.objects.open(id).unwrap();
    // What no node has is lost, and is not asked for again.
    let (none, before) = (Id([9; 16]), place.got());
    assert!(lock(&view).is_read() && !other.objects.is_elsewhere(none));
    other.objects.bring(none).unwrap();
    assert_eq!(place.got(), before);
}

#[test]
fn a_tree_that_goes_under_a_daemon_removes_nothing() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, "a", false).unwrap();
    let tree = machine.store.tree();
    fs::rename(&tree, tree.with_extension("elsewhere")).unwrap();
    assert!(crate::remote::local::walk(&machine).is_err());
    fs::rename(tree.with_extension("elsewhere"), &tree).unwrap();
    machine.session(&place, "a", false).unwrap();
    assert_eq!(check(&place), NAMES);
}

#[test]
fn a_directory_in_the_place_of_a_name_removes_the_name() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, "a", false).unwrap();
    fs::remove_file(machine.store.tree().join("latest")).unwrap();
    machine.write("latest/step.json", b"{}");
    machine.session(&place, "a", false).unwrap();
    let names = check(&place);
    assert!(!names.contains(&"latest".to_string()) && names.contains(&"latest/step.json".to_string()), "{names:?}");
}

#[test]
fn a_panic_is_told_and_the_work_begins_anew() {
    let (machine, place) = (Arc::new(run()), Arc::new(Memory::default()));
    place.panic_once();
    let local: Arc<dyn Local> = Arc::clone(&machine) as _;
    let daemon = Daemon::start(Arc::clone(&local), Arc::clone(&place) as _, settings("a")).unwrap();
    let failing = || daemon.progress(local.as_ref()).failing;
    until("status tells of the panic", || failing().is_some_and(|why| why.contains("a request panics")));
    until("everything is pushed", || check(&place) == NAMES);
    until("status says that it goes on", || failing().is_none());
    daemon.stop();
}

#[test]
fn a_node_that_may_run_is_not_buried() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, "a", false).unwrap();
    // Put, and not named yet: its daemon is about to.
    let young = format!("nodes/a/objects/{}-{:032x}", Id([9; 16]), 7);
    let hour = Duration::from_secs(3600);
    let bury = |grace| {
        let view: Arc<Mutex<_>> = Arc::default();
        Writer::bury(Arc::clone(&place) as _, view, "a", machine.store.id(), grace)
    };
    let refused = bury(hour);
    assert!(matches!(&refused, Err(Error::Denied(why)) if why.contains("daemon may run")), "{refused:?}");
    fs::remove_file(machine.store.tree().join("run/step_2.pt")).unwrap();
    machine.session(&place, "a", false).unwrap();
    place.age(hour);
    Place::put(place.as_ref(), &young, &vec![0u8; 10], 10, &|_| Ok(())).unwrap();
    assert_eq!(bury(hour).unwrap(), 1, "the object of the removed name goes");
    assert!(place.names().contains_key(&young));
    assert!(!place.names().keys().any(|name| name.contains("clock")));
    check(&place);
    // The daemon was alive: what it writes counts.
    machine.write("later.bin", &noise(100_000, 5));
    machine.session(&place, "a", false).unwrap();
    assert!(check(&place).contains(&"later.bin".to_string()));
}

#[test]
fn a_file_that_a_program_writes_meanwhile_stays() {
    let (a, b, place) = (run(), Machine::new(), Arc::new(Memory::default()));
    a.session(&place, "a", false).unwrap();
    b.session(&place, "b", false).unwrap();
    let view = Mutex::default();
    Reader::refresh(place.as_ref(), &view).unwrap();
    let view = lock(&view);
    let path = Path::new("run/config.json");
    let (stamp, shown) = view.winner(path).map(|(stamp, shown)| (stamp, shown.unwrap())).unwrap();
    let found = crate::remote::local::walk(&b).unwrap().files.remove(path).unwrap();
    assert!(show(&b, path, Some(&found), (&stamp, shown)).unwrap());
    let found = crate::remote::local::walk(&b).unwrap().files.remove(path).unwrap();
    b.write("run/config.json", b"written meanwhile");
    assert!(!show(&b, path, Some(&found), (&stamp, shown)).unwrap());
    assert!(!tree::take_away(&b, path, &found).unwrap());
    assert!(!show(&b, path, None, (&stamp, shown)).unwrap());
    assert_eq!(fs::read(b.store.tree().join(path)).unwrap(), b"written meanwhile");
    // Nothing appears in a directory that a program moves away meanwhile.
    let directory = tree::directory(&b.store, Path::new("run"), (0, 0), &mut Default::default()).unwrap();
    fs::rename(b.store.tree().join("run"), b.store.tree().join("moved")).unwrap();
    fs::remove_file(b.store.tree().join("moved/config.json")).unwrap();
    let ready = tree::make_ready(&b.store, path, &stamp, shown).unwrap();
    assert!(!tree::show(&b, (path, &directory), None, shown, &ready).unwrap());
    drop(ready);
    assert!(!b.store.tree().join("moved/config.json").exists());
    let left = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().to_string_lossy().contains("shown-");
    assert!(!fs::read_dir(b.store.tmp()).unwrap().any(left));
}
