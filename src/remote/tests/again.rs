//! Files that a store meets again: at another remote, in a copy of the store, or changed by a node that was not read yet.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use super::between::Mounted;
use super::*;

/// The bytes that a small file has on the remote.
fn bytes_of(place: &Memory, path: &str) -> Option<Vec<u8>> {
    let view = Mutex::default();
    Reader::refresh(place, &view).unwrap();
    match lock(&view).winner(Path::new(path))?.1?.content.clone() {
        Content::Inline(bytes) => Some(bytes),
        other => panic!("{path} is no small file: {other:?}"),
    }
}

fn mode(machine: &Machine, path: &str) -> u32 {
    fs::metadata(machine.store.tree().join(path)).unwrap().permissions().mode() & 0o7777
}

#[test]
fn files_of_one_remote_travel_to_another_or_are_said_to_be_missing() {
    let (a, b, place) = (run(), Machine::new(), Arc::new(Memory::default()));
    a.session(&place, "a", false).unwrap();
    b.session(&place, "b", false).unwrap();
    // As for a store with another URL.
    fs::remove_file(b.store.root().join("remote.shown")).unwrap();
    let (other, shared) = (Arc::new(Memory::default()), Shared::new(settings("b"), tree::load(&b.store, "memory")));
    let remote: Arc<dyn Place> = Arc::clone(&other) as _;
    let mut writer = Writer::claim(remote, Arc::clone(&shared.view), "b", b.store.id(), false).unwrap();
    let mut pusher = Pusher::default();
    // The objects of three names never came here.
    assert!(!pusher.round(&b, &mut writer, &shared).unwrap() && pusher.has_failed());
    assert_eq!(check(&other), ["latest", "run/config.json"]);
}

#[test]
fn a_change_that_was_not_read_is_the_earlier_one() {
    let (a, place) = (run(), Arc::new(Memory::default()));
    a.write("other.json", b"{}");
    a.session(&place, "a", false).unwrap();
    let mut b = Mounted::new(&place, "b");
    // a writes two files, and removes one. Then b writes the first and the third, and removes the second.
    a.write("run/config.json", b"of a");
    a.write("notes", b"of a");
    fs::remove_file(a.store.tree().join("other.json")).unwrap();
    a.session(&place, "a", false).unwrap();
    b.machine.write("run/config.json", b"of b");
    b.machine.write("other.json", b"of b");
    assert!(b.push());
    assert_eq!(bytes_of(&place, "run/config.json").unwrap(), b"of b");
    assert_eq!(bytes_of(&place, "other.json").unwrap(), b"of b");
    b.show();
    assert_eq!(fs::read(b.machine.store.tree().join("run/config.json")).unwrap(), b"of b");
    a.write("notes", b"newer, of a");
    a.session(&place, "a", false).unwrap();
    fs::remove_file(b.machine.store.tree().join("notes")).unwrap();
    b.push();
    b.show();
    assert_eq!(fs::read(b.machine.store.tree().join("notes")).unwrap(), b"newer, of a");
    assert_eq!(bytes_of(&place, "notes").unwrap(), b"newer, of a");
}

#[test]
fn a_copy_of_a_store_reverts_no_other_node_and_keeps_its_name() {
    let (a, b, place) = (run(), Machine::new(), Arc::new(Memory::default()));
    a.write("other.json", b"{}");
    a.session(&place, "a", false).unwrap();
    b.session(&place, "b", false).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let copied = Command::new("cp").arg("-a").arg(b.store.root()).arg(dir.path()).status().unwrap();
    assert!(copied.success());
    drop(b);
    a.write("run/config.json", b"newer");
    fs::remove_file(a.store.tree().join("other.json")).unwrap();
    a.session(&place, "a", false).unwrap();
    let copy = Machine::in_dir(dir);
    for (path, _) in tree::load(&copy.store, "memory") {
        let stub = fs::File::open(copy.store.tree().join(&path)).ok();
        let stub = stub.and_then(|file| Stub::read(&file, copy.store.id()).ok()?);
        copy.shapes.lock().unwrap().extend(stub.map(|stub| (path, Shape::Object(stub.object))));
    }
    assert_eq!(tree::last_node(&copy.store, "memory").as_deref(), Some("b"));
    copy.session(&place, "b", false).unwrap();
    assert_eq!(bytes_of(&place, "run/config.json").unwrap(), b"newer");
    assert_eq!(bytes_of(&place, "other.json"), None);
    assert_eq!(fs::read(copy.store.tree().join("run/config.json")).unwrap(), b"newer");
    assert_eq!((copy.files(), check(&place)), (NAMES.map(String::from).to_vec(), NAMES.map(String::from).to_vec()));
}

#[test]
fn a_mode_that_changes_elsewhere_travels() {
    let (a, b, place) = (run(), Machine::new(), Arc::new(Memory::default()));
    a.session(&place, "a", false).unwrap();
    b.session(&place, "b", false).unwrap();
    for path in ["run/config.json", "run/step_2.pt"] {
        assert_ne!(mode(&a, path), 0o600);
        fs::set_permissions(b.store.tree().join(path), fs::Permissions::from_mode(0o600)).unwrap();
    }
    let before = place.names().into_keys().filter(|name| name.contains("/objects/")).count();
    b.session(&place, "b", false).unwrap();
    a.session(&place, "a", false).unwrap();
    assert_eq!((mode(&a, "run/config.json"), mode(&a, "run/step_2.pt")), (0o600, 0o600));
    assert_eq!(place.names().into_keys().filter(|name| name.contains("/objects/")).count(), before);
    check(&place);
}

#[test]
fn nothing_is_done_while_names_move() {
    let (place, name) = (Arc::new(Memory::default()), "step/x");
    let mut b = Mounted::new(&place, "b");
    b.machine.write(name, b"x");
    b.machine.is_moving.store(true, Ordering::Relaxed);
    let answered = Arc::new(AtomicBool::new(false));
    let answers = Arc::clone(&answered);
    b.shared.waiting.close(name.into(), Box::new(move || answers.store(true, Ordering::Relaxed)));
    // The file travels all the same; but others may be in no part of the list.
    assert!(!b.push() && !answered.load(Ordering::Relaxed));
    assert_eq!(check(&place), [name]);
    b.machine.is_moving.store(false, Ordering::Relaxed);
    assert!(b.push() && answered.load(Ordering::Relaxed));
}

/// The objects that names have on the remote.
fn objects_of(place: &Memory, paths: [&str; 2]) -> [Option<Id>; 2] {
    let view = Mutex::default();
    Reader::refresh(place, &view).unwrap();
    let view = lock(&view);
    paths.map(|path| match &view.winner(Path::new(path))?.1?.content {
        Content::Object { id, .. } => Some(*id),
        other => panic!("{path} has no object: {other:?}"),
    })
}

#[test]
fn another_nodes_file_that_takes_the_place_of_another_is_the_later_change() {
    let names = ["run/step_1.pt", "run/step_2.pt"];
    let (a, place) = (run(), Arc::new(Memory::default()));
    a.write("run/small.json", b"small");
    a.session(&place, "a", false).unwrap();
    let [one, two] = objects_of(&place, names);
    let mut b = Mounted::new(&place, "b");
    // Three renames between two rounds exchange both.
    b.rename(names[0], "x");
    b.rename(names[1], names[0]);
    b.rename("x", names[1]);
    b.rename("run/small.json", "run/config.json");
    for _ in 0..3 {
        b.push();
        b.show();
    }
    assert_eq!(objects_of(&place, names), [two, one]);
    assert_eq!(bytes_of(&place, "run/config.json").unwrap(), b"small");
    b.rename(names[0], names[1]);
    for _ in 0..3 {
        b.push();
        b.show();
    }
    assert_eq!(objects_of(&place, names), [None, two]);
    a.session(&place, "a", true).unwrap();
    let left = ["latest", "run/config.json", "run/newest.pt", names[1]].map(String::from);
    assert_eq!((a.files(), b.machine.files(), check(&place)), (left.to_vec(), left.to_vec(), left.to_vec()));
    assert_eq!(objects_of(&place, names), [None, two]);
    assert_eq!(fs::read(a.store.tree().join("run/config.json")).unwrap(), b"small");
}

#[test]
fn what_waits_costs_no_request() {
    let (a, place) = (run(), Arc::new(Memory::default()));
    a.session(&place, "a", false).unwrap();
    let mut b = Mounted::new(&place, "b");
    // A file that is being written may be the one that is missing.
    b.machine.write("log", b"being written");
    b.machine.shapes.lock().unwrap().insert("log".into(), Shape::Unsettled);
    fs::remove_file(b.machine.store.tree().join("run/step_2.pt")).unwrap();
    assert!(!b.push());
    let before = place.requests();
    assert!(!b.push() && !b.push() && !b.push());
    assert_eq!(place.requests(), before);
    assert_eq!(check(&place), NAMES);
    // Once it may go, the news is read before it goes.
    b.machine.shapes.lock().unwrap().remove(Path::new("log"));
    b.push();
    b.push();
    assert!(b.push());
    assert_eq!(check(&place), ["latest", "log", "run/config.json", "run/newest.pt", "run/step_1.pt"]);
}

#[test]
fn of_two_copies_of_a_store_only_one_pushes() {
    let place = Arc::new(Memory::default());
    let mut b = Mounted::new(&place, "b");
    b.machine.write("x", b"x");
    assert!(b.push() && !b.writer.is_outdated().unwrap());
    let remote: Arc<dyn Place> = Arc::clone(&place) as _;
    let mut copy = Writer::claim(remote, Arc::default(), "b", b.machine.store.id(), true).unwrap();
    copy.append(Vec::new()).unwrap();
    b.writer.look().unwrap();
    assert!(matches!(b.writer.is_outdated(), Err(Error::Denied(words)) if words.contains("copy of this store")));
}
