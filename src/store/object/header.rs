//! The first 128 bytes of an object and its last 64 (docs/FORMAT.md, "Object").

use super::Id;
use crate::hash::xxh3_64;
use crate::store::Damage;
use crate::store::bytes::Fields;

/// Length of the header at the start of an object, bytes.
pub const HEADER_BYTES: usize = 128;
/// Length of the footer at the end of an object, bytes.
pub const FOOTER_BYTES: usize = 64;
/// Version of the object format that this program writes. Version 1 had a hash of samples where the position is now, and no note
/// in the index; version 2 had an index by rows, and the lattice alone; version 3 had no published systems, no grids among symbols
/// and no sections among lossless differences; version 4 had no values that were halved; version 6 had no hash of the original.
pub const OBJECT_VERSION: u32 = 8;

/// Version of an object whose file has tables with rows that have ids: it has them in the order of those. Otherwise as the one
/// before, but a stepfs that does not know how to put them back must not read it. The newest that this program reads.
pub const ORDERED_VERSION: u32 = 9;

/// The same with what versions 4 and 6 had.
const ORDERED_BEFORE: [u32; 2] = [5, 7];

/// The first version whose index has the hash of the original.
pub(super) const WITH_ORIGINAL: u32 = 8;

const HEADER_MAGIC: [u8; 8] = *b"stepfsOB";
const FOOTER_MAGIC: [u8; 8] = *b"stepfsIX";

/// What an object is, without its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The object's name.
    pub id: Id,
    /// The object that this one is a difference to; none for a keyframe.
    pub parent: Option<Id>,
    /// Version of the format it was written in.
    pub version: u32,
    /// Objects below this one, at most: 0 for a keyframe. Objects that a re-parenting has taken out from below it are
    /// still counted.
    pub depth: u32,
    /// States between this one and the keyframe its chain was begun with; that stays what it is when states go. Every
    /// eighth is a super-step.
    pub position: u32,
    /// Length of the decoded file, bytes.
    pub logical_len: u64,
    /// xxh3-128 of the decoded file.
    pub decoded_hash: u128,
    /// xxh3-128 of the file as the application wrote it; equal to `decoded_hash` when nothing was quantized.
    pub source_hash: u128,
    /// Hash of samples of the decoded file, as far as a word goes: copies of other files need not be read whole to be told
    /// apart. 0: not known.
    pub sample: u32,
    /// Modification time of the file as written, nanoseconds since 1970: orders the states of a lineage.
    pub modified_ns: i64,
    /// Lineage: hash of the tensors' paths, types and shapes and of the file's name with its step wild.
    pub lineage: u64,
    /// Hash of the tensors' paths, types and shapes alone.
    pub signature: u64,
}

/// States from one super-step to the next: a read applies at most 32 / 8 super-steps and 7 states after the last of them.
/// Merged deltas of eight weigh a quarter of the sum of their parts (GPT, 2.9 bits against 11).
pub const SUPER_STEP: u32 = 8;

impl Header {
    /// Whether the file decodes to other bytes than were written.
    pub fn is_lossy(&self) -> bool {
        self.source_hash != self.decoded_hash
    }

    /// Whether rows of tables are in the order of their ids, which may not be the file's.
    pub fn is_ordered(&self) -> bool {
        self.version == ORDERED_VERSION || ORDERED_BEFORE.contains(&self.version)
    }

    /// The version in which this program writes such an object.
    pub fn written_anew(&self) -> u32 {
        if self.is_ordered() { ORDERED_VERSION } else { OBJECT_VERSION }
    }

    /// Whether states further on may be differences to it: a keyframe, and every eighth state after it.
    pub fn is_super_step(&self) -> bool {
        self.position.is_multiple_of(SUPER_STEP)
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = Vec::with_capacity(HEADER_BYTES);
        out.extend_from_slice(&HEADER_MAGIC);
        out.extend_from_slice(&self.version.to_le_bytes());
        out.extend_from_slice(&self.depth.to_le_bytes());
        out.extend_from_slice(&self.id.0);
        out.extend_from_slice(&self.parent.unwrap_or(Id::NONE).0);
        out.extend_from_slice(&self.logical_len.to_le_bytes());
        out.extend_from_slice(&self.decoded_hash.to_le_bytes());
        out.extend_from_slice(&self.source_hash.to_le_bytes());
        // Version 1: not looked at by anybody.
        out.extend_from_slice(&self.position.to_le_bytes());
        out.extend_from_slice(&self.sample.to_le_bytes());
        out.extend_from_slice(&self.modified_ns.to_le_bytes());
        out.extend_from_slice(&self.lineage.to_le_bytes());
        out.extend_from_slice(&self.signature.to_le_bytes());
        out.extend_from_slice(&xxh3_64(&out).to_le_bytes());
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(&out);
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`Damage`] when a byte of it was changed, or a newer version of stepfs wrote it.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Damage> {
        if bytes[..8] != HEADER_MAGIC {
            return Err(Damage("its first bytes are not an object's"));
        }
        let (body, sum) = bytes.split_at(HEADER_BYTES - 8);
        if Fields::new(sum).u64()? != xxh3_64(body) {
            return Err(Damage("its header's checksum does not match"));
        }
        let mut fields = Fields::new(&body[8..]);
        let version = fields.u32()?;
        if !(1..=ORDERED_VERSION).contains(&version) {
            return Err(Damage("a newer version of stepfs wrote it"));
        }
        let depth = fields.u32()?;
        let (id, parent) = (Id(fields.u128()?.to_le_bytes()), Id(fields.u128()?.to_le_bytes()).some());
        let logical_len = fields.u64()?;
        let (decoded_hash, source_hash) = (fields.u128()?, fields.u128()?);
        let (position, sample) = (fields.u32()?, fields.u32()?);
        Ok(Header {
            version,
            depth,
            // Nothing was ever taken out of a chain of version 1.
            position: if version == 1 { depth } else { position },
            id,
            parent,
            logical_len,
            decoded_hash,
            source_hash,
            sample: if version == 1 { 0 } else { sample },
            modified_ns: fields.u64()? as i64,
            lineage: fields.u64()?,
            signature: fields.u64()?,
        })
    }
}

/// Where an object's index lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footer {
    /// First byte of the compressed index.
    pub index_offset: u64,
    /// Bytes of the compressed index; it ends where the footer begins.
    pub index_stored: u64,
    /// Bytes of the index when decompressed.
    pub index_len: u64,
    /// xxh3-64 of the compressed index.
    pub index_hash: u64,
    /// The object's name again: a footer belongs to one header.
    pub id: Id,
}

impl Footer {
    /// The footer's bytes.
    pub fn encode(&self) -> [u8; FOOTER_BYTES] {
        let mut out = Vec::with_capacity(FOOTER_BYTES);
        out.extend_from_slice(&FOOTER_MAGIC);
        out.extend_from_slice(&self.index_offset.to_le_bytes());
        out.extend_from_slice(&self.index_stored.to_le_bytes());
        out.extend_from_slice(&self.index_len.to_le_bytes());
        out.extend_from_slice(&self.index_hash.to_le_bytes());
        out.extend_from_slice(&self.id.0);
        out.extend_from_slice(&xxh3_64(&out).to_le_bytes());
        let mut bytes = [0; FOOTER_BYTES];
        bytes.copy_from_slice(&out);
        bytes
    }

    /// Reads a footer.
    ///
    /// # Errors
    /// [`Damage`] when a byte of it was changed or the file was cut short.
    pub fn decode(bytes: &[u8; FOOTER_BYTES]) -> Result<Footer, Damage> {
        let (body, sum) = bytes.split_at(FOOTER_BYTES - 8);
        if bytes[..8] != FOOTER_MAGIC || Fields::new(sum).u64()? != xxh3_64(body) {
            return Err(Damage("its end is missing or damaged"));
        }
        let mut fields = Fields::new(&body[8..]);
        Ok(Footer {
            index_offset: fields.u64()?,
            index_stored: fields.u64()?,
            index_len: fields.u64()?,
            index_hash: fields.u64()?,
            id: Id(fields.u128()?.to_le_bytes()),
        })
    }
}
