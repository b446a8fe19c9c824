//! Brings what a remote has into a store that is not mounted, for commands. There is no archive.

use std::collections::{BTreeMap, HashSet};
use std::fs::Metadata;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::fetch::Fetcher;
use super::journal::Content;
use super::local::{Ahead, Found, Local, Shape, walk};
use super::place::{Place, Result};
use super::reader::{Reader, lock};
use super::shared::{Settings, Shared};
use super::show::take_all;
use super::tree;
use super::view::View;
use crate::store::durable::CrashPoint;
use crate::store::{Elsewhere, Hold, Id, Newest, Objects, Store, Wait, beneath, in_parallel};

/// How far a copy has come.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    /// So many bytes are to come.
    Total(u64),
    /// So many more came.
    Came(u64),
}

/// Where a copy comes from, and who follows it.
pub struct Origin<'a> {
    /// The remote.
    pub place: &'a Arc<dyn Place>,
    /// Its URL, and the store's node there. The store remembers what it shows of this remote.
    pub name: (&'a str, &'a str),
    /// Is told each step; false ends the copy after the bytes under way.
    pub watch: Arc<dyn Fn(Step) -> bool + Send + Sync>,
}

struct Copy {
    store: Store,
    objects: Arc<Objects>,
}

/// The names that could not be copied.
#[derive(Debug, Default)]
pub struct Missing {
    /// Names that were asked for and that the remote has.
    pub found: usize,
    /// Names that are missing, each with the reason.
    pub names: BTreeMap<PathBuf, String>,
    /// Nodes that can be read only in part, each with the reason. They may have more names.
    pub nodes: Vec<String>,
}

/// Shows all names of a remote in a store, and brings the objects of those at and below `wanted`. Files that are not of
/// this remote stay. Killed anywhere, it goes on where it was: objects that are here do not come again. Returns what is
/// missing of the wanted names.
///
/// # Errors
/// The remote does not answer, or refuses; device errors; `watch` ended it.
pub fn copy(from: &Origin, store: Store, wanted: &Path) -> Result<Missing> {
    let Origin { place, name: (url, node), ref watch } = *from;
    let objects = Objects::load(&store.objects(), |_, _| {})?;
    let copy = Copy { objects: Arc::new(objects), store };
    let settings = Settings {
        url: url.to_string(),
        node: node.to_string(),
        newest: Newest::None,
        wait: Wait::Nothing,
        bandwidth: None,
        refresh: Duration::ZERO,
        grace: Duration::ZERO,
    };
    let shared = Shared::new(settings, tree::load(&copy.store, url));
    Reader::refresh(place.as_ref(), &shared.view)?;
    let mut missing = Missing { names: take_all(&copy, &shared)?, ..Missing::default() };
    missing.names.retain(|path, _| path.starts_with(wanted));
    tree::save(&copy.store, url, node, &shared.prune())?;
    let files = walk(&copy)?.files;
    let (needed, total) = needed_by(&lock(&shared.view), (node, wanted), &files, &copy.objects, &mut missing);
    watch(Step::Total(total));
    let watch = Arc::clone(watch);
    let fetcher = Fetcher::new(Arc::clone(place), Arc::clone(&shared.view), copy.store.tmp());
    let fetcher = fetcher.watched(Arc::new(move |bytes| watch(Step::Came(bytes))));
    // After an error that is not of one name alone, no other name is tried.
    let ended = AtomicBool::new(false);
    let brought = in_parallel(&needed, |(path, id)| {
        if ended.load(Ordering::Relaxed) {
            return Ok(None);
        }
        match fetcher.bring(&copy.objects, *id) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => {
                Ok(Some((path.clone(), error.to_string())))
            }
            brought => brought.map(|()| None).inspect_err(|_| ended.store(true, Ordering::Relaxed)),
        }
    });
    for failed in brought {
        missing.names.extend(failed?);
    }
    Ok(missing)
}

/// The objects of all names at and below `wanted` that the tree shows, and the number of bytes that are to come. What
/// is missing must not pass for what never was.
fn needed_by(
    view: &View,
    (node, wanted): (&str, &Path),
    files: &BTreeMap<PathBuf, Found>,
    objects: &Objects,
    missing: &mut Missing,
) -> (Vec<(PathBuf, Id)>, u64) {
    let broken = |(node, of): (&String, &super::view::Node)| Some(format!("node {node}: {}", of.broken.as_ref()?));
    missing.nodes = view.nodes().iter().filter_map(broken).collect();
    let (mut needed, mut total, mut seen) = (Vec::new(), 0, HashSet::new());
    for (path, stamp, shown) in view.files().filter(|(path, ..)| path.starts_with(wanted)) {
        missing.found += 1;
        let Content::Object { owner, id } = &shown.content else { continue };
        match view.chain(owner, *id) {
            Some(chain) if files.get(path).is_some_and(|found| found.came) => {
                let away = chain.into_iter().filter(|of| seen.insert(of.id) && objects.get(of.id).is_none());
                total = away.fold(total, |total: u64, encoding| total.saturating_add(encoding.len));
                needed.push((path.clone(), *id));
            }
            // This store's own file.
            Some(_) if stamp.node == node && files.contains_key(path) => {}
            Some(_) => {
                let why = match files.contains_key(path) {
                    true => "another file of this store has its place",
                    false => "it was removed in this store, and the next push removes it there",
                };
                missing.names.insert(path.clone(), why.into());
            }
            None => drop(missing.names.insert(path.clone(), "an object of it is missing on the remote".into())),
        }
    }
    (needed, total)
}

impl Local for Copy {
    fn store(&self) -> &Store {
        &self.store
    }

    fn objects(&self) -> &Arc<Objects> {
        &self.objects
    }

    fn shape(&self, _: &Path) -> Shape {
        Shape::Whole
    }

    fn ahead(&self, _: &Path) -> io::Result<Ahead> {
        Ok(Ahead::Later)
    }

    fn let_go(&self, _: Hold) {}

    fn changes(&self) -> u64 {
        0
    }

    fn was_looked_at(&self) -> bool {
        false
    }

    fn appear(&self, _: &Path, object: Option<Id>, make: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<bool> {
        let made = make()?;
        object.filter(|_| made).into_iter().for_each(|id| self.objects.name(id));
        Ok(made)
    }

    // The store's lock keeps other processes away, so no file changes meanwhile.
    fn replace(
        &self,
        path: &Path,
        _: &Metadata,
        object: Option<Id>,
        commit: &mut dyn FnMut(&Path) -> io::Result<bool>,
    ) -> io::Result<bool> {
        self.appear(path, object, &mut || commit(&beneath::reach(&self.store.tree(), path)?))
    }

    fn remove(&self, path: &Path, _: &Metadata, still: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<bool> {
        if !still()? {
            return Ok(false);
        }
        let at = beneath::reach(&self.store.tree(), path)?;
        self.store.io().device().remove_file(&at, CrashPoint::NameRemoved).map(|()| true)
    }

    /// An empty directory stays: the next mount, or the user, may use it.
    fn remove_directory(&self, _: &Path) -> io::Result<bool> {
        Ok(false)
    }
}
