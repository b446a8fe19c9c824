use super::*;
use std::os::unix::fs::MetadataExt;

/// Every path below a directory, with the properties that show a change.
fn picture(dir: &Path) -> Vec<(PathBuf, u64, i64, Option<Vec<u8>>)> {
    let mut all = Vec::new();
    let mut rest = vec![dir.to_path_buf()];
    while let Some(path) = rest.pop() {
        let metadata = fs::symlink_metadata(&path).unwrap();
        if metadata.is_dir() {
            rest.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        let bytes = metadata.is_file().then(|| fs::read(&path).unwrap());
        all.push((path, metadata.ino(), metadata.mtime_nsec(), bytes));
    }
    all.sort();
    all
}

#[test]
fn a_new_store_is_whole_and_stays_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let store = Store::open(&root).unwrap();
    let id = store.id();
    assert_eq!(fs::metadata(&root).unwrap().mode() & 0o777, 0o700);
    for name in DIRECTORIES {
        assert!(root.join(name).is_dir(), "{name}");
    }
    drop(store);
    assert_eq!(Store::open(&root).unwrap().id(), id);
    assert_eq!(Store::look(&root).unwrap().id(), id);
}

#[test]
fn another_format_is_refused_untouched() {
    for (other, words) in [(1, "a former stepfs"), (3, "a newer stepfs")] {
        let dir = tempfile::tempdir().unwrap();
        let text = settings::template(Id([5; 16]), false).replace("format = 2", &format!("format = {other}"));
        fs::write(dir.path().join(SETTINGS), text).unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        fs::write(dir.path().join("tmp/half-done"), "x").unwrap();
        let before = picture(dir.path());
        for error in [Store::open(dir.path()).unwrap_err(), Store::look(dir.path()).unwrap_err()] {
            assert!(matches!(error, Error::Format { found, .. } if found == other), "{error}");
            assert!(error.to_string().contains(words), "{error}");
        }
        assert_eq!(picture(dir.path()), before);
    }
}

#[test]
fn broken_settings_name_the_key() {
    let good = settings::template(Id([5; 16]), false);
    for (old, new, key) in [
        ("cache_mib = 10240", "cache_mib = \"much\"", "cache_mib"),
        ("cache_mib = 10240", "cache_mib = -1", "cache_mib"),
        ("cache_mib = 10240", "cache_mbi = 10240", "cache_mbi"),
        ("default_profile = \"balanced\"", "default_profile = \"bold\"", "default_profile"),
        ("default_profile = \"balanced\"", "", "default_profile"),
        ("format = 2", "", "format"),
        ("store = \"05", "store = \"zz", "store"),
        ("glob = \"**/*{best,final}*\"", "glob = \"**/*{best\"", "glob"),
    ] {
        let text = good.replacen(old, new, 1);
        assert_ne!(text, good);
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(SETTINGS), text).unwrap();
        let error = Store::open(dir.path()).unwrap_err().to_string();
        let path = dir.path().join(SETTINGS);
        assert!(error.starts_with(&format!("{}: ", path.display())) && error.contains(key), "{key}: {error}");
    }
}

#[test]
fn what_is_something_else_is_refused_untouched() {
    for name in ["model.pt", "tree/model.pt"] {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tree")).unwrap();
        fs::write(dir.path().join(name), "x").unwrap();
        let before = picture(dir.path());
        assert!(matches!(Store::open(dir.path()), Err(Error::NotAStore(_))), "{name}");
        assert_eq!(picture(dir.path()), before);
    }
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(Store::look(dir.path()), Err(Error::Missing(_))));
    assert!(matches!(Store::is_locked(dir.path()), Err(Error::Missing(_))));
    let file = dir.path().join("file");
    fs::write(&file, "x").unwrap();
    assert!(Store::open(&file).is_err());
}

#[test]
fn a_half_made_store_is_completed() {
    let parts = ["tree", "objects", "tmp", "cache", "lock", "stepfs.toml.new"];
    for made in 0..=parts.len() {
        let dir = tempfile::tempdir().unwrap();
        for name in &parts[..made] {
            match DIRECTORIES.contains(name) {
                true => fs::create_dir(dir.path().join(name)).unwrap(),
                false => fs::write(dir.path().join(name), "format =").unwrap(),
            }
        }
        let store = Store::open(dir.path()).unwrap();
        assert!(!dir.path().join("stepfs.toml.new").exists());
        assert_eq!(Store::look(dir.path()).unwrap().id(), store.id());
    }
}

#[test]
fn one_may_write() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    assert!(Store::is_locked(dir.path()).unwrap());
    let error = Store::open(dir.path()).unwrap_err();
    assert!(matches!(&error, Error::Busy { .. }), "{error}");
    assert!(error.to_string().contains(&format!("process {},", std::process::id())), "{error}");
    // The holder's name is still there for the next process.
    assert!(Store::open(dir.path()).unwrap_err().to_string().contains(&std::process::id().to_string()));
    Store::look(dir.path()).unwrap();
    drop(store);
    assert!(!Store::is_locked(dir.path()).unwrap());
    Store::open(dir.path()).unwrap();
}

#[test]
fn of_many_who_make_a_store_one_gets_it() {
    for _ in 0..20 {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("store");
        let all: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| Store::open(&root))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let id = Store::look(&root).unwrap().id();
        let opened: Vec<_> = all.iter().flatten().map(Store::id).collect();
        assert_eq!(opened, [id], "{all:?}");
    }
}

#[test]
fn a_store_without_settings_says_what_to_write() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let (id, object) = (store.id(), Id([3; 16]));
    drop(store);
    let stub = |store: Id, object: Id| {
        let mut block = Stub { store, object, logical_len: 1 << 20 }.encode().to_vec();
        block.resize(1 << 20, 0);
        block
    };
    // It comes first in some listings, and its object is not here.
    fs::write(dir.path().join("tree/a"), stub(Id([8; 16]), Id([4; 16]))).unwrap();
    fs::write(dir.path().join("tree/b"), stub(id, object)).unwrap();
    let path = path_of(&dir.path().join("objects"), object);
    fs::create_dir(path.parent().unwrap()).unwrap();
    fs::write(path, "an object").unwrap();
    fs::remove_file(dir.path().join(SETTINGS)).unwrap();
    let before = picture(dir.path());
    for error in [Store::open(dir.path()).unwrap_err(), Store::look(dir.path()).unwrap_err()] {
        let words = error.to_string();
        assert!(matches!(error, Error::NoSettings { id: Some(found), .. } if found == id), "{words}");
        fs::write(dir.path().join(SETTINGS), words.split_once(":\n").unwrap().1).unwrap();
        assert_eq!(Store::look(dir.path()).unwrap().id(), id, "{words}");
        fs::remove_file(dir.path().join(SETTINGS)).unwrap();
    }
    let now = picture(dir.path());
    assert!(now.iter().zip(&before).all(|(now, before)| (&now.0, &now.3) == (&before.0, &before.3)));
}
