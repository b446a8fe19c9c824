//! `stepfs release`

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::store::{MIN_RELEASE_BYTES, beneath};

use super::format::{name, progress};
use super::source::{Local, Mount};
use super::{FAILED, exit_if};

/// Pause between two checks of the files.
const PAUSE: Duration = Duration::from_millis(50);
/// How often to ask the daemon again. A file that was not sealed at first may belong to a checkpoint that the daemon
/// waits for.
const AGAIN: Duration = Duration::from_secs(1);
/// Checks that must give the same reason. The check itself makes a file busy for a moment.
const LOOKS: u32 = 4;

/// Archive and release files now, without waiting for the rest of their checkpoint.
///
/// Prints each file that must stay, with the reason, and exits with 1. These are the newest file of a lineage (which
/// stays exact), pinned files and open files. Files that `stepfs recall` brought back become the same objects again.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs release /ckpts/run-7")]
pub(super) struct Args {
    /// Files and directories in a mount.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

struct File {
    mount: Mount,
    path: PathBuf,
    /// It may stay without a message: it is small, and was found in a directory.
    quiet: bool,
    reason: String,
    looks: u32,
}

pub(super) fn run(args: Args) -> Result<()> {
    let mut wanted = Vec::new();
    let mut waiting = Vec::new();
    for path in &args.paths {
        let (mount, local) = Local::in_mount(path)?;
        let tree = local.tree()?;
        for path in tree.files(&local.path)? {
            let is_small = || beneath::metadata(&tree.store.tree(), &path).is_ok_and(|it| it.len() < MIN_RELEASE_BYTES);
            let quiet = path != local.path && is_small();
            waiting.push(File { mount: mount.clone(), path, quiet, reason: String::new(), looks: 0 });
        }
        wanted.push((mount, local.path));
    }
    let bar = progress(waiting.len() as u64, false);
    bar.set_message("releasing");
    let mut stays = Vec::new();
    let mut asked: Option<Instant> = None;
    while !waiting.is_empty() {
        if asked.is_none_or(|asked| asked.elapsed() > AGAIN) {
            for (mount, path) in &wanted {
                mount.tell(path, "release")?;
            }
            asked = Some(Instant::now());
        }
        std::thread::sleep(PAUSE);
        let mut left = Vec::new();
        for mut file in waiting {
            // The file is gone.
            let Ok(reason) = file.mount.word(&file.path, "release") else { continue };
            let reason = String::from_utf8_lossy(&reason).into_owned();
            file.looks = if reason == file.reason { file.looks + 1 } else { 0 };
            file.reason = reason;
            match &*file.reason {
                "released" => {}
                "working" => left.push(file),
                _ if file.looks < LOOKS => left.push(file),
                _ => stays.push(file),
            }
        }
        waiting = left;
        bar.set_position(bar.length().unwrap_or(0) - waiting.len() as u64);
    }
    bar.finish_and_clear();
    stays.retain(|file| !file.quiet);
    for file in &stays {
        say_error!("stepfs: {} stays as it is: {}", name(file.mount.at(&file.path)), file.reason);
    }
    exit_if(!stays.is_empty(), FAILED)
}
