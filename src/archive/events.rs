//! Events of the file system, which makes a note of each while it holds its own lock ([`super::shared`]).

use std::path::Path;
use std::time::Instant;

use super::Archive;
use super::catalog::Catalog;
use super::mirror::touch;

impl Archive {
    /// A handle that can write was opened (or the file was created or truncated): queued steps for the file are void.
    pub fn opened_for_writing(&self, path: &Path) {
        let now = Instant::now();
        self.tell(path, move |catalog, path| catalog.opened_for_writing(path, now));
    }

    /// A released file is resident again, with its bytes. `stays`: a user wants it so; else a program opens it for writing.
    pub fn recalled(&self, path: &Path, stays: bool) {
        self.tell(path, move |catalog, path| catalog.recalled(path, stays));
    }

    /// The pin of a file or directory is gone.
    pub fn unpinned(&self, path: &Path) {
        self.tell(path, |catalog, path| {
            catalog.unpinned(path);
            touch(catalog, path);
        });
    }

    /// Whether a file's bytes are known to be durable, as they are or as a stub.
    pub fn is_durable(&self, path: &Path) -> bool {
        self.shared.catalog().get(path).is_some_and(|entry| entry.state.is_durable())
    }

    /// The profile of a file or a directory was set or removed: steps under way are void.
    pub fn profile_changed(&self, path: &Path) {
        self.tell(path, |catalog, path| {
            catalog.profile_changed(path);
            touch(catalog, path);
        });
    }

    /// The last handle of a file that was written is gone. It waits for no others.
    pub fn sealed(&self, path: &Path) {
        self.written(path, u64::MAX);
    }

    /// The last handle of a file that was written is gone, and the file has so many bytes.
    pub fn written(&self, path: &Path, len: u64) {
        let written = Some((len, Instant::now()));
        self.tell(path, move |catalog, path| catalog.closed(path, written));
        self.reserve.saw(if len == u64::MAX { 0 } else { len });
    }

    /// The last handle of a file that was only read is gone: a release that found it busy may go on.
    pub fn closed(&self, path: &Path) {
        self.tell(path, |catalog, path| catalog.closed(path, None));
    }

    /// A program set the modification time of a file, as `cp -p` and `rsync` do after the last close.
    pub fn time_set(&self, path: &Path) {
        self.tell(path, Catalog::time_set);
    }

    /// A file or directory has a new name. The file that had that name is gone.
    pub fn renamed(&self, from: &Path, to: &Path) {
        let (from, to) = (from.to_path_buf(), to.to_path_buf());
        self.shared.note(move |catalog| {
            catalog.renamed(&from, &to);
            [&from, &to].iter().for_each(|path| touch(catalog, path));
        });
    }

    /// Two names were exchanged (files or directories).
    pub fn exchanged(&self, a: &Path, b: &Path) {
        let (a, b) = (a.to_path_buf(), b.to_path_buf());
        self.shared.note(move |catalog| {
            catalog.exchanged(&a, &b);
            [&a, &b].iter().for_each(|path| touch(catalog, path));
        });
    }

    /// A name came or went, or what is at and below it has other attributes: the mirror gets them.
    pub fn touched(&self, path: &Path) {
        self.tell(path, touch);
    }

    /// A name of a file is gone (rmdir needs no note).
    pub fn removed(&self, path: &Path) {
        self.tell(path, Catalog::removed);
    }

    /// A link was made or removed.
    pub fn link_changed(&self, path: &Path) {
        self.tell(path, |catalog, path| {
            catalog.link_changed(path);
            touch(catalog, path);
        });
    }

    /// A file got a second name.
    pub fn linked(&self, from: &Path, to: &Path) {
        let (from, to) = (from.to_path_buf(), to.to_path_buf());
        self.shared.note(move |catalog| catalog.linked(&from, &to));
    }

    /// Notes an event of one path.
    pub(super) fn tell(&self, path: &Path, event: impl FnOnce(&mut Catalog, &Path) + Send + 'static) {
        let path = path.to_path_buf();
        self.shared.note(move |catalog| event(catalog, &path));
    }
}
