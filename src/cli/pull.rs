//! `stepfs pull`

use std::path::{Component, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::{Result, bail};

use crate::mirror::{self, Step};
use crate::store::Store;

use super::format::progress;
use super::interrupted;
use super::mirror::{At, Mirror, tell};
use super::source::refuse_new_store;

/// Make a store of what a mirror has.
///
/// The store is created if it is missing. Files that it has already stay as they are. Interrupt it at any time: what came
/// stays, and the next pull goes on from there. Names that cannot be brought are listed, all others come, and the exit
/// code is 3.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs pull s3://bucket/run-7 /nvme/new.store            everything, on a machine that has nothing yet\n  \
stepfs mount /nvme/new.store /ckpts                      then go on there\n  \
stepfs pull s3://bucket/run-7 back.store run --at 2h     one directory, as it was two hours ago")]
pub(super) struct Args {
    /// The URL of a mirror: file:///DIRECTORY or s3://BUCKET/PREFIX.
    url: PathBuf,
    /// A store that is not mounted.
    store: PathBuf,
    /// Only the files at and below this path.
    path: Option<PathBuf>,
    /// As it was then: an age such as 3h or 2d, or @ and seconds since 1970. `stepfs status URL` lists what is there.
    #[arg(long, value_name = "TIME")]
    at: Option<At>,
}

pub(super) fn run(args: Args) -> Result<()> {
    super::log_to_stderr("warn");
    // `.` and `./run` are the same paths without the dot.
    let plain = |path: &PathBuf| path.components().filter(|part| *part != Component::CurDir).collect::<PathBuf>();
    let wanted = args.path.as_ref().map(plain).unwrap_or_default();
    let url = args.url.display();
    let Some(mirror) = Mirror::of(&args.url) else { bail!("{url}: write the URL of a mirror first, then the store") };
    // Before a store is made for it.
    let reader = mirror.at(args.at).read(&wanted)?;
    let is_there = wanted.as_os_str().is_empty() || reader.tree.get(&wanted).is_some();
    if !is_there && reader.tree.unread.is_empty() {
        bail!("{} is not on {url}; `stepfs ls {url}` shows its files", wanted.display());
    }
    refuse_new_store(&args.store)?;
    let store = Store::open(&args.store)?;
    let (bar, stop) = (progress(0, true), interrupted()?);
    let watch = |step| {
        match step {
            Step::Total(bytes) => bar.set_length(bytes),
            Step::Came(bytes) => bar.inc(bytes),
        }
        !stop.load(Ordering::Relaxed)
    };
    let pulled = mirror::pull(&reader, &store, &wanted, &watch);
    bar.finish_and_clear();
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted; what came stays, and the same command goes on from there");
    }
    tell(&pulled?)
}
