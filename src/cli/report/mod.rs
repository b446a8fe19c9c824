//! `stepfs report`: one page about a run.

mod chart;
mod heat;
mod page;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::clock::wall_ns;
use crate::store::step_pattern;
use crate::tools::updates::{State, Updates, updates};
use crate::tools::{Place as _, new_file};
use formats::{MAX_TRAINER_STATE, ReadAt, is_trainer_state, losses_of_trainer};

use super::format::{count, name, progress, size};
use super::latest::newest_first;
use super::listing::{Checkpoint, Entry, checkpoints, grouped, survey, survey_plain};
use super::log_to_stderr;
use super::place::Place;
use super::source::Local;
use chart::Line;

/// Updates that the page shows side by side. More columns are too narrow to read.
const COLUMNS: usize = 48;
/// Points of a curve. A page of 700 pixels shows no more.
const POINTS: usize = 400;

/// Write one page about a run: sizes, a timeline, updates of the weights, errors, losses, and all checkpoints.
///
/// RUN is the directory of a run: in a mount, a plain one, a store, or STORE:PATH. The page is one HTML file with all its
/// charts in it. It needs no network and no script, follows light and dark, and prints.
///
/// `update` is the norm of a weight's change from one checkpoint to the next, divided by its norm before, as `stepfs diff`
/// shows it. For that stepfs reads the weights of up to 49 checkpoints, evenly spaced. Nothing is unpickled.
///
/// OUT appears when it is complete and durable, or not at all.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs report /ckpts/run-7 -o run-7.html            then open it in a browser\n  \
stepfs report ~/ckpts.store:run-7 -o run-7.html     without a mount")]
pub(super) struct Args {
    /// The directory of a run.
    run: PathBuf,
    /// The new file, which must not exist.
    #[arg(short, long, value_name = "OUT")]
    out: PathBuf,
}

pub(super) fn run(args: Args) -> Result<()> {
    log_to_stderr("error");
    let mut told = String::new();
    new_file(&args.out, || {
        let place = Place::of_run(&args.run)?;
        let survey = Survey::of(&place)?;
        let all = survey.checkpoints()?;
        let report = Report::of(&place, &survey, &all)?;
        let page = page::page(&report).into_string();
        told = format!("{}, {}", count(report.states.len(), "checkpoint"), size(page.len() as u64));
        Ok(page.into_bytes())
    })?;
    say!("{}: {told}", name(&args.out));
    Ok(())
}

/// The files of a run.
struct Survey {
    entries: Vec<Entry>,
    /// Where they lie in a store, if they do.
    local: Option<Local>,
    /// Their directory on disk, as programs read it, above the paths of the entries.
    root: PathBuf,
    /// Room on the disk that the store grows on, bytes.
    free: Option<u64>,
}

/// All that the page shows.
struct Report<'a> {
    name: &'a str,
    survey: &'a Survey,
    /// All checkpoints and other files, in the order of their paths.
    all: &'a [Checkpoint<'a>],
    /// Those of them that are states of the run, by steps, or else by time.
    states: Vec<&'a Checkpoint<'a>>,
    by: By,
    heat: Heat<'a>,
    losses: Vec<Line>,
    now_ns: i64,
}

/// The updates of the largest series of the run.
#[derive(Default)]
struct Heat<'a> {
    /// The checkpoints that were looked at, oldest first.
    states: Vec<&'a Checkpoint<'a>>,
    /// Checkpoints of the series, and whole checkpoints of all others.
    of: usize,
    others: usize,
    updates: Updates,
}

/// The horizontal axis of checkpoints.
#[derive(Clone, Copy)]
enum By {
    Step,
    /// Seconds since this time, in nanoseconds since 1970.
    Time(i64),
}

impl By {
    /// Steps, if all checkpoints have different ones.
    fn of(states: &[&Checkpoint]) -> By {
        let first = states.iter().map(|state| state.modified_ns).min().unwrap_or(0);
        let mut steps: Vec<u64> = states.iter().filter_map(|state| state.step).collect();
        steps.sort_unstable();
        steps.dedup();
        let is_counted = states.iter().all(|state| state.step.is_some()) && (steps.len() > 1 || states.len() == 1);
        if is_counted { By::Step } else { By::Time(first) }
    }

    fn at(self, checkpoint: &Checkpoint) -> f64 {
        match self {
            By::Step => checkpoint.step.unwrap_or(0) as f64,
            By::Time(first) => (checkpoint.modified_ns - first) as f64 / 1e9,
        }
    }
}

impl Survey {
    fn of(place: &Place) -> Result<Survey> {
        let at = place.at();
        if at.is_file() {
            bail!("{} is a file; name the directory of a run", place.name());
        }
        let local = match place.in_store() {
            None => Local::in_some_mount(at)?,
            local => local,
        };
        let free = |path: &Path| rustix::fs::statvfs(path).map(|of| of.f_bavail.saturating_mul(of.f_frsize)).ok();
        let (entries, root, free) = match &local {
            None => (survey_plain(at)?, at.to_path_buf(), free(at)),
            Some(local) => {
                let root = local.mounted().map_or_else(|| local.store.join("tree"), |mount| mount.root.clone());
                // The copy of a mirror grows nowhere.
                (survey(local)?, root, free(&local.store).filter(|_| !place.is_brought()))
            }
        };
        Ok(Survey { entries, local, root, free })
    }

    /// All checkpoints and other files, in the order of their paths.
    fn checkpoints(&self) -> Result<Vec<Checkpoint<'_>>> {
        match &self.local {
            Some(local) => checkpoints(local, &self.entries),
            None => grouped(&self.root, &[], Path::new(""), &self.entries),
        }
    }
}

impl<'a> Report<'a> {
    fn of(place: &'a Place, survey: &'a Survey, all: &'a [Checkpoint<'a>]) -> Result<Report<'a>> {
        let (mut states, _) = newest_first(all);
        states.reverse();
        if states.is_empty() {
            bail!(
                "no checkpoint is below {}: no file there has tensors; name the directory that a run saves to",
                place.name()
            );
        }
        let by = By::of(&states);
        if let By::Step = by {
            states.sort_by_key(|state| (state.step, state.modified_ns));
        }
        let heat = Heat::of(place, survey, &states);
        let losses = losses(place, survey, &states, &heat, by);
        Ok(Report { name: place.name(), survey, all, states, by, heat, losses, now_ns: wall_ns() })
    }
}

impl<'a> Heat<'a> {
    /// Of the series with the most whole checkpoints that has weights.
    fn of(place: &Place, survey: &Survey, states: &[&'a Checkpoint<'a>]) -> Heat<'a> {
        let mut series: BTreeMap<Vec<u8>, Vec<&Checkpoint>> = BTreeMap::new();
        let whole = || states.iter().copied().filter(|state| state.is_state());
        for state in whole() {
            let counted = match state.is_directory {
                true => step_pattern::of_directory(&state.path),
                false => step_pattern::of_file(&state.path),
            };
            series.entry(counted.series).or_default().push(state);
        }
        let mut series: Vec<_> = series.into_values().collect();
        let bytes = |of: &Vec<&Checkpoint>| of.iter().map(|state| state.logical_bytes()).sum::<u64>();
        series.sort_by_key(|of| std::cmp::Reverse((of.len(), bytes(of))));
        for of in series {
            let shown: Vec<&Checkpoint> = evenly(&of, COLUMNS + 1);
            let bar = progress(0, true);
            bar.set_message("updates");
            let updates = updates(place, &shown.iter().map(|state| survey.state(state)).collect::<Vec<_>>(), &bar);
            bar.finish_and_clear();
            if !updates.rows.is_empty() {
                return Heat { states: shown, of: of.len(), others: whole().count() - of.len(), updates };
            }
        }
        Heat::default()
    }
}

impl Survey {
    /// A checkpoint with its files on disk.
    fn state(&self, checkpoint: &Checkpoint) -> State {
        let above = match checkpoint.is_directory {
            true => &*checkpoint.path,
            false => checkpoint.path.parent().unwrap_or(Path::new("")),
        };
        let files = checkpoint.entries.iter().filter_map(|entry| entry.at.strip_prefix(above).ok());
        State {
            root: self.root.join(above),
            name: checkpoint.path.to_string_lossy().into_owned(),
            files: files.map(Path::to_path_buf).collect(),
        }
    }
}

/// At most so many of these, the first and the last among them.
fn evenly<T: Copy>(all: &[T], most: usize) -> Vec<T> {
    match all.len() {
        count if count <= most => all.to_vec(),
        count => (0..most).map(|at| all[at * (count - 1) / (most - 1)]).collect(),
    }
}

/// The losses that names, files and Trainer's log hold.
fn losses(place: &Place, survey: &Survey, states: &[&Checkpoint], heat: &Heat, by: By) -> Vec<Line> {
    let mut curves: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    let mut add = |name: String, x: f64, y: f64| {
        if y.is_finite() {
            curves.entry(name).or_default().push((x, y));
        }
    };
    for state in states {
        let results = step_pattern::results(&state.path);
        for result in results.into_iter().filter(|result| result.lowest == Some(true)) {
            add(format!("{} in the names", result.word), by.at(state), result.value);
        }
    }
    for (state, word, value) in &heat.updates.losses {
        add(format!("{word} in the files"), by.at(heat.states[*state]), *value);
    }
    // Each state of Trainer has the whole log, so the newest suffices. The log counts steps.
    let mut logs: Vec<&Entry> = survey.entries.iter().filter(|entry| is_trainer_state(&entry.at)).collect();
    logs.sort_by_key(|entry| std::cmp::Reverse((entry.modified_ns, entry.step)));
    let log = |entry: &Entry| -> io::Result<_> {
        let (file, _) = place.open(&survey.root.join(&*entry.at))?;
        if file.size() > MAX_TRAINER_STATE { Ok(Vec::new()) } else { losses_of_trainer(&file) }
    };
    let logged = logs.iter().filter(|_| matches!(by, By::Step)).filter_map(|entry| log(entry).ok());
    for (word, step, value) in logged.into_iter().find(|log| !log.is_empty()).unwrap_or_default() {
        add(format!("{word} in Trainer's log"), step as f64, value);
    }
    let curve = |(name, mut points): (String, Vec<(f64, f64)>)| {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        let points = evenly(&points, POINTS).into_iter().map(|(x, y)| (x, y, format!("{name}: {y:.4}"))).collect();
        Line { name, points, is_joined: true }
    };
    curves.into_iter().map(curve).collect()
}
