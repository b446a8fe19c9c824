//! `stepfs sync`

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::archive::Queue;
use crate::mirror::Progress;

use super::format::{name, size};
use super::source::Mount;
use super::wait::{Left, wait, wait_until};

/// How long to wait for files that are open: a program may have closed them just now. The kernel tells of that after
/// `close` has returned, and a busy machine passes it on late.
const CLOSING: Duration = Duration::from_millis(500);
/// How long to wait while the mirror does not answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often to ask whether some are open.
const INTERVAL: Duration = Duration::from_millis(5);

/// Wait until all files that can be are archived and released.
///
/// The newest checkpoint of each lineage and all open files stay as written. Files that programs save meanwhile do not
/// extend the wait. Where files are open, the wait takes half a second at least.
#[derive(clap::Args)]
#[command(after_help = "Example: before the machine goes away\n  \
stepfs sync --mirror /ckpts")]
pub(super) struct Args {
    /// The mount, or a path in it.
    dir: PathBuf,
    /// Wait until the mirror has everything that it can have, too.
    #[arg(long)]
    mirror: bool,
}

pub(super) fn run(args: Args) -> Result<()> {
    sync(&Mount::of(&args.dir)?, args.mirror)
}

/// Waits for a mount, and for its mirror if `mirror` says so.
///
/// # Errors
/// The work cannot go on, or some files stay as they are; the message gives the reason.
pub(super) fn sync(mount: &Mount, mirror: bool) -> Result<()> {
    let asked_at = Instant::now();
    let queue = || mount.ask::<Queue>("queue");
    while asked_at.elapsed() < CLOSING && queue()?.open > 0 {
        std::thread::sleep(INTERVAL);
    }
    mount.tell(Path::new(""), "sync")?;
    let asked = queue()?.newest;
    let done = wait_until(queue, || Ok(None), |now| now.has_done(asked))?;
    if mirror {
        wait_for_mirror(mount)?;
    }
    if !done.failed.is_empty() {
        bail!("not archived, kept as written: {}", done.failed.join("; "));
    }
    Ok(())
}

/// Waits until all present changes of a mount are on its mirror, with a bar.
///
/// # Errors
/// The mirror does not answer, or refuses; names what is not there.
fn wait_for_mirror(mount: &Mount) -> Result<()> {
    let ask = || -> Result<Progress> {
        let Ok(text) = mount.word(Path::new(""), "mirror") else {
            bail!("{} is mounted without a mirror (`stepfs mount --mirror URL`)", mount.root.display());
        };
        mount.understand(&text)
    };
    let wanted = ask()?.changes;
    let mut bytes = 0;
    wait(true, PATIENCE, || {
        let now = ask()?;
        if now.done >= wanted {
            return Ok(None);
        }
        let why: Vec<&str> = now.failing.iter().chain(&now.failed).map(String::as_str).collect();
        // While other files travel, one that fails stops nothing. Those that came later are not waited for.
        let travels =
            std::mem::replace(&mut bytes, now.bytes) > now.bytes && now.failing.is_none() && now.others < wanted;
        let stuck = (!travels && !why.is_empty()).then(|| {
            let (files, left, why) = (now.files, size(now.bytes), name(why.join("; ")));
            format!("{files} files ({left}) are not on the mirror: {why}; it goes on by itself")
        });
        Ok(Some(Left { count: now.bytes, doing: format!("{} files to go", now.files), stuck }))
    })
}
