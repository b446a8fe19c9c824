//! Changes of the best of a run and of links, and their effect on files held for it.

use std::path::{Path, PathBuf};

use super::named::Named;
use super::{Catalog, Entry, Held, Says};

impl Catalog {
    /// Notes the statement of a file or link, or that it has none. Returns the paths that are named only since.
    pub(in crate::archive) fn says(&mut self, path: &Path, said: Option<(Says, i64)>) -> Vec<PathBuf> {
        let mut new = Vec::new();
        self.naming(|named| {
            new = named.set(path, said);
            None
        });
        new
    }

    /// The file or link that names the file at `path`, or a directory above it, as the best of a run.
    pub(in crate::archive) fn named_best_by(&self, path: &Path) -> Option<&Path> {
        self.named.by(path)
    }

    /// A link was made, replaced or removed at a path.
    pub(in crate::archive) fn link_changed(&mut self, path: &Path) {
        self.look_at(path);
    }

    /// Looks for a link at a path, and anew at all known ones, because they may lead through it.
    pub(super) fn look_at(&mut self, path: &Path) {
        self.links.insert(path.to_path_buf());
        self.links.extend(self.named.links().cloned());
    }

    /// Whether the file or link at a path names something.
    pub(in crate::archive) fn has_said(&self, path: &Path) -> bool {
        self.named.has_said(path)
    }

    /// Takes a name at which a link may have come or gone. The caller answers with [`Catalog::link_read`].
    pub(in crate::archive) fn claim_link(&mut self) -> Option<PathBuf> {
        let path = self.links.pop_first()?;
        self.links_being_read += 1;
        Some(path)
    }

    /// The link at a claimed name was read.
    pub(in crate::archive) fn link_read(&mut self) {
        self.links_being_read -= 1;
    }

    /// Whether there are names to look at for links.
    pub(in crate::archive) fn has_links(&self) -> bool {
        !self.links.is_empty() || self.links_being_read > 0
    }

    /// Whether a closed file or a new link was not yet read for the best of a run.
    pub(in crate::archive) fn may_learn(&self) -> bool {
        self.has_links() || self.entries.index().may_learn()
    }

    /// Changes the statements. Files that are no longer named go on as usual. `change` returns links to read
    /// again.
    pub(super) fn naming<T: IntoIterator<Item = PathBuf>>(&mut self, change: impl FnOnce(&mut Named) -> T) {
        let links = change(&mut self.named);
        self.links.extend(links);
        for path in self.named.take_dropped() {
            let named = &self.named;
            let is_free = |path: &Path, entry: &Entry| entry.held == Some(Held::Best) && named.by(path).is_none();
            self.entries.edit_below(&path, is_free, |entry| entry.held = None);
        }
    }
}
