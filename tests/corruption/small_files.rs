//! Stubs, `stepfs.toml`, the record of restores, and notes in `tmp/`.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use stepfs::store::durable::Times;
use stepfs::store::{Id, Restores, STUB_BYTES, Store, Stub, StubNote};

use super::series::{Rest, step};
use super::store::{Victim, is_full, write_stub};

/// Every byte of a stub: an error, never a file of other bytes, and never another object's.
#[test]
fn every_byte_of_a_stub() {
    let victim = Victim::golden("adam");
    let (path, _) = victim.files.iter().next().unwrap();
    let absolute = victim.root.join("tree").join(path);
    let file = fs::File::options().read(true).write(true).open(&absolute).unwrap();
    let mut block = [0; STUB_BYTES];
    file.read_exact_at(&mut block, 0).unwrap();
    for at in 0..STUB_BYTES {
        for change in [block[at] ^ 1, block[at] ^ 0x40, !block[at], 0] {
            if change == block[at] {
                continue;
            }
            file.write_all_at(&[change], at as u64).unwrap();
            let error = victim.stub(&absolute).expect_err("a changed byte is noticed");
            assert_eq!(error.kind(), std::io::ErrorKind::InvalidData, "byte {at}");
            if !is_full() {
                break;
            }
        }
        file.write_all_at(&block[at..=at], at as u64).unwrap();
    }
    // Shorter and longer files are no stubs of this length.
    let len = file.metadata().unwrap().len();
    for other in [len - 1, len + 1, 65_536, 2 * len] {
        file.set_len(other).unwrap();
        assert!(victim.stub(&absolute).is_err(), "{other} bytes");
        file.set_len(len).unwrap();
    }
    assert!(victim.stub(&absolute).unwrap().is_some());
    // Below 64 KiB there are no stubs: the rest is a plain file.
    file.set_len(65_535).unwrap();
    assert_eq!(victim.stub(&absolute).unwrap(), None);
}

/// A stub of another store is a plain file. A stub that names an object of another length, or none, is an error.
#[test]
fn stubs_of_others() {
    let victim = Victim::golden("adam");
    let (path, (own, _)) = victim.files.iter().next().unwrap();
    let absolute = victim.root.join("tree").join(path);
    let store = Store::look(&victim.root).unwrap().id();
    let len = fs::metadata(&absolute).unwrap().len();
    let write = |stub: &Stub| {
        write_stub(&absolute, stub);
    };
    write(&Stub { store: Id([1; 16]), object: Id([2; 16]), logical_len: len });
    assert_eq!(victim.stub(&absolute).unwrap(), None);
    assert_eq!(victim.verify(&[]).0, 0, "it is a plain file");
    // Its object is here, so the store has another id than it says.
    write(&Stub { store: Id([1; 16]), object: *own, logical_len: len });
    assert_eq!(victim.verify(&[]).0, 3);
    let other = victim.files.values().find(|(_, bytes)| bytes.len() as u64 != len).unwrap().0;
    for object in [other, Id([2; 16])] {
        write(&Stub { store, object, logical_len: len });
        let archive = stepfs::archive::Archive::open(Store::open(&victim.root).unwrap()).unwrap();
        let stub = archive.stub(Path::new(&path), &fs::File::open(&absolute).unwrap()).unwrap().unwrap();
        let error = archive.reader(&stub).unwrap_err();
        assert!(error.is_damage(), "{error}");
        drop(archive);
        let (code, report) = victim.verify(&[]);
        assert_eq!(code, 3, "{report}");
        assert_eq!(super::store::paths(&report), [path.clone()].into(), "{report}");
    }
}

/// Every byte of `stepfs.toml`: refused with an explanation, or settings that equal the text. Never another store's id.
#[test]
fn every_byte_of_the_settings() {
    let victim = Victim::golden("wide");
    let path = victim.root.join("stepfs.toml");
    let text = fs::read(&path).unwrap();
    let id = Store::look(&victim.root).unwrap().id();
    let mut refused = 0;
    for at in 0..text.len() {
        let mut changed = text.clone();
        changed[at] ^= 1 << (at % 8);
        fs::write(&path, &changed).unwrap();
        match Store::look(&victim.root) {
            Err(error) => {
                refused += 1;
                assert!(!error.to_string().is_empty());
            }
            Ok(store) if store.id() == id => {}
            // Another valid id: then no file counts as a stub, and the files in the tree show their bytes on the
            // device.
            Ok(_) => assert_eq!(victim.verify(&[]).0, 3, "byte {at}"),
        }
    }
    assert!(refused > 100, "{refused}");
    for length in 0..text.len() {
        fs::write(&path, &text[..length]).unwrap();
        let _ = Store::look(&victim.root);
    }
    fs::write(&path, &text).unwrap();
    victim.check_all("put back", |_| false);
}

/// Every byte of the record of restores: the record begins anew, and `verify` says so.
#[test]
fn every_byte_of_the_restores() {
    let rest = Rest::of(3);
    let store = Store::open(&rest.root()).unwrap();
    let mut restores = Restores::default();
    (0..6).for_each(|at| restores.restored(at % 2, at as i64 * 1000, at as u32, "run/step_1.pt"));
    restores.save(&store).unwrap();
    let path = rest.root().join("restores");
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 1 << (at % 8);
        fs::write(&path, &changed).unwrap();
        assert!(Restores::load(&store).is_err(), "byte {at}");
        fs::write(&path, &whole[..at]).unwrap();
        assert!(Restores::load(&store).is_err(), "length {at}");
    }
    drop(store);
    let victim = Victim::of(&rest.root());
    let (code, report) = victim.verify(&[]);
    assert_eq!(code, 3);
    assert!(report["damaged"][0]["error"].as_str().unwrap().starts_with("restores: "), "{report}");
    // It stops nobody from working, and a repair begins it anew.
    rest.settle();
    assert_eq!(victim.verify(&["--repair"]).0, 0);
    assert!(victim.root.join("damaged/restores").exists());
}

/// Every byte of a note of a directory's times: void, and the store opens.
#[test]
fn every_byte_of_a_note() {
    let rest = Rest::of(3);
    let id = rest.id(&step(1));
    let times = Times { accessed: (1_000, 5), modified: (2_000, 6) };
    let note = StubNote { path: step(1).into(), object: id, times };
    let bytes = note.encode();
    let directory = rest.root().join("tree/run");
    let before = Times::of(&fs::metadata(&directory).unwrap());
    let open = |bytes: &[u8]| {
        fs::write(rest.root().join("tmp/times-x"), bytes).unwrap();
        drop(Store::open(&rest.root()).unwrap());
        assert!(!rest.root().join("tmp/times-x").exists());
        Times::of(&fs::metadata(&directory).unwrap()).modified
    };
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        assert_eq!(open(&changed), before.modified, "byte {at}");
        assert_eq!(open(&bytes[..at]), before.modified, "length {at}");
    }
    assert_eq!(open(&[&bytes[..], b"x"].concat()), before.modified);
    // The unchanged note is applied.
    assert_eq!(open(&bytes), times.modified);
}
