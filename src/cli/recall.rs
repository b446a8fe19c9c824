//! `stepfs recall`

use std::fs;
use std::path::PathBuf;

use anyhow::Result;

use super::format::{name, progress};
use super::source::Local;
use super::{FAILED, exit_if};

/// Turn released files back into plain files, with the same bytes that reads give.
///
/// They stay plain until `stepfs release`, a write, or the next mount. After a release or a mount the same object
/// stands for them again, and no bytes change. Use it for programs that read a file many times in small pieces, or that
/// read it while stepfs does not run. Ctrl-C stops after the current file.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs recall /ckpts/run-7/step_100.pt")]
pub(super) struct Args {
    /// Files and directories in a mount.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
}

pub(super) fn run(args: Args) -> Result<()> {
    let mut released = Vec::new();
    let mut total = 0;
    for path in &args.paths {
        let (mount, local) = Local::in_mount(path)?;
        let tree = local.tree()?;
        for file in tree.files(&local.path)? {
            // Include damaged ones: the daemon reports the damage.
            if !matches!(tree.stub(&file), Ok(None)) {
                let file = mount.at(&file);
                let len = fs::symlink_metadata(&file).map_or(0, |metadata| metadata.len());
                total += len;
                released.push((file, len));
            }
        }
    }
    let bar = progress(total, true);
    let mut failed = false;
    for (file, len) in released {
        bar.set_message(file.file_name().unwrap_or_default().to_string_lossy().into_owned());
        if let Err(error) = xattr::set(&file, "user.stepfs.recall", b"1") {
            let why = match error.raw_os_error() {
                Some(libc::ENOENT) => continue,
                Some(libc::ENOSPC) => "there is no room for it in the store".to_string(),
                Some(libc::EDQUOT) => "the disk quota of the store's file system has no room for it".to_string(),
                Some(libc::EIO) => "it is damaged; the daemon's log and `stepfs verify` say more".to_string(),
                _ => error.to_string(),
            };
            bar.suspend(|| say_error!("stepfs: {}: {why}", name(file)));
            failed = true;
        }
        bar.inc(len);
    }
    bar.finish_and_clear();
    exit_if(failed, FAILED)
}
