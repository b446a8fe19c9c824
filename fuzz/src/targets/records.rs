//! Stubs, and the small files of a store. Each input is read as it is, and with a right checksum at its end.

use std::path::Path;

use stepfs::mirror::pieces::Bytes;
use stepfs::mirror::tree::Tree;
use stepfs::store::{FORMAT, Restores, STUB_BYTES, Stub, StubNote};
use xxhash_rust::xxh3::xxh3_64;

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

/// The bytes of a mirror's directory: as they are, and with these rows in right records.
pub(crate) fn directory(data: &[u8]) {
    let unpack = |bytes: &[u8]| {
        let mut tree = Tree::default();
        tree.unpack(Path::new(""), Bytes::default(), bytes).map(|_| tree)
    };
    let _ = unpack(data);
    let mut record = b"stepfsMD".to_vec();
    record.extend_from_slice(&FORMAT.to_le_bytes());
    record.extend_from_slice(data);
    if let Ok(tree) = unpack(&with_checksum(&record)) {
        tree.iter().for_each(|(path, _)| assert_eq!(path.components().count(), 1, "{path:?} leads elsewhere"));
    }
}
