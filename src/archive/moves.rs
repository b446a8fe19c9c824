//! Names that move while somebody lists the tree: what moved may be in no part of the list.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use crate::sync::{Mutex, MutexGuard};

/// New names that are remembered. A caller that missed more lists the whole tree again.
const REMEMBERED: usize = 256;

/// See the module.
#[derive(Debug, Default)]
pub struct Moves {
    /// Taken for moments, last of all locks.
    inside: Mutex<Inside>,
}

#[derive(Debug, Default)]
struct Inside {
    /// Moves that have begun and not ended.
    under_way: usize,
    /// Moves that have ended.
    ended: u64,
    /// The new names of the last of these.
    to: VecDeque<PathBuf>,
}

impl Moves {
    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A file or directory gets a new name as long as the result exists.
    pub fn begin(&self, to: &Path) -> Moving<'_> {
        self.inside().under_way += 1;
        Moving { moves: self, to: to.to_path_buf() }
    }

    /// How many moves have ended.
    pub(super) fn ended(&self) -> u64 {
        self.inside().ended
    }

    /// The new names since `ended` moves had ended. `None` if one is under way, or if they are too many.
    pub(super) fn since(&self, ended: u64) -> Option<Vec<PathBuf>> {
        let inside = self.inside();
        let count = usize::try_from(inside.ended - ended).ok().filter(|count| *count <= inside.to.len())?;
        (inside.under_way == 0).then(|| inside.to.iter().skip(inside.to.len() - count).cloned().collect())
    }
}

/// A move of a name that is under way until this is dropped.
#[derive(Debug)]
pub struct Moving<'a> {
    moves: &'a Moves,
    to: PathBuf,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        let mut inside = self.moves.inside();
        inside.under_way -= 1;
        inside.ended += 1;
        inside.to.push_back(std::mem::take(&mut self.to));
        if inside.to.len() > REMEMBERED {
            inside.to.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_moves_are_remembered() {
        let moves = Moves::default();
        let (a, b) = (moves.begin(Path::new("a")), moves.begin(Path::new("b")));
        drop(a);
        assert_eq!(moves.since(0), None, "one is under way");
        drop(b);
        assert_eq!(moves.since(0).unwrap(), [Path::new("a"), Path::new("b")]);
        assert_eq!((moves.since(1).unwrap().len(), moves.since(2).unwrap().len()), (1, 0));
        (0..REMEMBERED).for_each(|_| drop(moves.begin(Path::new("c"))));
        assert_eq!((moves.since(1), moves.since(2).map(|all| all.len())), (None, Some(REMEMBERED)));
    }
}
