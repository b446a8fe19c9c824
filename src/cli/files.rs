//! Decodes files of a store for commands that work on it directly.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::archive::repair::lost_stub;
use crate::recall::{self, Chain, Layout, ReadError, order, stream};
use crate::store::durable::scratch;
use crate::store::{Objects, Store, Stub, is_of_remote};

/// Passes the bytes of a file in the store's tree to `sink`, in order. The file may be released or resident.
pub(super) fn read(
    store: &Store,
    objects: &Objects,
    path: &Path,
    sink: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>,
) -> Result<()> {
    let name = || format!("{}", path.display());
    // Check and copy through one handle: a daemon may put a stub in the file's place at any moment.
    let file = store.io().open_beneath(&store.tree(), path, 0).with_context(name)?;
    if let Some(stub) = Stub::read_on(&file, store.id()).with_context(name)? {
        if is_only_on_remote(store, objects, path, &stub)? {
            bail!(
                "{}: only the remote has it; `stepfs pull` brings it into the store, and its path in a mount reads it",
                path.display()
            );
        }
        let chain = Chain::open(objects, stub.object).map_err(io::Error::from).with_context(name)?;
        ReadError::unless_as_long(&stub, chain.leaf().header().logical_len)
            .map_err(io::Error::from)
            .with_context(name)?;
        let layout = Layout::of(chain.leaf());
        let order = order(&chain).map_err(io::Error::from).with_context(name)?;
        if order.is_kept() {
            return stream(&chain, &layout, |offset, _, bytes| sink(offset, bytes)).with_context(name);
        }
        // Decoded rows arrive in another order than in the file.
        let file = tempfile::tempfile().context("cannot create a temporary file")?;
        recall::copy(&chain, &|bytes, at| scratch::write_all_at(&file, bytes, at)).with_context(name)?;
        return copy(&file, sink).with_context(name);
    }
    if let Some(id) = lost_stub(objects, &file).with_context(name)? {
        bail!("{}: its stub of object {id} was overwritten; run `stepfs verify --repair`", path.display());
    }
    copy(file.as_file(), sink).with_context(name)
}

/// Whether a file of a remote was not read here yet.
pub(super) fn is_only_on_remote(store: &Store, objects: &Objects, path: &Path, stub: &Stub) -> Result<bool> {
    Ok(objects.get(stub.object).is_none() && is_of_remote(&store.tree(), path)?)
}

/// Passes the bytes of a file to `sink`.
fn copy(file: &File, sink: &mut dyn FnMut(u64, &[u8]) -> io::Result<()>) -> io::Result<()> {
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

/// The objects of a store, read-only. A damaged object is reported when a file needs it.
pub(super) fn objects(store: &Store) -> Result<Objects> {
    Objects::load(&store.objects(), |_, _| {}).with_context(|| format!("{}", store.objects().display()))
}
