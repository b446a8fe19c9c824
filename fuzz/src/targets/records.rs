//! Stubs, and the small files of a store. Each input is read as it is, and with a right checksum at its end.

use stepfs::remote::journal::Segment;
use stepfs::store::{Restores, STUB_BYTES, Stub, StubNote};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

fn with_checksum(data: &[u8]) -> Vec<u8> {
    let mut bytes = data.to_vec();
    bytes.extend_from_slice(&xxh3_64(data).to_le_bytes());
    bytes
}

/// The first bytes of a stub; the others are 0.
pub(crate) fn stub(data: &[u8]) {
    let mut block = [0; STUB_BYTES];
    let length = data.len().min(STUB_BYTES);
    block[..length].copy_from_slice(&data[..length]);
    let _ = Stub::decode(&block);
    let sum = xxh3_64(&block[..STUB_BYTES - 8]);
    block[STUB_BYTES - 8..].copy_from_slice(&sum.to_le_bytes());
    if let Ok(Some(stub)) = Stub::decode(&block) {
        assert_eq!(Stub::decode(&stub.encode()), Ok(Some(stub)));
    }
}

/// A note of a directory's times.
pub(crate) fn note(data: &[u8]) {
    let _ = StubNote::decode(data);
    let fixed = with_checksum(data);
    if let Ok(note) = StubNote::decode(&fixed) {
        assert_eq!(StubNote::decode(&note.encode()), Ok(note));
    }
}

/// The record of restores.
pub(crate) fn restores(data: &[u8]) {
    let _ = Restores::decode(data);
    let fixed = with_checksum(data);
    let Ok(mut restores) = Restores::decode(&fixed) else { return };
    assert_eq!(Restores::decode(&restores.encode()), Ok(restores.clone()));
    let lineages: Vec<u64> = restores.all().map(|(lineage, _)| lineage).collect();
    for lineage in lineages.into_iter().chain([7]) {
        let now = restores.generations(lineage, i64::MAX);
        restores.restored(lineage, i64::MAX, now, "run/step_1.pt");
        assert_eq!(restores.generations(lineage, i64::MAX), now.saturating_add(1));
    }
    assert_eq!(Restores::decode(&restores.encode()), Ok(restores));
}

/// A segment of a remote's journal: as it is, under a right checksum, and with its records unpacked in it.
pub(crate) fn journal(data: &[u8]) {
    let _ = Segment::decode(data);
    let mut fixed = data.to_vec();
    fixed.extend_from_slice(&xxh3_128(data).to_le_bytes());
    let records = |segment: &Segment| segment.records.clone();
    if let Ok(segment) = Segment::decode(&fixed) {
        let again = segment.encode().expect("a segment is written");
        assert_eq!(Segment::decode(&again).as_ref().map(records), Ok(segment.records));
    }
    // The fuzzer does not find zstd's frames by itself.
    let mut framed = b"stepfsRJ\x01\0\0\0\0\0\0\0".to_vec();
    framed.extend_from_slice(&[7; 32]);
    framed.extend_from_slice(b"\x01n");
    let mut length = data.len();
    while length >= 0x80 {
        framed.push(length as u8 | 0x80);
        length >>= 7;
    }
    framed.push(length as u8);
    framed.extend_from_slice(&zstd::bulk::compress(data, 1).expect("zstd packs any bytes"));
    framed.extend_from_slice(&xxh3_128(&framed).to_le_bytes());
    if let Ok(segment) = Segment::decode(&framed) {
        let again = segment.encode().expect("a segment is written");
        assert_eq!(Segment::decode(&again), Ok(segment));
    }
}
