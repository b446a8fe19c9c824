//! `stepfs compare`: ways to keep a series of checkpoints by size, loss and cost, measured on the user's own files.
//!
//! stepfs's profiles and the published systems take the encoder's way from a file to its object, as under a mount
//! ([`kept`]). A user's first ideas run beside them ([`plain`]). Errors are measured on decoded files, element by
//! element, never taken from an object's own statement. All work is done below one directory, which is removed.

mod kept;
mod plain;
mod report;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use indicatif::ProgressBar;
use papers::registry::SystemId;

use crate::store::Profile;
use crate::terminal::format::{progress, table};
use crate::terminal::interrupt::Temporary;
use crate::terminal::{log_to_stderr, say_answer};

use super::series::Series;
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

/// A way of keeping checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Codec {
    /// As a store does under this profile: stepfs's own, or a published system.
    Profile(Profile),
    /// `zstd -N`, each file alone; or `zstd -N --patch-from`, each file as a patch to the one before.
    Zstd { level: u8, patch: bool },
}

const LEVELS: std::ops::RangeInclusive<u8> = 1..=22;
/// zstd's own default. Its highest levels save a few percent of floating-point numbers, at a hundredth of the speed.
/// So they run only by name.
const LEVEL: u8 = 3;
const PATCH: &str = "zstd-patch-";
const ZSTD: &str = "zstd-";

impl Codec {
    /// The codecs that are compared by default.
    fn usual() -> Vec<Codec> {
        let own = Profile::ALL.map(Codec::Profile);
        let published = SystemId::usual().map(|system| Codec::Profile(Profile::Published(system)));
        let zstd = [false, true].map(|patch| Codec::Zstd { level: LEVEL, patch });
        own.into_iter().chain(published).chain(zstd).collect()
    }

    /// A line about it.
    fn about(self) -> &'static str {
        match self {
            Codec::Profile(Profile::Exact) => "stepfs, every bit",
            Codec::Profile(Profile::Balanced) => "stepfs, a restore is meant to cost half an iteration of training",
            Codec::Profile(Profile::Compact) => "stepfs, a restore is meant to cost up to two iterations",
            Codec::Profile(Profile::Published(system)) => system.about(),
            Codec::Zstd { patch: false, .. } => "zstd at this level (1 to 22), each file alone",
            Codec::Zstd { .. } => "zstd --patch-from at this level (1 to 22), each file as a patch to the one before",
        }
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Codec::Profile(profile) => f.write_str(&profile.name()),
            Codec::Zstd { level, patch } => write!(f, "{}{level}", if *patch { PATCH } else { ZSTD }),
        }
    }
}

impl FromStr for Codec {
    type Err = String;

    fn from_str(text: &str) -> Result<Codec, String> {
        let patch = text.strip_prefix(PATCH);
        if let Some(number) = patch.or_else(|| text.strip_prefix(ZSTD)) {
            // No sign and no zeros before it: each has one name.
            let level = number.parse().ok().filter(|level| LEVELS.contains(level) && level.to_string() == number);
            let level = level.ok_or_else(|| format!("{number:?} is no level of zstd; write 1 to 22"))?;
            Ok(Codec::Zstd { level, patch: patch.is_some() })
        } else if let Some(own) = Profile::ALL.into_iter().find(|profile| profile.name() == text) {
            Ok(Codec::Profile(own))
        } else {
            // A known system with a bad number gets that system's error.
            let system = |id| Codec::Profile(Profile::Published(id));
            text.parse().map(system)
        }
    }
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
    let patched = codecs.iter().find(|codec| matches!(codec, Codec::Zstd { patch: true, .. }));
    let large = series.states.iter().find(|state| state.len > plain::MAX_PATCHED);
    if let Some((codec, state)) = patched.zip(large) {
        bail!("{}: more than {codec} can have; leave it out (--codecs)", state.path.display());
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_no_other_way() {
        for codec in Codec::usual() {
            assert_eq!(codec.to_string().parse(), Ok(codec));
            assert!(!codec.about().is_empty());
        }
        assert_eq!("zstd-patch-19".parse(), Ok(Codec::Zstd { level: 19, patch: true }));
        for wrong in ["", "zstd", "zstd-0", "zstd-03", "zstd-23", "zstd-patch-", "Exact", "lc-9", " exact"] {
            assert!(wrong.parse::<Codec>().is_err(), "{wrong}");
        }
    }
}
