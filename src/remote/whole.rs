//! An object for a file that the archive has not encoded: all of its bytes, lossless, without a parent.
//!
//! The archive never sees it here. On another machine it is an object like any other.

use std::path::Path;

use crate::store::Store;
use crate::store::durable::DeviceFile;
use crate::store::object::{Header, Index, ObjectWriter};
use codec::TILE_BYTES;
use codec::hash::{Sha256, Xxh3Of128, xxh3_64};
use formats::ReadAt;

use super::place::{Error, Result};

/// zstd level: floating-point numbers hardly compress, and training needs the processor.
const LEVEL: i32 = 1;

/// Writes the object of a file in `tmp/`, and hands it over without a name. `going` is asked between tiles whether the
/// work is still wanted.
///
/// # Errors
/// Device errors, and [`Error::Away`] if the work is no longer wanted.
pub(super) fn encode(
    store: &Store,
    path: &Path,
    source: &DeviceFile,
    modified_ns: i64,
    going: &dyn Fn() -> bool,
) -> Result<(Header, DeviceFile)> {
    let len = source.size();
    let mut writer = ObjectWriter::create_on(store.io(), &store.tmp())?;
    let (mut decoded, mut original) = (Xxh3Of128::default(), Sha256::default());
    let mut skeleton = Vec::new();
    let mut buf = vec![0; TILE_BYTES];
    let mut at = 0;
    while at < len {
        if !going() {
            return Err(Error::Away(format!("{} has changed", path.display())));
        }
        let bytes = &mut buf[..TILE_BYTES.min((len - at) as usize)];
        source.read_exact_at(bytes, at)?;
        decoded.update(bytes);
        original.update(bytes);
        skeleton.push(writer.put(&zstd::bulk::compress(bytes, LEVEL)?, xxh3_64(bytes))?);
        at += bytes.len() as u64;
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
        id: writer.id(),
        parent: None,
        lossy: false,
        ordered: false,
        depth: 0,
        position: 0,
        logical_len: len,
        decoded_hash: decoded.digest(),
        // No file is looked for by them: the object is of no lineage.
        decoded_sample: 0,
        source_sample: 0,
        original: original.digest(),
        modified_ns,
        lineage: 0,
        signature: 0,
    };
    let file = writer.nameless(&header)?;
    Ok((header, file))
}
