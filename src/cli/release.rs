//! `stepfs release`

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::FAILED;
use super::format::{name, progress};
use super::listing::files;
use super::target::{Target, attribute};

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
pub(super) struct Args {
    /// Files and directories in a mount.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

struct File {
    path: PathBuf,
    /// The user named it; it was not found in a directory.
    named: bool,
    reason: String,
    looks: u32,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    let mut wanted = Vec::new();
    let mut waiting = Vec::new();
    for path in &args.paths {
        let (target, mount) = Target::in_mount(path)?;
        let store = crate::store::Store::look(&target.store)?;
        for file in files(&store, &target.path)? {
            let named = file == target.path;
            waiting.push(File { path: mount.join(file), named, reason: String::new(), looks: 0 });
        }
        wanted.push(mount.join(target.path));
    }
    let bar = progress(waiting.len() as u64, false);
    bar.set_message("releasing");
    let mut stays = Vec::new();
    let mut asked: Option<Instant> = None;
    while !waiting.is_empty() {
        if asked.is_none_or(|asked| asked.elapsed() > AGAIN) {
            for path in &wanted {
                xattr::set(path, "user.stepfs.release", b"1").with_context(|| format!("{}", path.display()))?;
            }
            asked = Some(Instant::now());
        }
        std::thread::sleep(PAUSE);
        let mut left = Vec::new();
        for mut file in waiting {
            // The file is gone.
            let Ok(reason) = attribute(&file.path, "release") else { continue };
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
    // Files named only through a directory may stay because they are small, without a message.
    stays.retain(|file| file.named || file.reason != "small");
    for file in &stays {
        say_error!("stepfs: {} stays as it is: {}", name(&file.path.to_string_lossy()), file.reason);
    }
    Ok(if stays.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}
