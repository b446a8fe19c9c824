//! `stepfs reshard`

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::store::durable::Io;
use crate::tools::reshard as tools;

use super::place::Place;

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

pub(super) fn run(args: Args) -> Result<()> {
    super::log_to_stderr("warn");
    reshard(&Io::disk(), (&args.from, args.servers), &args.dir)?;
    Ok(())
}

/// Writes the version at `from` for another number of servers, as a new directory.
///
/// # Errors
/// A message for the user; `dir` does not exist then.
pub fn reshard(io: &Io, (from, servers): (&str, u32), dir: &Path) -> Result<()> {
    let version = Place::find(Path::new(from), either)?;
    tools::reshard(io, &version, servers, dir)
}

/// The path, or its other spelling if only that exists: ElasticDL writes `version-40`, its design document `version_40`.
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
