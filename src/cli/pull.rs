//! `stepfs pull`

use std::io;
use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Result, bail};

use crate::remote::{self as far, Origin, Step};
use crate::store::object::path_of;
use crate::store::{DAEMON_LOG, Store, open_aside};

use super::format::{name, progress};
use super::interrupted;
use super::remote::{Remote, connect, tell};
use super::source::{Local, Mount};

/// Bring everything that a remote has into a store, so that the store needs the remote no more.
///
/// A mount shows all names of its remote, and brings what programs read. This command brings all of it. The store is
/// created if it is missing. Files of the store that are not from this remote stay, and nothing is pushed. Interrupt it
/// at any time: what came stays, and the next pull goes on from there. Names that cannot be brought are listed, all
/// others come, and the exit code is 3.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs pull /nvme/new.store --remote s3://bucket/run-7   everything, on a machine that has nothing yet\n  \
stepfs mount /nvme/new.store /ckpts                      then go on there\n  \
stepfs pull /ckpts run/step_100                          one directory, into a mount")]
pub(super) struct Args {
    /// A store that is not mounted, or a mount.
    store: PathBuf,
    /// Only the files at and below this path in it.
    path: Option<PathBuf>,
    /// The remote: file:///DIRECTORY or s3://BUCKET/PREFIX. The store's stepfs.toml keeps it.
    #[arg(long, value_name = "URL")]
    remote: Option<String>,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    super::log_to_stderr("warn");
    // `.` and `./run` are the same paths without the dot.
    let plain = |path: &PathBuf| path.components().filter(|part| *part != Component::CurDir).collect::<PathBuf>();
    let wanted = args.path.as_ref().map(plain).unwrap_or_default();
    if let Ok((mount, local)) = Local::in_mount(&args.store) {
        if args.remote.is_some() {
            bail!("{} is mounted: its remote is fixed until it is unmounted", mount.root.display());
        }
        return through(&mount, &local, &local.path.join(wanted));
    }
    if let Some(url) = &args.remote {
        Remote::at(url).must_exist()?;
    }
    let mut store = Store::open(&args.store)?;
    if let Some(url) = &args.remote {
        store.set_remote(url)?;
    }
    let Some((place, settings)) = connect(&store, store.root())? else {
        bail!("{} has no remote; name one with --remote URL", args.store.display());
    };
    let (bar, stop) = (progress(0, true), interrupted()?);
    let (shown, stopped) = (bar.clone(), Arc::clone(&stop));
    let watch = move |step: Step| {
        match step {
            Step::Total(bytes) => shown.set_length(bytes),
            Step::Came(bytes) => shown.inc(bytes),
        }
        !stopped.load(Ordering::Relaxed)
    };
    let from = Origin { place: &place, name: (&settings.url, &settings.node), watch: Arc::new(watch) };
    let copied = far::copy(&from, store, &wanted);
    bar.finish_and_clear();
    if stop.load(Ordering::Relaxed) {
        bail!("interrupted; what came stays, and the same command goes on from there");
    }
    let missing = copied?;
    if missing.found == 0 && missing.nodes.is_empty() {
        let what = if wanted.as_os_str().is_empty() { "any file".into() } else { wanted.display().to_string() };
        bail!("{} has not {what}; `stepfs ls {0}` lists its files", settings.url);
    }
    let is_incomplete = tell(&missing);
    Ok(ExitCode::from(if is_incomplete { super::DAMAGED } else { 0 }))
}

/// Reads the files of a mount that only the remote has: the daemon brings and keeps what is read whole.
fn through(mount: &Mount, local: &Local, wanted: &Path) -> Result<ExitCode> {
    let tree = local.tree()?;
    let objects = tree.store.objects();
    let is_away =
        |path: &PathBuf| tree.stub(path).is_ok_and(|of| of.is_some_and(|of| !path_of(&objects, of.object).exists()));
    let all = tree.files(wanted)?;
    if all.is_empty() {
        bail!("{}: there is no such file", mount.at(wanted).display());
    }
    let away: Vec<PathBuf> = all.into_iter().filter(is_away).collect();
    let len = |path: &PathBuf| mount.at(path).metadata().map_or(0, |metadata| metadata.len());
    let bar = progress(away.iter().map(len).sum(), true);
    let mut failed = false;
    for path in &away {
        bar.set_message(name(&path.display().to_string()));
        let read = || -> io::Result<u64> {
            let copied = io::copy(&mut bar.wrap_read(open_aside(&mount.at(path))?), &mut io::sink())?;
            if is_away(path) { Err(io::Error::other("it was read, and is not kept")) } else { Ok(copied) }
        };
        if let Err(error) = read() {
            failed = true;
            let log = tree.store.root().join(DAEMON_LOG);
            say_error!("{}: {error}; {} says why", name(&path.display().to_string()), log.display());
        }
    }
    bar.finish_and_clear();
    Ok(ExitCode::from(if failed { super::DAMAGED } else { 0 }))
}
