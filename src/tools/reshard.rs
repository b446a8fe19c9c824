//! Writes a checkpoint of ElasticDL for another number of parameter servers.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::store::durable::{self, Attribute, CrashPoint, Io};
use crate::terminal::format::progress;
use crate::terminal::interrupt::Temporary;
use formats::elasticdl::{Reshard, Shard, Source};

use super::{Place, of_file};

/// Name of the staging directory beside DIR, until it is renamed. ElasticDL finds the newest version by reading a
/// number after the last hyphen (or underscore) of every name in its checkpoint directory. So this name must end with a
/// number, and 0 is older than every version.
const STAGING: &str = ".stepfs_-0";

const STEP: CrashPoint = CrashPoint::ReshardWritten;
/// Size of a write: rows arrive one by one.
const WRITE_BYTES: usize = 1 << 20;

/// Writes a version for another number of servers, as a new directory.
///
/// # Errors
/// A message for the user; `dir` does not exist then.
pub fn reshard(io: &Io, version: &dyn Place, servers: u32, dir: &Path) -> Result<()> {
    let shards = shards(version)?;
    if fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some()) {
        bail!("{} is not empty; name a directory that does not exist yet", dir.display());
    }
    if fs::symlink_metadata(dir).is_ok_and(|m| !m.is_dir()) {
        bail!("{} exists and is not a directory; name a new directory", dir.display());
    }
    let Some(name) = dir.file_name() else {
        bail!("{}: name a new directory", dir.display());
    };
    let parent = durable::parent(dir);
    let parent = fs::canonicalize(parent).map_err(of_file(parent))?;
    let (staging, dir) = (parent.join(STAGING), parent.join(name));
    let held = Temporary::directory_at(&staging, |path| io.device().make_dir(path, 0o777, STEP));
    let _held = held.with_context(|| match fs::symlink_metadata(&staging) {
        Ok(_) => format!("{}: another reshard is at work here, or was cut short (then remove it)", staging.display()),
        Err(_) => format!("{}", staging.display()),
    })?;
    // If ElasticDL takes the staging directory for version 0, it finds one file that it does not recognize, so the
    // version is not valid.
    let out = staging.join("out-0");
    let done = write(io, version, &shards, servers, &out)
        .and_then(|()| io.publish(&out, &dir, CrashPoint::ReshardInPlace).map_err(of_file(&dir)));
    let _ = io.empty(&staging, STEP).and_then(|()| io.device().remove_dir(&staging, STEP));
    done
}

/// Writes the new files into the directory `out`, which it makes.
fn write(io: &Io, version: &dyn Place, shards: &[Shard], servers: u32, out: &Path) -> Result<()> {
    let name = |shard: &Shard| format!("{}/{}", version.name(), shard.name());
    let open = |shard: &Shard| version.open(&version.at().join(shard.name())).with_context(|| name(shard));
    let files = shards.iter().map(open).collect::<Result<Vec<_>>>()?;
    let sources = shards.iter().zip(&files).map(|(shard, (file, _))| Source { name: name(shard), file });
    let sources: Vec<Source> = sources.collect();
    let reshard = Reshard::new(&sources, servers)?;
    let bar = progress((0..servers).map(|index| reshard.size(index)).sum(), true);
    io.device().make_dir(out, 0o777, STEP)?;
    let permissions = files.first().map(|(_, permissions)| permissions.clone());
    for index in 0..servers {
        let shard = Shard { index, count: servers, ending: shards[0].ending };
        let path = out.join(shard.name());
        bar.set_message(shard.name());
        let put = || -> io::Result<()> {
            let file = io.create(&path, STEP)?;
            let (mut at, mut waiting) = (0, Vec::with_capacity(2 * WRITE_BYTES));
            reshard.write(index, &mut |bytes| {
                waiting.extend_from_slice(bytes);
                if waiting.len() >= WRITE_BYTES {
                    file.write_all_at(&waiting, at, STEP)?;
                    at += waiting.len() as u64;
                    bar.inc(waiting.len() as u64);
                    waiting.clear();
                }
                Ok(())
            })?;
            file.write_all_at(&waiting, at, STEP)?;
            if let Some(permissions) = &permissions {
                file.set(&Attribute::Mode(permissions.mode()), STEP)?;
            }
            file.sync(STEP)
        };
        put().map_err(of_file(&path))?;
    }
    io.sync_dir(out, STEP)?;
    bar.finish_and_clear();
    let (from, variables, rows, tables) = (shards.len(), reshard.variables, reshard.rows, reshard.tables);
    let number = reshard.version;
    say!("version {number}: {variables} variables and {rows} rows of {tables} tables, {from} files to {servers}");
    Ok(())
}

/// The files of a complete version, by number.
fn shards(version: &dyn Place) -> Result<Vec<Shard>> {
    let mut shards = Vec::new();
    for entry in fs::read_dir(version.at()).with_context(|| version.name().to_string())? {
        let name = entry?.file_name();
        let Some(shard) = name.to_str().and_then(Shard::parse) else {
            bail!("{}: {} is not a file of an ElasticDL checkpoint", version.name(), name.display());
        };
        shards.push(shard);
    }
    shards.sort_by_key(|shard| shard.index);
    let Some(first) = shards.first().copied() else { bail!("{} is empty", version.name()) };
    if let Some(other) = shards.iter().find(|shard| (shard.count, shard.ending) != (first.count, first.ending)) {
        bail!("{}: {} and {} belong to different checkpoints", version.name(), first.name(), other.name());
    }
    let indexes = shards.iter().map(|shard| shard.index).chain([u32::MAX]);
    let Some((missing, _)) = (0..first.count).zip(indexes).find(|(want, got)| want != got) else { return Ok(shards) };
    let (name, have) = (Shard { index: missing, ..first }.name(), shards.len());
    bail!("{} is not complete: it has {have} of {} files, {name} is missing", version.name(), first.count)
}
