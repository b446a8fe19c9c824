//! Inode numbers as programs see them.
//!
//! A file shows its number in the store until a release or recall replaces it by another file. From then on stepfs
//! keeps its shown number for it, and a later file with that number in the store shows a fresh one. So `st_ino` never
//! changes while mounted, and no two files share one. The kernel's node ids are these numbers too.

use std::collections::{HashMap, HashSet};

use crate::archive::FileId;

/// Node id of the mount's root, fixed by the protocol.
pub(super) const ROOT: u64 = 1;

/// First of the numbers that no store's file system hands out (ext4 has 32 bits, XFS and Btrfs stay below 2^60).
const FRESH: u64 = 1 << 62;

/// Which number a file of the store shows.
#[derive(Debug)]
pub(super) struct Numbers {
    dev: u64,
    shown: HashMap<FileId, u64>,
    taken: HashSet<u64>,
    next: u64,
}

impl Numbers {
    /// For a tree whose root directory is `root`.
    pub(super) fn new(root: FileId) -> Self {
        let mut numbers = Self { dev: root.dev, shown: HashMap::new(), taken: HashSet::new(), next: FRESH };
        numbers.show(root, ROOT);
        numbers
    }

    fn show(&mut self, file: FileId, number: u64) {
        self.shown.insert(file, number);
        self.taken.insert(number);
    }

    /// The number of a file.
    pub(super) fn of(&mut self, file: FileId) -> u64 {
        if let Some(&number) = self.shown.get(&file) {
            return number;
        }
        let usable = file.dev == self.dev && file.ino > ROOT && file.ino < FRESH;
        if usable && !self.taken.contains(&file.ino) {
            return file.ino;
        }
        self.renew(file)
    }

    /// Another number for a file that got the number of one that is gone.
    pub(super) fn renew(&mut self, file: FileId) -> u64 {
        let number = self.next;
        self.next += 1;
        self.gone(file);
        self.show(file, number);
        number
    }

    /// `new` took the place of `old` and shows its number.
    pub(super) fn replaced(&mut self, old: FileId, new: FileId) {
        let number = self.of(old);
        self.gone(old);
        self.gone(new);
        self.show(new, number);
    }

    /// The file does not exist any more.
    pub(super) fn gone(&mut self, file: FileId) {
        if let Some(number) = self.shown.remove(&file) {
            self.taken.remove(&number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(ino: u64) -> FileId {
        FileId { dev: 7, ino }
    }

    #[test]
    fn a_number_stays_with_its_file_and_is_never_shared() {
        let mut numbers = Numbers::new(file(100));
        assert_eq!(numbers.of(file(100)), ROOT);
        assert_eq!(numbers.of(file(11)), 11);
        numbers.replaced(file(11), file(12));
        assert_eq!(numbers.of(file(12)), 11);
        // The store's file system gives 11 to a new file.
        let newcomer = numbers.of(file(11));
        assert!(newcomer >= FRESH);
        assert_eq!(numbers.of(file(11)), newcomer);
        // Back and forth.
        numbers.replaced(file(12), file(13));
        assert_eq!(numbers.of(file(13)), 11);
        numbers.gone(file(13));
        numbers.gone(file(11));
        assert_eq!(numbers.of(file(11)), 11);
        assert_eq!(numbers.shown.len(), 1);
        assert_eq!(numbers.taken.len(), 1);
    }

    #[test]
    fn odd_numbers_are_replaced() {
        let mut numbers = Numbers::new(file(100));
        for odd in [file(0), file(1), file(FRESH), file(u64::MAX), FileId { dev: 8, ino: 50 }] {
            assert!(numbers.of(odd) >= FRESH);
        }
    }
}
