//! `stepfs tune`: tries profiles on a series, and chooses the smallest that is good enough.
//!
//! A trial takes the archive's own way from a file to its object ([`crate::encode`]), without a store. Objects have no
//! names, so a trial that is interrupted leaves nothing behind.

mod eval;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::recall::{self, Layout, stream};
use crate::store::durable::scratch;
use crate::store::object::rows_and_width;
use crate::store::{Error, MIN_RELEASE_BYTES, Profile, Store, names_bytes, step_pattern};
use crate::terminal::format::{name, percent, progress, size, table};
use crate::terminal::interrupt::Temporary;
use crate::terminal::{log_to_stderr, say_answer};
use formats::{Role, Tensor};
use papers::inshrinkerator::search::{Space, search};
use papers::inshrinkerator::{Config, Layer, Metric};
use papers::registry::SystemId;
use papers::tile::is_for;

use super::of_file;
use super::series::{Series, State, is_parameter};
use eval::Evaluator;

/// Find the smallest profile that is still good enough, by a quality score of your own.
///
/// Stores the series with one candidate profile after the other, as a store would: the last file as difference to those
/// before it. Passes each decoded last file to CMD. Chooses the candidate with the fewest bytes whose score is within
/// the tolerance of the exact file's score. Candidates are exact, balanced, compact, and configurations of
/// Inshrinkerator (2023). Inshrinkerator's guided search tries a dozen to 200 of 432 configurations, and fewer the
/// easier it finds a good one.
///
/// Without --eval, a small error counts as good. The error is the root mean square error of the weights, divided by
/// that of their last update. It says nothing about the model's use; a score does.
///
/// Released files of a mount that are lossy already are refused. To get exact ones, set `stepfs profile --set exact
/// DIR`, and save a few checkpoints in DIR.
#[derive(clap::Args)]
#[command(after_help = "Example: at most 1% more held-out loss, and the result goes to the store's stepfs.toml\n  \
stepfs tune run/step_0[1-4].pt --eval 'python eval.py' --tolerance 1% --store ~/ckpts.store\n\n\
eval.py: its last line of output must be a number\n  \
import sys, torch\n  \
model.load_state_dict(torch.load(sys.argv[1])[\"model\"])\n  \
print(held_out_loss(model))\n\n\
Example: another profile for one directory of a mount only\n  \
stepfs tune a.safetensors b.safetensors --eval './accuracy.sh' --higher-is-better\n  \
stepfs profile /ckpts/run --set inshrinkerator-12bins-prune30")]
pub struct Args {
    /// Checkpoints of one run, oldest first; at least two. Sorted by number if all names have a step number. A
    /// directory stands for the checkpoints in it.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Command for `sh -c` that prints a score. The checkpoint's path is its last argument, or replaces $1. timeout(1) limits
    /// its time: 'timeout 1h python eval.py'.
    #[arg(long, value_name = "CMD")]
    eval: Option<String>,
    /// How much worse than the exact file's score a score may be, relative to it: 1% or 0.01. Without --eval: the
    /// largest error, relative to the update. [default: 1%, without --eval 75%]
    #[arg(long, value_name = "SHARE", value_parser = parse_share)]
    tolerance: Option<f64>,
    /// The score is an accuracy, not a loss.
    #[arg(long, requires = "eval")]
    higher_is_better: bool,
    /// The tolerance is in the score's own units, not relative.
    #[arg(long, requires = "eval")]
    absolute: bool,
    /// A configuration that was found for an earlier checkpoint of the run. Tries its neighbors that are no more
    /// aggressive, and all others only if none of them is good enough.
    #[arg(long, value_name = "NAME", value_parser = parse_near)]
    near: Option<Config>,
    /// Make the result the default_profile in this store's stepfs.toml. The store must not be mounted.
    #[arg(long, value_name = "STORE")]
    store: Option<PathBuf>,
    /// Directory for decoded files, with room for the last file and for the stored series.
    #[arg(long, value_name = "DIR")]
    tmp: Option<PathBuf>,
    /// Print all candidates and the choice as JSON.
    #[arg(long)]
    json: bool,
}

/// The default tolerance of a score.
const TOLERANCE: f64 = 0.01;
/// The default tolerance of the error, in updates: closer to the file than the checkpoint before it. On a small GPT,
/// `balanced`, which costs training at most half an iteration, has .66, and `compact` has .98.
const ERROR_TOLERANCE: f64 = 0.75;

/// Reads 1% or 0.01.
fn parse_share(text: &str) -> Result<f64, String> {
    let (digits, unit) = text.strip_suffix('%').map_or((text, 1.0), |digits| (digits, 100.0));
    let share = digits.trim().parse::<f64>().ok().map(|share| share / unit);
    share.filter(|share| share.is_finite() && *share >= 0.0).ok_or_else(|| "write 1% or 0.01".into())
}

fn parse_near(text: &str) -> Result<Config, String> {
    let system: SystemId = text.parse()?;
    system.configuration().ok_or_else(|| {
        format!("{text} is not a configuration of Inshrinkerator; write inshrinkerator-12bins, for example")
    })
}

/// Runs the command.
///
/// # Errors
/// A message for the user.
pub fn run(args: Args) -> Result<()> {
    log_to_stderr("warn");
    if let Some(store) = &args.store {
        // Fail before hours of work, not after.
        Store::look(store)?;
        if Store::is_locked(store)? {
            bail!("{}: {IN_USE}", store.display());
        }
    }
    let files = in_order(&args.files);
    let series = Series::open(&files)?;
    let update = last_update(&series)?;
    let parent = args.tmp.clone().unwrap_or_else(std::env::temp_dir);
    // Canonical, since CMD may change directories.
    let scratch = fs::canonicalize(&parent).and_then(|parent| Temporary::directory("stepfs-tune-", &parent));
    let (scratch, _held) = scratch.with_context(|| format!("{}", parent.display()))?;
    let report = tune(&args, &files, (&series, update), scratch.path())?;
    say_answer(args.json, &report, |report| say_part!("{}", report.words(&series.last().path)))?;
    let chosen = &report.chosen;
    let Some(path) = &args.store else {
        if !args.json {
            say!("In stepfs.toml:\n  default_profile = \"{chosen}\"");
        }
        return Ok(());
    };
    let profile: Profile = chosen.parse().map_err(anyhow::Error::msg)?;
    let mut store = Store::open(path).map_err(|error| match error {
        Error::Busy { .. } => anyhow!("{}: {IN_USE}; default_profile = \"{chosen}\"", path.display()),
        error => error.into(),
    })?;
    store.set_default_profile(profile)?;
    if !args.json {
        say!("{}: default_profile = \"{chosen}\"", path.join("stepfs.toml").display());
    }
    Ok(())
}

/// The reason why a store's settings are not changed.
const IN_USE: &str = "the store is in use, and a mount only reads its settings at the start: unmount it first, or omit \
                      --store and set the profile of a directory with `stepfs profile`";

/// Sorts by the step numbers in the names, if all names have them.
fn in_order(files: &[PathBuf]) -> Vec<PathBuf> {
    let mut numbered: Vec<(Vec<u64>, PathBuf)> =
        files.iter().map(|file| (step_pattern::steps(file), file.clone())).collect();
    let len = numbered.first().map_or(0, |(steps, _)| steps.len());
    if len > 0 && numbered.iter().all(|(steps, _)| steps.len() == len) {
        numbered.sort_by(|(a, _), (b, _)| a.cmp(b));
    }
    numbered.into_iter().map(|(_, file)| file).collect()
}

/// Root mean square of the update that led to the last file.
///
/// # Errors
/// A store keeps a file as it is, or nothing was trained between the last two.
fn last_update(series: &Series) -> Result<f64> {
    let unfit = |state: &State, why: String| anyhow!("{}: {why}", state.path.display());
    for state in &series.states {
        if state.len < MIN_RELEASE_BYTES {
            let why = format!("it is below {MIN_RELEASE_BYTES} bytes, and stepfs keeps such files as they are");
            return Err(unfit(state, why));
        }
        if !state.description.tensors.iter().any(is_parameter) {
            return Err(unfit(state, "it has no weights; `stepfs inspect` shows its tensors".into()));
        }
    }
    let update = series.last_update()?.rms();
    if !(update > 0.0 && update.is_finite()) {
        let why =
            "its weights are the same as in the file before; name checkpoints between which the model was trained";
        return Err(unfit(series.last(), why.into()));
    }
    Ok(update)
}

/// The share of the parameters that embeddings have, 0 to 1.
fn embedding_share(tensors: &[Tensor]) -> f64 {
    let parameters = || tensors.iter().filter(|tensor| is_parameter(tensor));
    let layer = |tensor: &Tensor| Layer::of_shape(&tensor.path, rows_and_width(&tensor.shape));
    let embeddings: u64 = parameters().filter(|of| layer(of) == Layer::Embedding).map(Tensor::elements).sum();
    embeddings as f64 / parameters().map(Tensor::elements).sum::<u64>().max(1) as f64
}

/// True if there are running means of gradients, from which sensitivity is computed.
fn has_gradients(tensors: &[Tensor]) -> bool {
    let mut first = tensors.iter().filter(|tensor| tensor.role == Role::FirstMoment && is_for(tensor.dtype));
    first.any(|tensor| tensor.of.is_some_and(|of| tensors.get(of).is_some_and(is_parameter)))
}

/// Tries profiles on the last file of a series: size, and quality of the decoded file.
struct Trials<'a> {
    series: &'a Series,
    /// Root mean square of the parameters' last update.
    update: f64,
    scratch: &'a Path,
    evaluator: Option<Evaluator<'a>>,
    exact_score: Option<f64>,
    args: &'a Args,
    bar: ProgressBar,
    tried: Vec<Candidate>,
}

impl Trials<'_> {
    /// The candidate of a profile; tries each profile only once.
    fn of(&mut self, profile: Profile) -> Result<&Candidate> {
        let name = profile.name();
        let at = match self.tried.iter().position(|candidate| candidate.profile == name) {
            Some(at) => at,
            None => {
                let candidate = self.try_out(profile).with_context(|| format!("{name}"))?;
                self.bar.set_message(candidate.profile.clone());
                self.bar.inc_length(1);
                self.bar.inc(1);
                self.tried.push(candidate);
                self.tried.len() - 1
            }
        };
        Ok(&self.tried[at])
    }

    fn try_out(&self, profile: Profile) -> Result<Candidate> {
        let (mut series_bytes, mut last) = (Vec::new(), None);
        self.series.keep(profile, self.scratch, &mut |at, kept| {
            series_bytes.push(kept.as_ref().map_or(self.series.states[at].len, |(bytes, _)| *bytes));
            last = kept.map(|(_, chain)| chain);
            Ok(())
        })?;
        let (file, mut error) = (self.series.last(), 0.0);
        if let Some(chain) = &last {
            let decoded = tempfile::tempfile_in(self.scratch)?;
            stream(chain, &Layout::of(chain.leaf()), |at, _, bytes| scratch::write_all_at(&decoded, bytes, at))?;
            error = self.series.errors(file, &decoded)?.rms() / self.update;
        }
        let score = match &self.evaluator {
            None => None,
            Some(evaluator) => {
                let path = self.scratch.join(file.path.file_name().context("the file has no name")?);
                scratch::remove(&path)?;
                let to = scratch::create_new(&path).map_err(of_file(&path))?;
                match &last {
                    Some(chain) => recall::copy(chain, &|bytes, at| scratch::write_all_at(&to, bytes, at))?,
                    None => io::copy(&mut File::open(&file.path)?, &mut &to).map(drop)?,
                }
                drop(to);
                let score = evaluator.score(&path);
                scratch::remove(&path)?;
                Some(score?)
            }
        };
        let degradation = score.zip(self.exact_score).map_or(error, |(score, exact)| self.worse(score, exact));
        let tolerance = self.args.tolerance();
        Ok(Candidate {
            profile: profile.name().into_owned(),
            bytes: series_bytes.last().copied().unwrap_or_default(),
            series_bytes,
            error,
            score,
            degradation,
            // NaN is not good.
            good: degradation <= tolerance,
        })
    }

    /// How much worse than the exact file's score this score is.
    fn worse(&self, score: f64, exact: f64) -> f64 {
        let worse = if self.args.higher_is_better { exact - score } else { score - exact };
        if self.args.absolute { worse } else { worse / exact.abs() }
    }
}

impl Args {
    fn tolerance(&self) -> f64 {
        self.tolerance.unwrap_or(if self.eval.is_some() { TOLERANCE } else { ERROR_TOLERANCE })
    }
}

fn tune(args: &Args, files: &[PathBuf], (series, update): (&Series, f64), scratch: &Path) -> Result<Report> {
    let file = series.last();
    let evaluator = args.eval.as_ref().map(|command| Evaluator::new(command, scratch));
    let exact_score = evaluator.as_ref().map(|evaluator| exact_score(args, evaluator, &file.path)).transpose()?;
    let bar = progress(0, false);
    let mut trials = Trials { series, update, scratch, evaluator, exact_score, args, bar, tried: Vec::new() };
    let exact = trials.of(Profile::Exact)?;
    if let Some(score) = exact.score.filter(|_| !exact.good || exact.degradation.abs() > args.tolerance()) {
        let before = exact_score.unwrap_or(score);
        bail!(
            "--eval gives {before}, then {score} for the same bytes, which exceeds the tolerance; fix its random seed"
        );
    }
    for profile in [Profile::Balanced, Profile::Compact] {
        trials.of(profile)?;
    }
    let mut space = Space::published(embedding_share(&file.description.tensors));
    if space.embedding_share == 0.0 {
        // That axis has no tensors.
        space.embedding_bins.truncate(1);
    }
    let gradients = has_gradients(&file.description.tensors);
    search(&space, args.near.as_ref(), args.tolerance(), |config| {
        // Without gradients the sensitivity is unknown, and both metrics are the same.
        let metric = if gradients { config.metric } else { Metric::Magnitude };
        let config = Config { metric, ..*config };
        anyhow::Ok(trials.of(Profile::Published(SystemId::inshrinkerator(config)))?.degradation)
    })?;
    Ok(Report {
        files: files.iter().map(|file| file.to_string_lossy().into_owned()).collect(),
        files_bytes: names_bytes(files.iter().map(PathBuf::as_path)),
        file_bytes: file.len,
        eval: args.eval.clone(),
        exact_score,
        tolerance: args.tolerance(),
        absolute: args.absolute,
        chosen: smallest(&trials.tried).profile.clone(),
        candidates: trials.tried,
    })
}

fn exact_score(args: &Args, evaluator: &Evaluator, file: &Path) -> Result<f64> {
    let path = std::path::absolute(file).with_context(|| format!("{}", file.display()))?;
    let score = evaluator.score(&path).context("the file as it was written")?;
    if !score.is_finite() {
        bail!("--eval gives {score} for the file as it was written; it must print a finite number");
    }
    if score == 0.0 && !args.absolute {
        bail!("--eval gives 0 for the file as it was written, so no relative tolerance is possible; add --absolute");
    }
    Ok(score)
}

/// A profile that was tried.
#[derive(Clone, Debug, Serialize)]
struct Candidate {
    profile: String,
    /// Size of the last file's object.
    bytes: u64,
    /// Sizes of all objects, in order.
    series_bytes: Vec<u64>,
    /// Root mean square error of the weights, divided by the root mean square of their last update.
    error: f64,
    /// The score that CMD printed. `None` without CMD; in JSON also if the score is not finite.
    score: Option<f64>,
    /// How much worse that score is than the exact file's; without CMD the error.
    degradation: f64,
    /// Within the tolerance.
    good: bool,
}

/// A run's result.
#[derive(Debug, Serialize)]
struct Report {
    files: Vec<String>,
    /// All of them in hexadecimal, if one is not UTF-8.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    files_bytes: Vec<String>,
    file_bytes: u64,
    eval: Option<String>,
    exact_score: Option<f64>,
    tolerance: f64,
    /// The tolerance is a difference of scores, not a share.
    #[serde(skip)]
    absolute: bool,
    /// The profile to use.
    chosen: String,
    candidates: Vec<Candidate>,
}

/// The smallest good candidate; among equal sizes the better one. The first is `exact`, which is always good.
fn smallest(candidates: &[Candidate]) -> &Candidate {
    let better = |a: &Candidate, b: &Candidate| {
        b.good && a.bytes.cmp(&b.bytes).then(a.degradation.total_cmp(&b.degradation)).is_gt()
    };
    candidates.iter().fold(&candidates[0], |best, next| if better(best, next) { next } else { best })
}

impl Report {
    /// The choice, then all candidates.
    fn words(&self, file: &Path) -> String {
        let (tolerance, scored) = (self.tolerance, self.exact_score.is_some());
        let good = match (scored, self.absolute) {
            (true, true) => format!("at most {tolerance} worse"),
            (true, false) => format!("at most {}% worse", 100.0 * tolerance),
            (false, _) => format!("an error of at most {tolerance} of the update"),
        };
        let of_score = if scored { [">score", ">worse"] } else { [">", ">"] };
        let head = ["profile", ">bytes", ">share", ">error", ""].into_iter().chain(of_score);
        let rows = self.candidates.iter().map(|of| {
            let (share, good) = (percent(of.bytes, self.file_bytes), if of.good { "ok" } else { "no" });
            let about = [of.profile.clone(), size(of.bytes), share, format!("{:.4}", of.error), good.into()];
            let score = of.score.map(|score| [format!("{score:.6}"), format!("{:.5}", of.degradation)]);
            about.into_iter().chain(score.into_iter().flatten()).collect()
        });
        let table = table(&head.collect::<Vec<_>>(), &rows.collect::<Vec<Vec<_>>>());
        let score = self.exact_score.map_or(String::new(), |score| format!(", score {score}"));
        let (file, whole) = (name(file), size(self.file_bytes));
        format!("Use {}\n\n{file}: {whole}{score}\nGood enough: {good}\n\n{table}", self.chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_as_people_write_them() {
        for (text, share) in [("1%", 0.01), ("0.01", 0.01), ("0", 0.0), ("50 %", 0.5), ("2", 2.0)] {
            assert_eq!(parse_share(text), Ok(share), "{text}");
        }
        for text in ["", "%", "-1%", "nan", "inf%", "1%%", "a"] {
            assert!(parse_share(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbered_files_are_put_in_order_and_others_left_as_they_are() {
        let order = |files: &[&str]| in_order(&files.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert_eq!(order(&["r/step_10.pt", "r/step_9.pt"]), [Path::new("r/step_9.pt"), Path::new("r/step_10.pt")]);
        assert_eq!(order(&["b.pt", "a.pt"]), [Path::new("b.pt"), Path::new("a.pt")]);
    }

    #[test]
    fn only_inshrinkerators_configurations_are_near() {
        assert_eq!(parse_near("inshrinkerator-4").unwrap(), Config::new(16));
        assert!(parse_near("lc-3").is_err() && parse_near("balanced").is_err());
    }

    fn candidate(profile: &str, bytes: u64, degradation: f64) -> Candidate {
        let good = degradation <= 0.01;
        Candidate {
            profile: profile.into(),
            bytes,
            series_bytes: vec![bytes],
            error: 0.0,
            score: None,
            degradation,
            good,
        }
    }

    #[test]
    fn the_smallest_that_is_good_enough_is_chosen() {
        let chosen = |own: u64, bytes: u64, worse: f64| {
            let all = [
                candidate("exact", 900, 0.0),
                candidate("balanced", own, 0.001),
                candidate("compact", 1, f64::NAN),
                candidate("inshrinkerator-12bins", bytes, worse),
            ];
            smallest(&all).profile.clone()
        };
        assert_eq!(chosen(100, 200, 0.005), "balanced");
        assert_eq!(chosen(300, 200, 0.005), "inshrinkerator-12bins");
        assert_eq!(chosen(300, 200, 0.02), "balanced");
        assert_eq!(chosen(300, 300, 0.0), "inshrinkerator-12bins");
        assert_eq!(chosen(1000, 200, f64::NAN), "exact");
    }
}
