//! The files that a pull makes in a store, and those that it leaves alone.

use super::*;
use crate::mirror::pieces;

/// The last state of a mirror.
fn reader(place: &Arc<Memory>, wanted: &str) -> Reader {
    Reader::open(&(Arc::clone(place) as _), None, Path::new(wanted)).unwrap()
}

/// Gives a file of one store the modification time that it has in another.
fn same_time(copy: &Machine, of: &Machine, name: &str) {
    let modified = fs::metadata(of.at(name)).unwrap().modified().unwrap();
    fs::File::open(copy.at(name)).unwrap().set_modified(modified).unwrap();
}

#[test]
fn a_pull_that_is_stopped_goes_on() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.write("run/large.bin", &noise(9 << 20, 7));
    machine.session(&place, false).unwrap();
    let whole = names(&machine.store);
    let copy = Machine::new();
    let shared: Arc<dyn Place> = Arc::clone(&place) as _;
    for at in 0.. {
        let done = Mutex::new(0);
        let watch = |_| {
            let mut done = done.lock().unwrap();
            *done += 1;
            *done <= at
        };
        let reader = Reader::open(&shared, None, Path::new("")).unwrap();
        if pull(&reader, &copy.store, Path::new(""), &watch).is_ok() {
            break;
        }
        // No name without its bytes.
        assert!(names(&copy.store).iter().all(|(name, bytes)| whole.get(name) == Some(bytes)));
    }
    assert_eq!(names(&copy.store), whole);
    let got = place.counts().2;
    let reader = Reader::open(&shared, None, Path::new("")).unwrap();
    let again = pull(&reader, &copy.store, Path::new(""), &|_| true).unwrap();
    assert!(again.names.is_empty() && place.counts().2 - got < 10_000, "a second pull brings nothing");
    // Attributes are those of the source.
    let mode = |store: &Store| fs::metadata(store.tree().join("run/config.json")).unwrap().permissions();
    assert_eq!(mode(&copy.store), mode(&machine.store));
    let time = |store: &Store, name| fs::metadata(store.tree().join(name)).unwrap().modified().unwrap();
    for name in ["run", "run/newest.pt", "empty"] {
        assert_eq!(time(&copy.store, name), time(&machine.store, name), "{name}");
    }
}

#[test]
fn another_file_in_its_place_stays() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let copy = Machine::new();
    copy.write("run/config.json", b"mine");
    copy.write("run/own.txt", b"mine too");
    let reader = Reader::open(&(Arc::clone(&place) as _), None, Path::new("")).unwrap();
    let missing = pull(&reader, &copy.store, Path::new(""), &|_| true).unwrap();
    assert_eq!(missing.names.keys().collect::<Vec<_>>(), [Path::new("run/config.json")]);
    assert_eq!(fs::read(copy.at("run/config.json")).unwrap(), b"mine");
    assert_eq!(names(&copy.store).len(), names(&machine.store).len() + 1);
}

#[test]
fn one_directory_costs_its_own_bytes() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.write("other/large.bin", &noise(3 << 20, 7));
    machine.session(&place, false).unwrap();
    let (copy, got) = (Machine::new(), place.counts().2);
    let reader = Reader::open(&(Arc::clone(&place) as _), None, Path::new("run/step_2.pt")).unwrap();
    let missing = pull(&reader, &copy.store, Path::new("run/step_2.pt"), &|_| true).unwrap();
    assert_eq!((missing.found, missing.names.len()), (1, 0));
    assert_eq!(names(&copy.store).into_keys().collect::<Vec<_>>(), ["run", "run/step_2.pt"]);
    assert!(place.counts().2 - got < 250_000);
}

#[test]
fn a_file_with_the_length_and_time_of_another_is_another() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let copy = Machine::new();
    let names = ["run/config.json", "run/newest.pt", "run/step_1.pt", "run/step_2.pt"];
    copy.write(names[0], b"[]");
    copy.write(names[1], &noise(200_000, 70));
    copy.release(names[2], &noise(100_000, 71), None);
    copy.write(names[3], &noise(100_000, 72));
    names.iter().for_each(|name| same_time(&copy, &machine, name));
    let before = super::names(&copy.store);
    let missing = pull(&reader(&place, ""), &copy.store, Path::new(""), &|_| true).unwrap();
    assert_eq!(missing.names.keys().collect::<Vec<_>>(), names.map(Path::new));
    let after = super::names(&copy.store);
    assert!(before.iter().all(|(name, bytes)| after.get(name) == Some(bytes)));
}

#[test]
fn a_file_with_the_same_bytes_is_the_same_and_is_not_brought() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let copy = Machine::new();
    copy.write("run/config.json", b"{}");
    copy.write("run/newest.pt", &noise(200_000, 1));
    // Decoded from an object, and of an object of another name.
    copy.write("run/step_1.pt", &noise(100_000, 2));
    copy.release("run/step_2.pt", &noise(100_000, 3), None);
    let names = ["run/config.json", "run/newest.pt", "run/step_1.pt", "run/step_2.pt"];
    names.iter().for_each(|name| same_time(&copy, &machine, name));
    let small = pieces::name(pieces::pack(b"{}").unwrap().0);
    place.fault(move |what, name, _| (what == "get" && name == small).then(|| Error::Denied("once is enough".into())));
    let missing = pull(&reader(&place, ""), &copy.store, Path::new(""), &|_| true).unwrap();
    assert_eq!(missing, Missing { found: 5, ..Missing::default() });
    assert_eq!(super::names(&copy.store), super::names(&machine.store));
}

#[test]
fn a_link_in_the_place_of_a_directory_leads_nothing_out_of_the_store() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let (copy, outside) = (Machine::new(), tempfile::tempdir().unwrap());
    std::os::unix::fs::symlink(outside.path(), copy.at("run")).unwrap();
    let missing = pull(&reader(&place, ""), &copy.store, Path::new(""), &|_| true).unwrap();
    assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    assert_eq!(missing.names.len(), 4, "{missing:?}");
    assert!(missing.names.values().all(|why| why.contains("place of its directory")), "{missing:?}");
    assert_eq!(fs::read_link(copy.at("run")).unwrap(), outside.path());
}

#[test]
fn a_file_that_looks_like_a_stub_is_marked_as_a_programs() {
    let (machine, place) = (Machine::new(), Arc::new(Memory::default()));
    let stub = Stub { store: machine.store.id(), object: Id([7; 16]), logical_len: 4096 };
    machine.write("like.pt", &stub.encode());
    machine.session(&place, false).unwrap();
    let copy = Machine::new();
    assert_eq!(pull(&reader(&place, ""), &copy.store, Path::new(""), &|_| true).unwrap().names.len(), 0);
    let file = copy.store.io().open(&copy.at("like.pt")).unwrap();
    assert!(!Stub::looks_like_one(&file).unwrap());
    assert_eq!(fs::read(copy.at("like.pt")).unwrap(), stub.encode());
}
