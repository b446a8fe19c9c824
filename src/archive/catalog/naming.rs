//! Changes of the best of a run and of links, and their effect on files held for it.

use std::path::{Path, PathBuf};

use std::cmp::Ordering;

use crate::store::step_pattern::{self, NamedResult};

use super::named::Named;
use super::{Catalog, Entry, Held, Says, State};

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

    /// The result in a file's name, if it is the best among the files of its run that may shrink. Of equal ones the first
    /// counts.
    pub(in crate::archive) fn best_result(&self, path: &Path) -> Option<NamedResult> {
        let own = step_pattern::results(path);
        let numbers = step_pattern::of_file(path);
        // A file that is being written may never be whole.
        let is_whole =
            |entry: &Entry| matches!(entry.state, State::Durable(_) | State::Sealed(_) | State::Archived(..));
        let others = if own.is_empty() { Vec::new() } else { self.of_series(path, &numbers.series, is_whole) };
        let is_best = |at: usize, result: &NamedResult, lowest: bool| {
            others.iter().all(|other| {
                let Some(theirs) = step_pattern::results(other).into_iter().nth(at) else { return true };
                let order =
                    if lowest { theirs.value.total_cmp(&result.value) } else { result.value.total_cmp(&theirs.value) };
                let is_later = || step_pattern::steps(other) > numbers.steps;
                order == Ordering::Greater || order == Ordering::Equal && is_later()
            })
        };
        own.into_iter().enumerate().find_map(|(at, result)| {
            let directions = result.lowest.map_or(vec![true, false], |lowest| vec![lowest]);
            directions.into_iter().any(|lowest| is_best(at, &result, lowest)).then_some(result)
        })
    }

    /// A file was sealed: those that were held for their result are judged anew.
    pub(in crate::archive) fn result_sealed(&mut self, path: &Path) {
        if step_pattern::results(path).is_empty() {
            return;
        }
        let series = step_pattern::of_file(path).series;
        let held = self.of_series(path, &series, |entry| entry.held == Some(Held::Result));
        held.iter().for_each(|other| self.files.edit(other, |entry| entry.held = None));
    }

    /// The other files of a series for which `holds` is true. Looks at each file below the run's directory, most by its name's
    /// depth and last part alone.
    fn of_series(&self, path: &Path, series: &[u8], holds: impl Fn(&Entry) -> bool) -> Vec<PathBuf> {
        let run = step_pattern::group(path).unwrap_or_else(|| path.to_path_buf());
        let run = run.parent().unwrap_or(Path::new("")).to_path_buf();
        let depth = path.components().count();
        let is_beside = |other: &Path| other.parent() == path.parent() || other.file_name() == path.file_name();
        let is_other = |(other, entry): &(&Path, &Entry)| {
            *other != path
                && holds(entry)
                && is_beside(other)
                && other.components().count() == depth
                && step_pattern::of_file(other).series == series
        };
        self.files.below(&run).filter(is_other).map(|(other, _)| other.to_path_buf()).collect()
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

    /// Changes the statements. Files that are no longer named go on as usual. `change` returns links to read
    /// again.
    pub(super) fn naming<T: IntoIterator<Item = PathBuf>>(&mut self, change: impl FnOnce(&mut Named) -> T) {
        let links = change(&mut self.named);
        self.links.extend(links);
        for path in self.named.take_dropped() {
            let named = &self.named;
            let is_free = |path: &Path, entry: &Entry| entry.held == Some(Held::Best) && named.by(path).is_none();
            self.files.edit_below(&path, is_free, |entry| entry.held = None);
        }
    }
}
