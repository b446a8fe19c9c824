//! A store with many codings, to be damaged: copies of the golden stores, and the bytes of their files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use stepfs::archive::ReadError;
use stepfs::recall::Chain;
use stepfs::store::object::{Object, path_of};
use stepfs::store::{Id, Objects, Store, Stub};

use super::series::{copy, decode, directory};

/// Every byte in turn (`scripts/corrupt.sh`), or a sample that takes seconds.
pub(crate) fn is_full() -> bool {
    std::env::var_os("STEPFS_CORRUPT").is_some()
}

/// A copy of a store that may be damaged.
pub(crate) struct Victim {
    _dir: tempfile::TempDir,
    pub(crate) root: PathBuf,
    /// Path in the tree, object, and the bytes that it reads as without damage.
    pub(crate) files: BTreeMap<PathBuf, (Id, Vec<u8>)>,
}

impl Victim {
    pub(crate) fn golden(store: &str) -> Victim {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(store);
        let dir = directory();
        let root = dir.path().join("store");
        copy(&from, &root);
        fs::remove_file(root.join("hashes.txt")).unwrap();
        Victim::at(dir, root)
    }

    /// A copy of any store.
    pub(crate) fn of(from: &Path) -> Victim {
        let dir = directory();
        let root = dir.path().join("store");
        copy(from, &root);
        Victim::at(dir, root)
    }

    fn at(dir: tempfile::TempDir, root: PathBuf) -> Victim {
        drop(Store::open(&root).unwrap());
        let mut victim = Victim { _dir: dir, root, files: BTreeMap::new() };
        let (objects, tree) = (victim.objects(), victim.root.join("tree"));
        let mut rest = vec![tree.clone()];
        while let Some(path) = rest.pop() {
            if path.is_dir() {
                rest.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
                continue;
            }
            if let Some(stub) = victim.stub(&path).unwrap() {
                let bytes = decode(&objects, stub.object).unwrap();
                victim.files.insert(path.strip_prefix(&tree).unwrap().to_path_buf(), (stub.object, bytes));
            }
        }
        assert!(!victim.files.is_empty());
        victim
    }

    pub(crate) fn objects(&self) -> Objects {
        Objects::load(&self.root.join("objects"), |_, _| {}).unwrap()
    }

    pub(crate) fn stub(&self, path: &Path) -> std::io::Result<Option<Stub>> {
        Stub::read(&fs::File::open(path)?, Store::look(&self.root).unwrap().id())
    }

    pub(crate) fn path(&self, id: Id) -> PathBuf {
        path_of(&self.root.join("objects"), id)
    }

    pub(crate) fn object(&self, id: Id) -> Object {
        Object::open(&self.root.join("objects"), id).unwrap()
    }

    /// Ids of all objects, and those that a read of each applies.
    pub(crate) fn chains(&self) -> BTreeMap<Id, BTreeSet<Id>> {
        let objects = self.objects();
        let chain = |id: Id| Chain::open(&objects, id).unwrap().objects().iter().map(|o| o.header().id).collect();
        objects.all().into_iter().map(|header| (header.id, chain(header.id))).collect()
    }

    /// Reads one file: the original bytes, or an error that names an object.
    #[track_caller]
    pub(crate) fn check(&self, objects: &Objects, path: &Path, what: &str) -> Option<ReadError> {
        let (id, right) = &self.files[path];
        match decode(objects, *id) {
            Ok(read) => {
                assert!(read == *right, "{what}: {} reads as other bytes", path.display());
                None
            }
            Err(error) => {
                assert!(error.is_damage(), "{what}: {error}");
                Some(error)
            }
        }
    }

    /// Reads all files. Those for which `may_fail` does not hold must be the originals. Returns the others.
    #[track_caller]
    pub(crate) fn check_all(&self, what: &str, may_fail: impl Fn(&Path) -> bool) -> BTreeSet<PathBuf> {
        let objects = self.objects();
        let mut failed = BTreeSet::new();
        for path in self.files.keys() {
            if let Some(error) = self.check(&objects, path, what) {
                assert!(may_fail(path), "{what}: {}: {error}", path.display());
                failed.insert(path.clone());
            }
        }
        failed
    }

    /// `stepfs verify`: its exit code and output.
    pub(crate) fn verify(&self, arguments: &[&str]) -> (i32, serde_json::Value) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stepfs"));
        let done = command.arg("verify").arg("--json").args(arguments).arg(&self.root).output().unwrap();
        let report = serde_json::from_slice(&done.stdout).unwrap_or(serde_json::Value::Null);
        let words = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.code() == Some(1) || !report.is_null(), "{}: {words}", done.status);
        (done.status.code().unwrap_or_else(|| panic!("{}: {words}", done.status)), report)
    }
}

/// The files that a report names.
pub(crate) fn paths(report: &serde_json::Value) -> BTreeSet<PathBuf> {
    let damaged = report["damaged"].as_array().unwrap();
    let paths = damaged.iter().flat_map(|damaged| damaged["paths"].as_array().unwrap());
    paths.map(|path| path.as_str().unwrap().into()).collect()
}

/// Runs `check` for each of `all` on one thread per processor, each with its own victim.
pub(crate) fn each<T: Sync>(all: &[T], victim: impl Fn() -> Victim + Sync, check: impl Fn(&Victim, &T) + Sync) {
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(|| {
                let victim = victim();
                while let Some(one) = all.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
                    check(&victim, one);
                }
            });
        }
    });
}

/// Makes a file the described stub, as a copy between stores would.
pub(crate) fn write_stub(path: &Path, stub: &Stub) -> fs::File {
    let file = fs::File::create(path).unwrap();
    file.write_all_at(&stub.encode(), 0).unwrap();
    file.set_len(stub.logical_len).unwrap();
    file
}
