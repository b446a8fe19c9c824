//! Foreign stores, or stores that others can write to. Their content must never make stepfs read, change or remove
//! anything outside, wait, or take memory without limit.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use stepfs::archive::{AtRest, Condition, FileId, Namespace, Outcome, policy};
use stepfs::store::durable::{CrashPoint, Io};
use stepfs::store::object::{Object, ObjectWriter};
use stepfs::store::{Objects, Restores, Store, copy_but_owner};

use super::adam::Adam;
use super::series::{Dtype, Rest, states, step};

/// A foreign directory with a file in it, and a store beside it.
fn victim(rest: &Rest) -> (PathBuf, PathBuf) {
    let directory = rest.dir.path().join("victim");
    fs::create_dir(&directory).unwrap();
    let file = directory.join("precious");
    fs::write(&file, vec![b'p'; 100_000]).unwrap();
    (directory, file)
}

fn intact(file: &Path) {
    assert!(fs::read(file).expect("the file is still there") == vec![b'p'; 100_000], "the file was changed");
}

fn pipe(path: &Path) {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the path ends with NUL and outlives the call.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

/// The answer of `work`, unless it waits for ever.
fn in_time<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(work()));
    told.recv_timeout(Duration::from_secs(20)).unwrap_or_else(|_| panic!("{what}: it hangs, or panicked"))
}

fn stepfs(args: &[&std::ffi::OsStr]) -> std::process::Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_stepfs"))
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > Duration::from_secs(20) {
            child.kill().unwrap();
            panic!("{args:?} hangs");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

#[test]
fn directories_of_a_store_are_no_links() {
    for name in ["tree", "objects", "tmp", "cache"] {
        let rest = Rest::new();
        let (directory, file) = victim(&rest);
        fs::remove_dir(rest.root().join(name)).unwrap();
        symlink(&directory, rest.root().join(name)).unwrap();
        let opened = Store::open(&rest.root()).map(stepfs::archive::Archive::open);
        intact(&file);
        let error = opened.map(drop).expect_err(name);
        assert!(error.to_string().contains("link"), "{error}");
        assert!(Store::look(&rest.root()).is_err(), "{name}");
    }
}

#[test]
fn files_of_a_store_are_no_links() {
    for name in ["lock", "stepfs.toml", "restores"] {
        let rest = Rest::new();
        let (_, file) = victim(&rest);
        let path = rest.root().join(name);
        let _ = fs::remove_file(&path);
        symlink(&file, &path).unwrap();
        let opened = Store::open(&rest.root()).and_then(|store| Restores::load(&store).map_err(|_| unreachable(name)));
        intact(&file);
        assert!(opened.is_err(), "{name}");
        if name == "lock" {
            assert!(Store::is_locked(&rest.root()).is_err());
        }
    }
}

fn unreachable(name: &str) -> stepfs::store::Error {
    stepfs::store::Error::Missing(name.into())
}

#[test]
fn pipes_and_endless_files_keep_nobody_waiting() {
    for name in ["lock", "stepfs.toml", "restores"] {
        let rest = Rest::new();
        let path = rest.root().join(name);
        let _ = fs::remove_file(&path);
        pipe(&path);
        let root = rest.root();
        let opened = in_time(name, move || {
            Store::open(&root).and_then(|store| Restores::load(&store).map_err(|_| unreachable("restores")))
        });
        assert!(opened.is_err(), "{name}");
    }
    let rest = Rest::new();
    let settings = rest.root().join("stepfs.toml");
    // 8 GiB of holes: not to be read into memory.
    let text = fs::read(&settings).unwrap();
    File::options().write(true).open(&settings).unwrap().set_len(8 << 30).unwrap();
    let error = Store::open(&rest.root()).unwrap_err();
    assert!(error.to_string().contains("stepfs.toml"), "{error}");
    fs::write(&settings, text).unwrap();
    Store::open(&rest.root()).unwrap();
}

#[test]
fn objects_are_plain_files_in_plain_directories() {
    let rest = Rest::of(3);
    let id = rest.id(&step(1));
    let path = rest.object_path(&step(1));
    let aside = rest.dir.path().join("aside");
    // A pipe.
    fs::rename(&path, &aside).unwrap();
    pipe(&path);
    let objects = rest.root().join("objects");
    let damaged = in_time("a pipe", move || {
        let mut damaged = Vec::new();
        Objects::load(&objects, |id, _| damaged.push(id)).unwrap();
        (damaged, Object::open(&objects, id).is_err())
    });
    assert_eq!(damaged, (vec![id], true));
    let root = rest.root();
    let listed = stepfs(&["ls".as_ref(), root.as_os_str()]);
    assert!(listed.status.success() || !listed.stderr.is_empty());
    // A link to an object, though the object is whole.
    fs::remove_file(&path).unwrap();
    symlink(&aside, &path).unwrap();
    assert!(Object::open(&rest.root().join("objects"), id).is_err());
    // A directory that is a link.
    fs::remove_file(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    let header = Object::open(&rest.root().join("objects"), id).unwrap().header().clone();
    let shard = path.parent().unwrap();
    let elsewhere = rest.dir.path().join("elsewhere");
    fs::rename(shard, &elsewhere).unwrap();
    symlink(&elsewhere, shard).unwrap();
    assert!(Object::open(&rest.root().join("objects"), id).is_err());
    // Nothing is written through a link either. Others may share its directory: ids are random.
    let there = || fs::read_dir(&elsewhere).unwrap().map(|entry| entry.unwrap().file_name()).collect::<BTreeSet<_>>();
    let before = there();
    let writer = ObjectWriter::rewrite(&Io::disk(), &rest.root().join("tmp"), id).unwrap();
    assert!(writer.finish(&header, &rest.root().join("objects")).is_err());
    assert_eq!(there(), before);
}

#[test]
fn retention_walks_through_no_link() {
    const RULE: &str = "[[retention]]\nglob = \"run/checkpoint-*\"\nkeep_last = 1\n";
    let mut rest = Rest::with(|text| format!("{text}\n{RULE}"));
    let (directory, file) = victim(&rest);
    for at in 1..4 {
        rest.write(&format!("run/checkpoint-{at}/a.bin"), b"a");
        rest.write(&format!("run/checkpoint-{at}/sub/b.bin"), b"b");
    }
    let store = Store::look(&rest.root()).unwrap();
    // The owner of a directory puts a link in its place while the walk is between a directory and its entries.
    let swap = |path: &Path| {
        let sub = rest.root().join("tree").join(path).with_file_name("sub");
        if sub.symlink_metadata().is_ok_and(|found| found.is_dir()) && path.ends_with("a.bin") {
            fs::rename(&sub, sub.with_file_name("aside")).unwrap();
            symlink(&directory, &sub).unwrap();
        }
        Condition::Whole { has_tensors: true }
    };
    let planned = policy(&store, &swap, &|_: &Path| false).unwrap();
    assert_eq!(planned.len(), 3);
    for (checkpoint, _) in &planned {
        let unit = &checkpoint.unit;
        assert!(unit.bytes < 100, "{}: {} bytes, some of them of others", unit.path.display(), unit.bytes);
    }
    intact(&file);
}

#[test]
fn nothing_is_removed_or_replaced_through_a_link() {
    let rest = Rest::new();
    let (directory, file) = victim(&rest);
    let inner = directory.join("inner");
    fs::create_dir(&inner).unwrap();
    symlink(&directory, rest.path("link")).unwrap();
    let tree = AtRest::of(&Store::open(&rest.root()).unwrap());
    let id = |path: &Path| FileId::of(&fs::metadata(path).unwrap());
    let removed = tree.remove(Path::new("link/precious"), id(&file), &mut || Ok(true)).unwrap();
    intact(&file);
    assert_eq!(removed, Outcome::Changed);
    assert_eq!(tree.remove_directory(Path::new("link/inner"), id(&inner)).unwrap(), Outcome::Changed);
    assert!(inner.is_dir());
    for path in ["../../victim/precious", file.to_str().unwrap()] {
        let removed = tree.remove(Path::new(path), id(&file), &mut || Ok(true));
        intact(&file);
        assert!(!matches!(removed, Ok(Outcome::Done)), "{path}");
    }
}

#[test]
fn export_and_import_follow_no_link_of_the_store() {
    let rest = Rest::new();
    let (directory, file) = victim(&rest);
    symlink(&directory, rest.path("link")).unwrap();
    let to = rest.dir.path().join("out");
    let run = |words: &[&std::ffi::OsStr]| stepfs(words);
    let root = rest.root();
    for path in ["link/precious", "../../victim/precious", file.to_str().unwrap()] {
        let done = run(&["export".as_ref(), root.as_os_str(), path.as_ref(), to.as_os_str()]);
        assert!(!done.status.success() && !to.exists(), "{path}");
    }
    let source = rest.dir.path().join("new.bin");
    fs::write(&source, "new").unwrap();
    let done = run(&["import".as_ref(), root.as_os_str(), source.as_os_str(), "--to".as_ref(), "link/deeper".as_ref()]);
    assert!(!done.status.success());
    assert!(!directory.join("deeper").exists(), "a directory was made outside of the store");
    intact(&file);
}

#[test]
fn a_copy_of_somebody_elses_file_has_no_privileges() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    fs::write(&from, "x").unwrap();
    fs::set_permissions(&from, fs::Permissions::from_mode(0o6755)).unwrap();
    let to = Io::disk().create(&dir.path().join("to"), CrashPoint::StubWritten).unwrap();
    let source = File::open(&from).unwrap();
    copy_but_owner(&source, &source.metadata().unwrap(), &to, CrashPoint::StubWritten).unwrap();
    assert_eq!(to.metadata().unwrap().mode() & 0o7777, 0o755);
}

/// Everything below a directory, links not followed.
fn below(root: &Path) -> Vec<(PathBuf, fs::Metadata)> {
    let (mut found, mut rest) = (Vec::new(), vec![root.to_path_buf()]);
    while let Some(path) = rest.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        if metadata.is_dir() {
            rest.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        found.push((path, metadata));
    }
    found
}

#[test]
fn a_store_is_its_owners_alone_whatever_the_umask() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let files: Vec<PathBuf> = (1..4).map(|at| dir.path().join(step(at))).collect();
    for (file, state) in files.iter().zip(states(3)) {
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, state).unwrap();
        fs::set_permissions(file, fs::Permissions::from_mode(0o644)).unwrap();
    }
    // It exists already, and is open to all.
    fs::create_dir(&root).unwrap();
    fs::set_permissions(&root, fs::Permissions::from_mode(0o777)).unwrap();
    let script = "umask 0; exec \"$0\" import \"$@\"";
    let mut command = Command::new("sh");
    command.arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_stepfs")).arg(&root).args(&files);
    assert!(command.status().unwrap().success());
    let mut objects = 0;
    for (path, metadata) in below(&root) {
        // Files of the tree keep the modes that applications set.
        if path.starts_with(root.join("tree")) {
            continue;
        }
        objects += usize::from(path.starts_with(root.join("objects")) && metadata.is_file());
        let wanted = if metadata.is_dir() { 0o700 } else { 0o600 };
        assert_eq!(metadata.mode() & 0o7777, wanted, "{}", path.display());
    }
    assert!(objects > 0);
}

/// `user::rwx,user:1001:rwx,group::---,mask::rwx,other::---` as the kernel has it.
fn access_list() -> Vec<u8> {
    let entry =
        |tag: u16, bits: u16, id: u32| [&tag.to_le_bytes()[..], &bits.to_le_bytes(), &id.to_le_bytes()].concat();
    let none = u32::MAX;
    let entries = [(1, 7, none), (2, 7, 1001), (4, 0, none), (16, 7, none), (32, 0, none)];
    [2u32.to_le_bytes().to_vec()]
        .into_iter()
        .chain(entries.map(|(tag, bits, id)| entry(tag, bits, id)))
        .flatten()
        .collect()
}

#[test]
fn a_store_inherits_no_access_list() {
    let dir = tempfile::tempdir().unwrap();
    if xattr::set(dir.path(), "system.posix_acl_default", &access_list()).is_err() {
        eprintln!("skipped: no access lists on the file system of the temporary directory");
        return;
    }
    let root = dir.path().join("store");
    let store = Store::open(&root).unwrap();
    for name in ["", "tree", "objects", "tmp", "cache"] {
        let list = xattr::get(root.join(name), "system.posix_acl_default").unwrap();
        assert_eq!(list, None, "{name}: new files in it would be open to others");
    }
    let file = store.tree().join("f");
    fs::write(&file, "x").unwrap();
    assert_eq!(xattr::get(&file, "system.posix_acl_access").unwrap(), None);
}

/// A sound object with a false shape of a second moment: decoding would take more than the object has.
#[test]
fn a_shape_that_lies_reserves_nothing() {
    let mut rest = Rest::new();
    let mut adam =
        Adam::new(0.999, 51, |random| vec![super::adam::Parameter::new("a.weight", Dtype::F32, &[64, 128], random)]);
    adam.train(20);
    for at in 1..4 {
        adam.train(2);
        rest.write(&step(at), &super::series::safetensors(&adam.tensors()));
    }
    rest.settle();
    let id = rest.id(&step(1));
    let objects = rest.root().join("objects");
    let object = Object::open(&objects, id).unwrap();
    let mut index = object.index().clone();
    let at = index.tensors.iter().position(|tensor| tensor.coding.is_log() && tensor.coding.parent.is_none()).unwrap();
    object.factors(at).unwrap();
    for shape in [vec![1 << 34, 2], vec![2, 1 << 34], vec![u64::MAX, u64::MAX], vec![64, 1 << 20]] {
        let mut writer = ObjectWriter::rewrite(&Io::disk(), &rest.root().join("tmp"), id).unwrap();
        let mut bytes = Vec::new();
        index.tensors[at].shape = shape.clone();
        let mut copy = index.clone();
        let tensors = copy.tensors.iter_mut().flat_map(|tensor| tensor.factors.iter_mut().chain(&mut tensor.tiles));
        for tile in tensors.chain(&mut copy.skeleton) {
            object.payload(tile, &mut bytes).unwrap();
            *tile = writer.put(&bytes, tile.decoded_hash).unwrap();
        }
        writer.close(&copy).unwrap();
        writer.finish(object.header(), &objects).unwrap();
        let error = Object::open(&objects, id).map(drop).expect_err(&format!("{shape:?}"));
        assert!(error.to_string().contains("factors"), "{error}");
    }
}

/// A name in a mount must not control others' terminals, or forge lines of a log.
#[test]
fn names_in_errors_and_logs_steer_no_terminal() {
    let rest = Rest::new();
    let name = "a\u{1b}[2J\r\nb.bin";
    let (root, other) = (rest.root(), rest.dir.path().join("other"));
    // A stub of no object, so that stepfs reports it.
    stepfs::store::Stub {
        store: Store::look(&root).unwrap().id(),
        object: stepfs::store::Id([7; 16]),
        logical_len: 100_000,
    }
    .write(&Io::disk().create(&rest.path(name), CrashPoint::StubWritten).unwrap())
    .unwrap();
    let commands: [&[&std::ffi::OsStr]; 3] = [
        &["export".as_ref(), root.as_os_str(), name.as_ref(), other.as_os_str()],
        &["verify".as_ref(), root.as_os_str()],
        &["cat".as_ref(), root.as_os_str(), "none\u{1b}[2J".as_ref()],
    ];
    for command in commands {
        let done = stepfs(command);
        assert!(!done.status.success());
        let said = [done.stdout, done.stderr].concat();
        assert!(
            !said.is_empty() && !said.contains(&0x1b) && !said.contains(&b'\r'),
            "{}",
            String::from_utf8_lossy(&said)
        );
    }
}
