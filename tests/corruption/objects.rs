//! Objects of every coding, damaged in every way.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Mutex;

use stepfs::store::Id;
use stepfs::store::object::{FOOTER_BYTES, HEADER_BYTES, Object};

use super::store::{Victim, each, is_full, paths};

const STORES: [&str; 5] = ["adam", "published", "wide", "optimizers", "opaque"];
/// The changes of a byte: one bit, all bits, zero.
const CHANGES: [fn(u8) -> u8; 4] = [|byte| byte ^ 1, |byte| byte ^ 0x80, |byte| !byte, |_| 0];

/// A place in an object, and the names that the error of a read must give.
struct Place {
    object: Id,
    at: u64,
    /// The tensor whose payload it is in; none for header, index, footer and skeleton.
    tensor: Option<String>,
    /// A file whose read needs the byte.
    file: PathBuf,
}

/// Bytes of all objects that some read needs: all, or a sample that contains the beginning of every structure.
fn places(victim: &Victim, stride: u64) -> Vec<Place> {
    let mut places = Vec::new();
    for (path, (id, _)) in &victim.files {
        let object: Object = victim.object(*id);
        let len = fs::metadata(victim.path(*id)).unwrap().len();
        let mut tensors: Vec<(u64, u64, String)> = Vec::new();
        for tensor in &object.index().tensors {
            let tiles = tensor.tiles.iter().chain(&tensor.factors);
            tensors.extend(tiles.map(|tile| (tile.offset, tile.offset + u64::from(tile.stored), tensor.path.clone())));
        }
        let of =
            |at: u64| tensors.iter().find(|(from, to, _)| (*from..*to).contains(&at)).map(|(.., path)| path.clone());
        let first: BTreeSet<u64> = tensors.iter().map(|(from, ..)| *from).collect();
        let wanted = |at: &u64| {
            let edge = *at < HEADER_BYTES as u64 || *at >= len - FOOTER_BYTES as u64;
            // The strides hit different places in each object.
            let spread = (at + u64::from(id.0[0]) * 7).is_multiple_of(stride);
            spread || first.contains(at) || edge && (at + u64::from(id.0[1])).is_multiple_of(stride.min(7))
        };
        for at in (0..len).filter(wanted) {
            places.push(Place { object: *id, at, tensor: of(at), file: path.clone() });
        }
    }
    places
}

/// No changed byte of any object gives other bytes. The error names the object, and the tensor if there is one. In a
/// sample, all other files are served. Every byte of a golden object is noticed.
#[test]
fn every_byte_is_noticed_where_it_is_needed() {
    let harmless = Mutex::new(Vec::new());
    for store in STORES {
        let victim = Victim::golden(store);
        let stride = if is_full() { 1 } else { 211 };
        let places = places(&victim, stride);
        assert!(places.len() > 250, "{store}: {}", places.len());
        let changes = if is_full() { &CHANGES[..] } else { &CHANGES[..1] };
        let chains = victim.chains();
        each(
            &places,
            || Victim::golden(store),
            |victim, place| {
                let path = victim.path(place.object);
                let file = fs::File::options().read(true).write(true).open(&path).unwrap();
                let mut byte = [0];
                file.read_exact_at(&mut byte, place.at).unwrap();
                // In a sample each place gets another of the changes.
                let turn = (place.at % 4) as usize;
                let changes = if changes.len() > 1 { changes } else { &CHANGES[turn..turn + 1] };
                for change in changes.iter().filter(|change| change(byte[0]) != byte[0]) {
                    let what = format!("{store}, object {}, byte {}", place.object, place.at);
                    file.write_all_at(&[change(byte[0])], place.at).unwrap();
                    let objects = victim.objects();
                    match victim.check(&objects, &place.file, &what) {
                        None => harmless.lock().unwrap().push(what.clone()),
                        Some(error) => {
                            assert_eq!(error.object, place.object, "{what}: {error}");
                            if let Some(tensor) = &place.tensor {
                                assert_eq!(error.tensor.as_ref(), Some(tensor), "{what}: {error}");
                            }
                        }
                    }
                    if place.at % 97 == 0 {
                        let needs = |path: &std::path::Path| chains[&victim.files[path].0].contains(&place.object);
                        victim.check_all(&what, needs);
                    }
                }
                file.write_all_at(&byte, place.at).unwrap();
                if place.at % 389 == 0 {
                    assert!(victim.check(&victim.objects(), &place.file, "put back").is_none());
                }
            },
        );
    }
    assert_eq!(harmless.into_inner().unwrap(), [""; 0]);
}

/// Every shorter file, and longer ones.
#[test]
fn no_length_but_its_own_will_do() {
    for store in STORES {
        let victim = Victim::golden(store);
        let mut files: Vec<_> = victim.files.iter().map(|(path, (id, _))| (path.clone(), *id)).collect();
        files.sort_by_key(|(_, id)| fs::metadata(victim.path(*id)).unwrap().len());
        files.truncate(if is_full() { usize::MAX } else { 3 });
        each(
            &files,
            || Victim::golden(store),
            |victim, (file, id)| {
                let path = victim.path(*id);
                let whole = fs::read(&path).unwrap();
                let step = if is_full() { 1 } else { 1 + whole.len() / 150 };
                for length in (0..whole.len()).step_by(step).chain([whole.len() - 1]) {
                    fs::write(&path, &whole[..length]).unwrap();
                    let error = victim.check(&victim.objects(), file, "shorter");
                    assert_eq!(error.map(|error| error.object), Some(*id), "{store}, {length} bytes of {id}");
                }
                for more in [&b"x"[..], &[0; 64], &[0; 5000], &whole] {
                    fs::write(&path, [&whole, more].concat()).unwrap();
                    let error = victim.check(&victim.objects(), file, "longer");
                    // An object twice in a row is the object with unneeded bytes in between: its end gives the place of
                    // its index.
                    assert_eq!(error.map(|error| error.object), Some(*id), "{store}, {} more", more.len());
                }
                fs::write(&path, &whole).unwrap();
            },
        );
    }
}

/// Pages of zeros, as a device returns them that lost a write.
#[test]
fn pages_of_zeros_are_noticed() {
    let victim = Victim::golden("adam");
    let chains = victim.chains();
    for (file, (id, _)) in &victim.files {
        let path = victim.path(*id);
        let whole = fs::read(&path).unwrap();
        for page in 0..whole.len().div_ceil(4096) {
            let mut zeroed = whole.clone();
            let end = whole.len().min((page + 1) * 4096);
            zeroed[page * 4096..end].fill(0);
            fs::write(&path, &zeroed).unwrap();
            let failed = victim.check_all("zeros", |path| chains[&victim.files[path].0].contains(id));
            assert!(failed.contains(file));
        }
        fs::write(&path, &whole).unwrap();
    }
    victim.check_all("put back", |_| false);
}

/// Objects under the names of others; a directory, a pipe or a link in an object's place: never waited for, never
/// followed.
#[test]
fn what_is_not_the_object_is_refused() {
    let victim = Victim::golden("adam");
    let chains = victim.chains();
    let ids: Vec<Id> = victim.files.values().map(|(id, _)| *id).collect();
    let one = ids[0];
    let path = victim.path(one);
    let whole = fs::read(&path).unwrap();
    let needs = |file: &std::path::Path| chains[&victim.files[file].0].contains(&one);
    let dependents: BTreeSet<PathBuf> = victim.files.keys().filter(|file| needs(file)).cloned().collect();
    let check = |what: &str| {
        assert_eq!(victim.check_all(what, needs), dependents, "{what}");
        let (code, report) = victim.verify(&[]);
        assert_eq!((code, paths(&report)), (3, dependents.clone()), "{what}: {report}");
        for damaged in report["damaged"].as_array().unwrap() {
            assert_eq!(damaged["object"].as_str(), Some(one.to_string().as_str()), "{what}: {report}");
        }
    };
    for other in &ids[1..4] {
        fs::write(&path, fs::read(victim.path(*other)).unwrap()).unwrap();
        check("another object");
        // The header of one, the body of another.
        fs::write(&path, [&whole[..HEADER_BYTES], &fs::read(victim.path(*other)).unwrap()[HEADER_BYTES..]].concat())
            .unwrap();
        check("another's body");
    }
    fs::remove_file(&path).unwrap();
    check("nothing");
    fs::create_dir(&path).unwrap();
    check("a directory");
    fs::remove_dir(&path).unwrap();
    std::os::unix::fs::symlink(victim.path(ids[1]), &path).unwrap();
    check("a link");
    fs::remove_file(&path).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
    check("a pipe");
    fs::remove_file(&path).unwrap();
    fs::write(&path, &whole).unwrap();
    victim.check_all("put back", |_| false);
    // A whole shard is gone, or is a file.
    let shard = path.parent().unwrap();
    fs::remove_dir_all(shard).unwrap();
    check("no shard");
    fs::write(shard, b"x").unwrap();
    check("a file in the place of a shard");
    // All of them, as in a store that was copied without its objects.
    fs::remove_dir_all(victim.root.join("objects")).unwrap();
    let (code, report) = victim.verify(&[]);
    assert_eq!((code, paths(&report)), (3, victim.files.keys().cloned().collect()), "{report}");
}

/// An object from before it was re-parented is another encoding of the same state. It is as good while its old parent
/// is there; otherwise the error names the parent.
#[test]
fn an_older_encoding_is_as_good_or_an_error() {
    let before = super::series::Rest::of(6);
    let other = before.copied();
    fs::remove_file(other.path(&super::series::step(2))).unwrap();
    other.settle();
    let victim = Victim::of(&other.root());
    let mut older = 0;
    for (file, (id, _)) in &victim.files {
        let old =
            before.root().join("objects").join(victim.path(*id).strip_prefix(victim.root.join("objects")).unwrap());
        let (old, new) = (fs::read(old).unwrap(), fs::read(victim.path(*id)).unwrap());
        if old == new {
            continue;
        }
        older += 1;
        fs::write(victim.path(*id), &old).unwrap();
        let parent = stepfs::store::object::Header::decode(old[..HEADER_BYTES].try_into().unwrap()).unwrap().parent;
        let error = victim.check(&victim.objects(), file, "older");
        match parent.filter(|parent| !victim.path(*parent).exists()) {
            Some(gone) => assert_eq!(error.map(|error| error.object), Some(gone)),
            None => assert!(error.is_none()),
        }
        fs::write(victim.path(*id), &new).unwrap();
    }
    assert!(older > 0);
}

/// `verify` names exactly the unreadable files, the damaged object, and nothing else.
#[test]
fn verify_names_what_is_damaged_and_nothing_else() {
    for store in STORES {
        let victim = Victim::golden(store);
        assert_eq!(victim.verify(&[]).0, 0);
        let all = places(&victim, if is_full() { 997 } else { 20_011 });
        for place in all.iter().step_by(if is_full() { 3 } else { 60 }) {
            let path = victim.path(place.object);
            let whole = fs::read(&path).unwrap();
            let mut changed = whole.clone();
            changed[place.at as usize] ^= 0x24;
            fs::write(&path, changed).unwrap();
            let failed = victim.check_all("verify", |_| true);
            let (code, report) = victim.verify(&[]);
            assert_eq!((code, paths(&report)), (3, failed), "{store}, byte {} of {}: {report}", place.at, place.object);
            for damaged in report["damaged"].as_array().unwrap() {
                assert_eq!(damaged["object"].as_str(), Some(place.object.to_string().as_str()), "{report}");
            }
            fs::write(&path, whole).unwrap();
        }
    }
}
