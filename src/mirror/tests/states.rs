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
    let then = states.last().unwrap().1;
    std::thread::sleep(Duration::from_millis(5));
    machine.remove("run");
    machine.session(&place, false).unwrap();
    let mut writer = machine.writer(&shared(&place), settings().keep).unwrap();
    writer.collect().unwrap();
    place.age("blobs/", Duration::from_secs(7200));
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
    assert_eq!((count(&place, "manifests/"), count(&place, "blobs/")), (1, 4));
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
    place.age("blobs/", Duration::from_secs(3601));
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
        // The mirror's machine dies, too: deletions that are not durable are undone.
        place.crash("manifests/");
        for (_, at_ms) in Reader::states(place.as_ref()).unwrap().1 {
            let (_, missing) = pulled(&place, Some(at_ms)).unwrap();
            assert!(missing.names.is_empty() && missing.unread.is_empty(), "killed at {at}: {missing:?}");
        }
        if !killed {
            assert!(at > 3);
            break;
        }
    }
}

#[test]
fn a_clock_that_is_a_year_ahead_takes_no_state() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let before = names(&machine.store);
    machine.remove("run");
    std::thread::sleep(Duration::from_millis(5));
    machine.session(&place, false).unwrap();
    // Seen from there, the names say that all this was a year ago. The mirror's own clock says that it was a moment ago.
    let (_, states) = Reader::states(place.as_ref()).unwrap();
    let year_ago = |(state, _): &(manifest::Number, u64)| {
        let top = manifest::get(place.as_ref(), *state).unwrap();
        place.set(&state.name(), None);
        let number = manifest::Number::after(None, state.at_ms - 365 * 24 * 3_600_000, machine.store.id());
        manifest::put(place.as_ref(), number, &top).unwrap();
        (number, number.at_ms)
    };
    let states: Vec<_> = states.iter().map(year_ago).collect();
    let mut writer = machine.writer(&shared(&place), settings().keep).unwrap();
    writer.collect().unwrap();
    assert_eq!(Reader::states(place.as_ref()).unwrap().1, states);
    let last_but_one = states[states.len() - 2].1;
    assert_eq!(pulled(&place, Some(last_but_one)).unwrap().0, before);
    // Without a put, the mirror's time goes on nevertheless. It goes on from the newest blob, which is older than the states.
    let mut writer = machine.writer(&shared(&place), Duration::from_millis(20)).unwrap();
    let mut left = (0..1000).map(|_| {
        std::thread::sleep(Duration::from_millis(10));
        writer.collect().unwrap();
        Reader::states(place.as_ref()).unwrap().1
    });
    assert_eq!(left.find(|left| left.len() == 1).unwrap(), states[states.len() - 1..]);
}

/// The mirror is a directory, and its machine's clock was ahead when the bytes were put.
#[test]
fn a_clock_that_was_ahead_takes_no_state_later() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let before = names(&machine.store);
    // Of two states in one millisecond, the number of the second is later than its put.
    let then = Reader::states(place.as_ref()).unwrap().1.last().unwrap().0.at_ms;
    machine.remove("run");
    std::thread::sleep(Duration::from_millis(5));
    machine.session(&place, false).unwrap();
    place.put_ahead("blobs/", Duration::from_secs(365 * 24 * 3600));
    let mut writer = machine.writer(&shared(&place), settings().keep).unwrap();
    writer.collect().unwrap();
    assert_eq!(pulled(&place, Some(then)).unwrap().0, before);
    // A state that was put in that time is found by the time at which it was true for the store.
    place.put_ahead("manifests/", Duration::from_secs(365 * 24 * 3600));
    assert_eq!(pulled(&place, Some(then)).unwrap().0, before);
}

#[test]
fn the_newest_state_that_somebody_removed_is_put_again() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let mut writer = machine.writer(&shared(&place), settings().keep).unwrap();
    assert!(machine.rounds(&mut writer).unwrap());
    for (state, _) in Reader::states(place.as_ref()).unwrap().1 {
        place.set(&state.name(), None);
    }
    writer.collect().unwrap();
    assert!(machine.rounds(&mut writer).unwrap());
    assert_eq!(pulled(&place, None).unwrap().0, names(&machine.store));
}

#[test]
fn what_a_file_needs_and_the_collector_took_travels_again() {
    let (machine, place) = (Machine::new(), Arc::new(Memory::default()));
    let parent = machine.release("a/parent.pt", &noise(100_000, 1), None);
    let mut writer = machine.writer(&shared(&place), Duration::ZERO).unwrap();
    assert!(machine.rounds(&mut writer).unwrap());
    // The difference to it is on its way for long.
    place.fault(|what, name, len| {
        let is_large = what == "put" && name.starts_with("blobs/") && len > 50_000;
        is_large.then(|| Error::Away("refused".into()))
    });
    machine.release("b/child.pt", &noise(100_000, 2), Some(parent));
    assert!(!machine.rounds(&mut writer).unwrap());
    let before = place.names().len();
    machine.remove("a");
    assert!(!machine.rounds(&mut writer).unwrap());
    writer.collect().unwrap();
    assert!(place.names().len() < before, "nobody needs the parent");
    place.heal();
    assert!(machine.rounds(&mut writer).unwrap());
    assert_eq!(pulled(&place, None).unwrap(), (names(&machine.store), Missing { found: 1, ..Missing::default() }));
}

#[test]
fn a_directory_that_was_packed_in_vain_keeps_what_an_older_state_needs() {
    let (machine, place) = (Machine::new(), Arc::new(Memory::default()));
    machine.write("run/a.pt", &noise(100_000, 1));
    let mut writer = machine.writer(&shared(&place), Duration::ZERO).unwrap();
    assert!(machine.rounds(&mut writer).unwrap());
    let before = names(&machine.store);
    // The directory's bytes are packed once more under its new name, and then it goes.
    place.fault(|what, _, _| (what == "put").then(|| Error::Away("away".into())));
    machine.rename("run", "moved");
    assert!(step(&mut writer, &machine, true).is_err());
    machine.remove("moved");
    assert!(step(&mut writer, &machine, true).is_err());
    writer.collect().unwrap();
    place.heal();
    assert_eq!(pulled(&place, None).unwrap(), (before, Missing { found: 1, ..Missing::default() }));
}

#[test]
fn an_object_on_the_mirror_stays_in_its_first_encoding() {
    let (machine, place) = (Machine::new(), Arc::new(Memory::default()));
    let bytes: Vec<u8> = noise(200_000, 1).iter().map(|byte| byte & 15).collect();
    let parent = machine.release("parent.pt", &bytes, None);
    machine.remove("parent.pt");
    machine.release("b/child.pt", &noise(100_000, 2), Some(parent));
    let mut writer = machine.writer(&shared(&place), Duration::ZERO).unwrap();
    place.fault(|what, name, len| {
        let is_large = what == "put" && name.starts_with("blobs/") && len > 50_000;
        is_large.then(|| Error::Away("refused".into()))
    });
    assert!(!machine.rounds(&mut writer).unwrap());
    place.heal();
    // Another file brings the parent meanwhile, in an encoding of today. Then the first file comes, with yesterday's encoding.
    machine.reencode(parent, &bytes);
    machine.release("a/other.pt", &noise(100_000, 3), Some(parent));
    assert!(!step(&mut writer, &machine, false).unwrap());
    assert!(machine.rounds(&mut writer).unwrap());
    writer.collect().unwrap();
    assert_eq!(pulled(&place, None).unwrap(), (names(&machine.store), Missing { found: 2, ..Missing::default() }));
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
