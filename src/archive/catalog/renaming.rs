//! Files that get other names, or one more.

use std::path::Path;
use std::sync::Arc;

use crate::store::Objects;
use formats::is_index;

use super::{Catalog, Entry, Held, State, unname};

impl Catalog {
    pub(in crate::archive) fn linked(&mut self, from: &Path, to: &Path, objects: &Objects) {
        if let Some(mut entry) = self.files.get(from).cloned() {
            // Lineage and profile follow from the name: what is known of the other one does not hold for this.
            entry.take_name(to);
            (entry.version, entry.sequence) = (self.number(), self.number());
            entry.busy = false;
            // The other directory may not be pinned, and another name is the best of its run.
            entry.held = entry.held.filter(|held| *held == Held::Recalled);
            let released = if let State::Released(id) = entry.state { Some(id) } else { None };
            released.into_iter().chain(entry.keeps).for_each(|id| objects.name(id));
            self.files.insert(to, entry);
            self.may_finish(to);
        }
    }

    /// A file, or a directory with its content, has a new name. The file that had that name is gone.
    pub(in crate::archive) fn renamed(&mut self, from: &Path, to: &Path, objects: &Objects) {
        self.naming(|named| {
            let (moved, _gone) = (named.take_below(from), named.take_below(to));
            named.insert(moved, from, to)
        });
        // It may be a link, contain links, or be a link's target.
        self.look_at(to);
        let moved = self.files.take(from);
        for (_, old) in self.files.take(to) {
            unname(&old, objects);
        }
        self.put(moved, from, to, objects);
        self.may_unfinish(from, objects);
        if is_index(to) {
            // It took the place of another one.
            self.may_unfinish(to, objects);
        }
        self.may_finish(to);
    }

    pub(in crate::archive) fn exchanged(&mut self, a: &Path, b: &Path, objects: &Objects) {
        self.naming(|named| {
            let (at_a, at_b) = (named.take_below(a), named.take_below(b));
            let mut links = named.insert(at_a, a, b);
            links.extend(named.insert(at_b, b, a));
            links
        });
        [a, b].iter().for_each(|path| self.look_at(path));
        let (at_a, at_b) = (self.files.take(a), self.files.take(b));
        self.put(at_a, a, b, objects);
        self.put(at_b, b, a, objects);
        [a, b].iter().for_each(|path| self.may_unfinish(path, objects));
        [a, b].iter().for_each(|path| self.may_finish(path));
    }

    fn put(&mut self, entries: Vec<(Arc<Path>, Entry)>, from: &Path, to: &Path, objects: &Objects) {
        for (path, mut entry) in entries {
            let path = match path.strip_prefix(from) {
                Ok(rest) if rest.as_os_str().is_empty() => to.to_path_buf(),
                Ok(rest) => to.join(rest),
                Err(_) => path.to_path_buf(),
            };
            // Lineage and profile follow from the name. They must be found again, and steps under way are
            // void. So is an object made under the old name: the new one may ask for an exact file.
            entry.version = self.number();
            if let State::Archived(_, id) = entry.state {
                objects.unname(id);
            }
            if entry.take_name(&path) {
                entry.forget_failure();
            }
            // It may have left the directory that was pinned, and another name is the best of its run.
            entry.held = entry.held.filter(|held| *held == Held::Recalled);
            entry.busy = false;
            self.files.insert(&path, entry);
        }
    }
}
