//! What other nodes do between two looks of one node.

use super::*;
use crate::recall::{Cache, Recall};
use crate::remote::journal::{Kind, Record, Segment, Shown};

/// A node that stays mounted.
pub(super) struct Mounted {
    pub(super) machine: Machine,
    pub(super) shared: Shared,
    pub(super) writer: Writer,
    pub(super) pusher: Pusher,
}

impl Mounted {
    pub(super) fn new(place: &Arc<Memory>, node: &str) -> Mounted {
        let (machine, shared) = (Machine::new(), Shared::new(settings(node), BTreeMap::new()));
        let remote: Arc<dyn Place> = Arc::clone(place) as _;
        let writer = Writer::claim(remote, Arc::clone(&shared.view), node, machine.store.id(), false).unwrap();
        let mut mounted = Mounted { machine, shared, writer, pusher: Pusher::default() };
        mounted.push();
        mounted.show();
        mounted
    }

    pub(super) fn push(&mut self) -> bool {
        self.pusher.round(&self.machine, &mut self.writer, &self.shared).unwrap()
    }

    pub(super) fn show(&self) {
        take_all(&self.machine, &self.shared).unwrap();
    }

    pub(super) fn rename(&self, from: &str, to: &str) {
        let tree = self.machine.store.tree();
        fs::rename(tree.join(from), tree.join(to)).unwrap();
        let shape = self.machine.shapes.lock().unwrap().remove(Path::new(from)).unwrap();
        self.machine.shapes.lock().unwrap().insert(to.into(), shape);
    }
}

#[test]
fn a_machine_that_slept_names_no_object_that_was_deleted_meanwhile() {
    let (a, place) = (run(), Arc::new(Memory::default()));
    a.session(&place, "a", false).unwrap();
    let mut b = Mounted::new(&place, "b");
    // While b sleeps, a removes a name, and deletes its object.
    fs::remove_file(a.store.tree().join("run/step_2.pt")).unwrap();
    a.session(&place, "a", true).unwrap();
    // b wakes up, and a program renames the file that b still shows.
    b.rename("run/step_2.pt", "run/two.pt");
    assert!(!b.push(), "the file cannot be pushed");
    assert_eq!(check(&place), ["latest", "run/config.json", "run/newest.pt", "run/step_1.pt"]);
    b.rename("run/step_1.pt", "run/one.pt");
    b.push();
    assert_eq!(check(&place), ["latest", "run/config.json", "run/newest.pt", "run/one.pt"]);
}

#[test]
fn a_removal_that_a_snapshot_forgot_is_one() {
    let (a, place) = (run(), Arc::new(Memory::default()));
    a.session(&place, "a", false).unwrap();
    let (mut b, unmounted) = (Mounted::new(&place, "b"), Machine::new());
    unmounted.session(&place, "c", false).unwrap();
    assert_eq!((b.machine.files().len(), unmounted.files().len()), (5, 5));
    fs::remove_file(a.store.tree().join("run/step_2.pt")).unwrap();
    fs::remove_file(a.store.tree().join("run/config.json")).unwrap();
    a.session(&place, "a", true).unwrap();
    let left = ["latest", "run/newest.pt", "run/step_1.pt"];
    assert_eq!(check(&place), left);
    b.writer.look().unwrap();
    b.push();
    b.show();
    assert!(b.push());
    b.show();
    unmounted.session(&place, "c", false).unwrap();
    assert_eq!(
        (check(&place), b.machine.files(), unmounted.files()),
        (left.map(String::from).to_vec(), left.map(String::from).to_vec(), left.map(String::from).to_vec())
    );
    let shown = b.shared.shown();
    assert_eq!(shown.len(), 3, "{shown:?}");
}

#[test]
fn a_list_without_the_beginning_of_a_journal_removes_nothing() {
    let (a, place) = (run(), Arc::new(Memory::default()));
    a.session(&place, "a", false).unwrap();
    let b = Mounted::new(&place, "b");
    let before = b.machine.files();
    // b mounts again, and lists a's journal while a snapshot replaces its segments.
    let journal: Vec<_> = place.names().into_iter().filter(|(name, _)| name.starts_with("nodes/a/journal/")).collect();
    let shown = Shared::new(settings("b"), b.shared.shown());
    for kept in [0, 1] {
        journal.iter().rev().skip(kept).for_each(|(name, _)| place.set(name, None));
        let _ = Reader::refresh(place.as_ref(), &shown.view);
        take_all(&b.machine, &shown).unwrap();
        assert_eq!(b.machine.files(), before, "{kept} of {} segments listed", journal.len());
        journal.iter().for_each(|(name, bytes)| place.set(name, Some(bytes.clone())));
    }
    Reader::refresh(place.as_ref(), &shown.view).unwrap();
    take_all(&b.machine, &shown).unwrap();
    let mut writer =
        Writer::claim(Arc::clone(&place) as _, Arc::clone(&shown.view), "b", b.machine.store.id(), false).unwrap();
    Pusher::default().round(&b.machine, &mut writer, &shown).unwrap();
    assert_eq!((b.machine.files(), check(&place)), (before.clone(), before));
}

#[test]
fn a_directory_stays_while_one_file_takes_the_place_of_another_and_for_a_while() {
    let (a, place) = (Machine::new(), Arc::new(Memory::default()));
    a.write("step/tmp", b"being written");
    a.session(&place, "a", false).unwrap();
    let b = Mounted::new(&place, "b");
    assert_eq!(b.machine.files(), ["step/tmp"]);
    let tree = a.store.tree();
    fs::rename(tree.join("step/tmp"), tree.join("step/shard")).unwrap();
    let shape = a.shapes.lock().unwrap().remove(Path::new("step/tmp"));
    a.shapes.lock().unwrap().insert("step/shard".into(), shape.unwrap_or(Shape::Whole));
    a.session(&place, "a", false).unwrap();
    b.writer.look().unwrap();
    b.show();
    assert_eq!(b.machine.files(), ["step/shard"]);
    assert_eq!(*b.machine.removed_beside.lock().unwrap(), [["step/shard", "step/tmp"]]);
    // A directory goes some time after its last file: a program may be about to create one there.
    fs::remove_dir_all(tree.join("step")).unwrap();
    a.write("other", b"{}");
    a.session(&place, "a", false).unwrap();
    b.writer.look().unwrap();
    b.show();
    let directory = b.machine.store.tree().join("step");
    b.shared.remove_emptied(&b.machine, Duration::from_secs(60));
    assert!(b.machine.files() == ["other"] && directory.exists());
    b.shared.remove_emptied(&b.machine, Duration::ZERO);
    assert!(!directory.exists());
}

#[test]
fn a_head_that_a_list_misses_hides_nothing() {
    let (a, place) = (run(), Arc::new(Memory::default()));
    a.session(&place, "a", false).unwrap();
    let b = Mounted::new(&place, "b");
    a.write("run/more.json", b"{}");
    a.session(&place, "a", false).unwrap();
    let heads: Vec<_> = place.names().into_keys().filter(|name| name.starts_with("heads/")).collect();
    heads.iter().filter(|name| name.ends_with(".a")).for_each(|name| place.set(name, None));
    b.writer.look().unwrap();
    b.show();
    assert!(b.machine.files().contains(&"run/more.json".to_string()));
}

#[test]
fn a_journal_that_is_too_large_for_a_snapshot_stays_and_is_read() {
    let place = Arc::new(Memory::default());
    let mut a = Mounted::new(&place, "a");
    let mut put = |path: &str| {
        let mut bytes = vec![0; 140 << 20];
        getrandom::fill(&mut bytes).unwrap();
        let (mode, len, content) = (0o644, bytes.len() as u64, Content::Inline(bytes));
        let shown = Shown { mode, uid: 0, gid: 0, len, modified_ns: 0, identity: 0, content };
        a.writer.append(vec![Record::Put { time: 0, path: path.into(), shown }]).unwrap();
    };
    put("one");
    put("two");
    for _ in 0..64 {
        a.writer.append(Vec::new()).unwrap();
    }
    assert_eq!(a.writer.tidy(Duration::ZERO).unwrap(), 0);
    let view = Mutex::default();
    Reader::refresh(place.as_ref(), &view).unwrap();
    let view = lock(&view);
    assert_eq!((view.files().count(), view.nodes()["a"].broken.as_ref()), (2, None));
}

#[test]
fn an_emptied_remote_never_shows_old_bytes_under_a_new_name() {
    let (a, place) = (Machine::new(), Arc::new(Memory::default()));
    a.write("run/config.json", b"{\"run\": 1}");
    a.session(&place, "a", false).unwrap();
    let b = Machine::new();
    b.session(&place, "b", false).unwrap();
    // Its times follow the clock's seconds.
    std::thread::sleep(Duration::from_millis(1100));
    let (again, place) = (Machine::new(), Arc::new(Memory::default()));
    again.write("run/config.json", b"{\"run\": 2}");
    again.session(&place, "a", false).unwrap();
    fs::remove_file(b.store.root().join("remote.shown")).unwrap();
    b.session(&place, "b", false).unwrap();
    assert_eq!(fs::read(b.store.tree().join("run/config.json")).unwrap(), b"{\"run\": 2}");
}

#[test]
fn a_second_store_of_one_name_stops_as_soon_as_it_looks() {
    let place = Arc::new(Memory::default());
    let mut late = Mounted::new(&place, "x");
    late.machine.write("run/late.json", b"{}");
    assert!(late.push());
    // The other store began a moment before, and its first segment arrives only now.
    let first = Segment {
        kind: Kind::Changes,
        store: Id([7; 16]),
        node: "x".into(),
        epoch: 1,
        sequence: 0,
        records: Vec::new(),
    };
    place.set(&first.name(), Some(first.encode().unwrap()));
    place.set(&first.place().head("x"), Some(Vec::new()));
    late.writer.look().unwrap();
    let refused = late.pusher.round(&late.machine, &mut late.writer, &late.shared);
    assert!(matches!(refused, Err(Error::Denied(_))), "{refused:?}");
    let remote: Arc<dyn Place> = Arc::clone(&place) as _;
    let again = Writer::claim(remote, Arc::clone(&late.shared.view), "x", late.machine.store.id(), true);
    assert!(matches!(again, Err(Error::Denied(_))));
}

#[test]
fn an_open_file_is_read_to_its_end_after_its_object_was_deleted() {
    let (a, place) = (Machine::new(), Arc::new(Memory::default()));
    let bytes = noise(40 << 20, 4);
    a.write("large.bin", &bytes);
    a.session(&place, "a", false).unwrap();
    let b = Mounted::new(&place, "b");
    let fetcher = Fetcher::new(Arc::clone(&place) as _, Arc::clone(&b.shared.view), b.machine.store.tmp());
    b.machine.objects.look_elsewhere(Arc::new(fetcher));
    let file = fs::File::open(b.machine.store.tree().join("large.bin")).unwrap();
    let id = Stub::read(&file, b.machine.store.id()).unwrap().unwrap().object;
    let cache = Cache::new(&b.machine.store.cache(), 1 << 30).unwrap();
    let reader = Recall::new(Arc::clone(&b.machine.objects), cache, 0, 2).unwrap().reader(id).unwrap();
    let mut buf = vec![0; 1 << 20];
    reader.read_at(0, &mut buf).unwrap();
    // The name shows another object, and a program has the file open.
    b.shared.keeper.keep(&b.machine.objects, &std::collections::BTreeSet::from([id]), Duration::ZERO);
    let begun = std::time::Instant::now();
    while b.machine.objects.is_elsewhere(id) {
        assert!(begun.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(20));
    }
    let names: Vec<_> = place.names().into_keys().filter(|name| name.contains("/objects/")).collect();
    names.iter().for_each(|name| place.set(name, None));
    for at in (0..bytes.len()).step_by(1 << 20) {
        reader.read_at(at as u64, &mut buf).unwrap();
        assert_eq!(buf, bytes[at..at + (1 << 20)], "at {at}");
    }
}
