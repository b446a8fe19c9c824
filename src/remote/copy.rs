//! A store that shows what a remote has, for commands: without a mount, and without an archive.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::daemon::take_all;
use super::fetch::Fetcher;
use super::journal::Content;
use super::local::{Ahead, Local, Shape};
use super::place::{Error, Place, Result};
use super::reader::{Reader, lock};
use super::shared::{Settings, Shared};
use super::view::View;
use crate::store::{Elsewhere, Hold, Id, Newest, Objects, Store, Wait};

struct Copy {
    store: Store,
    objects: Arc<Objects>,
}

/// Shows all names of a remote in an empty store, and brings the objects of those at and below `wanted`.
///
/// # Errors
/// Those of the remote and the device. A name that cannot be shown is one.
pub fn copy(place: &Arc<dyn Place>, store: Store, wanted: Option<&Path>) -> Result<()> {
    let objects = Objects::load(&store.objects(), |_, _| {})?;
    let copy = Copy { objects: Arc::new(objects), store };
    let settings = Settings {
        url: String::new(),
        node: String::new(),
        newest: Newest::None,
        wait: Wait::Nothing,
        bandwidth: None,
        refresh: Duration::ZERO,
        grace: Duration::ZERO,
    };
    let shared = Shared::new(settings, BTreeMap::new());
    Reader::refresh(place.as_ref(), &shared.view)?;
    if !take_all(&copy, &shared)? {
        return Err(Error::Wrong("some names of the remote cannot be shown; the log says which".into()));
    }
    let Some(wanted) = wanted else { return Ok(()) };
    let needed = needed_by(&lock(&shared.view), wanted)?;
    let fetcher = Fetcher::new(Arc::clone(place), Arc::clone(&shared.view), copy.store.tmp());
    for id in needed {
        fetcher.bring(&copy.objects, id)?;
    }
    Ok(())
}

/// The objects of all names at and below `wanted`. What is missing must not pass for what never was.
fn needed_by(view: &View, wanted: &Path) -> Result<Vec<Id>> {
    if wanted == Path::new("") {
        let broken = view.nodes().iter().find_map(|(node, of)| Some((node, of.broken.as_ref()?)));
        if let Some((node, why)) = broken {
            return Err(Error::Wrong(format!("part of node {node} cannot be read: {why}")));
        }
    }
    let mut needed = Vec::new();
    for (path, _, shown) in view.files().filter(|(path, ..)| path.starts_with(wanted)) {
        let Content::Object { owner, id } = &shown.content else { continue };
        if view.chain(owner, *id).is_none() {
            return Err(Error::Wrong(format!("{}: an object of it is missing on the remote", path.display())));
        }
        needed.push(*id);
    }
    Ok(needed)
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

    fn appeared(&self, _: &Path, object: Option<crate::store::Id>) {
        object.into_iter().for_each(|id| self.objects.name(id));
    }

    // The store is empty, so nothing is ever replaced or removed.
    fn replace(
        &self,
        _: &Path,
        _: &Metadata,
        _: Option<crate::store::Id>,
        _: &mut dyn FnMut(&Path) -> io::Result<bool>,
    ) -> io::Result<bool> {
        Ok(false)
    }

    fn remove(&self, _: &Path, _: &Metadata, _: &mut dyn FnMut() -> io::Result<bool>) -> io::Result<bool> {
        Ok(false)
    }
}
