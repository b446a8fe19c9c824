//! Histories against a mirror in memory: killed after every request, with faults, and read back.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::pace::Pace;
use super::place::{Error, Place, Result};
use super::settings::{Progress, Settings};
use super::source::{Ahead, Shape, Source, Told};
use super::writer::Writer;
use super::{Missing, Reader, claim, manifest, pull};
use crate::store::object::{Header, Index, ObjectWriter};
use crate::store::{Id, Objects, Store, Stub, files_below};
use codec::hash::{Xxh3Of128, sha256, xxh3_64};
use memory::Memory;

mod cost;
mod faults;
mod instants;
mod memory;
mod pulls;
mod states;

/// A store without an archive: what changed, and what each file is.
struct Machine {
    _dir: tempfile::TempDir,
    store: Store,
    objects: Arc<Objects>,
    shapes: Mutex<BTreeMap<PathBuf, Shape>>,
    touched: Mutex<BTreeSet<PathBuf>>,
    changes: AtomicU64,
    /// Programs do this right after each answer about changed names.
    meanwhile: Mutex<Option<Meanwhile>>,
}

type Meanwhile = Box<dyn FnMut(&Machine) + Send>;

impl Source for Machine {
    fn store(&self) -> &Store {
        &self.store
    }

    fn objects(&self) -> &Arc<Objects> {
        &self.objects
    }

    fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    fn changed(&self, all: bool, also: Vec<PathBuf>) -> Vec<Told> {
        let mut touched = std::mem::take(&mut *self.touched.lock().unwrap());
        touched.extend(also);
        if all {
            touched.extend(files_below(&self.store.tree(), Path::new("")).unwrap());
        }
        let is_file = |path: &Path| self.store.tree().join(path).symlink_metadata().is_ok_and(|of| of.is_file());
        let shape = |path: &Path| self.shapes.lock().unwrap().get(path).copied().unwrap_or(Shape::Whole);
        let changed =
            touched.into_iter().map(|path| (path.clone(), Ok(is_file(&path).then(|| shape(&path))))).collect();
        self.meanwhile.lock().unwrap().iter_mut().for_each(|act| act(self));
        changed
    }

    fn ahead(&self, _: &Path) -> io::Result<Ahead> {
        Ok(Ahead::Whole)
    }
}

impl Machine {
    fn new() -> Machine {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        let objects = Arc::new(Objects::load(&store.objects(), |id, error| panic!("{id}: {error}")).unwrap());
        let (shapes, touched, meanwhile) = Default::default();
        Machine { _dir: dir, store, objects, shapes, touched, changes: AtomicU64::new(1), meanwhile }
    }

    /// Programs do this once, right after the next answer.
    fn once_meanwhile(&self, act: impl FnOnce(&Machine) + Send + 'static) {
        let mut act = Some(act);
        let act = move |machine: &Machine| act.take().into_iter().for_each(|act| act(machine));
        *self.meanwhile.lock().unwrap() = Some(Box::new(act));
    }

    fn at(&self, path: &str) -> PathBuf {
        self.store.tree().join(path)
    }

    fn touch(&self, path: &str) {
        let below = files_below(&self.store.tree(), Path::new(path)).unwrap_or_default();
        self.touched.lock().unwrap().extend(below.into_iter().chain([path.into()]));
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), bytes).unwrap();
        self.touch(path);
    }

    fn remove(&self, path: &str) {
        let below = files_below(&self.store.tree(), Path::new(path)).unwrap();
        below.iter().for_each(|path| self.touch(path.to_str().unwrap()));
        match self.at(path).is_dir() {
            true => fs::remove_dir_all(self.at(path)).unwrap(),
            false => fs::remove_file(self.at(path)).unwrap(),
        }
        self.touch(path);
    }

    fn rename(&self, from: &str, to: &str) {
        let below = files_below(&self.store.tree(), Path::new(from)).unwrap();
        fs::rename(self.at(from), self.at(to)).unwrap();
        let mut shapes = self.shapes.lock().unwrap();
        for (path, shape) in std::mem::take(&mut *shapes) {
            let moved = path.strip_prefix(from).map(|rest| Path::new(to).join(rest));
            let moved = moved.map(|path| path.components().collect::<PathBuf>());
            shapes.insert(moved.unwrap_or(path), shape);
        }
        drop(shapes);
        below.iter().for_each(|path| self.touch(path.to_str().unwrap()));
        [from, to].into_iter().for_each(|path| self.touch(path));
    }

    /// Adds a released file whose object has a parent or not.
    fn release(&self, path: &str, bytes: &[u8], parent: Option<Id>) -> Id {
        let mut writer = ObjectWriter::create(&self.store.tmp()).unwrap();
        encode(&mut writer, bytes, "");
        let mut decoded = Xxh3Of128::default();
        decoded.update(bytes);
        let header = Header {
            id: writer.id(),
            parent,
            lossy: false,
            ordered: false,
            depth: u32::from(parent.is_some()),
            position: 0,
            logical_len: bytes.len() as u64,
            decoded_hash: decoded.digest(),
            decoded_sample: 0,
            source_sample: 0,
            original: sha256(bytes),
            modified_ns: 0,
            lineage: 0,
            signature: 0,
        };
        let id = header.id;
        self.objects.add(writer, header, 4096).unwrap();
        let stub = Stub { store: self.store.id(), object: id, logical_len: bytes.len() as u64 };
        self.write(path, &stub.encode());
        fs::File::options().write(true).open(self.at(path)).unwrap().set_len(bytes.len() as u64).unwrap();
        self.shapes.lock().unwrap().insert(path.into(), Shape::Object(id));
        id
    }

    /// Puts another encoding of the same bytes in an object's place.
    fn reencode(&self, id: Id, bytes: &[u8]) {
        let mut writer = ObjectWriter::rewrite(self.store.io(), &self.store.tmp(), id).unwrap();
        encode(&mut writer, bytes, "again");
        self.objects.replace(writer, self.objects.get(id).unwrap().0, 4096).unwrap();
    }

    /// A daemon starts.
    fn writer(&self, place: &Arc<dyn Place>, keep: Duration) -> Result<Writer> {
        claim(place.as_ref(), self.store.id())?;
        self.touched.lock().unwrap().clear();
        Writer::open(place, self.store.id(), &Settings { keep, ..settings() })
    }

    /// What a daemon does from its start on, until nothing is left or the mirror fails.
    fn session(&self, place: &Arc<Memory>, collect: bool) -> Result<()> {
        let mut writer =
            self.writer(&(Arc::clone(place) as _), if collect { Duration::ZERO } else { settings().keep })?;
        match self.rounds(&mut writer)? {
            true if collect => writer.collect(),
            true => Ok(()),
            false => Err(Error::Wrong(format!("never done: {:?}", failed(&writer)))),
        }
    }

    /// Some rounds, until nothing is left.
    fn rounds(&self, writer: &mut Writer) -> Result<bool> {
        for _ in 0..5 {
            if step(writer, self, true)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Writes the tiles and the index of an object.
fn encode(writer: &mut ObjectWriter, bytes: &[u8], origin: &str) {
    let tiles = bytes.chunks(codec::TILE_BYTES);
    let skeleton = tiles.map(|tile| writer.put(&zstd::bulk::compress(tile, 1).unwrap(), xxh3_64(tile)).unwrap());
    let skeleton = skeleton.collect();
    writer.close(&Index { skeleton, origin: origin.into(), ..Index::default() }).unwrap();
}

/// The files that fail, each with the reason.
fn failed(writer: &Writer) -> Vec<String> {
    let mut progress = Progress::default();
    writer.tell(&mut progress);
    progress.failed
}

/// One round of a daemon. True if the mirror has everything that it can have.
fn step(writer: &mut Writer, machine: &Machine, asked: bool) -> Result<bool> {
    let change = machine.changes();
    writer.look(machine, change, asked);
    writer.round(machine, &Pace::new(None), asked)?;
    Ok(writer.done().0 == change)
}

fn settings() -> Settings {
    Settings { url: "memory".into(), keep: Duration::from_secs(7 * 86_400), bandwidth: None }
}

/// Each name of a tree, with a hash of a file's bytes or a link's target, or of nothing for a directory.
type Names = BTreeMap<String, u64>;

/// What a fresh store has after a pull, decoded.
fn pulled(place: &Arc<Memory>, at_ms: Option<u64>) -> Result<(Names, Missing)> {
    let machine = Machine::new();
    let place: Arc<dyn Place> = Arc::clone(place) as _;
    let missing = pull(&Reader::open(&place, at_ms, Path::new(""))?, &machine.store, Path::new(""), &|_| true)?;
    Ok((names(&machine.store), missing))
}

fn names(store: &Store) -> Names {
    let objects = Arc::new(Objects::load(&store.objects(), |id, error| panic!("{id}: {error}")).unwrap());
    let mut names = Names::new();
    let mut rest = vec![PathBuf::new()];
    while let Some(directory) = rest.pop() {
        for entry in fs::read_dir(store.tree().join(&directory)).unwrap() {
            let path = directory.join(entry.unwrap().file_name());
            let at = store.tree().join(&path);
            let name = path.display().to_string();
            if at.is_symlink() {
                names.insert(name, xxh3_64(fs::read_link(at).unwrap().as_os_str().as_encoded_bytes()));
            } else if at.is_dir() {
                names.insert(name, xxh3_64(b""));
                rest.push(path);
            } else {
                names.insert(name, xxh3_64(&bytes_of(store, &objects, &at)));
            }
        }
    }
    names
}

/// The bytes of a plain file or a stub.
fn bytes_of(store: &Store, objects: &Arc<Objects>, at: &Path) -> Vec<u8> {
    let file = fs::File::open(at).unwrap();
    let Some(stub) = Stub::read(&file, store.id()).unwrap() else { return fs::read(at).unwrap() };
    let object = objects.open(stub.object).unwrap();
    let mut next = object.header().parent;
    while let Some(id) = next {
        next = objects.open(id).expect("all ancestors are here").header().parent;
    }
    let mut bytes = Vec::new();
    let mut payload = Vec::new();
    for tile in &object.index().skeleton {
        object.payload(tile, &mut payload).unwrap();
        bytes.extend(zstd::bulk::decompress(&payload, codec::TILE_BYTES).unwrap());
    }
    bytes
}

/// Incompressible bytes, so that lengths say something.
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 56) as u8
    };
    (0..len).map(next).collect()
}

fn run() -> Machine {
    let machine = Machine::new();
    machine.write("run/config.json", b"{}");
    machine.write("run/newest.pt", &noise(200_000, 1));
    let parent = machine.release("run/step_1.pt", &noise(100_000, 2), None);
    machine.release("run/step_2.pt", &noise(100_000, 3), Some(parent));
    std::os::unix::fs::symlink("run", machine.at("latest")).unwrap();
    fs::create_dir(machine.at("empty")).unwrap();
    machine
}

#[test]
fn a_writer_that_is_killed_after_any_request_leaves_states_that_were_true() {
    let machine = run();
    let whole = names(&machine.store);
    for answer_lost in [false, true] {
        for at in 0.. {
            let place = Arc::new(Memory::default());
            place.fail_after(Some(at), answer_lost);
            let killed = machine.session(&place, false).is_err();
            place.heal();
            // Whatever is named is whole.
            if let Ok((partly, missing)) = pulled(&place, None) {
                assert!(missing.names.is_empty() && missing.unread.is_empty(), "{missing:?}");
                assert!(partly.iter().all(|(name, bytes)| whole.get(name) == Some(bytes)), "killed at request {at}");
            }
            let before = place.counts();
            machine.session(&place, true).unwrap();
            assert_eq!(pulled(&place, None).unwrap(), (whole.clone(), Missing { found: 5, ..Missing::default() }));
            assert!(place.counts().1 - before.1 < 500_000, "what was there went again, killed at {at}");
            // Nothing but what is needed is left: four objects and files, and two directories. The top one is in the manifest.
            let blobs = place.names().keys().filter(|name| name.starts_with("blobs/")).count();
            assert_eq!(blobs, 6, "killed at request {at}: {:?}", place.names().keys());
            if !killed {
                assert!(at > 10, "{at} requests");
                break;
            }
        }
    }
}

#[test]
fn a_change_that_is_killed_after_any_request_is_either_there_or_not() {
    for answer_lost in [false, true] {
        for at in 0.. {
            let (machine, place) = (run(), Arc::new(Memory::default()));
            machine.session(&place, false).unwrap();
            let before = names(&machine.store);
            machine.remove("run/step_1.pt");
            machine.rename("run/newest.pt", "run/kept.pt");
            machine.write("run/config.json", b"{\"new\": 1}");
            machine.rename("run", "moved");
            let after = names(&machine.store);
            place.fail_after(Some(at), answer_lost);
            let killed = machine.session(&place, true).is_err();
            place.heal();
            let now = pulled(&place, None).unwrap().0;
            assert!(now == before || now == after, "killed at {at}: {:?}", now.keys());
            let put = place.counts().1;
            machine.session(&place, true).unwrap();
            assert_eq!(pulled(&place, None).unwrap().0, after, "request {at}");
            assert!(place.counts().1 - put < 20_000, "the renamed file was sent again");
            // The base of step 2 stays.
            assert_eq!(place.names().keys().filter(|name| name.starts_with("blobs/")).count(), 6);
            if !killed {
                break;
            }
        }
    }
}
