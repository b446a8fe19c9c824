//! `stepfs verify`

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use crate::archive::repair::{self, Progress, Report};
use crate::store::{Error, Store};

use super::against;
use super::words::{name, progress, size};

/// Read and decode everything in a store, and say exactly what is damaged.
///
/// Works while the store is mounted, too. With --repair, which needs a store that is not mounted, what can be saved is saved:
/// a flipped bit, bytes that another object or a file of the tree still has, stubs, `stepfs.toml`. What takes the place of
/// something damaged was read back first; what was damaged is kept in the store's `damaged/`.
///
/// With --against, files are compared with a manifest that `sha256sum` made when they were written. A released file may be lossy
/// by now: its object knows the hash of what it was made from.
#[derive(clap::Args)]
#[command(
    after_help = "Exit codes: 0 no damage (any more), 1 failed, 3 damage left. With --against: 0 every file is as it is in the \
manifest, or was made from what is, 1 failed, 3 one differs, is missing or is damaged."
)]
pub(super) struct Args {
    /// The store. With --against also a mount, or a directory in a mount, from which the manifest's names count.
    store: PathBuf,
    /// Compare the files that this manifest names (of `sha256sum`, also with --tag; `-` is standard input).
    #[arg(long, value_name = "MANIFEST", conflicts_with = "repair")]
    against: Option<PathBuf>,
    /// Save what can be saved. Without it, what it would do is said with each damage.
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
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    super::log_to_stderr("warn");
    if let Some(manifest) = &args.against {
        return against::run(manifest, &args.store, args.json);
    }
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
        true => {
            let (store, done) = Store::open_damaged(&args.store)?;
            let mut report = repair::repair(&store, &show)?;
            report.repaired.splice(0..0, done);
            report
        }
        false => {
            let store = Store::look(&args.store).map_err(|error| match error {
                Error::Settings(why) => anyhow::anyhow!(
                    "stepfs.toml: {why}\n`stepfs verify --repair` writes it anew if nothing better is to be had"
                ),
                error => error.into(),
            })?;
            repair::verify(&store, &show)?
        }
    };
    bar.finish_and_clear();
    print(&report, &args)?;
    Ok(ExitCode::from(if report.damaged.is_empty() { 0 } else { super::DAMAGED }))
}

fn print(report: &Report, args: &Args) -> Result<()> {
    if args.json {
        println!("{}", serde_json::to_string_pretty(&Shown { report, repair: args.repair })?);
        return Ok(());
    }
    for repaired in &report.repaired {
        println!("repaired: {}", name(repaired));
    }
    for damaged in &report.damaged {
        let mut line = match damaged.paths.is_empty() {
            true => "no file".to_string(),
            false => name(&damaged.paths.join(", ")),
        };
        line.push_str(": ");
        if let Some(object) = &damaged.object {
            line.push_str(&format!("object {object}: "));
        }
        if let Some(tensor) = &damaged.tensor {
            line.push_str(&format!("tensor {}: ", name(tensor)));
        }
        println!("{line}{}", damaged.error);
        match &damaged.remedy {
            Some(remedy) => println!("    can be repaired: {}", name(remedy)),
            None if args.repair => println!("    cannot be repaired; a backup can complete it"),
            None => {}
        }
    }
    println!("{} files, {} objects, {} decoded", report.files, report.objects, size(report.decoded_bytes));
    let saved = report.damaged.iter().filter(|damaged| damaged.remedy.is_some()).count();
    match report.damaged.len() {
        0 => println!("no damage"),
        count => println!("{count} damaged; every other file is unharmed"),
    }
    if !args.repair && saved > 0 {
        println!("{saved} can be repaired: umount the store, then `stepfs verify --repair STORE`");
    }
    Ok(())
}
