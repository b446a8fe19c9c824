//! Names that travel between stores, and remotes on which something is wrong.

use super::*;

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
