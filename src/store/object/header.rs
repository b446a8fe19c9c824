//! The first and the last bytes of an object (docs/FORMAT.md, "Object").

use serde::{Deserialize, Serialize};

use super::Id;
use crate::store::{Damage, record};

/// Length of the header at the start of an object, bytes. The fields take at most 186.
pub const HEADER_BYTES: usize = 192;
/// Length of the footer at the end of an object, bytes. The fields take at most 76.
pub const FOOTER_BYTES: usize = 80;

const HEADER_MAGIC: &[u8; 8] = b"stepfsCK";
const FOOTER_MAGIC: &[u8; 8] = b"stepfsIX";

/// The properties of an object, without its tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
        record::encode_in(HEADER_MAGIC, self)
    }

    /// Parses a header.
    ///
    /// # Errors
    /// [`Damage`] if a byte was changed or another version of stepfs wrote it.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, Damage> {
        record::decode_in(HEADER_MAGIC, bytes)
    }
}

/// The position of an object's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
        record::encode_in(FOOTER_MAGIC, self)
    }

    /// Parses a footer.
    ///
    /// # Errors
    /// [`Damage`] if a byte was changed or the file was cut short.
    pub fn decode(bytes: &[u8; FOOTER_BYTES]) -> Result<Footer, Damage> {
        record::decode_in(FOOTER_MAGIC, bytes)
    }
}
