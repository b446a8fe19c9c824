//! Names that move while somebody lists the tree: what moved may be in no part of the list.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;

use super::Archive;

/// New names that are remembered. A caller that missed more lists the whole tree again.
const REMEMBERED: usize = 256;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Moves {
    /// Moves that have begun and not ended.
    under_way: usize,
    /// Moves that have ended.
    ended: u64,
    /// The new names of the last of these.
    to: VecDeque<PathBuf>,
}

impl Moves {
    fn end(&mut self, to: PathBuf) {
        self.under_way -= 1;
        self.ended += 1;
        self.to.push_back(to);
        if self.to.len() > REMEMBERED {
            self.to.pop_front();
        }
    }

    /// The new names since `ended` moves had ended. `None` if one is under way, or if they are too many.
    fn since(&self, ended: u64) -> Option<Vec<PathBuf>> {
        let count = usize::try_from(self.ended - ended).ok().filter(|count| *count <= self.to.len())?;
        (self.under_way == 0).then(|| self.to.iter().skip(self.to.len() - count).cloned().collect())
    }
}

/// A move of a name that is under way until this is dropped.
pub struct Moving<'a> {
    archive: &'a Archive,
    to: PathBuf,
}

impl Drop for Moving<'_> {
    fn drop(&mut self) {
        let mut moves = self.archive.moves.lock().unwrap_or_else(PoisonError::into_inner);
        moves.end(std::mem::take(&mut self.to));
    }
}

impl Archive {
    /// A file or directory gets a new name as long as the result exists.
    pub fn moving(&self, to: &Path) -> Moving<'_> {
        self.moves.lock().unwrap_or_else(PoisonError::into_inner).under_way += 1;
        Moving { archive: self, to: to.to_path_buf() }
    }

    /// How many moves have ended.
    pub(super) fn moves(&self) -> u64 {
        self.moves.lock().unwrap_or_else(PoisonError::into_inner).ended
    }

    /// The new names since `moves` moves had ended. `None` if one is under way, or if they are too many.
    pub(super) fn moved_since(&self, moves: u64) -> Option<Vec<PathBuf>> {
        self.moves.lock().unwrap_or_else(PoisonError::into_inner).since(moves)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_moves_are_remembered() {
        let mut moves = Moves { under_way: 2, ..Moves::default() };
        moves.end("a".into());
        assert_eq!(moves.since(0), None, "one is under way");
        moves.end("b".into());
        assert_eq!(moves.since(0).unwrap(), [Path::new("a"), Path::new("b")]);
        assert_eq!((moves.since(1).unwrap().len(), moves.since(2).unwrap().len()), (1, 0));
        for _ in 0..REMEMBERED {
            moves.under_way += 1;
            moves.end("c".into());
        }
        assert_eq!((moves.since(1), moves.since(2).map(|all| all.len())), (None, Some(REMEMBERED)));
    }
}
