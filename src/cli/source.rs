//! What a command works on, as its user names it: a store, a path in a mount of one, or the URL of a mirror.
//!
//! [`Mirror::of`] tells a URL. [`Local`] is a store or a path in a mount, whose daemon answers through [`Mount`]. [`Tree`]
//! reads the files of a store without a daemon. [`Brought`] is a store for that, also of a mirror.

use std::cell::OnceCell;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;

use crate::archive::repair::lost_stub;
use crate::fs::{Mounted, Unanswered, all_mounts, is_dead, mount_of};
use crate::mirror::{Missing, pull};
use crate::recall::{self, Chain, Layout, ReadError, order, stream};
use crate::store::durable::scratch;
use crate::store::object::Object;
use crate::store::{Error, Objects, Store, Stub, beneath, files_below, is_store, natural, real, store_around};
use codec::hash::Sha256;

use super::interrupt::Temporary;
use super::mirror::Mirror;

/// Begins the name of a store that a mirror is copied into.
const COPY: &str = "stepfs-mirror-";
pub(super) const NO_TEMPORARY: &str = "cannot create temporary files; set TMPDIR to a directory with room";

/// A store, its mount if the path leads through one, and the path inside the tree.
#[derive(Debug)]
pub(super) struct Local {
    /// Absolute path of the store.
    pub(super) store: PathBuf,
    pub(super) mount: Option<Mount>,
    /// Path inside the tree; empty for the whole tree.
    pub(super) path: PathBuf,
    /// In a shared store: the role of the mount's daemon, if it is not the keeper. It answers nothing about files, so the store
    /// is read without it.
    pub(super) served: Option<(Mount, String)>,
}

impl Local {
    /// A path in a store, without a daemon.
    pub(super) fn at_rest(store: PathBuf, path: PathBuf) -> Local {
        Local { store, mount: None, path, served: None }
    }

    /// Finds the place of `path`: a store, a mount, or a path in a mount.
    pub(super) fn of(path: &Path) -> Result<Local> {
        super::mirror::local(path.to_path_buf()).map_err(|why| anyhow!("{}: {why}", path.display()))?;
        let absolute = fs::canonicalize(path).map_err(|error| unreachable(path, error))?;
        if is_store(&absolute) {
            return Ok(Local::at_rest(absolute, PathBuf::new()));
        }
        let Some(mounted) = mount_of(&absolute) else {
            if let Err(error @ (Error::NoSettings { .. } | Error::Io { .. })) = Store::look(&absolute) {
                return Err(error.into());
            }
            refuse_inside(path, &absolute)?;
            bail!(
                "{} is neither a stepfs store nor in a stepfs mount; `stepfs status` lists the mounts",
                path.display()
            );
        };
        let path = absolute.strip_prefix(&mounted.point).unwrap_or(&absolute).to_path_buf();
        let mount = Mount { root: mounted.point.clone() };
        let store = match mount.word(Path::new(""), "store") {
            Ok(store) => PathBuf::from(OsString::from_vec(store)),
            Err(error) => return Err(mounted.unanswered(error).into()),
        };
        if !is_store(&store) {
            return Err(Unanswered::Moved(mount.root, store).into());
        }
        Ok(match mount.served() {
            Some(role) => Local { store, mount: None, path, served: Some((mount, role)) },
            None => Local { store, mount: Some(mount), path, served: None },
        })
    }

    /// The place of `path` if it leads into a mount; `None` for a store, and for what does not exist.
    pub(super) fn in_some_mount(path: &Path) -> Result<Option<Local>> {
        match fs::canonicalize(path) {
            Ok(absolute) if !is_store(&absolute) && mount_of(&absolute).is_some() => Local::of(path).map(Some),
            _ => Ok(None),
        }
    }

    /// The place of `path`, which must be in a mount, for actions that need the daemon.
    pub(super) fn in_mount(path: &Path) -> Result<(Mount, Local)> {
        let local = Local::of(path)?;
        if let Some(mount) = local.mount.clone() {
            return Ok((mount, local));
        }
        if let Some((mount, role)) = &local.served {
            return Err(mount.not_keepers(role));
        }
        let next = match mounted_at(&local.store) {
            Some(mounted) => format!("name its mount {0}, or a path below {0}", mounted.point.display()),
            None => format!("this needs its daemon: `stepfs mount {} DIR`, then name DIR", path.display()),
        };
        bail!("{} is a store; {next}", path.display())
    }

    /// The mount that the path leads through, also of a daemon that is not the keeper.
    pub(super) fn mounted(&self) -> Option<&Mount> {
        self.mount.as_ref().or(self.served.as_ref().map(|(mount, _)| mount))
    }

    /// Maps a name from the user to a path in the tree, or `None` if it lies outside. An absolute name is a path in the
    /// mount or in the store's tree. Any other name is relative to this place.
    pub(super) fn inside(&self, name: &Path) -> Option<PathBuf> {
        let below = match name.is_absolute() {
            true => {
                let roots = self.mounted().map(|mount| mount.root.clone()).into_iter().chain([self.store.join("tree")]);
                roots.into_iter().find_map(|root| Some(name.strip_prefix(root).ok()?.to_path_buf()))?
            }
            false => self.path.join(name),
        };
        let mut path = PathBuf::new();
        for part in below.components() {
            match part {
                Component::Normal(name) => path.push(name),
                Component::ParentDir if !path.pop() => return None,
                _ => {}
            }
        }
        Some(path)
    }

    /// [`Local::inside`] the place that the user names as `shown`.
    ///
    /// # Errors
    /// It lies outside.
    pub(super) fn wanted(&self, shown: &Path, name: &Path) -> Result<PathBuf> {
        self.inside(name).with_context(|| {
            format!(
                "{} is not inside {}; paths are relative to it, without a leading `/`: `stepfs ls {1}` shows them",
                name.display(),
                shown.display()
            )
        })
    }

    /// A file's path as the user knows it: below this place, which the user named so, or inside the store.
    pub(super) fn shown(&self, named: &Path, file: &Path) -> PathBuf {
        match self.mount.is_some() {
            true => joined(named, file.strip_prefix(&self.path).unwrap_or(Path::new(""))),
            false => file.to_path_buf(),
        }
    }

    /// The files of the store.
    pub(super) fn tree(&self) -> Result<Tree> {
        Tree::look(&self.store)
    }
}

/// Why a path cannot be reached: it may lie in a mount that is dead, or closed to this user.
pub(super) fn unreachable(path: &Path, error: io::Error) -> anyhow::Error {
    let mounted = std::path::absolute(path).ok().and_then(|path| mount_of(&path));
    match mounted.filter(|_| matches!(error.raw_os_error(), Some(libc::EACCES | libc::ENOTCONN))) {
        Some(mounted) => mounted.unanswered(error).into(),
        None => anyhow::Error::new(error).context(format!("{}", path.display())),
    }
}

/// Where a store is mounted; `store` is absolute and has no links.
pub(super) fn mounted_at(store: &Path) -> Option<Mounted> {
    all_mounts().into_iter().rfind(|mounted| mounted.store == store && !is_dead(&mounted.point))
}

/// The mount of a store at a point, if it is shared; else where it is mounted.
pub(super) fn mounted_on(store: &Path, point: &Path) -> Option<Mounted> {
    match Store::look(store).is_ok_and(|store| store.is_shared()) {
        true => all_mounts().into_iter().rfind(|mounted| mounted.point == *point && mounted.store == store),
        false => mounted_at(store),
    }
}

/// Refuses a path inside a store: files are there in the store's own form. `absolute` has no links.
///
/// # Errors
/// It lies in a store; names the path in the mount.
pub(super) fn refuse_inside(path: &Path, absolute: &Path) -> Result<()> {
    let Some(store) = absolute.parent().and_then(store_around) else { return Ok(()) };
    let below = absolute.strip_prefix(store.join("tree")).ok();
    let at = mounted_at(store).zip(below).map(|(mounted, below)| format!(": {}", mounted.point.join(below).display()));
    let (path, store) = (path.display(), store.display());
    bail!("{path} lies inside the store {store}; name the store, or a path in its mount{}", at.unwrap_or_default())
}

/// Refuses a place where no store may be made: in a stepfs mount, in another store, or below nothing.
///
/// # Errors
/// The reason, with the next step.
pub(super) fn refuse_new_store(named: &Path) -> Result<()> {
    let store = real(&std::path::absolute(named)?);
    let shown = named.display();
    if !is_store(&store) {
        refuse_inside(&store, &store)?;
    }
    if let Some(parent) = store.parent().filter(|parent| !store.exists() && !parent.exists()) {
        bail!("{} does not exist, so the store cannot be created in it; mkdir -p {0}", parent.display());
    }
    if store.exists() && !store.is_dir() {
        bail!("{shown} is a file; a store is a directory, and stepfs creates it");
    }
    if let Some(mounted) = mount_of(&store) {
        let point = mounted.point.display();
        bail!("{shown} lies in the stepfs mount {point}; a store belongs on a disk, so name a directory outside");
    }
    Ok(())
}

/// A path below another one. `join("")` would end in a slash.
pub(super) fn joined(above: &Path, below: &Path) -> PathBuf {
    if below.as_os_str().is_empty() { above.to_path_buf() } else { above.join(below) }
}

/// A mount, whose daemon answers by attributes `user.stepfs.*`.
#[derive(Clone, Debug)]
pub(super) struct Mount {
    /// Absolute path.
    pub(super) root: PathBuf,
}

impl Mount {
    /// The mount that holds `path`.
    pub(super) fn of(path: &Path) -> Result<Mount> {
        Local::in_mount(path).map(|(mount, _)| mount)
    }

    /// A file's path for programs.
    pub(super) fn at(&self, path: &Path) -> PathBuf {
        joined(&self.root, path)
    }

    /// An attribute of a file.
    pub(super) fn word(&self, path: &Path, name: &str) -> io::Result<Vec<u8>> {
        let value = xattr::get(self.at(path), format!("user.stepfs.{name}"))?;
        value.ok_or_else(|| io::Error::from_raw_os_error(libc::ENODATA))
    }

    /// An attribute of a file, as text. `None` if there is none, or nobody answers.
    pub(super) fn text(&self, path: &Path, name: &str) -> Option<String> {
        String::from_utf8(self.word(path, name).ok()?).ok()
    }

    /// In a shared store: what the daemon is, if it is not the keeper.
    fn served(&self) -> Option<String> {
        self.text(Path::new(""), "role").filter(|role| role != "keeper")
    }

    fn not_keepers(&self, role: &str) -> anyhow::Error {
        anyhow!("{} is only {role}; the keeper's mount does this", self.root.display())
    }

    /// Why the daemon does not do something: it is not the keeper any more, or an error with these words.
    fn refused(&self, error: io::Error, words: String) -> anyhow::Error {
        self.served().map_or_else(|| anyhow!(error).context(words), |role| self.not_keepers(&role))
    }

    /// Asks the daemon about the whole store: `status`, `queue`, `gc`.
    ///
    /// # Errors
    /// It does not answer, or is not the keeper any more.
    pub(super) fn ask<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let text = self.word(Path::new(""), name);
        self.understand(&text.map_err(|error| self.refused(error, format!("{} does not answer", self.root.display())))?)
    }

    /// What the daemon has answered.
    ///
    /// # Errors
    /// It is another version, with other answers.
    pub(super) fn understand<T: DeserializeOwned>(&self, answer: &[u8]) -> Result<T> {
        serde_json::from_slice(answer).with_context(|| {
            let daemon = self.other_version().unwrap_or_else(|| crate::version().into());
            let (own, at) = (crate::version(), self.root.display());
            format!(
                "the daemon of {at} is {daemon}, this is {own}, which does not understand its answer; use the daemon's \
                 program, or `stepfs umount {at}` and mount again"
            )
        })
    }

    /// The version of the daemon, if it is another one than this program's: the program was replaced since the mount.
    pub(super) fn other_version(&self) -> Option<String> {
        let version = self.text(Path::new(""), "version").unwrap_or_else(|| "an older stepfs".into());
        (version != crate::version()).then_some(version)
    }

    /// Sets a user's mark of a file, or removes it without a `value`; answers whether there was one to remove. `can` says
    /// what only files and directories can.
    pub(super) fn mark(&self, path: &Path, mark: &str, value: Option<&[u8]>, can: &str) -> Result<bool> {
        let at = self.at(path);
        let done = match value {
            Some(value) => xattr::set(&at, mark, value),
            None => xattr::remove(&at, mark),
        };
        match done {
            Err(error) if value.is_none() && error.raw_os_error() == Some(libc::ENODATA) => Ok(false),
            // The kernel refuses attributes of pipes and devices.
            Err(_) if fs::symlink_metadata(at).is_ok_and(|it| !it.is_file() && !it.is_dir()) => {
                bail!("only files and directories can {can}")
            }
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                bail!("it cannot {can}: the store's file system has no extended attributes; put the store on another")
            }
            done => Ok(done.map(|()| true)?),
        }
    }

    /// Tells the daemon to do something with a file, or with the store.
    ///
    /// # Errors
    /// It refuses, or is not the keeper any more.
    pub(super) fn tell(&self, path: &Path, name: &str) -> Result<()> {
        let at = self.at(path);
        let told = xattr::set(&at, format!("user.stepfs.{name}"), b"1");
        told.map_err(|error| self.refused(error, at.display().to_string()))
    }
}

/// A store for a command that reads files. A mirror's is removed at the end.
pub(super) struct Brought {
    pub(super) root: PathBuf,
    /// The wanted path in its tree.
    pub(super) path: PathBuf,
    /// As the user names it.
    named: PathBuf,
    /// The names that could not be brought.
    pub(super) missing: Missing,
    pub(super) _copy: Option<(tempfile::TempDir, Temporary)>,
}

impl Brought {
    /// A store for a command that reads files; `wanted` is relative to `path`. All that is no mount and no URL counts as
    /// a store.
    pub(super) fn find(path: &Path, wanted: &Path) -> Result<Brought> {
        if let Some(mirror) = Mirror::of(path) {
            return Brought::of(&mirror, wanted);
        }
        let local = Local::in_some_mount(path)?;
        let local = local.unwrap_or_else(|| Local::at_rest(path.to_path_buf(), PathBuf::new()));
        let (wanted, named) = (local.wanted(path, wanted)?, path.to_path_buf());
        Ok(Brought { root: local.store, path: wanted, named, missing: Missing::default(), _copy: None })
    }

    /// A new store among the temporary files, with the names of a mirror at and below `wanted`, and their objects.
    pub(super) fn of(mirror: &Mirror, wanted: &Path) -> Result<Brought> {
        // It may be large.
        let (copy, temporary) = Temporary::directory(COPY, &std::env::temp_dir()).context(NO_TEMPORARY)?;
        let root = copy.path().join("store");
        let path = Local::at_rest(root.clone(), PathBuf::new()).wanted(Path::new(&mirror.url), wanted)?;
        let missing = pull(&mirror.read(&path)?, &Store::open(&root)?, &path, &|_| true)?;
        Ok(Brought { root, path, named: PathBuf::from(&mirror.url), missing, _copy: Some((copy, temporary)) })
    }

    /// Its files.
    pub(super) fn tree(&self) -> Result<Tree> {
        Ok(Tree { named: self.named.clone(), ..Tree::look(&self.root)? })
    }
}

/// Takes bytes, with their place in the file.
type Sink<'a> = &'a mut dyn FnMut(u64, &[u8]) -> io::Result<()>;

/// The files of a store, read without its daemon.
pub(super) struct Tree {
    pub(super) store: Store,
    /// The store, mount or URL, for messages.
    named: PathBuf,
    objects: OnceCell<Objects>,
}

impl Tree {
    /// Of a store that another process may have open.
    pub(super) fn look(root: &Path) -> Result<Tree> {
        Ok(Tree::of(Store::look(root)?))
    }

    pub(super) fn of(store: Store) -> Tree {
        Tree { named: store.root().to_path_buf(), store, objects: OnceCell::new() }
    }

    /// Paths inside the tree of the regular files at or below `path`. Skips files that disappear meanwhile.
    pub(super) fn files(&self, path: &Path) -> Result<Vec<PathBuf>> {
        let mut files = files_below(&self.store.tree(), path).map_err(|error| self.unless_missing(path, error))?;
        files.sort_by(|a, b| natural::order(a, b));
        Ok(files)
    }

    /// The error for a path that cannot be opened.
    fn unless_missing(&self, path: &Path, error: io::Error) -> anyhow::Error {
        let (shown, named) = (path.display(), self.named.display());
        match error.kind() {
            io::ErrorKind::NotFound => anyhow!("{shown} is not in {named}; `stepfs ls {named}` shows its files"),
            _ if self.store.tree().join(path).is_dir() => {
                anyhow!("{shown} is a directory in {named}; `stepfs export {named} {shown} DEST` copies it")
            }
            _ => anyhow::Error::new(error).context(format!("{shown}")),
        }
    }

    /// The stub at a path in the tree, if there is one.
    pub(super) fn stub(&self, path: &Path) -> Result<Option<Stub>> {
        let tree = self.store.tree();
        let file = beneath::open_file(&tree, path).with_context(|| format!("{}", tree.join(path).display()))?;
        Ok(Stub::read(&file, self.store.id())?)
    }

    /// The objects, read-only and as they were at the first call. A damaged object is reported when a file needs it.
    pub(super) fn objects(&self) -> Result<&Objects> {
        if let Some(objects) = self.objects.get() {
            return Ok(objects);
        }
        let root = self.store.objects();
        let objects = Objects::load(&root, |_, _| {}).with_context(|| format!("{}", root.display()))?;
        Ok(self.objects.get_or_init(|| objects))
    }

    /// The SHA-256 of the bytes that a released file was archived from.
    pub(super) fn original(&self, path: &Path) -> Result<Option<[u8; 32]>> {
        let Some(stub) = self.stub(path)? else { return Ok(None) };
        Ok(Some(Object::open(&self.store.objects(), stub.object)?.header().original))
    }

    /// Passes the bytes of a file to `sink`, in order. The file may be released or resident.
    pub(super) fn read(&self, path: &Path, sink: Sink) -> Result<()> {
        let (store, objects) = (&self.store, self.objects()?);
        let name = || format!("{}", path.display());
        // Check and copy through one handle: a daemon may put a stub in the file's place at any moment.
        let opened = store.io().open_beneath(&store.tree(), path, 0);
        let file = opened.map_err(|error| self.unless_missing(path, error))?;
        if let Some(stub) = Stub::read_on(&file, store.id()).with_context(name)? {
            return decode(objects, &stub, sink).map_err(|error| {
                let why = error.get_ref().and_then(|of| of.downcast_ref::<ReadError>());
                match why.is_some_and(ReadError::is_damage) {
                    true => anyhow!("{}: {error}; `stepfs verify {}` says more", path.display(), self.named.display()),
                    false => anyhow::Error::new(error).context(name()),
                }
            });
        }
        if let Some(id) = lost_stub(objects, &file).with_context(name)? {
            bail!("{}: its stub of object {id} was overwritten; run `stepfs verify --repair`", path.display());
        }
        copy(file.as_file(), sink).with_context(name)
    }
}

/// The SHA-256 of the bytes that `read` passes to its sink.
pub(super) fn digest<E>(read: impl FnOnce(Sink) -> Result<(), E>) -> Result<[u8; 32], E> {
    let mut hash = Sha256::default();
    read(&mut |_, bytes| {
        hash.update(bytes);
        Ok(())
    })?;
    Ok(hash.digest())
}

/// Passes the bytes of a released file to `sink`, in order.
fn decode(objects: &Objects, stub: &Stub, sink: Sink) -> io::Result<()> {
    let chain = Chain::open(objects, stub.object)?;
    ReadError::unless_as_long(stub, chain.leaf().header().logical_len)?;
    if order(&chain)?.is_kept() {
        return stream(&chain, &Layout::of(chain.leaf()), |offset, _, bytes| sink(offset, bytes));
    }
    // Decoded rows arrive in another order than in the file.
    let file =
        tempfile::tempfile().map_err(|error| io::Error::new(error.kind(), format!("{NO_TEMPORARY}: {error}")))?;
    recall::copy(&chain, &|bytes, at| scratch::write_all_at(&file, bytes, at))?;
    copy(&file, sink)
}

/// Passes the bytes of a file to `sink`.
pub(super) fn copy(file: &File, sink: Sink) -> io::Result<()> {
    let mut buf = vec![0; 1 << 20];
    let mut at = 0;
    loop {
        match file.read_at(&mut buf, at)? {
            0 => return Ok(()),
            count => {
                sink(at, &buf[..count])?;
                at += count as u64;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_looked_for_in_the_tree() {
        let mount = || Some(Mount { root: "/mnt".into() });
        let local = |path: &str| Local { store: "/s".into(), mount: mount(), path: path.into(), served: None };
        let inside = |path: &str, name: &str| local(path).inside(Path::new(name));
        assert_eq!(inside("", "run/a.pt"), Some("run/a.pt".into()));
        assert_eq!(inside("run", "./a.pt"), Some("run/a.pt".into()));
        assert_eq!(inside("run", "../b/a.pt"), Some("b/a.pt".into()));
        assert_eq!(inside("run", "/mnt/a.pt"), Some("a.pt".into()));
        assert_eq!(inside("run", "/s/tree/a.pt"), Some("a.pt".into()));
        assert_eq!(inside("run", "/elsewhere/a.pt"), None);
        assert_eq!(inside("", "../a.pt"), None);
    }

    #[test]
    fn files_are_shown_below_the_path_that_was_named() {
        let local = |mount: bool, path: &str| Local {
            store: "/s".into(),
            mount: mount.then(|| Mount { root: "/mnt".into() }),
            path: path.into(),
            served: None,
        };
        let shown = |named: &str, local: &Local, file: &str| local.shown(Path::new(named), Path::new(file));
        assert_eq!(shown("../run", &local(true, "run"), "run/a/b.pt"), Path::new("../run/a/b.pt"));
        assert_eq!(shown("b.pt", &local(true, "run/b.pt"), "run/b.pt").to_str(), Some("b.pt"));
        assert_eq!(shown("/mnt", &local(true, ""), "b.pt"), Path::new("/mnt/b.pt"));
        assert_eq!(shown("/s", &local(false, ""), "run/b.pt"), Path::new("run/b.pt"));
    }
}
