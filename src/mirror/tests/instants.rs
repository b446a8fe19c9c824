//! Changes between the catalog's answer, a look at the tree, and the bytes.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::time::Instant;

use super::*;
use crate::mirror::Daemon;

/// A machine whose mirror has everything.
fn mirrored() -> (Machine, Arc<Memory>, Writer) {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    let mut writer = machine.writer(&(Arc::clone(&place) as _), settings().keep).unwrap();
    assert!(machine.rounds(&mut writer).unwrap());
    (machine, place, writer)
}

/// All that the mirror has, if nothing is missing.
fn whole(place: &Arc<Memory>) -> Names {
    let (names, missing) = pulled(place, None).unwrap();
    assert!(missing.names.is_empty() && missing.unread.is_empty(), "{missing:?}");
    names
}

/// Does something right after the catalog's answer about a name. The mirror has it as it was before or after.
fn meanwhile(touched: &str, act: impl FnOnce(&Machine) + Send + 'static) {
    let (machine, place, mut writer) = mirrored();
    let before = names(&machine.store);
    machine.touch(touched);
    machine.once_meanwhile(act);
    step(&mut writer, &machine, false).unwrap();
    let (now, after) = (whole(&place), names(&machine.store));
    assert!(now == before || now == after, "{:?}", now.keys());
    assert!(machine.rounds(&mut writer).unwrap());
    assert_eq!(whole(&place), after);
}

#[test]
fn a_name_that_moves_after_the_catalogs_answer_keeps_its_file() {
    meanwhile("run/newest.pt", |machine| machine.rename("run/newest.pt", "run/kept.pt"));
    meanwhile("latest", |machine| machine.rename("latest", "last"));
    // With all that is in it.
    meanwhile("run/newest.pt", |machine| machine.rename("run", "moved"));
}

/// One of its names is there at each instant, also of a released file.
#[test]
fn a_name_that_moves_before_and_after_the_answer_keeps_its_file() {
    for name in ["newest.pt", "step_1.pt"] {
        let (machine, place, mut writer) = mirrored();
        machine.rename(&format!("run/{name}"), "run/kept.pt");
        machine.once_meanwhile(|machine| machine.rename("run/kept.pt", "run/last.pt"));
        step(&mut writer, &machine, false).unwrap();
        let now = whole(&place);
        let is_there = |name: &str| now.keys().any(|path| path.ends_with(name));
        assert!([name, "kept.pt", "last.pt"].into_iter().any(is_there), "{:?}", now.keys());
        assert!(machine.rounds(&mut writer).unwrap());
        assert_eq!(whole(&place), names(&machine.store));
    }
}

/// The file is archived, and gets another mode, while its bytes cannot travel.
#[test]
fn a_file_on_its_way_is_not_done_when_it_is_archived() {
    let (machine, place, mut writer) = mirrored();
    machine.write("run/new.pt", &noise(200_000, 55));
    let wanted = machine.changes();
    place.fault(|_, name, len| {
        (name.starts_with("blobs/") && len > 50_000).then(|| Error::Away("too large today".into()))
    });
    let _ = step(&mut writer, &machine, true);
    assert!(writer.done().0 < wanted);
    fs::set_permissions(machine.at("run/new.pt"), fs::Permissions::from_mode(0o600)).unwrap();
    machine.touch("run/new.pt");
    let _ = step(&mut writer, &machine, true);
    assert!(writer.done().0 < wanted, "after another mode");
    let object = machine.release("run/other.pt", &noise(200_000, 55), None);
    machine.shapes.lock().unwrap().insert("run/new.pt".into(), Shape::Object(object));
    machine.touch("run/new.pt");
    let _ = step(&mut writer, &machine, true);
    assert!(writer.done().0 < wanted, "after it was archived");
    machine.rename("run/new.pt", "run/renamed.pt");
    let _ = step(&mut writer, &machine, true);
    assert!(writer.done().0 < wanted, "under another name");
    place.heal();
    assert!(machine.rounds(&mut writer).unwrap());
    assert!(writer.done().0 >= wanted);
}

#[test]
fn a_file_that_is_written_after_the_catalogs_answer_has_no_former_object() {
    meanwhile("run/step_2.pt", |machine| {
        machine.shapes.lock().unwrap().remove(Path::new("run/step_2.pt"));
        machine.write("run/step_2.pt", &noise(70_000, 33));
    });
}

#[test]
fn a_renamed_file_keeps_its_former_name_until_it_is_sealed() {
    let (machine, place, mut writer) = mirrored();
    let before = names(&machine.store);
    machine.rename("run/newest.pt", "run/kept.pt");
    machine.shapes.lock().unwrap().insert("run/kept.pt".into(), Shape::Unsettled);
    step(&mut writer, &machine, false).unwrap();
    assert_eq!(whole(&place), before);
    machine.shapes.lock().unwrap().remove(Path::new("run/kept.pt"));
    machine.touch("run/kept.pt");
    let put = place.counts().1;
    assert!(machine.rounds(&mut writer).unwrap());
    assert_eq!(whole(&place), names(&machine.store));
    assert!(place.counts().1 - put < 5_000, "its bytes are there");
}

#[test]
fn a_write_is_seen_under_a_name_of_which_nobody_tells() {
    let (machine, place, mut writer) = mirrored();
    for name in ["run/config.json", "run/newest.pt"] {
        fs::hard_link(machine.at(name), machine.at(&format!("{name}.other"))).unwrap();
        machine.touch(&format!("{name}.other"));
    }
    assert!(machine.rounds(&mut writer).unwrap());
    assert_eq!(whole(&place), names(&machine.store));
    machine.write("run/config.json.other", b"new");
    machine.write("run/newest.pt", &noise(200_000, 44));
    assert!(machine.rounds(&mut writer).unwrap());
    assert_eq!(whole(&place), names(&machine.store));
}

/// Looks with no more rights than a stranger has, also as root.
fn look_as_a_stranger(writer: &mut Writer, machine: &Machine) {
    let identify = |user| {
        // SAFETY: it changes nothing but with which rights this thread opens files.
        unsafe { libc::setfsuid(user) };
    };
    identify(65_534);
    writer.look(machine, machine.changes(), true);
    identify(rustix::process::geteuid().as_raw());
}

#[test]
fn a_directory_that_cannot_be_listed_waits() {
    let (machine, place, mut writer) = mirrored();
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    for path in machine.store.tree().ancestors().take(3) {
        mode(path, 0o755);
    }
    fs::create_dir(machine.at("run/new")).unwrap();
    symlink("somewhere", machine.at("run/new/link")).unwrap();
    mode(&machine.at("run/new"), 0);
    machine.touch("run/new");
    look_as_a_stranger(&mut writer, &machine);
    mode(&machine.at("run/new"), 0o700);
    assert!(failed(&writer)[0].starts_with("run/new: "), "{:?}", failed(&writer));
    assert!(machine.rounds(&mut writer).unwrap());
    assert_eq!(whole(&place), names(&machine.store));
}

#[test]
fn saves_that_go_on_do_not_delay_what_was_saved_before() {
    let (machine, place) = (Arc::new(run()), Arc::new(Memory::default()));
    let shared: Arc<dyn Place> = Arc::clone(&place) as _;
    claim(shared.as_ref(), machine.store.id()).unwrap();
    let mut count = 0;
    *machine.meanwhile.lock().unwrap() = Some(Box::new(move |machine| {
        count += 1;
        machine.write("log.txt", format!("{count}").as_bytes());
        machine.write(&format!("run/{}.json", count % 7), &[count as u8]);
    }));
    let daemon = Daemon::start(Arc::clone(&machine) as _, shared, settings()).unwrap();
    let (wanted, begun) = (daemon.progress(machine.as_ref()).changes, Instant::now());
    while daemon.progress(machine.as_ref()).done < wanted {
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", daemon.progress(machine.as_ref()));
        std::thread::sleep(Duration::from_millis(5));
    }
    daemon.stop();
    assert!(pulled(&place, None).unwrap().0.contains_key("run/newest.pt"));
}

/// Between two looks programs may save any number of files, and somebody waits for the first one.
#[test]
fn a_file_is_not_done_because_others_were_saved_before_it_was_looked_at() {
    let (machine, _, mut writer) = mirrored();
    machine.write("run/stuck.pt", &noise(100_000, 9));
    machine.shapes.lock().unwrap().insert("run/stuck.pt".into(), Shape::Stuck);
    let wanted = machine.changes();
    for number in 0..5 {
        machine.write(&format!("run/later_{number}.json"), b"{}");
    }
    assert!(!step(&mut writer, &machine, true).unwrap());
    assert!(writer.done().0 < wanted, "{:?}", writer.done());
    assert_eq!(writer.done().1, machine.changes());
}

#[test]
fn a_file_that_fails_is_told_from_those_that_travel() {
    let (machine, _, mut writer) = mirrored();
    machine.write("run/stuck.pt", &noise(100_000, 9));
    machine.shapes.lock().unwrap().insert("run/stuck.pt".into(), Shape::Stuck);
    assert!(!step(&mut writer, &machine, true).unwrap());
    let stuck = machine.changes();
    assert_eq!(writer.done(), (stuck - 1, stuck));
    machine.write("run/later.json", b"{}");
    assert!(!step(&mut writer, &machine, false).unwrap());
    assert_eq!(writer.done(), (stuck - 1, machine.changes()));
}
