//! `stepfs compare`: ways to keep a series of checkpoints by size, loss and cost, measured on the user's own files.
//!
//! stepfs's profiles and the published systems take the encoder's way from a file to its object, as under a mount
//! ([`kept`]). A user's first ideas run beside them ([`plain`]). Errors are measured on decoded files, element by
//! element, never taken from an object's own statement. All work is done below one directory, which is removed.

mod codec;
mod kept;
mod plain;
mod report;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;

use crate::terminal::format::{progress, table};
use crate::terminal::interrupt::Temporary;
use crate::terminal::{log_to_stderr, say_answer};

use super::Series;
use codec::Codec;
use report::{Measured, Report};

/// Store a series of checkpoints with many codecs, and compare size, loss and cost.
///
/// FILES are checkpoints of one run, oldest first. A directory stands for the checkpoints in it, in the order of their
/// numbers. stepfs only reads them. Profiles and published systems keep them as a mount does: keyframes, indexes and
/// stubs count. The newest checkpoint is encoded too, although a mount would keep it as written; the one before it
/// serves as its successor. Loss is measured on decoded values.
///
/// FILES must hold the values that a program wrote: released files of a mount that are lossy already are refused. To
/// get exact ones, set `stepfs profile --set exact DIR`, and save a few checkpoints in DIR.
///
/// DIR needs room for the series as one codec keeps it, and for one file. All temporary data is removed at the end, also after Ctrl-C.
#[derive(clap::Args)]
#[command(after_help = format!("Examples:\n  stepfs compare run/step_*.pt\n  \
stepfs compare run --codecs balanced,compact,lc-3,zstd-patch-19\n\n\
The shell sorts step_10 before step_9: name the directory, or number with zeros.\n\nCodecs:\n{}", listed()))]
pub struct Args {
    /// Checkpoints, and directories of checkpoints.
    #[arg(required = true, value_name = "FILES")]
    files: Vec<PathBuf>,
    /// Codecs to compare, by name, separated by commas [default: all that are listed below].
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    codecs: Vec<String>,
    /// Directory for temporary files [default: TMPDIR].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

/// Runs the command.
///
/// # Errors
/// A message for the user.
pub fn run(args: Args) -> Result<()> {
    log_to_stderr("error");
    let codecs = codecs(&args.codecs)?;
    let series = Series::open(&args.files)?;
    for (path, why) in &series.skipped {
        say_error!("stepfs: left out: {}: {why}", path.display());
    }
    let parent = args.dir.unwrap_or_else(std::env::temp_dir);
    let dir = Temporary::directory("stepfs-compare-", &parent);
    let (dir, _held) = dir.with_context(|| format!("{}", parent.display()))?;
    // Each file is encoded and decoded by each codec.
    let bar = progress((2 * series.states.len() * codecs.len()) as u64, false);
    let report = compare(&series, &codecs, dir.path(), &bar);
    bar.finish_and_clear();
    let report = report?;
    say_answer(args.json, &report, |report| say_part!("{report}"))
}

/// The codecs with these names, or all codecs if `names` is empty.
fn codecs(names: &[String]) -> Result<Vec<Codec>> {
    let mut codecs = Vec::new();
    for name in names {
        match name.trim().parse::<Codec>() {
            Ok(codec) if codecs.contains(&codec) => {}
            Ok(codec) => codecs.push(codec),
            Err(why) => bail!("there is no codec {name:?} ({why}); there are:\n{}", listed()),
        }
    }
    Ok(if names.is_empty() { Codec::usual() } else { codecs })
}

/// All codecs, one per line.
fn listed() -> String {
    let row = |codec: Codec| vec![format!("  {codec}"), codec.about().to_string()];
    let rows: Vec<Vec<String>> = Codec::usual().into_iter().map(row).collect();
    table(&["  codec", "about"], &rows) + "Other numbers work too, if the system or zstd has them.\n"
}

/// Keeps the series by each of the codecs, and measures. All files that it writes are below `dir`, and gone when it
/// returns. Takes room there for the series by one codec and for one decoded file.
fn compare(series: &Series, codecs: &[Codec], dir: &Path, bar: &ProgressBar) -> Result<Report> {
    codecs.iter().try_for_each(|codec| codec.is_for(series))?;
    bar.set_message("updates");
    let scale = series.scale()?;
    let mut kept = Vec::new();
    for codec in codecs {
        bar.set_message(codec.to_string());
        let measured: Result<Measured> = match *codec {
            Codec::Profile(profile) => kept::measure(series, profile, dir, bar),
            Codec::Zstd { level, patch } => plain::zstd(series, level, patch, dir, bar),
        };
        let measured = measured.with_context(|| codec.to_string())?;
        kept.push(measured.report(codec.to_string(), codec.about(), series, &scale));
    }
    Ok(Report::new(series, &scale, kept))
}
