//! `stepfs diff`: which tensors of a run changed from one checkpoint to another, and how much.

use std::path::{Path, PathBuf};

use anyhow::{Error, Result, bail};
use indicatif::ProgressBar;
use serde::Serialize;

use crate::store::natural;
use crate::terminal::format::{name, progress, table};
use crate::terminal::{log_to_stderr, say_answer};
use formats::{InOrder, Role};

use super::Find;
use super::checkpoint::{Checkpoint, Found, form, is_alike};
use super::flow::{in_order, spans};
use super::values::{Change, Place, change};

/// Rows that a person looks through.
const ROWS: usize = 20;

/// Show the tensors that changed between two checkpoints, the largest change first.
///
/// A and B are files or directories of any format that stepfs understands: in a mount or anywhere, in a store
/// (STORE:PATH), or on a mirror (URL:PATH). A released file is compared as it reads. Tensors are matched by name; sharded
/// checkpoints must be split alike. `relative` is the norm of the change divided by the norm in A. A `cosine` of 1 says
/// that A and B point one way.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs diff /ckpts/step_1000.pt /ckpts/step_2000.pt\n  \
stepfs diff checkpoint-500 checkpoint-600 --all\n  \
stepfs diff ~/ckpts.store:step_1.pt s3://bucket/run-7:step_1.pt     a store, and its mirror")]
pub struct Args {
    /// The earlier checkpoint.
    a: PathBuf,
    /// The later one.
    b: PathBuf,
    /// Show every tensor; without it the twenty weights that changed most.
    #[arg(long)]
    all: bool,
    /// Print a JSON object with every tensor.
    #[arg(long)]
    json: bool,
}

/// The difference of two checkpoints.
#[derive(Serialize)]
struct Report {
    a: String,
    b: String,
    /// In both, with one type and shape: those with new values that are not finite, then the largest change first.
    tensors: Vec<Row>,
    /// Of another type or shape, in words.
    different: Vec<String>,
    only_in_a: Vec<String>,
    only_in_b: Vec<String>,
}

#[derive(Serialize)]
struct Row {
    tensor: String,
    dtype: &'static str,
    shape: Vec<u64>,
    role: &'static str,
    elements: u64,
    /// Elements with other bits.
    changed: u64,
    /// Elements of A and of B that are not finite; they count in no number below.
    not_finite: [u64; 2],
    /// Root mean square in A, and of the change. `None` for types that are no floats of 16 to 64 bits.
    rms: Option<f64>,
    rms_of_change: Option<f64>,
    relative: Option<f64>,
    cosine: Option<f64>,
    largest_change: Option<f64>,
    #[serde(skip)]
    is_weight: bool,
}

/// Runs the command.
///
/// # Errors
/// A message for the user.
pub fn run(args: Args, find: &Find) -> Result<()> {
    log_to_stderr("error");
    let [a, b] = [&args.a, &args.b].map(|path| Checkpoint::open(find(path)?.as_ref()));
    let report = compare(&a?, &b?)?;
    say_answer(args.json, &report, |report| say_part!("{}", report.words(args.all)))
}

fn compare(a: &Checkpoint, b: &Checkpoint) -> Result<Report> {
    let (mut pairs, mut different, mut only_in_a) = (Vec::new(), Vec::new(), Vec::new());
    for (name, left) in a.tensors() {
        match b.get(name) {
            None => only_in_a.push(name.to_string()),
            Some(right) if is_alike(left.tensor, right.tensor) => pairs.push((name, left, right)),
            Some(right) => different.push(format!("{name}: {} in A, {} in B", form(left.tensor), form(right.tensor))),
        }
    }
    if pairs.is_empty() && different.is_empty() {
        bail!("{} and {} have no tensor of the same name; name two checkpoints of one model", a.name, b.name);
    }
    let only_in_b = b.tensors().into_iter().filter(|(name, _)| a.get(name).is_none());
    let only_in_b = only_in_b.map(|(name, _)| name.to_string()).collect();
    let bar = progress(pairs.iter().map(|(_, left, _)| left.tensor.bytes()).sum(), true);
    // So that both files are read from front to back.
    pairs.sort_by_key(|(_, left, _)| (std::ptr::from_ref(left.part), left.tensor.extent.start));
    let changes = changes(&pairs, &bar).map_err(|(_, error)| error)?;
    let rows = pairs.iter().zip(&changes).map(|((name, left, _), change)| Row::of(name, *left, change));
    let mut tensors: Vec<Row> = rows.collect();
    bar.finish_and_clear();
    let by_name = |x: &Row, y: &Row| natural::order(Path::new(&x.tensor), Path::new(&y.tensor));
    tensors.sort_by(|x, y| y.rank().total_cmp(&x.rank()).then_with(|| by_name(x, y)));
    Ok(Report { a: a.name.clone(), b: b.name.clone(), tensors, different, only_in_a, only_in_b })
}

/// How each of these tensors differs from its twin, on all cores.
///
/// # Errors
/// A file cannot be read: 0 for the first of a pair, 1 for the second, with the reason.
pub(super) fn changes(pairs: &[(&str, Found, Found)], bar: &ProgressBar) -> Result<Vec<Change>, (usize, Error)> {
    let all =
        pairs.iter().enumerate().flat_map(|(at, pair)| spans(0..pair.1.tensor.bytes()).map(move |span| (at, span)));
    let made = in_order(all, |(): &mut (), (at, span)| {
        let (name, left, right) = pairs[at];
        let both = [left, right];
        let [a, b] = both.map(|of| (InOrder::new(&of.part.file, &of.part.description), of.tensor.extent.start));
        let [a, b] = [&a, &b].map(|(file, start)| Place { file, extent: start + span.start..start + span.end });
        let change = change(left.tensor.dtype, &a, &b, &|bytes| bar.inc(bytes));
        change.map(|change| (at, change)).map_err(|(side, error)| {
            (side, Error::new(error).context(format!("{}: {name}", both[side].part.path.display())))
        })
    })?;
    let mut changes = vec![Change::default(); pairs.len()];
    made.iter().for_each(|(at, change)| changes[*at].merge(change));
    Ok(changes)
}

impl Row {
    fn of(name: &str, Found { tensor, .. }: Found, change: &Change) -> Row {
        let is_float = tensor.dtype.is_lattice_float();
        let number = |value: f64| (is_float && value.is_finite()).then_some(value);
        Row {
            tensor: name.to_string(),
            dtype: tensor.dtype.name(),
            shape: tensor.shape.clone(),
            role: tensor.role.name(),
            elements: tensor.elements(),
            changed: change.changed,
            not_finite: change.not_finite,
            rms: number(change.before.rms()),
            rms_of_change: number(change.difference.rms()),
            relative: number(change.difference.rms() / change.before.rms()),
            cosine: number(change.cosine()),
            largest_change: number(change.difference.max),
            is_weight: tensor.role.group() == Role::Weight,
        }
    }

    /// New values that are not finite come first; a tensor that was 0 comes next.
    fn rank(&self) -> f64 {
        let new = self.not_finite[1] > self.not_finite[0];
        let from_zero = self.relative.is_none() && self.changed > 0;
        let relative = if from_zero { f64::MAX } else { self.relative.unwrap_or(0.0) };
        if new { f64::INFINITY } else { relative }
    }

    fn cells(&self) -> Vec<String> {
        let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1e}"));
        let changed = match (self.changed, self.relative) {
            (0, _) => "same".into(),
            (_, Some(relative)) => share(relative),
            (_, None) => "changed".into(),
        };
        let cosine = self.cosine.map_or("-".into(), |cosine| format!("{cosine:.5}"));
        let mut shown = format!("{}  {} {:?}", name(&self.tensor), self.dtype, self.shape);
        if self.not_finite != [0, 0] {
            shown += &format!("  not finite: {} in A, {} in B", self.not_finite[0], self.not_finite[1]);
        }
        vec![changed, cosine, number(self.rms), number(self.largest_change), shown]
    }
}

/// A share in percent, with two digits that count.
pub fn share(relative: f64) -> String {
    match 100.0 * relative {
        percent if percent >= 10.0 => format!("{percent:.0}%"),
        percent if percent >= 0.01 => format!("{percent:.2}%"),
        percent => format!("{percent:.1e}%"),
    }
}

impl Report {
    fn words(&self, is_all: bool) -> String {
        let mut out = String::new();
        let mut line = |text: String| {
            out += &text;
            out.push('\n');
        };
        let has_weights = self.tensors.iter().any(|row| row.is_weight);
        let (listed, others): (Vec<&Row>, Vec<&Row>) =
            self.tensors.iter().partition(|row| is_all || !has_weights || row.is_weight);
        let what = if is_all || !has_weights { "tensors" } else { "weights" };
        let changed = |rows: &[&Row]| rows.iter().filter(|row| row.changed > 0).count();
        line(format!("A: {}", name(&self.a)));
        line(format!("B: {}", name(&self.b)));
        line(format!("{} {what}, {} changed", listed.len(), changed(&listed)));
        for text in &self.different {
            line(format!("not alike: {}", name(text)));
        }
        for (side, names) in [("A", &self.only_in_a), ("B", &self.only_in_b)] {
            let more = names.len().saturating_sub(3);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let shown: Vec<String> = names.iter().take(3).map(name).collect();
            if !names.is_empty() {
                line(format!("only in {side}: {}{more}", shown.join(", ")));
            }
        }
        let shown = if is_all { listed.len() } else { listed.len().min(ROWS) };
        if shown > 0 {
            let rows: Vec<Vec<String>> = listed[..shown].iter().map(|row| row.cells()).collect();
            line(table(&[">relative", ">cosine", ">rms in A", ">largest", "tensor"], &rows).trim_end().to_string());
        }
        if shown < listed.len() {
            line(format!("and {} {what} that changed less; --all shows them", listed.len() - shown));
        }
        if !others.is_empty() {
            let (count, changed) = (others.len(), changed(&others));
            line(format!("{count} tensors of optimizers and others, {changed} changed; --all shows them"));
        }
        out
    }
}
