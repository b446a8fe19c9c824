//! What the tools on a run's history read, as its user names it: a path anywhere, `STORE:PATH` of a store, mounted or not, or
//! `URL:PATH` of a mirror.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Result, bail};

use crate::store::durable::scratch;
use crate::store::{Stub, beneath, is_store, open_aside};
use crate::tools;

use super::format::causes;
use super::mirror::{Mirror, tell};
use super::source::{Brought, Local, NO_TEMPORARY, Tree, refuse_inside, unreachable};

/// Finds a file for the tools on a run's history.
pub(super) fn find(named: &Path) -> Result<Box<dyn tools::Place>> {
    Ok(Box::new(Place::find(named, Path::to_path_buf)?))
}

/// A file or directory with the bytes that programs see.
pub(super) struct Place {
    name: String,
    tree: Option<Tree>,
    /// Its path on disk.
    at: PathBuf,
    /// The store holds a mirror's files.
    brought: Option<Brought>,
}

impl Place {
    /// Finds the directory of a run: also a whole store.
    ///
    /// # Errors
    /// As of [`Place::find`].
    pub(super) fn of_run(named: &Path) -> Result<Place> {
        if !is_store(named) {
            return Place::find(named, Path::to_path_buf);
        }
        let tree = Tree::look(named)?;
        let at = tree.store.tree();
        Ok(Place { name: named.display().to_string(), tree: Some(tree), at, brought: None })
    }

    /// The store whose files it reads without a mount, and its path in the store's tree.
    pub(super) fn in_store(&self) -> Option<Local> {
        let tree = self.tree.as_ref()?;
        let path = self.at.strip_prefix(tree.store.tree()).ok()?.to_path_buf();
        Some(Local::at_rest(tree.store.root().to_path_buf(), path))
    }

    /// True if it is a copy of a mirror's files.
    pub(super) fn is_brought(&self) -> bool {
        self.brought.is_some()
    }

    /// Finds what the user named. `spelled` answers which path is meant by a path.
    ///
    /// # Errors
    /// There is nothing, or a mirror does not have all of it.
    pub(super) fn find(named: &Path, spelled: fn(&Path) -> PathBuf) -> Result<Place> {
        let (name, plain) = (named.display().to_string(), spelled(named));
        if is_store(&plain) {
            bail!("{name} is a store; name a path in it: {name}:PATH");
        }
        match fs::canonicalize(&plain) {
            Ok(absolute) => {
                refuse_inside(named, &absolute)?;
                return Ok(Place { name, tree: None, at: plain, brought: None });
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
            Err(error) => return Err(unreachable(named, error)),
        }
        let parts = named.to_str().and_then(|text| text.rsplit_once(':'));
        let parts = parts.filter(|(place, path)| ![place, path].contains(&&"") && !path.starts_with("//"));
        let Some((place, inside)) = parts else {
            bail!("{name}: no such file or directory; of a store write STORE:PATH, of a mirror URL:PATH");
        };
        let (place, inside) = (Path::new(place), Path::new(inside));
        if inside.components().any(|part| !matches!(part, Component::Normal(_))) {
            bail!("{}: name a path inside the store, without `..`", inside.display());
        }
        let brought = Mirror::of(place).map(|mirror| Brought::of(&mirror, inside)).transpose()?;
        if brought.as_ref().is_some_and(|brought| tell(&brought.missing).is_err()) {
            bail!("{name} is not complete");
        }
        let root = brought.as_ref().map_or(place, |brought| &brought.root);
        let tree = is_store(root).then(|| Tree::look(root)).transpose()?;
        let above = tree.as_ref().map_or(root.to_path_buf(), |tree| tree.store.tree());
        let at = spelled(&above.join(inside));
        if !at.exists() {
            bail!("{name}: {} has no {}", place.display(), inside.display());
        }
        Ok(Place { name, tree, at, brought })
    }
}

impl tools::Place for Place {
    fn name(&self) -> &str {
        &self.name
    }

    fn at(&self) -> &Path {
        &self.at
    }

    /// A released file of a store is decoded into a temporary file.
    fn open(&self, path: &Path) -> io::Result<(File, Permissions)> {
        let in_tree = self.tree.as_ref().map(|tree| (tree, path.strip_prefix(tree.store.tree()).unwrap_or(path)));
        let file = match in_tree {
            Some((tree, path)) => beneath::open_file(&tree.store.tree(), path),
            None => open_aside(path),
        }?;
        // Only the permission bits: the new files may be another user's.
        let permissions = Permissions::from_mode(file.metadata()?.permissions().mode() & 0o777);
        let Some((tree, inside)) = in_tree else { return Ok((file, permissions)) };
        let told = |error| io::Error::other(causes(&error));
        // On this handle: a daemon may put a stub in the file's place at any moment, or the file in a stub's.
        if Stub::read(&file, tree.store.id())?.is_none() {
            return Ok((file, permissions));
        }
        let no_room = |error: io::Error| io::Error::new(error.kind(), format!("{NO_TEMPORARY}: {error}"));
        let decoded = tempfile::tempfile().map_err(no_room)?;
        tree.read(inside, &mut |at, bytes| scratch::write_all_at(&decoded, bytes, at).map_err(no_room))
            .map_err(told)?;
        Ok((decoded, permissions))
    }
}
