//! The pickle machine's memo.

use std::collections::HashMap;

use super::Item;

/// Picklers count memo entries up from 0, but nothing makes them.
#[derive(Default)]
pub(super) struct Memo {
    /// Entries 0, 1, ...
    dense: Vec<Item>,
    /// Those beyond a gap.
    sparse: HashMap<u64, Item>,
}

impl Memo {
    /// The entry, if it was made.
    pub(super) fn get(&self, key: u64) -> Option<Item> {
        let dense = usize::try_from(key).ok().and_then(|k| self.dense.get(k));
        dense.or_else(|| self.sparse.get(&key)).copied()
    }

    /// Sets an entry; whether it is new.
    pub(super) fn insert(&mut self, key: u64, item: Item) -> bool {
        let len = self.dense.len() as u64;
        if key < len {
            self.dense[key as usize] = item;
            false
        } else if key == len {
            self.dense.push(item);
            // The gap before it has closed.
            self.sparse.is_empty() || self.sparse.remove(&key).is_none()
        } else {
            self.sparse.insert(key, item).is_none()
        }
    }

    /// Number of entries.
    pub(super) fn len(&self) -> u64 {
        (self.dense.len() + self.sparse.len()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memo_is_a_map_whatever_the_order() {
        let mut memo = Memo::default();
        let keys = [2, 0, 1, 3, u64::MAX, 2, 4, 0];
        let new: Vec<bool> = (0..8).map(|i| memo.insert(keys[i], Item::Int(i as i64))).collect();
        assert_eq!(new, [true, true, true, true, true, false, true, false]);
        assert_eq!(memo.len(), 6);
        let got = [0, 1, 2, 3, 4, 5, u64::MAX].map(|k| memo.get(k));
        let want = [Some(7), Some(2), Some(5), Some(3), Some(6), None, Some(4)];
        assert_eq!(got, want.map(|w| w.map(Item::Int)));
    }
}
