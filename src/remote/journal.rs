//! The bytes of a journal's segments (docs/FORMAT.md, "Remote").
//!
//! A segment is put once and never changed. Its checksum covers all of it, and every length is checked before use.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use crate::store::bytes::{Fields, put_short_text};
use crate::store::{Damage, Id};
use codec::entropy::varint;
use codec::hash::Xxh3Of128;

const MAGIC: [u8; 8] = *b"stepfsRJ";
/// Version of the remote's format that this program writes, and the newest that it reads.
pub const FORMAT: u32 = 1;
/// Where the names are that tell of news.
pub const HEADS: &str = "heads/";
/// Limit on a segment. A million names take about 100 MB.
pub const MAX_SEGMENT_BYTES: u64 = 1 << 28;
/// Limit on an unpacked segment, so that a crafted one cannot fill the memory.
const MAX_BODY_BYTES: u64 = 1 << 30;
/// Bytes around a segment's body, at most.
const MOST_AROUND: u64 = 1 << 10;
/// Longer than any path the kernel takes.
const MAX_PATH_BYTES: usize = 4096;
/// Longer than any host's name.
const MAX_NODE_BYTES: usize = 128;
/// zstd level of the body: names of checkpoints differ little.
const LEVEL: i32 = 3;

/// The part that a segment plays in a node's journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Changes.
    Changes,
    /// Everything that the node has; replaces its earlier segments.
    Snapshot,
    /// Not on a remote: what a store's tree last showed (`remote.shown` in the store).
    Shown,
}

/// An object on the remote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// The object's id.
    pub id: Id,
    /// The object that its bytes are a difference to.
    pub parent: Option<Id>,
    /// xxh3-128 of the object's file.
    pub hash: u128,
    /// Bytes of the object's file.
    pub len: u64,
    /// Its bytes are not those of the file that it was made from.
    pub lossy: bool,
}

impl Encoding {
    /// Its name on the remote.
    pub fn name(&self, node: &str) -> String {
        format!("nodes/{node}/objects/{}-{:032x}", self.id, self.hash)
    }
}

/// Where the bytes of a name are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// In the journal itself: a small file.
    Inline(Vec<u8>),
    /// In an object of this node.
    Object {
        /// The node that has the object; it may be another one than the name's after a rename.
        owner: String,
        /// The object.
        id: Id,
    },
    /// The name is a symbolic link to this path.
    Link(Vec<u8>),
}

/// The state of a name: its file or directory, and who wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length of the file, bytes.
    pub len: u64,
    /// Modification time, nanoseconds since 1970.
    pub modified_ns: i64,
    /// Tells the file from all others of the node that wrote it ([`super::local::identity`]).
    pub identity: u64,
    /// The bytes.
    pub content: Content,
}

/// One change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// An object is on the remote, after all its ancestors.
    Object(Encoding),
    /// A name shows this from now on.
    Put {
        /// Lamport time.
        time: u64,
        /// The name.
        path: PathBuf,
        /// The state of the name.
        shown: Shown,
    },
    /// A name is gone.
    Removed {
        /// Lamport time.
        time: u64,
        /// The name.
        path: PathBuf,
    },
}

/// One segment of a node's journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The part it plays in its node's journal.
    pub kind: Kind,
    /// The store that wrote it.
    pub store: Id,
    /// The node.
    pub node: String,
    /// Number of the daemon's start; it grows.
    pub epoch: u64,
    /// Number of the segment since that start.
    pub sequence: u64,
    /// The changes, in order.
    pub records: Vec<Record>,
}

/// Why a segment cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// A byte was changed.
    #[error("{0}")]
    Damaged(#[from] Damage),
    /// A newer stepfs wrote it.
    #[error("it has format {0}, this stepfs reads up to format {FORMAT}; use a newer stepfs")]
    Newer(u32),
}

/// The name of a segment, which orders it among those of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// Number of the daemon's start.
    pub epoch: u64,
    /// Number of the segment.
    pub sequence: u64,
    /// First four bytes of the store's id: two stores that claim one node never write one name.
    pub store: u32,
    /// It is a snapshot.
    pub snapshot: bool,
}

impl Place {
    /// The last part of the segment's name.
    pub fn text(&self) -> String {
        let ending = if self.snapshot { "-s" } else { "" };
        format!("{:016x}-{:016x}-{:08x}{ending}", self.epoch, self.sequence, self.store)
    }

    /// The name that tells of a node's last segment: one list of `heads/` shows which nodes have news.
    pub fn head(&self, node: &str) -> String {
        format!("{HEADS}{}.{node}", self.text())
    }

    /// Parses the name of a head.
    pub fn parse_head(name: &str) -> Option<(String, Place)> {
        let (place, node) = name.strip_prefix(HEADS)?.split_once('.')?;
        Some((node.to_string(), Place::parse(place)?)).filter(|(node, _)| is_node(node))
    }

    /// Parses the last part of a segment's name; `None` for any other name.
    pub fn parse(text: &str) -> Option<Place> {
        let (digits, snapshot) = match text.strip_suffix("-s") {
            Some(digits) => (digits, true),
            None => (text, false),
        };
        let mut parts = digits.split('-');
        let mut part = |length: usize| {
            let part = parts.next().filter(|part| part.len() == length)?;
            let lower = part.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
            lower.then(|| u64::from_str_radix(part, 16).ok()).flatten()
        };
        let (epoch, sequence, store) = (part(16)?, part(16)?, part(8)? as u32);
        parts.next().is_none().then_some(Place { epoch, sequence, store, snapshot })
    }
}

/// The first four bytes of a store's id, as [`Place::store`].
pub(super) fn short(store: Id) -> u32 {
    let [a, b, c, d, ..] = store.0;
    u32::from_be_bytes([a, b, c, d])
}

impl Segment {
    /// Its place in the node's journal.
    pub fn place(&self) -> Place {
        Place {
            epoch: self.epoch,
            sequence: self.sequence,
            store: short(self.store),
            snapshot: self.kind == Kind::Snapshot,
        }
    }

    /// Its name on the remote.
    pub fn name(&self) -> String {
        format!("nodes/{}/journal/{}", self.node, self.place().text())
    }

    /// The segment's bytes.
    ///
    /// # Errors
    /// zstd's; `FileTooLarge` if no stepfs would read it.
    pub fn encode(&self) -> std::io::Result<Vec<u8>> {
        let mut body = Vec::new();
        varint::put(self.records.len() as u64, &mut body);
        self.records.iter().for_each(|record| put_record(record, &mut body));
        let packed = zstd::bulk::compress(&body, LEVEL)?;
        let is_readable = body.len() as u64 <= MAX_BODY_BYTES && packed.len() as u64 <= MAX_SEGMENT_BYTES - MOST_AROUND;
        if !is_readable {
            let words = format!("a segment of the journal would have {} bytes", packed.len());
            return Err(std::io::Error::new(std::io::ErrorKind::FileTooLarge, words));
        }
        let mut out = MAGIC.to_vec();
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&(self.kind as u32).to_le_bytes());
        out.extend_from_slice(&self.store.0);
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.sequence.to_le_bytes());
        put_short_text(&mut out, &self.node);
        varint::put(body.len() as u64, &mut out);
        out.extend_from_slice(&packed);
        out.extend_from_slice(&sum(&out).to_le_bytes());
        Ok(out)
    }

    /// Parses a segment.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn decode(bytes: &[u8]) -> Result<Segment, Unreadable> {
        let mut fields = Fields::new(bytes);
        if fields.take(8)? != MAGIC {
            return Err(Damage("its first bytes are not a journal's").into());
        }
        let format = fields.u32()?;
        if format > FORMAT {
            return Err(Unreadable::Newer(format));
        }
        let (covered, tail) = bytes.split_at(bytes.len().saturating_sub(16));
        if format != FORMAT || Fields::new(tail).u128()? != sum(covered) {
            return Err(Damage("its checksum does not match").into());
        }
        let mut fields = Fields::new(covered.get(12..).ok_or(Damage("it is cut short"))?);
        let kind = match fields.u32()? {
            0 => Kind::Changes,
            1 => Kind::Snapshot,
            2 => Kind::Shown,
            _ => return Err(Damage("it is of no known kind").into()),
        };
        let store = Id(fields.u128()?.to_le_bytes());
        let (epoch, sequence) = (fields.u64()?, fields.u64()?);
        let node = take_node(&mut fields)?;
        let len = Some(fields.varint()?).filter(|len| *len <= MAX_BODY_BYTES).ok_or(Damage("it is too large"))?;
        let packed = fields.take(fields.remaining())?;
        let body = zstd::bulk::decompress(packed, len as usize)
            .ok()
            .filter(|body| body.len() as u64 == len)
            .ok_or(Damage("its records do not decompress"))?;
        let mut fields = Fields::new(&body);
        let count = fields.varcount(1)?;
        // A record takes more memory than bytes, so the vector grows with what is really there.
        let mut records = Vec::new();
        for _ in 0..count {
            records.push(take_record(&mut fields)?);
        }
        match fields.remaining() {
            0 => Ok(Segment { kind, store, node, epoch, sequence, records }),
            _ => Err(Damage("it is longer than its records").into()),
        }
    }
}

/// True for the name of a node: letters, digits, `-`, `_` and `.`, and no dot in front.
pub fn is_node(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !name.is_empty() && name.len() <= MAX_NODE_BYTES && !name.starts_with('.') && name.bytes().all(plain)
}

fn sum(bytes: &[u8]) -> u128 {
    let mut hash = Xxh3Of128::default();
    hash.update(bytes);
    hash.digest()
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    varint::put(bytes.len() as u64, out);
    out.extend_from_slice(bytes);
}

fn put_record(record: &Record, out: &mut Vec<u8>) {
    match record {
        Record::Object(Encoding { id, parent, hash, len, lossy }) => {
            out.push(if *lossy { 4 } else { 1 });
            out.extend_from_slice(&id.0);
            out.extend_from_slice(&parent.unwrap_or(Id::NONE).0);
            out.extend_from_slice(&hash.to_le_bytes());
            varint::put(*len, out);
        }
        Record::Put { time, path, shown } => {
            out.push(2);
            varint::put(*time, out);
            put_bytes(out, path.as_os_str().as_bytes());
            [shown.mode, shown.uid, shown.gid].iter().for_each(|field| varint::put(u64::from(*field), out));
            varint::put(shown.len, out);
            out.extend_from_slice(&shown.modified_ns.to_le_bytes());
            varint::put(shown.identity, out);
            match &shown.content {
                Content::Inline(bytes) => {
                    out.push(0);
                    put_bytes(out, bytes);
                }
                Content::Object { owner, id } => {
                    out.push(1);
                    put_short_text(out, owner);
                    out.extend_from_slice(&id.0);
                }
                Content::Link(target) => {
                    out.push(2);
                    put_bytes(out, target);
                }
            }
        }
        Record::Removed { time, path } => {
            out.push(3);
            varint::put(*time, out);
            put_bytes(out, path.as_os_str().as_bytes());
        }
    }
}

/// Lamport times stay far below: one that is close to the end of its type would overflow in each node that reads it.
pub(super) const MAX_TIME: u64 = 1 << 62;

fn take_time(fields: &mut Fields) -> Result<u64, Damage> {
    Some(fields.varint()?).filter(|time| *time < MAX_TIME).ok_or(Damage("a time is too large"))
}

fn take_record(fields: &mut Fields) -> Result<Record, Damage> {
    match fields.take(1)?[0] {
        kind @ (1 | 4) => {
            let id = Id(fields.u128()?.to_le_bytes()).some().ok_or(Damage("an object has no id"))?;
            let parent = Id(fields.u128()?.to_le_bytes()).some();
            let (hash, len) = (fields.u128()?, fields.varint()?);
            if i64::try_from(len).is_err() {
                return Err(Damage("an object is longer than any file"));
            }
            Ok(Record::Object(Encoding { id, parent, hash, len, lossy: kind == 4 }))
        }
        2 => {
            let (time, path) = (take_time(fields)?, take_path(fields)?);
            let mut small = || u32::try_from(fields.varint()?).map_err(|_| Damage("an attribute is too large"));
            let (mode, uid, gid) = (small()?, small()?, small()?);
            let len = fields.varint()?;
            let modified_ns = fields.u64()? as i64;
            let identity = fields.varint()?;
            let content = match fields.take(1)?[0] {
                0 => Content::Inline(take_bytes(fields)?),
                1 => Content::Object { owner: take_node(fields)?, id: Id(fields.u128()?.to_le_bytes()) },
                2 => Content::Link(take_bytes(fields)?),
                _ => return Err(Damage("a content is of no known kind")),
            };
            if matches!(&content, Content::Inline(bytes) if bytes.len() as u64 != len) {
                return Err(Damage("a file has another length than its bytes"));
            }
            if mode & !0o7777 != 0 || i64::try_from(len).is_err() {
                return Err(Damage("an attribute is too large"));
            }
            let shown = Shown { mode, uid, gid, len, modified_ns, identity, content };
            Ok(Record::Put { time, path, shown })
        }
        3 => Ok(Record::Removed { time: take_time(fields)?, path: take_path(fields)? }),
        _ => Err(Damage("a record is of no known kind")),
    }
}

fn take_bytes(fields: &mut Fields) -> Result<Vec<u8>, Damage> {
    let length = fields.varcount(1)?;
    Ok(fields.take(length)?.to_vec())
}

fn take_node(fields: &mut Fields) -> Result<String, Damage> {
    let node = fields.short_text()?;
    if is_node(&node) { Ok(node) } else { Err(Damage("a node's name is wrong")) }
}

/// A path in the tree: relative, and nothing in it leads upwards.
fn take_path(fields: &mut Fields) -> Result<PathBuf, Damage> {
    let bytes = take_bytes(fields)?;
    let path = Path::new(OsStr::from_bytes(&bytes));
    let plain = path.components().all(|component| matches!(component, Component::Normal(_)));
    // `components` overlooks `a//b`, `a/.` and a slash at the end.
    let same = path.components().collect::<PathBuf>().as_os_str() == path.as_os_str();
    if bytes.is_empty() || bytes.len() > MAX_PATH_BYTES || !plain || !same || bytes.contains(&0) {
        return Err(Damage("a path leads outside"));
    }
    Ok(path.to_path_buf())
}

#[cfg(test)]
mod tests;
