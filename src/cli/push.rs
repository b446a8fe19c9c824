//! `stepfs push`, and the wait for a remote.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::archive::{Archive, AtRest};
use crate::remote::Progress;
use crate::store::Store;

use super::format::{name, progress, size};
use super::source::{Local, Mount};
use super::wait::wait_for;
use super::{interrupted, remote, sync};

/// How often to ask how far pushing has come.
const INTERVAL: Duration = Duration::from_millis(50);
/// How long to wait while the remote does not answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Push a store to its remote, and wait until the remote has everything.
///
/// A mount pushes by itself. This command does it for a store that is not mounted: it archives what may be archived,
/// and pushes all files and their objects. For a mount it waits until everything is pushed. Interrupt it at any time:
/// what is pushed stays, and the next push goes on from there.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs push ~/ckpts.store --remote s3://bucket/run-7     a store from before it had a remote\n  \
stepfs push /ckpts                                       wait until a mount has pushed everything\n  \
stepfs pull /nvme/new.store --remote s3://bucket/run-7   on another machine")]
pub(super) struct Args {
    /// A store that is not mounted, or a mount.
    path: PathBuf,
    /// The remote: file:///DIRECTORY or s3://BUCKET/PREFIX. The store's stepfs.toml keeps it.
    #[arg(long, value_name = "URL")]
    remote: Option<String>,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    super::log_to_stderr("warn");
    // A store from before may not be there yet; `push` creates none.
    let local = Local::of(&args.path)?;
    if let Some(mount) = &local.mount {
        if let Some(url) = args.remote {
            bail!("{} is mounted: `stepfs umount` it first, or mount it with --remote {url}", mount.root.display());
        }
        return sync::sync(mount, true);
    }
    let mut store = Store::open(&local.store)?;
    if let Some(url) = &args.remote {
        let root = store.root().to_path_buf();
        remote::adopt(&mut store, url, &root)?;
    }
    let Some((place, settings)) = remote::connect(&store, store.root())? else {
        bail!("{} has no remote; name one with --remote URL", local.store.display());
    };
    let stop = interrupted()?;
    let namespace = Arc::new(AtRest::of(&store));
    let archive = Archive::open(store)?;
    archive.start(namespace);
    let push = || -> Result<ExitCode> {
        let done = wait_for(
            || if stop.load(Ordering::Relaxed) { bail!("interrupted") } else { Ok(archive.queue()) },
            || Ok(None),
        )?;
        archive.connect(place, settings)?;
        let ask = || archive.remote_progress().context("the remote has gone");
        wait_for_remote(ask, &stop, "the same command goes on from there once that is fixed")?;
        sync::no_failures(&done)
    };
    let pushed = push();
    archive.stop();
    pushed
}

/// Waits until all present changes of a mount are on its remote.
///
/// # Errors
/// The remote does not answer, or refuses.
pub(super) fn wait_for_mount(mount: &Mount) -> Result<()> {
    let ask = || -> Result<Progress> {
        let Ok(text) = mount.word(Path::new(""), "remote") else {
            bail!("{} is mounted without a remote (`stepfs mount --remote URL`)", mount.root.display());
        };
        Ok(serde_json::from_slice(&text)?)
    };
    // Ctrl-C ends the wait alone: the mount goes on.
    wait_for_remote(ask, &AtomicBool::new(false), "it goes on by itself once that is fixed")
}

/// Waits until all present changes are on the remote, with a bar.
fn wait_for_remote(ask: impl Fn() -> Result<Progress>, stop: &AtomicBool, next: &str) -> Result<()> {
    let wanted = ask()?.changes;
    let bar = progress(0, true);
    let (mut most, mut files) = (0, 0);
    let mut failing: Option<Instant> = None;
    loop {
        let now = ask()?;
        if now.pushed >= wanted {
            bar.finish_and_clear();
            return Ok(());
        }
        let left = || format!("{} files ({}) are not on the remote yet", now.files, size(now.bytes));
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted: {}; the same command goes on from there", left());
        }
        // While other files travel, one that cannot be read stops nothing.
        if std::mem::replace(&mut files, now.files) != now.files && now.tried < wanted {
            failing = None;
        }
        match &now.failing {
            Some(why) if failing.get_or_insert_with(Instant::now).elapsed() > PATIENCE => {
                bail!("{}: {}; {next}", left(), name(why));
            }
            Some(_) => {}
            None => failing = None,
        }
        most = most.max(now.bytes);
        bar.set_message(format!("{} files to push", now.files));
        bar.set_length(most);
        bar.set_position(most - now.bytes);
        std::thread::sleep(INTERVAL);
    }
}
