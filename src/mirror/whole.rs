//! An object for a file that the archive has not encoded: all of its bytes, lossless, without a parent.
//!
//! Its id follows from its bytes, so equal bytes travel once. The archive never sees it here. In a store that pulls it,
//! it is an object like any other.

use std::path::Path;

use crate::encode::StepError;
use crate::encode::original::hash_of;
use crate::store::durable::DeviceFile;
use crate::store::object::{Header, Index, ObjectWriter};
use crate::store::{Id, Store};
use codec::TILE_BYTES;
use codec::hash::{Xxh3Of128, xxh3_64};
use formats::ReadAt;

use super::place::{Error, Result};

/// zstd level: floating-point numbers hardly compress, and training needs the processor.
const LEVEL: i32 = 1;

/// SHA-256 of a file.
///
/// # Errors
/// Device errors, and [`Error::Away`] once `going` is false.
pub(super) fn hash(source: &DeviceFile, going: &(dyn Fn() -> bool + Sync)) -> Result<[u8; 32]> {
    hash_of(source, source.size(), &|| !going()).map_err(|error| match error {
        StepError::Cancelled => stopped(),
        error => Error::Local(error.into()),
    })
}

fn stopped() -> Error {
    Error::Away("the daemon stops".into())
}

/// Writes the object of a file in `tmp/`, and hands it over without a name. The caller says the file's SHA-256.
///
/// # Errors
/// Device errors, and [`Error::Away`] once `going` is false.
pub(super) fn encode(
    store: &Store,
    path: &Path,
    (source, original): (&DeviceFile, [u8; 32]),
    modified_ns: i64,
    going: &(dyn Fn() -> bool + Sync),
) -> Result<DeviceFile> {
    let id = short(&original);
    let mut writer = ObjectWriter::rewrite(store.io(), &store.tmp(), id)?;
    let mut decoded = Xxh3Of128::default();
    let (mut skeleton, mut tile) = (Vec::new(), vec![0; TILE_BYTES]);
    for at in (0..source.size()).step_by(TILE_BYTES) {
        if !going() {
            return Err(stopped());
        }
        let bytes = &mut tile[..TILE_BYTES.min((source.size() - at) as usize)];
        source.read_exact_at(bytes, at)?;
        decoded.update(bytes);
        skeleton.push(writer.put(&zstd::bulk::compress(bytes, LEVEL)?, xxh3_64(bytes))?);
    }
    let index = Index {
        origin: path.to_string_lossy().into_owned(),
        profile: "exact".into(),
        container: "opaque".into(),
        skeleton,
        ..Index::default()
    };
    writer.close(&index)?;
    let header = Header {
        id,
        parent: None,
        lossy: false,
        ordered: false,
        depth: 0,
        position: 0,
        logical_len: source.size(),
        decoded_hash: decoded.digest(),
        // No file is looked for by them: the object is of no lineage.
        decoded_sample: 0,
        source_sample: 0,
        original,
        modified_ns,
        lineage: 0,
        signature: 0,
    };
    Ok(writer.nameless(&header)?)
}

/// The beginning of a SHA-256. Nobody finds two contents of one beginning by chance.
pub(super) fn short(digest: &[u8; 32]) -> Id {
    let mut id = Id([0; 16]);
    id.0.copy_from_slice(&digest[..16]);
    id
}
