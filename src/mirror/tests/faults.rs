//! Faults of the mirror, of single files, and of what lies there.

use super::*;
use crate::mirror::pieces::{Bytes, name};

/// Some rounds, until nothing is left. False if something stays.
fn round(writer: &mut Writer, machine: &Machine) -> Result<bool> {
    machine.rounds(writer)
}

#[test]
fn one_file_that_the_mirror_refuses_delays_no_other() {
    let statuses: [fn(String) -> Error; 3] = [Error::Denied, Error::Away, Error::Missing];
    for status in statuses {
        let (machine, place) = (run(), Arc::new(Memory::default()));
        machine.session(&place, false).unwrap();
        let refused = std::sync::OnceLock::new();
        place.fault(move |what, name, _| {
            let is_large =
                what == "put" && name.starts_with("blobs/") && *refused.get_or_init(|| name.to_string()) == name;
            is_large.then(|| status("refused".into()))
        });
        machine.write("run/refused.bin", &noise(100_000, 9));
        let mut writer = machine.writer(&(Arc::clone(&place) as _), settings().keep).unwrap();
        assert!(!round(&mut writer, &machine).unwrap());
        assert!(failed(&writer)[0].contains("run/refused.bin"), "{:?}", failed(&writer));
        machine.write("run/other.bin", &noise(100_000, 10));
        machine.remove("run/step_2.pt");
        machine.rename("run/newest.pt", "run/renamed.pt");
        assert!(!round(&mut writer, &machine).unwrap());
        let now = pulled(&place, None).unwrap().0;
        assert!(now.contains_key("run/other.bin") && now.contains_key("run/renamed.pt"), "{:?}", now.keys());
        assert!(!now.contains_key("run/step_2.pt") && !now.contains_key("run/newest.pt"));
        place.heal();
        assert!(round(&mut writer, &machine).unwrap());
        assert_eq!(pulled(&place, None).unwrap().0, names(&machine.store));
    }
}

#[test]
fn a_name_keeps_its_old_bytes_until_the_new_ones_are_there() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let mut writer = machine.writer(&(Arc::clone(&place) as _), settings().keep).unwrap();
    assert!(round(&mut writer, &machine).unwrap());
    let old = names(&machine.store);
    let (state, modified) =
        (machine.at("run/newest.pt"), fs::metadata(machine.at("run/newest.pt")).unwrap().modified().unwrap());
    // With its old length and time: only its content is another.
    machine.write("run/newest.pt", &noise(200_000, 50));
    fs::File::open(&state).unwrap().set_modified(modified).unwrap();
    machine.touch("run/newest.pt");
    place.fault(|what, name, _| (what == "put" && name.starts_with("blobs/")).then(|| Error::Denied("refused".into())));
    assert!(!round(&mut writer, &machine).unwrap());
    assert_eq!(pulled(&place, None).unwrap().0, old);
    place.heal();
    assert!(round(&mut writer, &machine).unwrap());
    assert_eq!(pulled(&place, None).unwrap().0, names(&machine.store));
}

#[test]
fn an_old_time_on_new_bytes_is_seen_after_a_start() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    for (name, len) in [("run/config.json", 2), ("run/newest.pt", 200_000)] {
        machine.session(&place, false).unwrap();
        let modified = fs::metadata(machine.at(name)).unwrap().modified().unwrap();
        fs::write(machine.at(name), noise(len, 77)).unwrap();
        fs::File::open(machine.at(name)).unwrap().set_modified(modified).unwrap();
        machine.session(&place, false).unwrap();
        assert_eq!(pulled(&place, None).unwrap().0, names(&machine.store));
    }
}

#[test]
fn attributes_travel_without_the_bytes() {
    use std::os::unix::fs::PermissionsExt;
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let put = place.counts().1;
    for name in ["run/newest.pt", "run/config.json", "empty"] {
        fs::set_permissions(machine.at(name), fs::Permissions::from_mode(0o700)).unwrap();
    }
    fs::File::open(machine.at("run/newest.pt")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
    machine.session(&place, false).unwrap();
    assert!(place.counts().1 - put < 5_000);
    let copy = Machine::new();
    let reader = Reader::open(&(Arc::clone(&place) as _), None, Path::new("")).unwrap();
    pull(&reader, &copy.store, Path::new(""), &|_| true).unwrap();
    for name in ["run/newest.pt", "run/config.json", "empty"] {
        assert_eq!(fs::metadata(copy.at(name)).unwrap().permissions().mode() & 0o7777, 0o700);
    }
    assert_eq!(fs::metadata(copy.at("run/newest.pt")).unwrap().modified().unwrap(), std::time::UNIX_EPOCH);
}

#[test]
fn a_mirror_that_throttles_slows_down_and_fails_nothing() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    (0..20).for_each(|number| machine.write(&format!("run/{number}.bin"), &noise(70_000, number)));
    let mut count = 0;
    place.fault(move |what, name, _| {
        count += 1;
        (what == "put" && name.starts_with("blobs/") && count % 5 == 0).then(|| Error::Busy("SlowDown".into()))
    });
    let mut writer = machine.writer(&(Arc::clone(&place) as _), settings().keep).unwrap();
    while !step(&mut writer, &machine, true).unwrap() {
        assert_eq!(failed(&writer), Vec::<String>::new());
    }
    assert_eq!(pulled(&place, None).unwrap().0, names(&machine.store));
}

#[test]
fn deleting_goes_on_while_putting_fails() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let mut writer = machine.writer(&(Arc::clone(&place) as _), Duration::ZERO).unwrap();
    assert!(round(&mut writer, &machine).unwrap());
    let blobs = |place: &Memory| place.names().keys().filter(|name| name.starts_with("blobs/")).count();
    let before = blobs(&place);
    place.fault(|what, name, len| {
        (what == "put" && name.starts_with("blobs/") && len > 50_000)
            .then(|| Error::Away("the mirror has no room".into()))
    });
    machine.write("run/large.bin", &noise(100_000, 8));
    machine.remove("run/newest.pt");
    machine.remove("run/step_2.pt");
    machine.remove("run/step_1.pt");
    assert!(!round(&mut writer, &machine).unwrap());
    writer.collect().unwrap();
    assert!(blobs(&place) < before, "{before}");
    assert!(!pulled(&place, None).unwrap().0.contains_key("run/newest.pt"));
}

#[test]
fn what_the_mirror_lost_travels_again() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let whole = names(&machine.store);
    for name in place.names().into_keys().filter(|name| name.starts_with("blobs/")) {
        place.set(&name, None);
        machine.session(&place, false).unwrap();
        assert_eq!(pulled(&place, None).unwrap().0, whole, "{name}");
    }
    // The same while a daemon runs: the next collection notices.
    let mut writer = machine.writer(&(Arc::clone(&place) as _), settings().keep).unwrap();
    assert!(round(&mut writer, &machine).unwrap());
    place.names().into_keys().filter(|name| name.starts_with("blobs/")).for_each(|name| place.set(&name, None));
    assert!(writer.collect().is_err(), "old states cannot be read");
    assert!(round(&mut writer, &machine).unwrap());
    assert_eq!(pulled(&place, None).unwrap().0, whole);
}

#[test]
fn damaged_truncated_and_hostile_answers_are_errors() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    // What nobody reads may be anything.
    machine.session(&place, true).unwrap();
    let whole = names(&machine.store);
    for (name, bytes) in place.names() {
        let last = bytes.len() - 1;
        let flipped = [&bytes[..last], &[bytes[last] ^ 1]].concat();
        for wrong in [flipped, bytes[..last].to_vec(), [&bytes[..], b"x"].concat(), Vec::new(), vec![0; 1 << 16]] {
            place.set(&name, Some(wrong));
            match pulled(&place, None) {
                Err(_) => {}
                Ok((partly, missing)) => {
                    let is_whole = missing.names.is_empty() && missing.unread.is_empty() && partly == whole;
                    // Of a blob no byte may be wrong; the mark may have a comment more.
                    assert!(!is_whole || !name.starts_with("blobs/") && !name.starts_with("manifests/"), "{name}");
                    assert!(partly.iter().all(|(name, bytes)| whole.get(name) == Some(bytes)), "{name}");
                }
            }
        }
        place.set(&name, Some(bytes));
    }
    assert_eq!(pulled(&place, None).unwrap().0, whole);
}

#[test]
fn a_damaged_state_is_written_again() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    for name in place.names().into_keys().filter(|name| name.starts_with("manifests/")) {
        place.set(&name, Some(b"no manifest".to_vec()));
    }
    let put = place.counts().1;
    machine.session(&place, false).unwrap();
    assert_eq!(pulled(&place, None).unwrap().0, names(&machine.store));
    assert!(place.counts().1 - put < 5_000, "the bytes are there");
}

#[test]
fn a_file_that_cannot_be_read_or_changes_is_named() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.write("run/stuck.pt", &noise(100_000, 9));
    machine.shapes.lock().unwrap().insert("run/stuck.pt".into(), Shape::Stuck);
    let id = machine.release("run/damaged.pt", &noise(100_000, 8), None);
    let path = crate::store::object::path_of(&machine.store.objects(), id);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let mut writer = machine.writer(&(Arc::clone(&place) as _), settings().keep).unwrap();
    assert!(!round(&mut writer, &machine).unwrap());
    let failed = failed(&writer);
    assert!(
        failed.len() == 2 && failed[0].contains("run/damaged.pt") && failed[1].contains("run/stuck.pt"),
        "{failed:?}"
    );
    assert_eq!(pulled(&place, None).unwrap().0.len(), 7);
    fs::write(&path, &bytes).unwrap();
    machine.shapes.lock().unwrap().remove(Path::new("run/stuck.pt"));
    assert!(round(&mut writer, &machine).unwrap());
    assert_eq!(pulled(&place, None).unwrap().0, names(&machine.store));
}

#[test]
fn what_may_still_change_keeps_what_it_had() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, false).unwrap();
    let before = names(&machine.store);
    machine.write("run/newest.pt", &noise(200_000, 60));
    machine.shapes.lock().unwrap().insert("run/newest.pt".into(), Shape::Unsettled);
    machine.session(&place, false).unwrap();
    assert_eq!(pulled(&place, None).unwrap().0, before);
    machine.shapes.lock().unwrap().remove(Path::new("run/newest.pt"));
    machine.session(&place, false).unwrap();
    assert_eq!(pulled(&place, None).unwrap().0, names(&machine.store));
}

#[test]
fn bytes_in_pieces_come_back_and_false_ones_are_errors() {
    let (place, original) = (Memory::default(), noise(9 << 20, 3));
    let (bytes, packed) = Bytes::pack(&original).unwrap();
    packed.into_iter().for_each(|(hash, packed)| place.set(&name(hash), Some(packed)));
    assert_eq!(bytes.pieces.len(), 3);
    assert!(bytes.get(&place).unwrap() == original);
    let of = |len, pieces: &[Id]| Bytes { len, pieces: pieces.to_vec() };
    let [first, second, third] = bytes.pieces[..] else { panic!() };
    let others = [
        of(bytes.len - 1, &bytes.pieces),
        of(bytes.len + 1, &bytes.pieces),
        of(u64::MAX, &bytes.pieces),
        of(0, &bytes.pieces),
        of(bytes.len, &[first, second]),
        of(bytes.len, &[third, second, first]),
    ];
    for other in others {
        assert!(matches!(other.get(&place), Err(Error::Wrong(_))), "{other:?}");
    }
}
