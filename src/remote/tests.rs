//! Histories against a remote in memory: killed after every request, of the pushing and of the collecting side.

use std::collections::BTreeMap;
use std::fs::{self, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
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
use crate::container::ReadAt;
use crate::hash::xxh3_64;
use crate::store::object::{Header, Index, ObjectWriter};
use crate::store::{Hold, Id, Newest, Objects, Store, Stub, Wait};

mod between;
mod faults;
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
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        let objects = Arc::new(Objects::load(&store.objects(), |id, error| panic!("{id}: {error}")).unwrap());
        Machine {
            _dir: dir,
            store,
            objects,
            shapes: Mutex::default(),
            changes: AtomicU64::new(0),
            removed_beside: Mutex::default(),
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

#[test]
fn a_fresh_store_gets_every_file() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, "a", false).unwrap();
    let other = Machine::new();
    other.session(&place, "b", false).unwrap();
    assert_eq!(other.files(), NAMES);
    assert_eq!(fs::read(other.store.tree().join("run/config.json")).unwrap(), b"{}");
    assert_eq!(fs::read_link(other.store.tree().join("latest")).unwrap(), Path::new("run"));
    let file = fs::File::open(other.store.tree().join("run/step_2.pt")).unwrap();
    let stub = Stub::read(&file, other.store.id()).unwrap().unwrap();
    let view = Arc::new(Mutex::default());
    Reader::refresh(place.as_ref(), &view).unwrap();
    let fetcher = Fetcher::new(Arc::clone(&place) as _, Arc::clone(&view), other.store.tmp());
    // On the remote only: nothing is lost, and nothing is frozen.
    assert!(other.objects.frozen().is_some());
    other.objects.look_elsewhere(Arc::new(fetcher));
    assert!(other.objects.frozen().is_none() && other.objects.is_elsewhere(stub.object));
    other.objects.bring(stub.object).unwrap();
    let (mine, theirs) = (other.objects.open(stub.object).unwrap(), machine.objects.open(stub.object).unwrap());
    let mut bytes = [vec![0; mine.file().size() as usize], vec![0; theirs.file().size() as usize]];
    mine.file().read_exact_at(&mut bytes[0], 0).unwrap();
    theirs.file().read_exact_at(&mut bytes[1], 0).unwrap();
    assert_eq!(bytes[0], bytes[1]);
    assert_eq!(other.objects.chain_len(stub.object), 2);
    // It pushes nothing: all is there under another node's name.
    assert!(!place.names().keys().any(|name| name.starts_with("nodes/b/objects/")));
}

#[test]
fn names_travel_in_both_directions() {
    let (a, b, place) = (run(), Machine::new(), Arc::new(Memory::default()));
    a.session(&place, "a", false).unwrap();
    b.session(&place, "b", false).unwrap();
    // b removes a name of a's, renames one, and writes over one.
    fs::remove_file(b.store.tree().join("run/step_1.pt")).unwrap();
    fs::rename(b.store.tree().join("run/step_2.pt"), b.store.tree().join("run/two.pt")).unwrap();
    let two = b.shapes.lock().unwrap().remove(Path::new("run/step_2.pt")).unwrap();
    b.shapes.lock().unwrap().insert("run/two.pt".into(), two);
    b.write("run/config.json", b"{\"b\": 1}");
    b.session(&place, "b", true).unwrap();
    assert_eq!(check(&place), ["latest", "run/config.json", "run/newest.pt", "run/two.pt"]);
    a.session(&place, "a", true).unwrap();
    assert_eq!(a.files(), ["latest", "run/config.json", "run/newest.pt", "run/two.pt"]);
    assert_eq!(fs::read(a.store.tree().join("run/config.json")).unwrap(), b"{\"b\": 1}");
    // a's object is still needed, by b's name; that of the removed name is its base.
    check(&place);
    let objects: Vec<_> = place.names().into_keys().filter(|name| name.contains("/objects/")).collect();
    assert!(objects.len() == 3 && objects.iter().all(|name| name.starts_with("nodes/a/")), "{objects:?}");
}

#[test]
fn a_collector_deletes_nothing_while_a_journal_cannot_be_read() {
    let (a, b, place) = (run(), Machine::new(), Arc::new(Memory::default()));
    a.session(&place, "a", false).unwrap();
    b.session(&place, "b", false).unwrap();
    // From now on only a name of b's needs a's object. The removal makes a write a snapshot without its own name.
    fs::rename(b.store.tree().join("run/step_2.pt"), b.store.tree().join("run/two.pt")).unwrap();
    let two = b.shapes.lock().unwrap().remove(Path::new("run/step_2.pt")).unwrap();
    b.shapes.lock().unwrap().insert("run/two.pt".into(), two);
    fs::remove_file(b.store.tree().join("run/newest.pt")).unwrap();
    b.session(&place, "b", true).unwrap();
    a.session(&place, "a", true).unwrap();
    let objects = || place.names().into_keys().filter(|name| name.contains("/objects/")).collect::<Vec<_>>();
    let before = objects();
    assert_eq!(before.len(), 2, "{before:?}");
    let journal: Vec<_> = place.names().into_iter().filter(|(name, _)| name.starts_with("nodes/b/journal/")).collect();
    for (name, bytes) in &journal {
        let mut wrong = bytes.clone();
        *wrong.last_mut().unwrap() ^= 1;
        place.set(name, Some(wrong));
    }
    a.session(&place, "a", true).unwrap();
    assert_eq!(objects(), before);
    journal.iter().for_each(|(name, bytes)| place.set(name, Some(bytes.clone())));
    assert!(check(&place).contains(&"run/two.pt".to_string()));
}

#[test]
fn what_is_wrong_on_a_remote_is_refused_or_left_out() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, "a", false).unwrap();
    // Another store claims the name.
    let other = Machine::new();
    let refused = other.session(&place, "a", false);
    assert!(matches!(&refused, Err(Error::Denied(why)) if why.contains("another store")), "{refused:?}");
    // An object that is not what its name says.
    let names = place.names();
    let (name, bytes) = names.iter().find(|(name, _)| name.contains("/objects/")).unwrap();
    let mut wrong = bytes.clone();
    wrong[1000] ^= 1;
    place.set(name, Some(wrong));
    let view = Mutex::default();
    Reader::refresh(place.as_ref(), &view).unwrap();
    let encodings: Vec<_> = lock(&view).nodes()["a"].objects.values().cloned().collect();
    let encoding = encodings.iter().find(|encoding| encoding.name("a") == *name).unwrap();
    let fetched = fetch_whole(place.as_ref(), "a", encoding, &mut |_, _| Ok(()));
    assert!(matches!(&fetched, Err(Error::Wrong(why)) if why.contains(name.as_str())), "{fetched:?}");
    place.set(name, Some(bytes.clone()));
    // A damaged segment of one node: the others are read.
    let b = Machine::new();
    b.write("of-b", b"b");
    b.session(&place, "b", false).unwrap();
    let journal: Vec<_> = place.names().into_iter().filter(|(name, _)| name.starts_with("nodes/a/journal/")).collect();
    for (name, bytes) in &journal {
        let mut wrong = bytes.clone();
        *wrong.last_mut().unwrap() ^= 1;
        place.set(name, Some(wrong));
    }
    assert_eq!(check(&place), ["of-b"]);
    let view = Mutex::default();
    Reader::refresh(place.as_ref(), &view).unwrap();
    assert!(lock(&view).nodes()["a"].broken.as_ref().unwrap().contains("checksum"));
    // The node itself writes down anew what it has.
    machine.session(&place, "a", false).unwrap();
    assert!(check(&place).len() >= 6);
    // A newer stepfs has written here.
    let (name, _) = &journal[0];
    let mut newer = Segment::encode(&Segment::decode(&journal[0].1).unwrap()).unwrap();
    newer[8] = 2;
    place.set(name, Some(newer));
    let refused = machine.session(&place, "a", false);
    assert!(matches!(&refused, Err(Error::Denied(why)) if why.contains("newer stepfs")), "{refused:?}");
}

#[test]
fn an_empty_remote_is_not_taken_for_a_new_one() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, "a", false).unwrap();
    let unmounted = Arc::new(Memory::default());
    let refused = machine.session(&unmounted, "a", false);
    assert!(matches!(&refused, Err(Error::Away(why)) if why.contains("mounted")), "{refused:?}");
    assert!(unmounted.names().is_empty());
}

#[test]
fn a_store_that_lost_its_tree_removes_nothing() {
    let (machine, place) = (run(), Arc::new(Memory::default()));
    machine.session(&place, "a", false).unwrap();
    let (tree, record) = (machine.store.tree(), machine.store.root().join("remote.shown"));
    let lose_names = || {
        for name in ["run", "latest"] {
            let path = tree.join(name);
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
        }
    };
    // Part of another directory, as a copy of the store is: what is there counts as shown, and may have been removed.
    fs::rename(&tree, tree.with_extension("first")).unwrap();
    fs::create_dir(&tree).unwrap();
    fs::rename(tree.with_extension("first").join("run"), tree.join("run")).unwrap();
    assert!(tree::load(&machine.store, "memory").keys().all(|path| path.starts_with("run")));
    assert!(!tree::load(&machine.store, "memory").is_empty());
    let losses: [&dyn Fn(); 3] = [&|| fs::remove_file(&record).unwrap(), &|| (), &|| {
        // Another directory, with something in it.
        fs::rename(&tree, tree.with_extension("lost")).unwrap();
        fs::create_dir(&tree).unwrap();
        fs::create_dir(tree.join("lost+found")).unwrap();
    }];
    for lose_more in losses {
        lose_names();
        lose_more();
        machine.session(&place, "a", true).unwrap();
        assert_eq!(check(&place), NAMES);
        assert_eq!(machine.files(), NAMES);
    }
    let newest = fs::File::open(machine.store.tree().join("run/newest.pt")).unwrap();
    let mut head = [0; 8];
    newest.read_exact_at(&mut head, 0).unwrap();
    assert_eq!(&head, b"stepfsST");
}
