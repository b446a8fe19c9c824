use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::store::object::Index;

fn header(id: Id, parent: Option<Id>, at: u32) -> Header {
    Header {
        id,
        lossy: false,
        ordered: false,
        parent,
        depth: at,
        position: at,
        logical_len: 0,
        decoded_hash: 0,
        original: [0; 32],
        decoded_sample: 0,
        source_sample: 0,
        modified_ns: at.into(),
        lineage: 1,
        signature: 2,
    }
}

fn collect(objects: &Objects, keep: &HashSet<Id>) -> Vec<Id> {
    let garbage = objects.take_garbage(keep, &|_| true);
    objects.remove(&garbage);
    garbage
}

struct Store {
    dir: tempfile::TempDir,
    objects: Objects,
}

impl Store {
    fn new() -> Store {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("tmp")).unwrap();
        fs::create_dir(dir.path().join("objects")).unwrap();
        let objects = Objects::load(&dir.path().join("objects"), |_, _| {}).unwrap();
        Store { dir, objects }
    }

    fn add(&self, parent: Option<Id>, at: u32) -> Id {
        let mut writer = ObjectWriter::create(&self.dir.path().join("tmp")).unwrap();
        writer.close(&Index::default()).unwrap();
        let id = writer.id();
        self.objects.add(writer, header(id, parent, at), 1).unwrap();
        self.objects.unname(id);
        id
    }

    fn reparent(&self, id: Id, parent: Option<Id>) {
        let mut writer = ObjectWriter::rewrite(&Io::disk(), &self.dir.path().join("tmp"), id).unwrap();
        writer.close(&Index::default()).unwrap();
        let former = self.objects.get(id).unwrap().0;
        self.objects.replace(writer, Header { parent, ..former }, 1).unwrap();
    }

    /// Collects and merges until nothing is left to do, always with the last permitted parent; returns the number of
    /// merges.
    fn settle(&self, keep: &HashSet<Id>) -> usize {
        for merges in 0.. {
            while !collect(&self.objects, keep).is_empty() {}
            let (Some(merge), pending) = self.objects.next_merge(keep) else {
                return merges;
            };
            assert!(pending >= merge.heirs.len() && !merge.heirs.is_empty(), "{merge:?}");
            for (at, heir) in merge.heirs.iter().enumerate() {
                let first = merge.heirs[..at].first().filter(|first| self.objects.can_follow(*heir, **first, &merge));
                let deepest = if at == 0 { merge.roof.checked_sub(1) } else { Some(u32::MAX) };
                let siblings = deepest.map_or(Vec::new(), |deepest| self.objects.siblings(*heir, deepest, keep));
                let mut others = first.into_iter().chain(&siblings).filter(|other| !merge.dying.contains(other));
                self.reparent(*heir, others.next_back().copied().or(merge.above));
            }
        }
        unreachable!()
    }

    fn reload(&self, names: &[Id]) -> Objects {
        let objects = Objects::load(&self.dir.path().join("objects"), |id, error| panic!("{id}: {error}")).unwrap();
        names.iter().for_each(|id| objects.name(*id));
        objects
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// For any tree of states and any named ones: the named ones stay, in their order, and nothing else does. No chain
    /// becomes longer, and the table equals a fresh look at the directory.
    #[test]
    fn what_is_named_stays_and_nothing_else(
        parents in vec(proptest::option::of(0usize..100), 1..40),
        named in vec(any::<bool>(), 40),
        kept in proptest::option::of(0usize..40),
    ) {
        let store = Store::new();
        let mut ids: Vec<Id> = Vec::new();
        for (at, parent) in parents.iter().enumerate() {
            let parent = parent.filter(|_| at > 0).map(|parent| ids[parent % at]);
            ids.push(store.add(parent, at as u32));
        }
        let depths: Vec<u32> = ids.iter().map(|id| store.objects.chain_len(*id)).collect();
        let names: Vec<Id> = ids.iter().zip(&named).filter(|(_, named)| **named).map(|(id, _)| *id).collect();
        names.iter().for_each(|id| store.objects.name(*id));
        let keep: HashSet<Id> = kept.and_then(|at| ids.get(at)).copied().into_iter().collect();
        store.settle(&keep);
        let mut stay: Vec<Id> = store.objects.all().into_iter().map(|header| header.id).collect();
        let mut expected: Vec<Id> = names.iter().chain(&keep).copied().collect();
        stay.sort();
        expected.sort();
        expected.dedup();
        prop_assert_eq!(&stay, &expected);
        for (id, depth) in ids.iter().zip(depths).filter(|(id, _)| expected.contains(id)) {
            prop_assert!(store.objects.chain_len(*id) <= depth);
        }
        let fresh = store.reload(&names);
        for id in &stay {
            let sorted = |objects: &Objects| {
                let mut children = objects.lock().children(*id).to_vec();
                children.sort();
                children
            };
            prop_assert_eq!(sorted(&fresh), sorted(&store.objects));
            prop_assert_eq!(&fresh.get(*id).unwrap().0, &store.objects.get(*id).unwrap().0);
        }
        prop_assert_eq!(fresh.frozen(), None);
        prop_assert_eq!(store.objects.lock().unnamed().count(), keep.iter().filter(|id| !names.contains(id)).count());
    }
}

#[test]
fn nothing_goes_while_what_files_need_is_missing() {
    let store = Store::new();
    let root = store.add(None, 0);
    let middle = store.add(Some(root), 1);
    let leaf = store.add(Some(middle), 2);
    let other = store.add(None, 3);
    fs::remove_file(crate::store::object::path_of(&store.dir.path().join("objects"), middle)).unwrap();
    let objects = store.reload(&[leaf]);
    let keep = HashSet::new();
    // The object may come back from a backup; its parent must exist then.
    assert!(objects.frozen().is_some());
    assert!(collect(&objects, &keep).is_empty());
    assert_eq!(objects.next_merge(&keep), (None, 0));
    // The unreadable file is removed: nothing needs the missing object any more.
    objects.unname(leaf);
    assert_eq!(objects.frozen(), None);
    let mut gone = collect(&objects, &keep);
    let mut expected = vec![root, leaf, other];
    gone.sort();
    expected.sort();
    assert_eq!(gone, expected);
    // A file that names a missing object.
    let objects = store.reload(&[middle]);
    assert!(objects.frozen().is_some());
    objects.unname(middle);
    assert_eq!(objects.frozen(), None);
}

#[test]
fn a_circle_neither_hangs_nor_goes() {
    let store = Store::new();
    let first = store.add(None, 0);
    let second = store.add(Some(first), 1);
    store.reparent(first, Some(second));
    let objects = store.reload(&[]);
    let keep = HashSet::new();
    assert!(collect(&objects, &keep).is_empty());
    assert_eq!(objects.next_merge(&keep), (None, 0));
    assert!(objects.chain_len(first) > MAX_CHAIN);
    let objects = store.reload(&[first]);
    assert!(collect(&objects, &keep).is_empty());
    assert_eq!(objects.all().len(), 2);
}

#[test]
fn twins_that_are_differences_to_each_other_do_not_hang() {
    let store = Store::new();
    let first = store.add(None, 1);
    let second = store.add(Some(first), 1);
    let header = |id| store.objects.get(id).unwrap().0;
    assert_eq!(first_of_twins(&store.objects, header(second)).id, first);
    store.reparent(first, Some(second));
    let objects = store.reload(&[first]);
    let found = first_of_twins(&objects, header(first));
    assert!([first, second].contains(&found.id));
}

#[test]
fn an_heir_does_not_follow_one_with_a_longer_chain() {
    let store = Store::new();
    // The first heir depends on a long chain of dying states, the second on the dying keyframe.
    let keyframe = store.add(None, 0);
    let middle = store.add(Some(keyframe), 1);
    let end = store.add(Some(middle), 2);
    let first = store.add(Some(end), 3);
    let second = store.add(Some(keyframe), 4);
    let elsewhere = store.add(None, 1);
    let deep = store.add(Some(elsewhere), 2);
    [first, second, elsewhere, deep].into_iter().for_each(|id| store.objects.name(id));
    let keep = HashSet::new();
    let merge = store.objects.next_merge(&keep).0.unwrap();
    assert_eq!(merge.heirs, [first, second]);
    // It will be a keyframe. The other can follow it, unless it becomes a difference to something else.
    assert!(store.objects.can_follow(second, first, &merge));
    assert_eq!(merge.roof, 0);
    assert_eq!(store.objects.siblings(first, u32::MAX, &keep), [deep]);
    assert_eq!(store.objects.siblings(first, 0, &keep), [elsewhere]);
    store.reparent(first, Some(deep));
    assert!(!store.objects.can_follow(second, first, &merge));
    store.reparent(first, None);
    assert!(store.objects.can_follow(second, first, &merge));
}

#[test]
fn a_shared_base_is_asked_about_again_when_its_children_change() {
    let store = Store::new();
    let base = store.add(None, 0);
    let children: Vec<Id> = (1..4).map(|at| store.add(Some(base), at)).collect();
    children.iter().for_each(|id| store.objects.name(*id));
    let keep = HashSet::new();
    let (merge, pending) = store.objects.next_merge(&keep);
    let merge = merge.unwrap();
    assert_eq!((merge.heirs, merge.above, merge.is_line, pending), (children.clone(), None, false, 3));
    store.objects.share(&[base]);
    assert_eq!(store.objects.next_merge(&keep), (None, 0));
    store.objects.unname(children[0]);
    assert_eq!(collect(&store.objects, &keep), [children[0]]);
    assert_eq!(store.objects.next_merge(&keep).1, 2);
}

#[test]
fn a_new_parent_stays_when_the_directory_could_not_be_synced_after_the_rename() {
    use std::os::unix::fs::PermissionsExt;
    let store = Store::new();
    let dying = store.add(None, 0);
    let other = store.add(None, 1);
    let heir = store.add(Some(dying), 2);
    [heir, other].iter().for_each(|id| store.objects.name(*id));
    let mut writer = ObjectWriter::rewrite(&Io::disk(), &store.dir.path().join("tmp"), heir).unwrap();
    writer.close(&Index::default()).unwrap();
    let header = Header { parent: Some(other), ..store.objects.get(heir).unwrap().0 };
    // Names in it can be changed, but it cannot be opened: as without free descriptors, or if its sync fails.
    let objects = store.dir.path().join("objects");
    let shard = crate::store::object::path_of(&objects, heir).parent().unwrap().to_path_buf();
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    mode(store.dir.path(), 0o755);
    mode(&objects, 0o755);
    mode(&store.dir.path().join("tmp"), 0o777);
    mode(&shard, 0o333);
    // SAFETY: no memory is passed; both concern this thread's access to files only.
    unsafe { libc::setfsuid(65534) };
    let result = store.objects.replace(writer, header, 1);
    // SAFETY: as above.
    unsafe { libc::setfsuid(0) };
    mode(&shard, 0o755);
    assert_eq!(result.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(Object::header_of(&Io::disk(), &objects, heir).unwrap().0.parent, Some(other));
    // The file that named the new parent is removed before the next attempt.
    store.objects.unname(other);
    collect(&store.objects, &HashSet::new());
    assert!(
        Object::header_of(&Io::disk(), &objects, other).is_ok(),
        "what the object on the device is a difference to is gone"
    );
}
