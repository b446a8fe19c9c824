//! The first 160 bytes of an object and its last 64 (docs/FORMAT.md, "Object").

use super::Id;
use crate::hash::xxh3_64;
use crate::store::Damage;
use crate::store::bytes::Fields;

/// Length of the header at the start of an object, bytes.
pub const HEADER_BYTES: usize = 160;
/// Length of the footer at the end of an object, bytes.
pub const FOOTER_BYTES: usize = 64;
/// Version of the object format. A reader refuses all others.
const VERSION: u32 = 1;

const HEADER_MAGIC: [u8; 8] = *b"stepfsCK";
const FOOTER_MAGIC: [u8; 8] = *b"stepfsIX";
/// First bytes of objects from development versions.
const DEVELOPMENT_MAGIC: [u8; 8] = *b"stepfsOB";
/// A development version wrote the object. It also wrote the store's other objects, so nothing of the store is read.
pub(in crate::store) const DEVELOPMENT: Damage = Damage(
    "a development version of stepfs wrote this store; export its files with that version, and make a new store",
);

/// Flag of [`Header::lossy`].
const LOSSY: u32 = 1;
/// Flag of [`Header::ordered`].
const ORDERED: u32 = 2;

/// The properties of an object, without its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The object's id.
    pub id: Id,
    /// The object that this one is a difference to; `None` for a keyframe.
    pub parent: Option<Id>,
    /// True if the decoded file differs from the written one.
    pub lossy: bool,
    /// True if rows of tables are in the order of their ids, not in the file's order.
    pub ordered: bool,
    /// Upper bound on the objects below this one: 0 for a keyframe. Still counts objects that a re-parenting removed
    /// from below it.
    pub depth: u32,
    /// Number of states from the chain's first keyframe to this state. It stays the same when states are removed. Every
    /// eighth state is a super-step.
    pub position: u32,
    /// Length of the decoded file, bytes.
    pub logical_len: u64,
    /// xxh3-128 of the decoded file.
    pub decoded_hash: u128,
    /// Fingerprint of the decoded file. It distinguishes copies from other files without reading them whole.
    pub decoded_sample: u64,
    /// Fingerprint of the file as written by the application.
    pub source_sample: u64,
    /// SHA-256 of the file as written by the application, with its rows in the original order.
    pub original: [u8; 32],
    /// Modification time of the written file, nanoseconds since 1970. It orders the states of a lineage.
    pub modified_ns: i64,
    /// Lineage: a hash of the tensors' paths, types and shapes, and of the file's name with its step as a wildcard.
    pub lineage: u64,
    /// Hash of the tensors' paths, types and shapes alone.
    pub signature: u64,
}

/// States from one super-step to the next: a read applies at most 32 / 8 super-steps and 7 states after the last of
/// them. Eight merged deltas take a quarter of the sum of their parts (GPT, 2.9 bits against 11).
pub const SUPER_STEP: u32 = 8;

impl Header {
    /// True if later states may be differences to it: a keyframe, and every eighth state after it.
    pub fn is_super_step(&self) -> bool {
        self.position.is_multiple_of(SUPER_STEP)
    }

    /// The header's bytes.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = Vec::with_capacity(HEADER_BYTES);
        out.extend_from_slice(&HEADER_MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        let flags = if self.lossy { LOSSY } else { 0 } | if self.ordered { ORDERED } else { 0 };
        out.extend_from_slice(&flags.to_le_bytes());
        out.extend_from_slice(&self.id.0);
        out.extend_from_slice(&self.parent.unwrap_or(Id::NONE).0);
        out.extend_from_slice(&self.logical_len.to_le_bytes());
        out.extend_from_slice(&self.decoded_hash.to_le_bytes());
        out.extend_from_slice(&self.decoded_sample.to_le_bytes());
        out.extend_from_slice(&self.source_sample.to_le_bytes());
        out.extend_from_slice(&self.original);
        out.extend_from_slice(&self.depth.to_le_bytes());
        out.extend_from_slice(&self.position.to_le_bytes());
        out.extend_from_slice(&self.modified_ns.to_le_bytes());
        out.extend_from_slice(&self.lineage.to_le_bytes());
        out.extend_from_slice(&self.signature.to_le_bytes());
        out.extend_from_slice(&xxh3_64(&out).to_le_bytes());
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(&out);
        bytes
    }

    /// Parses a header.
    ///
    /// # Errors
    /// [`Damage`] if a byte was changed or another version of stepfs wrote it.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Damage> {
        match bytes[..8] {
            ref magic if *magic == HEADER_MAGIC => {}
            ref magic if *magic == DEVELOPMENT_MAGIC => return Err(DEVELOPMENT),
            _ => return Err(Damage("its first bytes are not an object's")),
        }
        let (body, sum) = bytes.split_at(HEADER_BYTES - 8);
        if Fields::new(sum).u64()? != xxh3_64(body) {
            return Err(Damage("its header's checksum does not match"));
        }
        let mut fields = Fields::new(&body[8..]);
        let (version, flags) = (fields.u32()?, fields.u32()?);
        if version != VERSION || flags & !(LOSSY | ORDERED) != 0 {
            return Err(Damage("a newer version of stepfs wrote it"));
        }
        Ok(Header {
            lossy: flags & LOSSY != 0,
            ordered: flags & ORDERED != 0,
            id: Id(fields.u128()?.to_le_bytes()),
            parent: Id(fields.u128()?.to_le_bytes()).some(),
            logical_len: fields.u64()?,
            decoded_hash: fields.u128()?,
            decoded_sample: fields.u64()?,
            source_sample: fields.u64()?,
            original: fields.digest()?,
            depth: fields.u32()?,
            position: fields.u32()?,
            modified_ns: fields.u64()? as i64,
            lineage: fields.u64()?,
            signature: fields.u64()?,
        })
    }
}

/// The position of an object's index.
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
    /// The object's id again: it ties the footer to its header.
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

    /// Parses a footer.
    ///
    /// # Errors
    /// [`Damage`] if a byte was changed or the file was cut short.
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
