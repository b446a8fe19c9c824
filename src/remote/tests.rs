//! Histories against a remote in memory: killed after every request, of the pushing and of the collecting side.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::fetch::Fetcher;
use super::journal::{Content, Segment};
use super::local::{Ahead, Local, Shape};
use super::memory::Memory;
use super::place::{Error, Place, Result};
use super::push::Pusher;
use super::reader::{Reader, lock};
use super::shared::Shared;
use super::show::take_all;
use super::writer::Writer;
use super::{Settings, fetch_whole, tree};
use crate::store::object::{Header, Index, ObjectWriter};
use crate::store::{Hold, Id, Newest, Objects, Store, Stub, Wait};
use codec::hash::xxh3_64;
use formats::ReadAt;

mod again;
mod between;
mod faults;
mod names;
mod pieces;
mod scale;

/// A file of this name cannot be read.
const UNREADABLE: &str = "unreadable.pt";

/// A store without an archive: its tree says what each file is.
struct Machine {
    _dir: tempfile::TempDir,
    store: Store,
    objects: Arc<Objects>,
    shapes: Mutex<BTreeMap<PathBuf, Shape>>,
    changes: AtomicU64,
    /// The files that were there at each removal.
    removed_beside: Mutex<Vec<Vec<String>>>,
    /// Names move all the time.
    is_moving: AtomicBool,
}

impl Local for Machine {
    fn store(&self) -> &Store {
        &self.store
    }

    fn objects(&self) -> &Arc<Objects> {
        &self.objects
    }

    fn shape(&self, path: &Path) -> Shape {
        self.shapes.lock().unwrap().get(path).copied().unwrap_or(Shape::Whole)
    }

    fn ahead(&self, path: &Path) -> io::Result<Ahead> {
        match path.ends_with(UNREADABLE) {
            true => Err(io::Error::from_raw_os_error(libc::EIO)),
            false => Ok(Ahead::Whole),
        }
    }

    fn let_go(&self, _: Hold) {}

    fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    fn moved_since(&self, _: u64) -> Option<Vec<PathBuf>> {
        (!self.is_moving.load(Ordering::Relaxed)).then(Vec::new)
    }

    fn was_looked_at(&self) -> bool {
        true
    }

    fn appear(&self, path: &Path, object: Option<Id>, make: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<bool> {
        let made = make()?;
        if made {
            self.shapes.lock().unwrap().insert(path.into(), object.map_or(Shape::Whole, Shape::Object));
            object.into_iter().for_each(|id| self.objects.name(id));
        }
        Ok(made)
    }

    fn replace(
        &self,
        path: &Path,
        _: &Metadata,
        object: Option<Id>,
        commit: &mut dyn FnMut(&Path) -> io::Result<bool>,
    ) -> io::Result<bool> {
        self.appear(path, object, &mut || commit(&self.store.tree().join(path)))
    }

    fn remove(&self, path: &Path, _: &Metadata, still: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<bool> {
        if !still()? {
            return Ok(false);
        }
        self.shapes.lock().unwrap().remove(path);
        self.removed_beside.lock().unwrap().push(self.files());
        fs::remove_file(self.store.tree().join(path)).map(|()| true)
    }

    fn remove_directory(&self, path: &Path) -> io::Result<bool> {
        match fs::remove_dir(self.store.tree().join(path)) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(false),
            removed => removed.map(|()| true),
        }
    }
}

impl Machine {
    fn new() -> Machine {
        Machine::in_dir(tempfile::tempdir().unwrap())
    }

    /// The machine with the store in this directory.
    fn in_dir(dir: tempfile::TempDir) -> Machine {
        let store = Store::open(&dir.path().join("store")).unwrap();
        let objects = Arc::new(Objects::load(&store.objects(), |id, error| panic!("{id}: {error}")).unwrap());
        Machine {
            _dir: dir,
            store,
            objects,
            shapes: Mutex::default(),
            changes: AtomicU64::new(0),
            removed_beside: Mutex::default(),
            is_moving: AtomicBool::new(false),
        }
    }

    fn write(&self, path: &str, bytes: &[u8]) {
        let path = self.store.tree().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
        self.changes.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds a released file whose object has a parent or not.
    fn release(&self, path: &str, bytes: &[u8], parent: Option<Id>) -> Id {
        let mut writer = ObjectWriter::create(&self.store.tmp()).unwrap();
        let skeleton = vec![writer.put(&zstd::bulk::compress(bytes, 1).unwrap(), xxh3_64(bytes)).unwrap()];
        writer.close(&Index { skeleton, ..Index::default() }).unwrap();
        let header = Header {
            id: writer.id(),
            parent,
            lossy: false,
            ordered: false,
            depth: u32::from(parent.is_some()),
            position: 0,
            logical_len: bytes.len() as u64,
            decoded_hash: 0,
            decoded_sample: 0,
            source_sample: 0,
            original: [0; 32],
            modified_ns: 0,
            lineage: 0,
            signature: 0,
        };
        let id = header.id;
        self.objects.add(writer, header, 4096).unwrap();
        let stub = Stub { store: self.store.id(), object: id, logical_len: bytes.len() as u64 };
        self.write(path, &stub.encode());
        fs::File::options()
            .write(true)
            .open(self.store.tree().join(path))
            .unwrap()
            .set_len(bytes.len() as u64)
            .unwrap();
        self.shapes.lock().unwrap().insert(path.into(), Shape::Object(id));
        id
    }

    /// What a daemon does from its start on, until nothing is left or the remote fails.
    fn session(&self, place: &Arc<Memory>, node: &str, collect: bool) -> Result<()> {
        let shared = Shared::new(settings(node), tree::load(&self.store, "memory"));
        let session = || -> Result<()> {
            let place: Arc<dyn Place> = Arc::clone(place) as _;
            let known = shared.shown().values().any(|stamp| stamp.node == node);
            let mut writer = Writer::claim(Arc::clone(&place), Arc::clone(&shared.view), node, self.store.id(), known)?;
            let mut pusher = Pusher::default();
            for _ in 0..3 {
                pusher.round(self, &mut writer, &shared)?;
                Reader::look(place.as_ref(), &shared.view)?;
                take_all(self, &shared)?;
            }
            if collect {
                writer.tidy(Duration::ZERO)?;
            }
            Ok(())
        };
        let done = session();
        tree::save(&self.store, "memory", node, &shared.shown()).unwrap();
        done
    }

    fn files(&self) -> Vec<String> {
        let walked = super::local::walk(self).unwrap();
        walked.files.keys().map(|path| path.display().to_string()).collect()
    }
}

fn settings(node: &str) -> Settings {
    Settings {
        url: "memory".into(),
        node: node.into(),
        newest: Newest::Exact,
        wait: Wait::Nothing,
        bandwidth: None,
        refresh: Duration::from_secs(1),
        grace: Duration::ZERO,
    }
}

/// Every name that the remote shows has all its objects, whole. Returns the names.
fn check(place: &Memory) -> Vec<String> {
    let view = Mutex::default();
    Reader::refresh(place, &view).unwrap();
    let view = lock(&view);
    for (path, _, shown) in view.files() {
        if let Content::Object { owner, id } = &shown.content {
            let chain = view.chain(owner, *id).unwrap_or_else(|| panic!("{} has no object", path.display()));
            for encoding in chain {
                fetch_whole(place, owner, encoding, &mut |_, _| Ok(())).unwrap();
            }
        }
    }
    view.files().map(|(path, ..)| path.display().to_string()).collect()
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
    std::os::unix::fs::symlink("run", machine.store.tree().join("latest")).unwrap();
    machine
}

const NAMES: [&str; 5] = ["latest", "run/config.json", "run/newest.pt", "run/step_1.pt", "run/step_2.pt"];

#[test]
fn a_pusher_that_is_killed_after_any_request_leaves_no_name_without_its_object() {
    let machine = run();
    for answer_lost in [false, true] {
        for at in 0.. {
            let place = Arc::new(Memory::default());
            let _ = fs::remove_file(machine.store.root().join("remote.shown"));
            place.fail_after(Some(at), answer_lost);
            let killed = machine.session(&place, "a", false).is_err();
            place.fail_after(None, false);
            let before = check(&place);
            let there = place.names().keys().filter(|name| name.contains("step")).count();
            machine.session(&place, "a", true).unwrap();
            assert_eq!(check(&place), NAMES, "killed at request {at}, when {before:?} and {there} were there");
            // Nothing but what is named is left.
            let objects = place.names().keys().filter(|name| name.contains("/objects/")).count();
            assert_eq!(objects, 3, "{:?}", place.names().keys());
            if !killed {
                assert!(at > 8, "{at} requests");
                break;
            }
        }
    }
}

#[test]
fn a_collector_that_is_killed_after_any_request_leaves_no_name_without_its_object() {
    for answer_lost in [false, true] {
        for at in 0.. {
            let (machine, place) = (run(), Arc::new(Memory::default()));
            machine.session(&place, "a", false).unwrap();
            fs::remove_file(machine.store.tree().join("run/step_1.pt")).unwrap();
            fs::rename(machine.store.tree().join("run/newest.pt"), machine.store.tree().join("run/kept.pt")).unwrap();
            let begun = place.requests();
            place.fail_after(Some(at), answer_lost);
            let killed = machine.session(&place, "a", true).is_err();
            place.fail_after(None, false);
            check(&place);
            machine.session(&place, "a", true).unwrap();
            assert_eq!(check(&place), ["latest", "run/config.json", "run/kept.pt", "run/step_2.pt"], "request {at}");
            // The base of step 2 stays, and the renamed file was not sent again.
            assert_eq!(place.names().keys().filter(|name| name.contains("/objects/")).count(), 3);
            if !killed {
                assert!(place.requests() > begun + 10);
                break;
            }
        }
    }
}
