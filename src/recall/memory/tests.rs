use super::*;
use crate::codec::Integers;
use crate::codec::lattice::Exception;
use crate::codec::log::Factors;
use crate::store::object::{Header, Index, ObjectWriter};

fn object(dir: &std::path::Path) -> Arc<Object> {
    let mut writer = ObjectWriter::create(dir).unwrap();
    writer.close(&Index::default()).unwrap();
    let header = Header {
        id: writer.id(),
        lossy: false,
        ordered: false,
        parent: None,
        depth: 0,
        position: 0,
        logical_len: 0,
        decoded_hash: 0,
        original: [0; 32],
        decoded_sample: 0,
        source_sample: 0,
        modified_ns: 0,
        lineage: 0,
        signature: 0,
    };
    Arc::new(writer.reopen(header).unwrap())
}

fn lattice(a: i32, keyframe: Option<&Arc<Vec<u8>>>) -> State {
    let exceptions = vec![Exception { index: 3, raw: 7 }];
    State::Lattice { keyframe: keyframe.cloned(), accumulators: Integers::Wide(vec![a; 100]), step: 0.5, exceptions }
}

fn kept(state: &State) -> State {
    state.packed().unwrap()
}

#[test]
fn states_come_back_narrow_or_wide() {
    let dir = tempfile::tempdir().unwrap();
    let (memory, object) = (Memory::new(1 << 20), object(dir.path()));
    let keyframe = Arc::new(vec![1; 400]);
    let (factors, unit) = (Arc::new(Factors::flat(7)), 1 << 16);
    let states = [
        lattice(5, Some(&keyframe)),
        lattice(1 << 20, None),
        lattice(-32768, None),
        State::Bytes(keyframe),
        State::Log { factors, first: 9, unit, q: Integers::Wide(vec![3, -4, crate::codec::log::ZERO]) },
    ];
    for (tile, state) in states.iter().enumerate() {
        memory.put(key(&object, 0, tile), Use::Read, kept(state));
    }
    for (tile, state) in states.iter().enumerate() {
        assert_eq!(memory.get(&object, 0, tile).as_deref(), Some(state));
    }
    // The keyframe is held twice and counted once. Every lattice has an exception of 16 bytes. -32768 means a zero of
    // the logarithmic lattice, so a lattice with it is wide.
    assert_eq!(memory.status().bytes, 400 + 200 + 400 + 400 + 3 * 16 + 6);
    let moment = State::Moment {
        rule: crate::codec::moment::Rule::Root,
        second: Arc::default(),
        accumulators: Integers::Wide(vec![1]),
        step: 0.5,
        exceptions: Vec::new(),
    };
    assert!(moment.packed().is_none());
    memory.forget(object.header().id);
    assert_eq!(memory.status().bytes, 0);
    assert!(memory.get(&object, 0, 0).is_none());
}

#[test]
fn reading_never_drives_out_more_than_its_half() {
    let dir = tempfile::tempdir().unwrap();
    let memory = Memory::new(1000);
    let put = |object: &Arc<Object>, tile, kind| {
        let state = State::Bytes(Arc::new(vec![0; 100]));
        memory.put(key(object, 0, tile), kind, kept(&state));
        assert!(memory.status().bytes <= 1000);
        memory.get(object, 0, tile).is_some()
    };
    let tip = object(dir.path());
    assert!((0..4).all(|tile| put(&tip, tile, Use::Encode)));
    let (first, second) = (object(dir.path()), object(dir.path()));
    assert!((0..6).all(|tile| put(&first, tile, Use::Read)));
    // More than fits: the older file's states are dropped, the tip's stay.
    assert!((0..6).all(|tile| put(&second, tile, Use::Read)));
    assert!(memory.get(&first, 0, 0).is_none());
    assert!((0..4).all(|tile| memory.get(&tip, 0, tile).is_some()));
    // An object does not drop its own beginning either, which the next reader of it would need first.
    assert!(!put(&second, 6, Use::Read));
    assert!((0..6).all(|tile| memory.get(&second, 0, tile).is_some()));
    // The next tip takes the space beyond the readers' half, then the former tip's place.
    let next = object(dir.path());
    assert!((0..8).all(|tile| put(&next, tile, Use::Encode)), "{:?}", memory.status());
}

#[test]
fn a_tile_is_decoded_once_however_many_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (memory, object) = (Memory::new(1 << 20), object(dir.path()));
    let decoded = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| match memory.claim(&object, 1, 2) {
                Ok(found) => assert_eq!(*found, lattice(9, None)),
                Err(claim) => {
                    // The first two give up: the others must not wait for ever.
                    if decoded.fetch_add(1, Ordering::Relaxed) < 2 {
                        return;
                    }
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    memory.put(claim.key, Use::Read, kept(&lattice(9, None)));
                }
            });
        }
    });
    assert_eq!(decoded.into_inner(), 3);
}

#[test]
fn a_state_that_was_encoded_and_completed_by_a_reader_is_taken_off_the_right_accounts() {
    let dir = tempfile::tempdir().unwrap();
    let memory = Memory::new(1000);
    let (tip, read) = (object(dir.path()), object(dir.path()));
    let put = |object: &Arc<Object>, tile, kind| {
        memory.put(key(object, 0, tile), kind, kept(&lattice(5, None)));
    };
    // A reader has its half. A large encoded state has all of the other half, and no room for its last tile.
    (0..2).for_each(|tile| put(&read, tile, Use::Read));
    (0..3).for_each(|tile| put(&tip, tile, Use::Encode));
    assert!(memory.get(&tip, 0, 2).is_none());
    // The object that was read is removed. Then the large state is read, as another one's super-step.
    memory.forget(read.header().id);
    put(&tip, 2, Use::Read);
    assert!(memory.get(&tip, 0, 2).is_some());
    memory.forget(tip.header().id);
    assert_eq!(memory.status().bytes, 0);
    assert_eq!(memory.lock().used, [0, 0]);
}
