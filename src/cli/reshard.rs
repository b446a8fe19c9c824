//! `stepfs reshard`

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, bail};

use crate::store::beneath;
use crate::store::durable::{self, Io};
use crate::tools::reshard as tools;

use super::mirror::{Mirror, tell};
use super::source::{Brought, Tree, is_store};

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
stepfs reshard s3://bucket/run-7:version-40 3 /new/version-40 from a mirror\n\n\
ElasticDL itself restores a version to any number of servers, but each server then reads all files.\n\
A resharded file has only the data of its own server.")]
pub(super) struct Args {
    /// The version: a directory, STORE:PATH of a store, mounted or not, or URL:PATH of a mirror.
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

/// Where the files of a version are.
struct Version {
    /// For messages.
    name: String,
    tree: Option<Tree>,
    /// Path in the tree, or any path if there is no store.
    path: PathBuf,
    /// The store holds a mirror's files.
    _brought: Option<Brought>,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    super::log_to_stderr("warn");
    let stop = super::interrupted()?;
    reshard(&Io::disk(), (&args.from, args.servers), &args.dir, &stop)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the version at `from` for another number of servers, as a new directory. Leaves nothing behind if `stop` is
/// set.
///
/// # Errors
/// A message for the user; `dir` does not exist then.
pub fn reshard(io: &Io, (from, servers): (&str, u32), dir: &Path, stop: &AtomicBool) -> Result<()> {
    let version = Version::find(from)?;
    let open = |name: &str, scratch: &Path, check: &dyn Fn() -> io::Result<()>| version.open(name, scratch, check);
    let files = tools::Version { name: from, directory: &version.on_disk(), open: &open };
    tools::reshard(io, &files, servers, dir, stop)
}

impl Version {
    /// Finds the version that the user named. ElasticDL writes `version-40`, its design document says `version_40`;
    /// each spelling finds both.
    fn find(text: &str) -> Result<Version> {
        let name = text.to_string();
        let plain = either(Path::new(text));
        if is_store(&plain) {
            bail!("{text} is a store; name a version in it: {text}:version-V");
        }
        if plain.is_dir() {
            return Ok(Version { name, tree: None, path: plain, _brought: None });
        }
        let Some((store, inside)) =
            text.rsplit_once(':').filter(|(store, inside)| !store.is_empty() && !inside.is_empty())
        else {
            bail!("{text}: no such directory; of a store write STORE:version-V");
        };
        let (place, inside) = (Path::new(store), Path::new(inside));
        if inside.components().any(|part| !matches!(part, std::path::Component::Normal(_))) {
            bail!("{}: name a directory inside the store, without `..`", inside.display());
        }
        let brought = Mirror::of(place).map(|mirror| Brought::of(&mirror, inside)).transpose()?;
        if brought.as_ref().is_some_and(|brought| tell(&brought.missing)) {
            bail!("{text} is not complete");
        }
        let root = brought.as_ref().map_or(place, |brought| &brought.root);
        let tree = is_store(root).then(|| Tree::look(root)).transpose()?;
        let above = tree.as_ref().map_or(root.to_path_buf(), |tree| tree.store.tree());
        let found = either(&above.join(inside));
        if !found.is_dir() {
            bail!("{text}: {} has no directory {}", place.display(), inside.display());
        }
        let path = if tree.is_some() { found.strip_prefix(&above)?.to_path_buf() } else { found };
        Ok(Version { name, tree, path, _brought: brought })
    }

    fn on_disk(&self) -> PathBuf {
        self.tree.as_ref().map_or(self.path.clone(), |tree| tree.store.tree().join(&self.path))
    }

    /// Opens a file. A released file of a store is decoded into a temporary file.
    fn open(&self, name: &str, scratch: &Path, check: &dyn Fn() -> io::Result<()>) -> Result<(File, Permissions)> {
        let path = self.path.join(name);
        let opened = match &self.tree {
            Some(tree) => beneath::open_file(&tree.store.tree(), &path),
            None => File::open(&path),
        };
        let opened = opened.with_context(|| format!("{}/{name}", self.name))?;
        // Only the permission bits: the new files may be another user's.
        let permissions = Permissions::from_mode(opened.metadata()?.mode() & 0o777);
        let Some(tree) = &self.tree else { return Ok((opened, permissions)) };
        if tree.stub(&path)?.is_none() {
            return Ok((opened, permissions));
        }
        let file = tempfile::tempfile_in(scratch).with_context(|| format!("{}", scratch.display()))?;
        tree.read(&path, &mut |at, bytes| {
            check()?;
            durable::scratch::write_all_at(&file, bytes, at)
        })?;
        Ok((file, permissions))
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
