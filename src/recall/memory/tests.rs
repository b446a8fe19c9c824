use super::*;
use crate::store::object::{Header, Index, ObjectWriter};
use codec::Integers;
use codec::lattice::Exception;
use codec::log::Factors;

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

fn kept(state: &State) -> Arc<State> {
    Arc::new(state.packed())
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
        State::Log { factors, first: 9, unit, q: Integers::Wide(vec![3, -4, codec::log::ZERO]) },
    ];
    for (tile, state) in states.iter().enumerate() {
        memory.put(&object, 0, tile, &kept(state));
    }
    for (tile, state) in states.iter().enumerate() {
        assert_eq!(memory.get(&object, 0, tile).as_deref(), Some(state));
    }
    // The keyframe is held twice and counted once. Every lattice has an exception of 16 bytes. -32768 means a zero of
    // the logarithmic lattice, so a lattice with it is wide.
    assert_eq!(memory.status().bytes, 400 + 200 + 400 + 400 + 3 * 16 + 6);
    memory.forget(object.header().id);
    assert_eq!(memory.status().bytes, 0);
    assert!(memory.get(&object, 0, 0).is_none());
}

#[test]
fn the_object_used_longest_ago_makes_room() {
    let dir = tempfile::tempdir().unwrap();
    let memory = Memory::new(1000);
    let put = |object: &Arc<Object>, tile| {
        memory.put(object, 0, tile, &kept(&State::Bytes(Arc::new(vec![0; 100]))));
        assert!(memory.status().bytes <= 1000);
        memory.get(object, 0, tile).is_some()
    };
    let (first, second, third) = (object(dir.path()), object(dir.path()), object(dir.path()));
    assert!((0..4).all(|tile| put(&first, tile)));
    assert!((0..4).all(|tile| put(&second, tile)));
    assert!(memory.get(&first, 0, 0).is_some());
    assert!((0..6).all(|tile| put(&third, tile)));
    assert!(memory.get(&second, 0, 0).is_none());
    assert!((0..4).all(|tile| memory.get(&first, 0, tile).is_some()));
    // An object does not drop its own beginning.
    assert!((6..10).all(|tile| put(&third, tile)) && !put(&third, 10));
    assert!((0..10).all(|tile| memory.get(&third, 0, tile).is_some()));
}

#[test]
fn a_keyframe_is_counted_until_its_last_state_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let memory = Memory::new(10_000);
    let (old, new, keyframe) = (object(dir.path()), object(dir.path()), Arc::new(vec![1; 400]));
    memory.put(&old, 0, 0, &kept(&lattice(5, Some(&keyframe))));
    let alone = memory.status().bytes;
    memory.put(&new, 0, 0, &kept(&lattice(6, Some(&keyframe))));
    assert_eq!(memory.status().bytes, 2 * alone - 400);
    memory.forget(old.header().id);
    assert_eq!(memory.status().bytes, alone);
    memory.forget(new.header().id);
    assert_eq!(memory.status().bytes, 0);
}

#[test]
fn a_control_group_limits_what_is_usual() {
    let root = tempfile::tempdir().unwrap();
    let write = |path: &str, words: &str| {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, words).unwrap();
    };
    write("job/memory.max", "max\n");
    write("job/step/memory.max", "3000\n");
    write("job/step/task/memory.max", "9000\n");
    write("memory/box/memory.limit_in_bytes", "2000\n");
    write("memory/memory.limit_in_bytes", "9223372036854771712\n");
    let limit = |groups: &str| group_limit(groups, root.path());
    assert_eq!(limit("0::/job\n"), None);
    assert_eq!(limit("0::/job/step/task\n"), Some(3000), "a group above has less");
    assert_eq!(limit("5:cpu:/box\n4:hugetlb,memory:/box\n0::/job\n"), Some(2000));
    assert_eq!(limit("5:cpu:/box\n0::/elsewhere\n"), None, "no such mount");
    assert_eq!(limit("4:memory:/of/the/host\n"), Some(9_223_372_036_854_771_712), "a container's own is at the root");
    assert_eq!(limit("4:memory:/with:colon/../..\n0::/../outside\nnonsense"), Some(9_223_372_036_854_771_712));
}
