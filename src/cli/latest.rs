//! `stepfs latest` and `stepfs best`: one path for a script.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::clock::is_future;
use crate::store::Named;

use super::format::name;
use super::listing::{Checkpoint, checkpoints, survey};
use super::say_json;
use super::source::Local;

/// Print the path of the newest whole checkpoint.
///
/// Whole: closed and durable, not cut short, readable, and with as many files as the one before it. The newest is the
/// one that was written last. A newer one that is not whole is named on standard error. Exit code 1 if there is none.
#[derive(clap::Args)]
#[command(after_help = "Example: go on from the last checkpoint\n  \
torchrun train.py --resume $(stepfs latest /ckpts/run-7)")]
pub(super) struct LatestArgs {
    /// A mount, or a directory in it.
    dir: PathBuf,
    /// Print a JSON object with the path, or null if there is none.
    #[arg(long)]
    json: bool,
}

/// Print the path of the best checkpoint, as the run itself states it.
///
/// The run states it by the files of transformers' Trainer and of Lightning, by links such as `best.pt`, or by results
/// in the names of the files. Exit code 1 if nothing states it, or if several runs do.
#[derive(clap::Args)]
#[command(after_help = "Example: evaluate the best one\n  \
python eval.py $(stepfs best /ckpts/run-7)")]
pub(super) struct BestArgs {
    /// A mount, or a directory in it.
    dir: PathBuf,
    /// Print a JSON object with the path, or null if there is none.
    #[arg(long)]
    json: bool,
}

pub(super) fn latest(args: LatestArgs) -> Result<()> {
    of(&args.dir, args.json, |found| {
        let (newest, future) = newest_first(found);
        if let Some(future) = future {
            let path = name(&*future.path);
            say_error!("stepfs: {path} has a time in the future, so the steps decide; `stepfs status` says what to do");
        }
        let Some(at) = newest.iter().position(|checkpoint| checkpoint.is_state()) else {
            let (dir, why) = (args.dir.display(), not_whole(&newest));
            say_none(args.json)?;
            bail!("no whole checkpoint is below {dir}{why}; `stepfs ls {dir}` shows all");
        };
        if at > 0 {
            say_error!("stepfs: newer, but not whole{}", not_whole(&newest[..at]));
        }
        Ok(newest[at].path.to_path_buf())
    })
}

/// The checkpoints of a run, the newest first, also those that are not whole. The second is one with a time in the future:
/// the steps decide then.
pub(super) fn newest_first<'a>(found: &'a [Checkpoint<'a>]) -> (Vec<&'a Checkpoint<'a>>, Option<&'a Checkpoint<'a>>) {
    let is_any = |checkpoint: &&Checkpoint| checkpoint.has_tensors || checkpoint.fidelity.is_bad();
    let mut newest: Vec<&Checkpoint> = found.iter().filter(is_any).collect();
    let future = newest.iter().find(|checkpoint| is_future(checkpoint.modified_ns)).copied();
    newest.sort_by_key(|checkpoint| {
        let first = if future.is_some() { checkpoint.step } else { None };
        std::cmp::Reverse((first, checkpoint.modified_ns, checkpoint.step))
    });
    (newest, future)
}

/// The checkpoints that the run states to be its best: those that a file or link names, else those with the best results in
/// their names.
pub(super) fn stated_best<'a>(found: &'a [Checkpoint<'a>]) -> Vec<&'a Checkpoint<'a>> {
    let stated = |by: fn(&Checkpoint) -> bool| found.iter().filter(|found| by(found)).collect::<Vec<_>>();
    let best = stated(|found| found.entries.iter().any(|entry| entry.best.is_some()));
    match best.is_empty() {
        true => stated(|found| found.entries.iter().any(|entry| entry.has_best_result)),
        false => best,
    }
}

/// Why these are not whole, for a message.
fn not_whole(found: &[&Checkpoint]) -> String {
    let reason = |checkpoint: &&Checkpoint| format!("{} ({})", name(&*checkpoint.path), checkpoint.fidelity.words());
    let reasons: Vec<String> = found.iter().take(3).map(reason).collect();
    if reasons.is_empty() { String::new() } else { format!(": {}", reasons.join(", ")) }
}

pub(super) fn best(args: BestArgs) -> Result<()> {
    of(&args.dir, args.json, |found| match stated_best(found)[..] {
        [] => {
            say_none(args.json)?;
            bail!(
                "nothing below {0} names a checkpoint as the best of its run; `stepfs latest {0}` names the newest",
                args.dir.display()
            )
        }
        [best] => {
            if best.entries.iter().any(|entry| entry.lossy != "0") {
                say_error!("stepfs: it is lossy: it was named as the best after its release");
            }
            if best.fidelity.is_bad() {
                bail!("the best is not whole{}", not_whole(&[best]));
            }
            Ok(best.path.to_path_buf())
        }
        ref best => {
            let names: Vec<String> = best.iter().map(|best| name(&*best.path)).collect();
            bail!("several are named as the best: {}; name the directory of one run", names.join(", "))
        }
    })
}

/// Tells programs that there is no such checkpoint; any other failure leaves standard output empty.
fn say_none(json: bool) -> Result<()> {
    if json { say_json(&()) } else { Ok(()) }
}

/// Prints the path that `choose` picks, as the user would write it.
fn of(dir: &Path, json: bool, choose: impl FnOnce(&[Checkpoint]) -> Result<PathBuf>) -> Result<()> {
    let (_, local) = Local::in_mount(dir)?;
    let entries = survey(&local)?;
    let chosen = choose(&checkpoints(&local, &entries)?)?;
    let shown = local.shown(dir, &chosen);
    match json {
        true => say_json(&Named("path", shown)),
        // A script needs the bytes of the name as they are.
        false => super::say_path(&shown),
    }
}
