//! `mount.stepfs`, as mount(8) calls it: for `mount -t stepfs STORE DIR -o OPTIONS`, or a line of `/etc/fstab`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::store::Store;

use super::mount::{self, Created, Mounting};
use super::mount_options::Options;
use super::passthrough;
use super::{Exit, format};

/// Name of the link in /sbin to the program. It is also a subcommand of `stepfs`.
pub(super) const NAME: &str = "mount.stepfs";
/// mount(8) calls this name if the type is written as in `/proc/mounts`.
const OTHER_NAME: &str = "mount.fuse.stepfs";

/// Exit code of mount(8) for wrong arguments.
pub(super) const USAGE: u8 = 1;
/// Exit code of mount(8) for a failed mount.
const FAILED: u8 = 32;

/// Mount a store as mount(8) and /etc/fstab do: `mount -t stepfs STORE DIR -o OPTIONS`.
///
/// Returns when the mount serves. Options of stepfs: allow_other, no_passthrough, user=NAME, profile=NAME, memory=SIZE, log=FILE,
/// and create to create a missing store. Exit codes are those of mount(8): 0 done, 1 wrong usage, 32 failed.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Directory of the store.
    store: PathBuf,
    /// Directory to mount it on.
    dir: PathBuf,
    /// Options, between commas.
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Ignore unknown options.
    #[arg(short)]
    sloppy: bool,
    /// Do everything except the mount.
    #[arg(short)]
    fake: bool,
    /// No effect: the kernel keeps /etc/mtab.
    #[arg(short)]
    no_mtab: bool,
    /// Print each action.
    #[arg(short)]
    verbose: bool,
    /// Mount read-only; same as `-o ro`.
    #[arg(short)]
    read_only: bool,
    /// Mount read-write, which is the default.
    #[arg(short)]
    writable: bool,
    /// Type of the file system; stepfs.
    #[arg(short = 't', value_parser = ["stepfs", "fuse.stepfs"])]
    kind: Option<String>,
}

/// The program's arguments; inserts this subcommand if the program was called by one of the names above.
pub(super) fn arguments(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = arguments.collect();
    let name = arguments.first().and_then(|name| Path::new(name).file_name()).unwrap_or_default().as_encoded_bytes();
    if name.ends_with(NAME.as_bytes()) || name.ends_with(OTHER_NAME.as_bytes()) {
        arguments.insert(1, NAME.into());
    }
    arguments
}

pub(super) fn run(args: Args) -> Result<()> {
    let (error, code) = match options(&args).map(|options| mount(&args, options)) {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(error)) => (super::told(&error), FAILED),
        Err(error) => (error, USAGE),
    };
    say_error!("{NAME}: {}", format::lines(&error));
    Err(Exit(code).into())
}

fn options(args: &Args) -> Result<Options, String> {
    let mut list = args.options.join(",");
    if args.read_only {
        list.push_str(",ro");
    }
    if args.sloppy { Options::lenient(&list) } else { Options::strict(&list) }
}

fn mount(args: &Args, options: Options) -> Result<()> {
    // `stepfs mount` creates a missing mount point, this command does not: at boot, a missing one more often means that
    // the disk below is not mounted.
    let helper = match &options.user {
        Some(user) if !args.fake => passthrough::serve_as(user, !options.no_passthrough)?,
        _ => None,
    };
    crate::fs::clear_dead_mount(&args.dir).with_context(|| format!("{}", args.dir.display()))?;
    if !args.dir.is_dir() {
        bail!("the mount point {} is not a directory; create it with: mkdir -p {0}", args.dir.display());
    }
    if !options.create {
        // Its error says how to create a store.
        Store::look(&args.store)?;
    }
    if args.verbose {
        let (store, dir) = (args.store.display(), args.dir.display());
        say!("{NAME}: {} {store} on {dir}", if args.fake { "would mount" } else { "mounting" });
    }
    if args.fake {
        return Ok(());
    }
    let created = Created::before(&args.store, &args.dir);
    let mounting = Mounting { store: args.store.clone(), dir: args.dir.clone(), options, helper };
    mount::start(&mounting).inspect_err(|_| created.remove())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_name_is_a_command() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        for name in ["mount.stepfs", "/sbin/mount.stepfs", "/sbin/mount.fuse.stepfs", "/tmp/x-mount.stepfs"] {
            let line = words(&format!("{name} /store /dir"));
            assert_eq!(arguments(line.into_iter())[1..], words("mount.stepfs /store /dir"));
        }
        assert_eq!(arguments(words("/usr/bin/stepfs mount a b").into_iter())[1..], words("mount a b"));
        assert_eq!(arguments(words("stepfs ls a").into_iter()), words("stepfs ls a"));
    }
}
