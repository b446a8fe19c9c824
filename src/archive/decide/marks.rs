//! The best files of a run: by statements of its files, by links, and by results in names. All are one kind of mark.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::archive::entry::{Says, State};
use crate::store::step_pattern::{self, NamedResult};

use super::File;

/// Who says that a file is the best of its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::archive) enum Mark {
    /// A file of the run, or a link.
    Named(Arc<Path>),
    /// Its own name, which shows the best result.
    Result,
}

/// The results that the name of a file shows.
#[derive(Debug)]
pub(in crate::archive) struct Results {
    list: Vec<NamedResult>,
    series: Vec<u8>,
    steps: Vec<u64>,
}

impl Results {
    /// None if the name shows none.
    pub(in crate::archive) fn of(path: &Path) -> Option<Results> {
        let list = step_pattern::results(path);
        let of = |list| (step_pattern::of_file(path), list);
        Some(list).filter(|list| !list.is_empty()).map(of).map(|(of, list)| Results {
            list,
            series: of.series,
            steps: of.steps,
        })
    }
}

/// The statements about a run, or about all of them, that are not those of files that are there.
#[derive(Debug, Default)]
pub(in crate::archive) struct Others {
    /// Links whose names ask for exact bytes: the link and its target, inside the tree.
    pub(in crate::archive) links: BTreeMap<Arc<Path>, Arc<Path>>,
    /// Statements of files that are gone. Each counts until another one of its series comes: the run's best does not
    /// become worse.
    orphans: Vec<(Arc<Path>, Arc<Says>)>,
}

impl Others {
    /// Those about a run.
    pub(in crate::archive) fn about(&self, run: &Path) -> Others {
        // A target is a file of the run, or a directory at, above or below the run's.
        let may_mark = |target: &Path| target.starts_with(run) || run.starts_with(target);
        let links = self.links.iter().filter(|(_, target)| may_mark(target));
        let links = links.map(|(link, target)| (Arc::clone(link), Arc::clone(target))).collect();
        Others { links, orphans: self.orphans.iter().filter(|(path, _)| path.starts_with(run)).cloned().collect() }
    }

    /// A file goes. If it made the last statement of its series, that one still counts.
    pub(in crate::archive) fn keep_of(&mut self, file: Option<&Arc<File>>) {
        let Some((path, says)) = file.and_then(|file| Some((&file.path, file.entry.says.as_ref()?))) else { return };
        self.orphans.retain(|(_, orphan)| orphan.series != says.series);
        self.orphans.push((Arc::clone(path), Arc::clone(says)));
    }

    /// Names moved: so did the statements of files that are gone.
    pub(in crate::archive) fn follow(&mut self, moved: impl Fn(&Path) -> PathBuf) {
        for (path, says) in &mut self.orphans {
            let to = moved(path);
            if to != **path {
                (*path, *says) = (to.as_path().into(), Arc::new(says.under(&to)));
            }
        }
    }
}

/// The marks of a run's files, by their places.
pub(super) fn marks(files: &[Arc<File>], others: &Others) -> BTreeMap<usize, Mark> {
    let mut marks: BTreeMap<usize, Mark> = best_results(files).map(|at| (at, Mark::Result)).collect();
    let named = named(files, others);
    if named.is_empty() {
        return marks;
    }
    for (at, file) in files.iter().enumerate() {
        // The path, and each directory above it.
        let path = file.path.as_os_str().as_encoded_bytes();
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at).chain([path.len()]);
        if let Some(by) = ends.rev().find_map(|end| named.get(&path[..end])) {
            marks.insert(at, Mark::Named(Arc::clone(by)));
        }
    }
    marks
}

/// The paths that count as named, each with the first statement that names it.
fn named<'a>(files: &'a [Arc<File>], others: &'a Others) -> HashMap<&'a [u8], &'a Arc<Path>> {
    let own = files.iter().filter_map(|file| Some((&file.path, file.entry.says.as_ref()?)));
    let mut newest: HashMap<&[u8], (&Arc<Path>, &Says)> = HashMap::new();
    for (path, says) in own {
        let last = newest.entry(&says.series).or_insert((path, says));
        if (says.modified_ns, path) > (last.1.modified_ns, last.0) {
            *last = (path, says);
        }
    }
    for (path, says) in &others.orphans {
        newest.entry(&says.series).or_insert((path, says));
    }
    let targets = newest.values().flat_map(|(by, says)| says.targets.iter().map(|target| (target.as_path(), *by)));
    let links = others.links.iter().map(|(link, target)| (&**target, link));
    let mut named: HashMap<&[u8], &Arc<Path>> = HashMap::new();
    for (target, by) in targets.chain(links) {
        let first = named.entry(target.as_os_str().as_encoded_bytes()).or_insert(by);
        *first = (*first).min(by);
    }
    named
}

/// The places of the files that show a best result, among the files of one series that may shrink. Of equal ones the
/// first counts.
fn best_results(files: &[Arc<File>]) -> impl Iterator<Item = usize> {
    type Key<'a> = (&'a [u8], usize, bool);
    type Best<'a> = (f64, &'a [u64], usize);
    let mut best: HashMap<Key<'_>, Best<'_>> = HashMap::new();
    for (at, file) in files.iter().enumerate() {
        // A file that is being written may never be whole.
        let is_whole = matches!(file.entry.state, State::Durable(_) | State::Sealed(_) | State::Archived(..));
        let Some(of) = file.results.as_ref().filter(|_| is_whole) else { continue };
        for (place, result) in of.list.iter().enumerate() {
            for lowest in [true, false].into_iter().filter(|lowest| result.lowest.is_none_or(|only| only == *lowest)) {
                let own = (if lowest { result.value } else { -result.value }, &*of.steps, at);
                let first = best.entry((&of.series, place, lowest)).or_insert(own);
                if own.0.total_cmp(&first.0).then(own.1.cmp(first.1)).is_lt() {
                    *first = own;
                }
            }
        }
    }
    best.into_values().map(|(.., at)| at).collect::<Vec<_>>().into_iter()
}
