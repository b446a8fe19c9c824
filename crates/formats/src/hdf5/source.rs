//! The bytes of an HDF5 file, read within bounds.

use std::collections::HashSet;
use std::ops::Range;

use super::super::ReadAt;
use super::super::read::{Fail, bad, cut_short, refuse_if, u16_at, u32_at, u64_at};

/// Metadata read of one file, counted with a fixed cost for each block. Links, paths and chunks cost some of it, too.
const MAX_METADATA: u64 = 64 << 20;
/// A block's cost beside its bytes. Without it tiny blocks could take more time and memory than large ones.
const BLOCK: u64 = 64;

/// HDF5's undefined address.
pub(super) const NOWHERE: u64 = u64::MAX;

/// First bytes of the format.
pub(super) const MAGIC: [u8; 8] = *b"\x89HDF\r\n\x1a\n";

const BROKEN: &str = "HDF5: the superblock is damaged, or of a kind that stepfs does not know";

/// An HDF5 file, alone or in a record of a zip. Addresses count from its start.
pub(super) struct Source<'a> {
    src: &'a dyn ReadAt,
    /// Where it stands.
    range: Range<u64>,
    /// Bytes of metadata that may still be read.
    left: u64,
    /// Metadata that was read, as addresses.
    blocks: Vec<Range<u64>>,
    /// Nodes of trees that were read: none may be reached twice.
    nodes: HashSet<u64>,
}

impl<'a> Source<'a> {
    /// The file in this range, and the address of the root group's object header.
    pub(super) fn open(src: &'a dyn ReadAt, range: Range<u64>) -> Result<(Self, u64), Fail> {
        let mut source = Source { src, range, left: MAX_METADATA, blocks: Vec::new(), nodes: HashSet::new() };
        let size = source.range.end - source.range.start;
        let start = source.peek_most(0, 16)?;
        refuse_if(start.len() < 16 || start[..8] != MAGIC, BROKEN)?;
        let version = start[8];
        // Sizes of offsets and lengths.
        let (sizes, len) = match version {
            0 => ([start[13], start[14]], 96),
            1 => ([start[13], start[14]], 100),
            2 | 3 => ([start[9], start[10]], 48),
            _ => return bad(BROKEN),
        };
        refuse_if(sizes != [8, 8], "HDF5: addresses or lengths of another size than 8 bytes")?;
        let block = source.read(0, len)?;
        let (base, end, driver, root) = if version < 2 {
            let at = len as usize - 72;
            (u64_at(&block, at), u64_at(&block, at + 16), u64_at(&block, at + 24), u64_at(&block, at + 40))
        } else {
            refuse_if(u32_at(&block, 44) != lookup3(&block[..44]), "HDF5: the superblock's checksum is wrong")?;
            // A program that writes, or that died while it wrote.
            if block[11] != 0 {
                return cut_short("HDF5: not closed by its writer");
            }
            (u64_at(&block, 12), u64_at(&block, 28), NOWHERE, u64_at(&block, 36))
        };
        refuse_if(base != 0 || driver != NOWHERE, "HDF5: split into several files, or with a user block")?;
        // Closing a file cuts it to this length. Before that, some datasets may lack their content.
        if end != size {
            return cut_short("HDF5: cut short, or not closed by its writer");
        }
        Ok((source, root))
    }

    /// Counts a cost that is no block's.
    pub(super) fn spend(&mut self, cost: u64) -> Result<(), Fail> {
        self.left = self.left.checked_sub(cost).ok_or("HDF5: more than 64 MiB of metadata")?;
        Ok(())
    }

    /// A block of metadata.
    pub(super) fn read(&mut self, address: u64, len: u64) -> Result<Vec<u8>, Fail> {
        let bytes = self.peek(address, len)?;
        self.blocks.extend(self.place(address, len));
        Ok(bytes)
    }

    /// Reads bytes without counting them as metadata yet.
    fn peek(&mut self, address: u64, len: u64) -> Result<Vec<u8>, Fail> {
        let place = self.place(address, len).ok_or("HDF5: metadata beyond the end of the file")?;
        self.spend(len.saturating_add(BLOCK))?;
        let mut bytes = vec![0; len as usize];
        self.src.read_exact_at(&mut bytes, place.start)?;
        Ok(bytes)
    }

    /// The bytes from an address on, at most so many.
    pub(super) fn peek_most(&mut self, address: u64, len: u64) -> Result<Vec<u8>, Fail> {
        let size = self.range.end - self.range.start;
        self.peek(address, len.min(size.saturating_sub(address)))
    }

    /// A block that ends with its checksum.
    pub(super) fn read_checked(&mut self, address: u64, len: u64) -> Result<Vec<u8>, Fail> {
        let mut block = self.read(address, len)?;
        match block.len().checked_sub(4) {
            Some(end) if u32_at(&block, end) == lookup3(&block[..end]) => block.truncate(end),
            _ => return bad("HDF5: a checksum of metadata is wrong"),
        }
        Ok(block)
    }

    /// Enters a node of a tree. A tree that comes back to a node is damaged.
    pub(super) fn enter(&mut self, address: u64) -> Result<(), Fail> {
        refuse_if(!self.nodes.insert(address), "HDF5: a tree comes back to itself")?;
        self.spend(BLOCK)
    }

    /// A node of a tree of this kind: its level, and its entries, each with a key of so many bytes and the address of a
    /// child. `level`: the one that its parent requires. Levels descend, so that the tree ends.
    pub(super) fn node(
        &mut self,
        address: u64,
        kind: u8,
        level: Option<u8>,
        key: usize,
    ) -> Result<(u8, Vec<u8>), Fail> {
        self.enter(address)?;
        let head = self.read(address, 24)?;
        let own = head[5];
        // A level more than 31 would need more nodes than any file has.
        if !head.starts_with(b"TREE") || head[4] != kind || own > 31 || level.is_some_and(|level| level != own) {
            return bad("HDF5: a tree is damaged");
        }
        let entries = usize::from(u16_at(&head, 6)) * (key + 8);
        let mut body = self.read(address.saturating_add(24), (entries + key) as u64)?;
        body.truncate(entries);
        Ok((own, body))
    }

    /// Where these bytes are in the whole file, if they are in it.
    pub(super) fn place(&self, address: u64, len: u64) -> Option<Range<u64>> {
        let start = self.range.start.checked_add(address)?;
        let end = start.checked_add(len)?;
        (address != NOWHERE && end <= self.range.end).then_some(start..end)
    }

    /// The metadata that was read, in ascending order, as ranges of the whole file.
    pub(super) fn into_blocks(mut self) -> Vec<Range<u64>> {
        self.blocks.sort_by_key(|block| block.start);
        self.blocks
    }
}

/// The checksum of metadata: Jenkins' lookup3.
fn lookup3(bytes: &[u8]) -> u32 {
    let [mut a, mut b, mut c] = [0xdead_beef_u32.wrapping_add(bytes.len() as u32); 3];
    let last = bytes.len().saturating_sub(1) / 12;
    for (number, block) in bytes.chunks(12).enumerate() {
        let mut words = [0; 12];
        words[..block.len()].copy_from_slice(block);
        let [x, y, z] = [0, 4, 8].map(|at| u32_at(&words, at));
        (a, b, c) = (a.wrapping_add(x), b.wrapping_add(y), c.wrapping_add(z));
        if number == last {
            return finish(a, b, c);
        }
        (a, b, c) = mix(a, b, c);
    }
    c
}

fn mix(mut a: u32, mut b: u32, mut c: u32) -> (u32, u32, u32) {
    for [first, second, third] in [[4, 6, 8], [16, 19, 4]] {
        a = a.wrapping_sub(c) ^ c.rotate_left(first);
        c = c.wrapping_add(b);
        b = b.wrapping_sub(a) ^ a.rotate_left(second);
        a = a.wrapping_add(c);
        c = c.wrapping_sub(b) ^ b.rotate_left(third);
        b = b.wrapping_add(a);
    }
    (a, b, c)
}

fn finish(mut a: u32, mut b: u32, mut c: u32) -> u32 {
    c = (c ^ b).wrapping_sub(b.rotate_left(14));
    a = (a ^ c).wrapping_sub(c.rotate_left(11));
    b = (b ^ a).wrapping_sub(a.rotate_left(25));
    c = (c ^ b).wrapping_sub(b.rotate_left(16));
    a = (a ^ c).wrapping_sub(c.rotate_left(4));
    b = (b ^ a).wrapping_sub(a.rotate_left(14));
    (c ^ b).wrapping_sub(b.rotate_left(24))
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_is_jenkins_own() {
        assert_eq!(super::lookup3(b""), 0xdead_beef);
        assert_eq!(super::lookup3(b"Four score and seven years ago"), 0x1777_0551);
    }
}
