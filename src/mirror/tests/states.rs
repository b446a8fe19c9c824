//! The states that a mirror has: whose they are, how long they stay, and what collecting leaves.

use super::*;

fn shared(place: &Arc<Memory>) -> Arc<dyn Place> {
    Arc::clone(place) as _
}

#[test]
fn another_store_is_refused_until_the_mark_is_deleted() {
    let (machine, other, place) = (run(), run(), Arc::new(Memory::default()));
    // A mark without a state is nobody's yet.
    claim(place.as_ref(), other.store.id()).unwrap();
    machine.session(&place, false).unwrap();
    let mut writer = machine.writer(&shared(&place), settings().keep).unwrap();
    let refused = other.session(&place, false).unwrap_err().to_string();
    assert!(refused.contains(&machine.store.id().to_string()), "{refused}");
    // The machine is gone for good, and its user says so.
    place.set(manifest::MARK, None);
    other.write("other.txt", b"x");
    other.session(&place, false).unwrap();
    assert_eq!(pulled(&place, None).unwrap().0, names(&other.store));
    // It was not gone.
    machine.write("late.txt", b"x");
    assert!(matches!(step(&mut writer, &machine, true), Err(Error::Denied(_))));
    assert_eq!(pulled(&place, None).unwrap().0, names(&other.store));
    // A mirror without its mark is not mounted.
    place.set(manifest::MARK, None);
    let missing = Writer::open(&shared(&place), other.store.id(), &settings()).err().unwrap();
    assert!(matches!(missing, Error::Away(_)), "{missing}");
}

#[test]
fn another_format_is_refused() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let mark = String::from_utf8(place.names()[manifest::MARK].clone()).unwrap();
    place.set(manifest::MARK, Some(mark.replace("format = 1", "format = 2").into_bytes()));
    let before = place.names();
    let refused = [machine.session(&place, true).err(), pulled(&place, None).err()];
    for refused in refused.map(|error| error.unwrap().to_string()) {
        assert!(refused.contains("has format 2"), "{refused}");
    }
    assert!(place.names() == before);
}

#[test]
fn what_was_removed_is_there_at_the_time_before() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let before = names(&machine.store);
    let (_, states) = Reader::states(place.as_ref()).unwrap();
    let then = states.last().unwrap().at_ms;
    std::thread::sleep(Duration::from_millis(5));
    machine.remove("run");
    machine.session(&place, false).unwrap();
    let mut writer = machine.writer(&shared(&place), settings().keep).unwrap();
    writer.collect().unwrap();
    place.age(Duration::from_secs(7200));
    writer.collect().unwrap();
    assert_eq!(pulled(&place, None).unwrap().0.into_keys().collect::<Vec<_>>(), ["empty", "latest"]);
    assert_eq!(pulled(&place, Some(then)).unwrap().0, before);
    assert!(pulled(&place, Some(5)).is_err(), "nothing was there in 1970");
    // Back into the store that lost it.
    let reader = Reader::open(&shared(&place), Some(then), Path::new("run")).unwrap();
    assert_eq!(pull(&reader, &machine.store, Path::new("run"), &|_| true).unwrap().names.len(), 0);
    assert_eq!(names(&machine.store), before);
}

#[test]
fn old_states_go_with_what_only_they_need() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    machine.remove("run/newest.pt");
    machine.remove("run/step_2.pt");
    std::thread::sleep(Duration::from_millis(5));
    machine.session(&place, false).unwrap();
    let count = |place: &Memory, of: &str| place.names().keys().filter(|name| name.starts_with(of)).count();
    let mut writer = machine.writer(&shared(&place), Duration::from_secs(3600)).unwrap();
    writer.collect().unwrap();
    // A manifest of an empty store, and two more; two blobs too young to go are needed anyway.
    let states = count(&place, "manifests/");
    assert!(states >= 2, "{:?}", place.names().keys());
    let mut writer = machine.writer(&shared(&place), Duration::ZERO).unwrap();
    writer.collect().unwrap();
    assert_eq!((count(&place, "manifests/"), count(&place, "blobs/")), (1, 5));
    assert_eq!(pulled(&place, None).unwrap().0, names(&machine.store));
}

#[test]
fn a_blob_on_its_way_stays() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    // Put by a process that died before it named it.
    place.set("blobs/ab/abababababababababababababababab", Some(b"x".to_vec()));
    let mut writer = machine.writer(&shared(&place), Duration::from_secs(3600)).unwrap();
    writer.collect().unwrap();
    assert!(place.names().contains_key("blobs/ab/abababababababababababababababab"));
    place.age(Duration::from_secs(3601));
    place.set("blobs/cd/cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd", Some(b"x".to_vec()));
    writer.collect().unwrap();
    assert!(!place.names().contains_key("blobs/ab/abababababababababababababababab"));
    assert!(place.names().contains_key("blobs/cd/cdcdcdcdcdcdcdcdcdcdcdcdcdcdcdcd"));
    assert_eq!(pulled(&place, None).unwrap().0, names(&machine.store));
}

#[test]
fn a_collector_that_is_killed_after_any_request_leaves_every_state_whole() {
    for at in 0.. {
        let (machine, place) = (run(), Arc::new(Memory::default()));
        machine.session(&place, false).unwrap();
        machine.remove("run/newest.pt");
        std::thread::sleep(Duration::from_millis(2));
        machine.session(&place, false).unwrap();
        let mut writer = machine.writer(&shared(&place), Duration::ZERO).unwrap();
        place.fail_after(Some(at), true);
        let killed = writer.collect().is_err();
        place.heal();
        for state in Reader::states(place.as_ref()).unwrap().1 {
            let (_, missing) = pulled(&place, Some(state.at_ms)).unwrap();
            assert!(missing.names.is_empty() && missing.unread.is_empty(), "killed at {at}: {missing:?}");
        }
        if !killed {
            assert!(at > 3);
            break;
        }
    }
}

#[test]
fn a_directory_in_the_place_of_a_name_and_back() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    let mut writer = machine.writer(&shared(&place), settings().keep).unwrap();
    let mut check = |machine: &Machine| {
        assert!(machine.rounds(&mut writer).unwrap());
        assert_eq!(pulled(&place, None).unwrap().0, names(&machine.store));
    };
    check(&machine);
    machine.remove("latest");
    machine.write("latest/step.json", b"{}");
    machine.touch("latest");
    check(&machine);
    machine.remove("latest");
    machine.write("latest", b"a file now");
    check(&machine);
    // A directory with links and empty directories moves: nobody tells of each.
    fs::create_dir_all(machine.at("run/a/b")).unwrap();
    std::os::unix::fs::symlink("x", machine.at("run/a/link")).unwrap();
    machine.touch("run/a");
    check(&machine);
    machine.rename("run", "other");
    check(&machine);
    // Another directory takes the place of an empty one.
    fs::create_dir(machine.at("other/a/b/c")).unwrap();
    machine.touch("other/a/b/c");
    fs::create_dir(machine.at("place")).unwrap();
    machine.touch("place");
    check(&machine);
    machine.rename("other/a/b", "place");
    check(&machine);
    machine.rename("other/a", "a");
    machine.rename("other/newest.pt", "a/newest.pt");
    machine.remove("other");
    check(&machine);
}
