//! What a save costs beside many names.

use std::time::Instant;

use super::*;
use crate::clock::of_thread;

/// A machine with `directories` of `files` small files each, and a writer that has mirrored them.
fn many(directories: u64, files: u64, place: &Arc<Memory>) -> (Machine, Writer) {
    let machine = Machine::new();
    for directory in 0..directories {
        fs::create_dir(machine.at(&format!("step-{directory}"))).unwrap();
        for file in 0..files {
            fs::write(machine.at(&format!("step-{directory}/{file}.json")), format!("{directory}-{file}")).unwrap();
        }
    }
    let mut writer = machine.writer(&(Arc::clone(place) as _), settings().keep).unwrap();
    while !step(&mut writer, &machine, true).unwrap() {}
    (machine, writer)
}

/// Requests, bytes and processor time of a one-byte save.
fn save(machine: &Machine, writer: &mut Writer, place: &Memory, seed: u8) -> (u64, u64, Duration) {
    machine.write("step-0/0.json", &[seed]);
    let (before, began) = (place.counts(), of_thread());
    assert!(step(writer, machine, false).unwrap());
    let (after, spent) = (place.counts(), of_thread().saturating_sub(began));
    (after.0 - before.0, after.1 - before.1, spent)
}

#[test]
fn a_save_costs_what_changed() {
    for (directories, files) in [(20, 20), (1, 400), (400, 1)] {
        let place = Arc::new(Memory::default());
        let (machine, mut writer) = many(directories, files, &place);
        let (requests, bytes, _) = save(&machine, &mut writer, &place, 1);
        // The mark, the file, its directory, and the manifest, which has the top directory unless that is large.
        assert_eq!(requests, if directories < 400 { 4 } else { 5 });
        assert!(bytes < 2_000 + 60 * files + 60 * directories, "{bytes}");
        // Nothing changed: nothing is asked.
        let before = place.counts();
        assert!(step(&mut writer, &machine, false).unwrap());
        assert_eq!(place.counts(), before);
    }
}

/// Run by hand: `cargo test --release --lib -- --ignored --nocapture beside_many_names`.
#[test]
#[ignore = "measures"]
fn a_save_beside_many_names() {
    for (directories, files) in [(100, 100), (1, 10_000), (10_000, 100)] {
        let (place, began) = (Arc::new(Memory::default()), Instant::now());
        let (machine, mut writer) = many(directories, files, &place);
        let first = began.elapsed();
        let mut all: Vec<_> = (0..20).map(|seed| save(&machine, &mut writer, &place, seed)).collect();
        all.sort_by_key(|(.., spent)| *spent);
        let (requests, bytes, spent) = all[10];
        println!(
            "{directories} directories of {files}: first {first:.1?}, a save {requests} requests, {bytes} bytes, {spent:.2?}"
        );
        let before = (place.counts(), Instant::now());
        let mut writer = machine.writer(&(Arc::clone(&place) as _), settings().keep).unwrap();
        assert!(step(&mut writer, &machine, true).unwrap());
        let (requests, _, bytes) = place.counts();
        println!(
            "  a start: {} requests, {} bytes, {:.1?}",
            requests - before.0.0,
            bytes - before.0.2,
            before.1.elapsed()
        );
    }
}
