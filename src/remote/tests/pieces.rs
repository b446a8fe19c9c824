//! Reads of parts of a large object that only the remote has.

use super::*;
use crate::recall::{Cache, Recall};

const MIB: usize = 1 << 20;

/// A store that shows a file of 64 MiB which only the remote has; its reads, the object, and the bytes.
struct Away {
    machine: Machine,
    place: Arc<Memory>,
    recall: Arc<Recall>,
    id: Id,
    bytes: Vec<u8>,
}

fn away() -> Away {
    let (writer, machine, place) = (Machine::new(), Machine::new(), Arc::new(Memory::default()));
    let bytes = noise(64 * MIB, 4);
    writer.write("large.bin", &bytes);
    writer.session(&place, "a", false).unwrap();
    machine.session(&place, "b", false).unwrap();
    let file = fs::File::open(machine.store.tree().join("large.bin")).unwrap();
    let id = Stub::read(&file, machine.store.id()).unwrap().unwrap().object;
    let view = Arc::new(Mutex::default());
    Reader::refresh(place.as_ref(), &view).unwrap();
    let fetcher = Fetcher::new(Arc::clone(&place) as _, view, machine.store.tmp());
    machine.objects.look_elsewhere(Arc::new(fetcher));
    let cache = Cache::new(&machine.store.cache(), 1 << 30).unwrap();
    let recall = Recall::new(Arc::clone(&machine.objects), cache, 0, 2).unwrap();
    Away { machine, place, recall, id, bytes }
}

#[test]
fn a_part_brings_that_part_and_much_brings_the_whole() {
    let Away { machine, place, recall, id, bytes } = away();
    let before = place.got();
    let reader = recall.reader(id).unwrap();
    let mut buf = vec![0; MIB];
    let at = 20 * MIB + 5;
    assert_eq!(reader.read_at(at as u64, &mut buf).unwrap(), MIB);
    assert_eq!(buf, bytes[at..at + MIB]);
    let came = place.got() - before;
    // Two tiles, the ends of the object, and what is asked for ahead.
    assert!(came < 5 * MIB as u64, "{came} bytes came for one MiB");
    assert!(machine.objects.is_elsewhere(id));
    // The bytes that are here do not come again.
    reader.read_at(at as u64, &mut buf).unwrap();
    assert_eq!(place.got() - before, came);
    for at in (0..bytes.len()).step_by(MIB) {
        reader.read_at(at as u64, &mut buf).unwrap();
        assert_eq!(buf, bytes[at..at + MIB], "at {at}");
    }
    assert!(!machine.objects.is_elsewhere(id), "all of it was read, so it is here");
    let came = place.got() - before;
    assert!(came < bytes.len() as u64 * 5 / 4, "{came} bytes came for {}", bytes.len());
    // From now on the remote may be away.
    drop(reader);
    recall.forget(id);
    place.fail_after(Some(0), false);
    recall.reader(id).unwrap().read_at(7, &mut buf).unwrap();
    assert_eq!(buf, bytes[7..7 + MIB]);
}

#[test]
fn a_damaged_part_is_an_error_and_no_answer() {
    let Away { machine: _machine, place, recall, id, bytes } = away();
    let (name, whole) = place.names().into_iter().find(|(name, _)| name.contains("/objects/")).unwrap();
    let mut wrong = whole.clone();
    let middle = wrong.len() / 2;
    wrong[middle] ^= 1;
    place.set(&name, Some(wrong));
    let reader = recall.reader(id).unwrap();
    let mut buf = vec![0; 4096];
    reader.read_at(MIB as u64, &mut buf).unwrap();
    assert_eq!(buf, bytes[MIB..MIB + 4096]);
    // The bytes of one tile or of its neighbour, since noise does not shrink.
    let read = |reader: &crate::recall::Reader, buf: &mut Vec<u8>| {
        (28..36).map(|at| reader.read_at((at * MIB) as u64, buf).is_ok()).collect::<Vec<_>>()
    };
    assert!(read(&reader, &mut buf).contains(&false));
    // An object that is cut short, and a remote that is away.
    drop(reader);
    place.set(&name, Some(whole[..whole.len() - 1].to_vec()));
    assert!(recall.reader(id).is_err());
    place.fail_after(Some(0), false);
    assert!(recall.reader(id).is_err());
}
