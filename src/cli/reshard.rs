//! `stepfs reshard`

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};

use crate::container::elasticdl::{Reshard, Shard, Source};
use crate::store::durable::{self, Attribute, CrashPoint, Io, scratch};
use crate::store::{Store, beneath};

use super::files::{objects, read};
use super::format::progress;
use super::listing::stub;
use super::remote_url::{Brought, bring, url_of};

/// Write a checkpoint of ElasticDL for another number of parameter servers.
///
/// Reads all files of one version (variables-0-of-M.ckpt ... ), written by M servers. Writes the N files that a run
/// with N servers would have written. The hash of a variable's name gives its server; the id of an embedding row gives
/// its server. Values stay the same, bit for bit. DIR appears when all data in it is complete and durable, or not at
/// all. A run finds it under the name version-V in the run's checkpoint directory.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs reshard ~/ckpts.store:version-40 3 /new/version-40     from a store, mounted or not\n  \
stepfs reshard /ckpts/version-40 3 /new/version-40            from a mount or any directory\n  \
stepfs reshard s3://bucket/run-7:version-40 3 /new/version-40 from a remote\n\n\
ElasticDL itself restores a version to any number of servers, but each server then reads all files.\n\
A resharded file has only the data of its own server.")]
pub(super) struct Args {
    /// The version: a directory, STORE:PATH of a store, mounted or not, or URL:PATH of a remote.
    #[arg(value_name = "STORE:version-V")]
    from: String,
    /// Number of servers.
    #[arg(value_parser = clap::value_parser!(u32).range(1..=MAX_SERVERS))]
    servers: u32,
    /// Directory for the files; must be missing or empty.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Limit on servers: real runs have some dozens, and each server has a file.
const MAX_SERVERS: i64 = 10_000;

/// The files of a version on a remote.
fn bring_version(url: &Path, inside: &Path) -> Result<Brought> {
    let brought = bring(url, inside)?;
    match brought.tell_missing() {
        false => Ok(brought),
        true => bail!("{}:{} is not complete", url.display(), inside.display()),
    }
}

/// Name of the staging directory beside DIR, until it is renamed. ElasticDL finds the newest version by reading a
/// number after the last hyphen (or underscore) of every name in its checkpoint directory. So this name must end with a
/// number, and 0 is older than every version.
const STAGING: &str = ".stepfs_-0";

/// Where the files of a version are.
struct Version {
    /// For messages.
    name: String,
    store: Option<Store>,
    /// Path in the store's tree, or any path if there is no store.
    path: PathBuf,
    /// The store holds a remote's files.
    _brought: Option<Brought>,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    super::log_to_stderr("warn");
    let stop = super::interrupted()?;
    reshard(&Io::disk(), (&args.from, args.servers), &args.dir, &stop)?;
    Ok(ExitCode::SUCCESS)
}

const STEP: CrashPoint = CrashPoint::ReshardWritten;

/// Writes the version at `from` for another number of servers, as a new directory. Leaves nothing behind if `stop` is
/// set.
///
/// # Errors
/// A message for the user; `dir` does not exist then.
pub fn reshard(io: &Io, (from, servers): (&str, u32), dir: &Path, stop: &AtomicBool) -> Result<()> {
    let version = Version::find(from)?;
    let shards = version.shards()?;
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
    let parent = fs::canonicalize(parent).with_context(|| format!("{}", parent.display()))?;
    let staging = Staging::begin(io, parent.join(STAGING))?;
    write(io, &version, &shards, servers, (&staging, stop)).map_err(|error| match stop.load(Ordering::Relaxed) {
        true => anyhow::anyhow!("interrupted; nothing was written"),
        false => error,
    })?;
    let dir = &parent.join(name);
    io.publish(&staging.out(), dir, CrashPoint::ReshardInPlace).with_context(|| format!("{}", dir.display()))?;
    Ok(())
}

fn write(
    io: &Io,
    version: &Version,
    shards: &[Shard],
    servers: u32,
    (staging, stop): (&Staging, &AtomicBool),
) -> Result<()> {
    let check = || match stop.load(Ordering::Relaxed) {
        true => Err(std::io::Error::from(std::io::ErrorKind::Interrupted)),
        false => Ok(()),
    };
    let mut files = Vec::new();
    for shard in shards {
        files.push(version.open(shard, staging, &check)?);
    }
    let sources: Vec<Source> = shards
        .iter()
        .zip(&files)
        .map(|(shard, (file, _))| Source { name: format!("{}/{}", version.name, shard.name()), file })
        .collect();
    let reshard = Reshard::new(&sources, servers)?;
    let bar = progress((0..servers).map(|index| reshard.len(index)).sum(), true);
    let permissions = files.first().map(|(_, permissions)| permissions.clone());
    for index in 0..servers {
        let shard = Shard { index, count: servers, ending: shards[0].ending };
        let path = staging.out().join(shard.name());
        bar.set_message(shard.name());
        let put = || -> std::io::Result<()> {
            let file = io.create(&path, STEP)?;
            let (mut at, mut waiting) = (0, Vec::with_capacity(2 * WRITE_BYTES));
            reshard.write(index, &mut |bytes| {
                waiting.extend_from_slice(bytes);
                if waiting.len() >= WRITE_BYTES {
                    check()?;
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
        put().with_context(|| format!("{}", path.display()))?;
    }
    io.sync_dir(&staging.out(), STEP)?;
    bar.finish_and_clear();
    let (from, variables, rows, tables) = (shards.len(), reshard.variables, reshard.rows, reshard.tables);
    let number = reshard.version;
    say!("version {number}: {variables} variables and {rows} rows of {tables} tables, {from} files to {servers}");
    Ok(())
}

/// Size of a write: rows arrive one by one.
const WRITE_BYTES: usize = 1 << 20;

impl Version {
    /// Finds the version that the user named. ElasticDL writes `version-40`, its design document says `version_40`;
    /// each spelling finds both.
    fn find(text: &str) -> Result<Version> {
        let name = text.to_string();
        let plain = either(Path::new(text));
        if plain.is_dir() {
            return Ok(Version { name, store: None, path: plain, _brought: None });
        }
        let Some((store, inside)) =
            text.rsplit_once(':').filter(|(store, inside)| !store.is_empty() && !inside.is_empty())
        else {
            bail!("{text}: no such directory (to read from a store, write STORE:version-V)");
        };
        let (place, inside) = (Path::new(store), Path::new(inside));
        if inside.components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
            bail!("{}: name a directory inside the store, without `..`", inside.display());
        }
        let brought = match url_of(place) {
            Some(_) => Some(bring_version(place, inside)?),
            None => None,
        };
        let root = brought.as_ref().map_or(place, |brought| &brought.root);
        let store = match root.join("stepfs.toml").is_file() {
            true => Some(Store::look(root)?),
            false => None,
        };
        let tree = store.as_ref().map_or(root.to_path_buf(), Store::tree);
        let found = either(&tree.join(inside));
        if !found.is_dir() {
            bail!("{text}: {} has no directory {}", place.display(), inside.display());
        }
        let path = match &store {
            Some(_) => found.strip_prefix(&tree)?.to_path_buf(),
            None => found,
        };
        Ok(Version { name, store, path, _brought: brought })
    }

    fn on_disk(&self) -> PathBuf {
        self.store.as_ref().map_or(self.path.clone(), |store| store.tree().join(&self.path))
    }

    /// The files of a complete version, by number.
    fn shards(&self) -> Result<Vec<Shard>> {
        let mut shards = Vec::new();
        for entry in fs::read_dir(self.on_disk()).with_context(|| self.name.clone())? {
            let name = entry?.file_name();
            let Some(shard) = name.to_str().and_then(Shard::parse) else {
                bail!("{}: {} is not a file of an ElasticDL checkpoint", self.name, name.display());
            };
            shards.push(shard);
        }
        shards.sort_by_key(|shard| shard.index);
        let Some(first) = shards.first().copied() else { bail!("{} is empty", self.name) };
        if let Some(other) = shards.iter().find(|shard| (shard.count, shard.ending) != (first.count, first.ending)) {
            bail!("{}: {} and {} belong to different checkpoints", self.name, first.name(), other.name());
        }
        match (0..first.count)
            .zip(shards.iter().map(|shard| shard.index).chain([u32::MAX]))
            .find(|(want, got)| want != got)
        {
            Some((missing, _)) => {
                let (name, have) = (Shard { index: missing, ..first }.name(), shards.len());
                bail!("{} is not complete: it has {have} of {} files, {name} is missing", self.name, first.count)
            }
            None => Ok(shards),
        }
    }

    /// Opens a file. A released file of a store is decoded into the staging directory.
    fn open(
        &self,
        shard: &Shard,
        staging: &Staging,
        check: &dyn Fn() -> std::io::Result<()>,
    ) -> Result<(File, Permissions)> {
        let path = self.path.join(shard.name());
        let on_disk = self.on_disk().join(shard.name());
        let context = || format!("{}/{}", self.name, shard.name());
        let opened = match &self.store {
            Some(store) => beneath::open_file(&store.tree(), &path),
            None => File::open(&on_disk),
        };
        let opened = opened.with_context(context)?;
        // Only the permission bits: it is a new file, perhaps of another user.
        let permissions = Permissions::from_mode(opened.metadata()?.mode() & 0o777);
        if let Some(store) = &self.store
            && stub(store, &path)?.is_some()
        {
            let file = tempfile::tempfile_in(&staging.path).with_context(|| format!("{}", staging.path.display()))?;
            read(store, &objects(store)?, &path, &mut |at, bytes| {
                check()?;
                scratch::write_all_at(&file, bytes, at)
            })?;
            return Ok((file, permissions));
        }
        Ok((opened, permissions))
    }
}

/// The path, or its other spelling (`version-` or `version_`) if only that exists.
fn either(path: &Path) -> PathBuf {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let other = match (name.strip_prefix("version-"), name.strip_prefix("version_")) {
        (Some(number), _) => format!("version_{number}"),
        (_, Some(number)) => format!("version-{number}"),
        _ => return path.to_path_buf(),
    };
    let other = path.with_file_name(other);
    if !path.exists() && other.is_dir() { other } else { path.to_path_buf() }
}

/// The directory for the new files; dropping it removes all that is left in it.
struct Staging {
    io: Io,
    path: PathBuf,
}

impl Staging {
    fn begin(io: &Io, path: PathBuf) -> Result<Staging> {
        io.device().make_dir(&path, 0o777, STEP).with_context(|| match fs::symlink_metadata(&path) {
            Ok(_) => format!("{}: another reshard is at work here, or was cut short (then remove it)", path.display()),
            Err(_) => format!("{}", path.display()),
        })?;
        let staging = Staging { io: io.clone(), path };
        io.device().make_dir(&staging.out(), 0o777, STEP)?;
        Ok(staging)
    }

    fn out(&self) -> PathBuf {
        // If ElasticDL takes the staging directory for version 0, it finds one file that it does not recognize, so the
        // version is not valid.
        self.path.join("out-0")
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = self.io.empty(&self.path, STEP).and_then(|()| self.io.device().remove_dir(&self.path, STEP));
    }
}
