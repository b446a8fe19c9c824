//! Pushes the bytes of one file.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::journal::{Content, Record};
use super::local::{Ahead, Found, Local, Shape};
use super::place::{Error, Result};
use super::plan::Want;
use super::reader::lock;
use super::shared::Shared;
use super::whole;
use super::writer::Writer;
use crate::clock::stamp_ns;
use crate::store::durable::{CrashPoint, DeviceFile};
use crate::store::object::Object;
use crate::store::{Id, MAX_CHAIN, MIN_RELEASE_BYTES, modified_ns};
use formats::ReadAt;

/// The kernel's clock for files advances within this time.
const A_TICK: Duration = Duration::from_millis(10);

/// The outcome of pushing one file.
pub(super) enum Outcome {
    /// Its bytes are there: the objects that are new, and where the bytes are.
    There(Vec<Record>, Content),
    /// Its turn comes later.
    Later,
    /// It cannot be read, or has changed meanwhile; says so.
    Failed(String),
}

/// Opens a file if it is still the one that was listed.
fn open(local: &dyn Local, path: &Path, found: &Found) -> Result<Option<DeviceFile>> {
    // A write in the same tick of the clock for files would not change the time.
    let age = stamp_ns() - found.modified_ns;
    if (0..A_TICK.as_nanos() as i64).contains(&age) {
        std::thread::sleep(A_TICK);
    }
    let store = local.store();
    let file = match store.io().open_beneath(&store.tree(), path, libc::O_NOATIME) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => store.io().open_beneath(&store.tree(), path, 0),
        file => file,
    };
    match file {
        Ok(file) if is_same(&file, found)? => Ok(Some(file)),
        Ok(_) => Ok(None),
        // Removed, or something else is there: the next round sees it.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn is_same(file: &DeviceFile, found: &Found) -> std::io::Result<bool> {
    let metadata = file.metadata()?;
    Ok((metadata.ino(), metadata.len(), modified_ns(&metadata)) == (found.inode, found.len, found.modified_ns))
}

/// Makes a file durable that may not be so yet: no other machine has what this one may lose.
fn make_durable(file: &DeviceFile, found: &Found) -> Result<()> {
    if found.shape == Shape::Awaited {
        file.sync(CrashPoint::Fsync)?;
    }
    Ok(())
}

/// The bytes of a small file; `None` if it has changed.
///
/// # Errors
/// Device errors.
pub(super) fn read_small(local: &dyn Local, path: &Path, found: &Found) -> Result<Option<Vec<u8>>> {
    let Some(file) = open(local, path, found)? else { return Ok(None) };
    make_durable(&file, found)?;
    let mut bytes = vec![0; file.size().min(MIN_RELEASE_BYTES) as usize];
    if bytes.len() as u64 != found.len || file.read_full(&mut bytes, 0)? != bytes.len() {
        return Ok(None);
    }
    Ok(is_same(&file, found)?.then_some(bytes))
}

/// Why a file is left for a later round.
pub(super) const CHANGED: &str = "it changes while it is read";

/// Pushes the bytes of one file.
///
/// # Errors
/// Those of the remote and the device.
pub(super) fn push_one(
    local: &dyn Local,
    writer: &mut Writer,
    shared: &Shared,
    path: &Path,
    (want, found): (Want, &Found),
) -> Result<Outcome> {
    match want {
        Want::Stuck => Ok(Outcome::Failed("it cannot be read, or is not durable; user.stepfs.why says why".into())),
        Want::Object(id) => push_object(local, writer, shared, id),
        Want::Ahead => match local.ahead(path)? {
            Ahead::Object(hold) => {
                let pushed = match open(local, path, found) {
                    Ok(Some(_)) => push_object(local, writer, shared, hold.id()),
                    Ok(None) => Ok(Outcome::Later),
                    Err(error) => Err(error),
                };
                local.let_go(hold);
                pushed
            }
            Ahead::Whole => push_whole(local, writer, shared, path, found),
            Ahead::Later => Ok(Outcome::Later),
        },
        _ => push_whole(local, writer, shared, path, found),
    }
}

fn push_object(local: &dyn Local, writer: &mut Writer, shared: &Shared, id: Id) -> Result<Outcome> {
    let objects = local.objects();
    let Some(_hold) = objects.hold(id) else {
        // Only the remote has it: a program has changed another node's file, but not its bytes.
        let owner = lock(&shared.view).owner_of(id).map(str::to_string);
        return Ok(match owner {
            Some(owner) => Outcome::There(Vec::new(), Content::Object { owner, id }),
            None => Outcome::Failed(format!("object {id} is missing")),
        });
    };
    let mut chain: Vec<Arc<Object>> = Vec::new();
    let mut next = Some(id);
    while let Some(id) = next {
        if chain.len() > MAX_CHAIN as usize {
            return Ok(Outcome::Failed(format!("object {id}: its chain of parents is too long")));
        }
        match objects.open(id) {
            Ok(object) => {
                next = object.header().parent;
                chain.push(object);
            }
            // Its child was re-parented meanwhile, or it is damaged: a later round sees which.
            Err(error) => return Ok(Outcome::Failed(format!("object {id}: {error}"))),
        }
    }
    let records = writer.push_chain(&chain, &|bytes| shared.pace.take(bytes))?;
    Ok(Outcome::There(records, Content::Object { owner: writer.node().to_string(), id }))
}

fn push_whole(local: &dyn Local, writer: &mut Writer, shared: &Shared, path: &Path, found: &Found) -> Result<Outcome> {
    let changed = || Ok(Outcome::Failed(CHANGED.into()));
    let Some(file) = open(local, path, found)? else { return changed() };
    make_durable(&file, found)?;
    let going = || !shared.is_stopped() && (found.shape == Shape::Awaited || local.shape(path) == found.shape);
    let (header, object) = match whole::encode(local.store(), path, &file, found.modified_ns, &going) {
        // Its shape is another one now: the next round sees which.
        Err(Error::Away(_)) => return Ok(Outcome::Later),
        encoded => encoded?,
    };
    if !is_same(&file, found)? {
        return changed();
    }
    let record = writer.push_object(&header, &object, &|bytes| shared.pace.take(bytes))?;
    let content = Content::Object { owner: writer.node().to_string(), id: header.id };
    Ok(Outcome::There(record.into_iter().collect(), content))
}
