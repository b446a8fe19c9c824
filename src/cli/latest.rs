//! `stepfs latest` and `stepfs best`: one path for a script.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use formats::{Kind, Role, describe_at};

use crate::archive::Queue;
use crate::clock::is_future;
use crate::store::{Named, Store, beneath, step_pattern};

use super::format::name;
use super::listing::{Checkpoint, Entry, checkpoints, survey};
use super::say_json;
use super::source::Local;

/// Print the path of the newest whole checkpoint that a run can go on from.
///
/// Whole: closed and durable, not cut short, readable, and with as many files as the one before it. The newest is the one
/// that was written last. It is passed over if its weights are known not to be finite, or if it holds less than an older one
/// of its step or a later one: no optimizer's state, or arrays of numpy alone. Standard error names those that are passed over. Exit
/// code 1 if there is none.
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
    of(&args.dir, args.json, |local, found| {
        let (newest, future) = newest_first(found);
        if let Some(future) = future {
            let path = name(&*future.path);
            say_error!("stepfs: {path} has a time in the future, so the steps decide; `stepfs status` says what to do");
        }
        let store = &local.tree()?.store;
        let Some((at, content)) = to_go_on_from(store, &newest) else {
            let (dir, why) = (args.dir.display(), not_whole(&newest));
            say_none(args.json)?;
            bail!("no whole checkpoint is below {dir}{why}; `stepfs ls {dir}` shows all");
        };
        let (whole, not): (Vec<_>, Vec<_>) = newest[..at].iter().copied().partition(|of| of.is_state());
        if !not.is_empty() {
            say_error!("stepfs: newer, but not whole{}", not_whole(&not));
        }
        if content == Content::Diverged {
            say_error!("stepfs: no state with finite weights is left, and this one has some that are not");
        }
        if let Some(newer) = whole.first() {
            let lacks = if content == Content::Full { "an optimizer's state" } else { "names of weights" };
            say_error!("stepfs: newer, but without {lacks}: {}", name(&*newer.path));
        }
        Ok(newest[at].path.to_path_buf())
    })
}

/// The content of a checkpoint, as far as a run that goes on needs it. The greater has more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Content {
    /// Weights that are not finite.
    Diverged,
    /// Arrays of numpy, or tensors that are no weights: predictions, embeddings, data.
    Arrays,
    /// Weights, or an optimizer's state.
    Part,
    /// Both, or tensors that another file names.
    Full,
}

/// Whether a file has weights, and an optimizer's state.
fn holds(store: &Store, entry: &Entry) -> [bool; 2] {
    const ROLES: [Role; 2] = [Role::Weight, Role::Optimizer];
    let (is_array, has) = if entry.object.is_some() {
        let is_array = entry.at.extension().is_some_and(|of| of == "npy" || of == "npz");
        (is_array, ROLES.map(|role| entry.roles.get(role.name()).is_some_and(|of| of.raw_bytes > 0)))
    } else {
        let tree = store.tree();
        let described = store.io().open_beneath(&tree, &entry.at, 0);
        let described =
            described.and_then(|file| describe_at(&entry.at, &file, |beside| beneath::open_file(&tree, beside)));
        // A file that cannot be read now takes no checkpoint's place from it.
        let Some(described) = described.ok().filter(|of| !of.kind.is_named_later()) else { return [true; 2] };
        let has = |role| described.tensors.iter().any(|tensor| tensor.role.group() == role);
        (matches!(described.kind, Kind::Npy | Kind::Npz), ROLES.map(has))
    };
    [has[0] && !is_array, has[1]]
}

/// The content of a checkpoint: all that its files hold.
fn content(store: &Store, of: &Checkpoint) -> Content {
    let mut all = [false; 2];
    for entry in &of.entries {
        let own = holds(store, entry);
        all = [all[0] || own[0], all[1] || own[1]];
        if all == [true; 2] {
            return Content::Full;
        }
    }
    if all == [false; 2] { Content::Arrays } else { Content::Part }
}

/// The place of the state that a run goes on from, with its content: the newest, unless an older one as far has more in it.
/// One of each series is looked into: the others are like it. Most runs need one look.
fn to_go_on_from(store: &Store, newest: &[&Checkpoint]) -> Option<(usize, Content)> {
    let mut known: HashMap<Vec<u8>, Content> = HashMap::new();
    let mut chosen: Option<(usize, Content)> = None;
    for (at, of) in newest.iter().enumerate() {
        // A state of an earlier step is no replacement, nor is a file without one: the run may have begun with it.
        let may_replace = chosen.is_none_or(|(newer, content)| match (of.step, newest[newer].step) {
            _ if content == Content::Diverged => true,
            (Some(step), Some(newer)) => step >= newer,
            (step, None) => step.is_some() || content == Content::Arrays,
            (None, Some(_)) => false,
        });
        let own = match may_replace {
            true if of.is_state() => {
                let series = step_pattern::of_file(&of.path).series;
                *known.entry(series).or_insert_with(|| content(store, of))
            }
            true if of.fidelity.is_diverged() => Content::Diverged,
            _ => continue,
        };
        if chosen.is_none_or(|(_, content)| own > content) {
            chosen = Some((at, own));
        }
        if chosen.is_some_and(|(_, content)| content == Content::Full) {
            break;
        }
    }
    chosen
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

/// How long `best` waits until the daemon has read a link or file that a program just made.
const LEARNS: Duration = Duration::from_secs(5);

pub(super) fn best(args: BestArgs) -> Result<()> {
    let (mount, _) = Local::in_mount(&args.dir)?;
    let end = Instant::now() + LEARNS;
    while Instant::now() < end && mount.ask::<Queue>("queue").is_ok_and(|queue| queue.may_learn) {
        std::thread::sleep(LEARNS / 100);
    }
    of(&args.dir, args.json, |_, found| match stated_best(found)[..] {
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
fn of(dir: &Path, json: bool, choose: impl FnOnce(&Local, &[Checkpoint]) -> Result<PathBuf>) -> Result<()> {
    let (_, local) = Local::in_mount(dir)?;
    let entries = survey(&local)?;
    let chosen = choose(&local, &checkpoints(&local, &entries)?)?;
    let shown = local.shown(dir, &chosen);
    match json {
        true => say_json(&Named("path", shown)),
        // A script needs the bytes of the name as they are.
        false => super::say_path(&shown),
    }
}
