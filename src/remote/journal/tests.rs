use super::*;
use proptest::prelude::*;

fn segment() -> Segment {
    let shown = |content| Shown {
        mode: 0o640,
        uid: 1000,
        gid: 7,
        len: if let Content::Inline(bytes) = &content { bytes.len() as u64 } else { 1 << 33 },
        modified_ns: -5,
        identity: 77,
        content,
    };
    let put = |path: &str, content| Record::Put { time: 9, path: path.into(), shown: shown(content) };
    let object = |n: u8, parent| Encoding { id: Id([n; 16]), parent, hash: 1 << 99, len: 5000, lossy: n == 2 };
    Segment {
        kind: Kind::Changes,
        store: Id([3; 16]),
        node: "node-1.rack".into(),
        epoch: 5,
        sequence: 6,
        records: vec![
            Record::Object(object(1, None)),
            Record::Object(object(2, Some(Id([1; 16])))),
            put("run/a.json", Content::Inline(b"{}".to_vec())),
            put("run/b.pt", Content::Object { owner: "node-2".into(), id: Id([2; 16]) }),
            put("latest", Content::Link(b"run".to_vec())),
            Record::Removed { time: 10, path: "run/c\u{e9}".into() },
        ],
    }
}

#[test]
fn a_segment_is_read_as_it_was_written() {
    for kind in [Kind::Changes, Kind::Snapshot, Kind::Shown] {
        let segment = Segment { kind, ..segment() };
        let bytes = segment.encode().unwrap();
        assert_eq!(Segment::decode(&bytes).unwrap(), segment);
        assert_eq!(Place::parse(&segment.place().text()), Some(segment.place()));
    }
    for wrong in ["", "1-2-3", "00-s", "0000000000000005-0000000000000006-0303030x", ".part"] {
        assert_eq!(Place::parse(wrong), None, "{wrong}");
    }
}

#[test]
fn every_changed_byte_is_found() {
    let bytes = segment().encode().unwrap();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0x10;
        assert!(Segment::decode(&changed).is_err(), "byte {at}");
        assert!(Segment::decode(&bytes[..at]).is_err(), "cut at {at}");
    }
}

#[test]
fn a_newer_format_is_told_from_damage() {
    let mut bytes = segment().encode().unwrap();
    bytes[8] = 2;
    assert_eq!(Segment::decode(&bytes), Err(Unreadable::Newer(2)));
}

#[test]
fn no_path_leads_outside() {
    for path in ["", "/etc/passwd", "../x", "a/../../x", "a/./b", "a//b", "a/"] {
        let mut one = segment();
        one.records = vec![Record::Removed { time: 1, path: path.into() }];
        assert!(Segment::decode(&one.encode().unwrap()).is_err(), "{path}");
    }
    let nodes = ["", ".", "..", "a/b", ".hidden", "a b"];
    assert!(nodes.iter().all(|node| !is_node(node)) && is_node("host-1.a_b"));
}

#[test]
fn a_time_without_a_next_one_is_refused() {
    let at = |time| Segment { records: vec![Record::Removed { time, path: "x".into() }], ..segment() };
    assert!(Segment::decode(&at(MAX_TIME - 1).encode().unwrap()).is_ok());
    assert!(Segment::decode(&at(u64::MAX).encode().unwrap()).is_err());
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_read(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let mut framed = MAGIC.to_vec();
        framed.extend_from_slice(&FORMAT.to_le_bytes());
        framed.extend_from_slice(&bytes);
        let sum = sum(&framed);
        framed.extend_from_slice(&sum.to_le_bytes());
        let _ = (Segment::decode(&bytes), Segment::decode(&framed));
    }
}
