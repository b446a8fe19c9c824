//! `stepfs verify`

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde::Serialize;

use crate::archive::repair::{self, Progress, Report};
use crate::mirror::Missing;
use crate::store::{Store, name_bytes};

use super::against;
use super::format::{name, progress, size};
use super::mirror::{At, Mirror, tell};
use super::source::Brought;
use super::{DAMAGED, exit_if, say_answer};

/// Read and decode all files and objects of a store, and list the damage exactly.
///
/// The store may be mounted. With --repair it must not be mounted, and stepfs repairs what it can: bytes that another
/// object, a file of the tree or the mirror still has, stubs, `stepfs.toml`. A replacement is read back before it
/// takes the damaged one's place. The store's `damaged/` keeps the damaged files.
///
/// With --against, files are compared with a manifest that `sha256sum` made when they were written. A released file may
/// be lossy by now; its object has the SHA-256 of the original bytes.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs verify ~/ckpts.store\n\n\
Exit codes: 0 no damage left, 1 failed, 3 damage left. With --against: 0 every file has the \
manifest's hash, or was archived from such bytes, 1 failed, 3 a file differs, is missing or is damaged.")]
pub(super) struct Args {
    /// The store, a mount, or the URL of a mirror. Of a mirror, one state is verified. With --against also a directory in a
    /// mount that the manifest's names are relative to.
    store: PathBuf,
    /// Of a mirror: its state as it was then, not the newest. An age such as 3h or 2d, or @ and seconds since 1970.
    #[arg(long, value_name = "TIME", conflicts_with_all = ["against", "repair"])]
    at: Option<At>,
    /// Compare the files in this manifest (of `sha256sum`; `-` is standard input).
    #[arg(long, value_name = "MANIFEST", conflicts_with = "repair")]
    against: Option<PathBuf>,
    /// Repair the damage. Without it, the output says what a repair would do.
    #[arg(long)]
    repair: bool,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Shown<'a> {
    #[serde(flatten)]
    report: &'a Report,
    /// `--repair` was given.
    repair: bool,
    /// Names of the mirror that cannot be brought, each with the reason.
    missing: BTreeMap<String, &'a str>,
    /// Those of them that are not UTF-8, in hexadecimal.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    missing_bytes: BTreeMap<String, &'a str>,
    /// Directories of the mirror that cannot be read.
    unread: &'a [String],
}

pub(super) fn run(args: Args) -> Result<()> {
    super::log_to_stderr("warn");
    if let Some(manifest) = &args.against {
        return against::run(manifest, &args.store, args.json);
    }
    let mirror = Mirror::of(&args.store);
    if args.repair && mirror.is_some() {
        bail!("a mirror mends itself while its store is mounted; name a store");
    }
    let of = match (mirror.is_some(), args.at) {
        (true, None) => " in its newest state; --at TIME verifies an older one",
        (true, Some(_)) => " in this state",
        (false, None) => "",
        (false, Some(_)) => bail!("--at is for the URL of a mirror; leave it out"),
    };
    let brought = match mirror {
        Some(mirror) => Brought::of(&mirror.at(args.at), Path::new(""))?,
        None => Brought::find(&args.store, Path::new(""))?,
    };
    if !brought.path.as_os_str().is_empty() {
        bail!(
            "{} is a path in a mount; stepfs verifies whole stores: `stepfs verify {}`",
            args.store.display(),
            brought.root.display()
        );
    }
    let told = tell(&brought.missing);
    let bar = progress(0, true);
    let show = |step: Progress| match step {
        Progress::Total(bytes) => {
            bar.set_position(0);
            bar.set_length(bytes);
        }
        Progress::Object(id) => bar.set_message(id.to_string()),
        Progress::Decoded(bytes) => bar.inc(bytes),
    };
    let report = match args.repair {
        true => repair::repair(&Store::open(&brought.root)?, &show)?,
        false => repair::verify(&Store::look(&brought.root)?, &show)?,
    };
    bar.finish_and_clear();
    let Missing { names, unread, .. } = &brought.missing;
    let shown = Shown {
        report: &report,
        repair: args.repair,
        missing: names.iter().map(|(path, why)| (path.to_string_lossy().into_owned(), why.as_str())).collect(),
        missing_bytes: names.iter().filter_map(|(path, why)| Some((name_bytes(path)?, why.as_str()))).collect(),
        unread,
    };
    say_answer(args.json, &shown, |shown| print(shown, &args.store, told.is_err(), of))?;
    exit_if(!report.damaged.is_empty(), DAMAGED)?;
    told
}

fn print(Shown { report, repair, .. }: &Shown, store: &Path, is_incomplete: bool, of: &str) {
    for repaired in &report.repaired {
        say!("repaired: {}", name(repaired));
    }
    for damaged in &report.damaged {
        let paths = if damaged.paths.is_empty() { "no file".into() } else { name(damaged.paths.join(", ")) };
        let object = damaged.object.as_ref().map_or(String::new(), |object| format!("object {object}: "));
        let tensor = damaged.tensor.as_ref().map_or(String::new(), |tensor| format!("tensor {}: ", name(tensor)));
        say!("{paths}: {object}{tensor}{}", damaged.error);
        match &damaged.remedy {
            Some(remedy) => say!("    can be repaired: {}", name(remedy)),
            None => {
                let salvage = damaged.object.as_ref().zip(damaged.paths.first()).map_or(String::new(), |(_, path)| {
                    format!(", or save its readable tensors: stepfs export --salvage {} {path} OUT", store.display())
                });
                say!("    cannot be repaired; restore it from a backup{}", name(&salvage));
            }
        }
    }
    say!("{} files, {} objects, {} decoded", report.files, report.objects, size(report.decoded_bytes));
    let saved = report.damaged.iter().filter(|damaged| damaged.remedy.is_some()).count();
    match report.damaged.len() {
        0 if is_incomplete => say!("no damage in the rest"),
        0 => say!("no damage{of}"),
        count => say!("{count} damaged; every other file is unharmed"),
    }
    if !repair && saved > 0 {
        say!("{saved} can be repaired: unmount the store, then `stepfs verify --repair STORE`");
    }
}
