//! `stepfs compare`

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::compare::{Codec, Errors, Report, Series, Watch, compare, steps};

use super::as_written::refuse_lossy;
use super::format::{name, percent, progress, size, table};

/// Store a series of checkpoints with many codecs, and compare size, loss and cost.
///
/// FILES are checkpoints of one run, oldest first. A directory stands for the checkpoints in it, in the order of their
/// numbers. stepfs only reads them. Profiles and published systems go through a temporary store, as in a mount:
/// keyframes, indexes and stubs count. The newest checkpoint is archived too, although a mount would keep it as
/// written; a copy of the one before it serves as its successor. Loss is measured on decoded values.
///
/// FILES must hold the values that a program wrote: released files of a mount that are lossy already are refused. To
/// get exact ones, set `stepfs profile --set exact DIR`, and save a few checkpoints in DIR.
///
/// DIR needs room for twice the series. All temporary data is removed at the end, also after Ctrl-C.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  stepfs compare run/step_*.pt\n  \
stepfs compare run --codecs balanced,compact,lc-3,zstd-patch-19\n\n\
The shell sorts step_10 before step_9: name the directory, or number with zeros.\n\
`stepfs compare --list` lists the codecs.")]
pub(super) struct Args {
    /// Checkpoints, and directories of checkpoints.
    #[arg(required_unless_present = "list", value_name = "FILES")]
    files: Vec<PathBuf>,
    /// Codecs to compare, by name, separated by commas [default: all of `--list`].
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    codecs: Vec<String>,
    /// List the codecs, and exit.
    #[arg(long, conflicts_with_all = ["codecs", "files"])]
    list: bool,
    /// Directory for the temporary stores [default: TMPDIR].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

/// Codecs per table; more do not fit on a screen.
const ACROSS: usize = 6;

pub(super) fn run(args: Args) -> Result<ExitCode> {
    super::log_to_stderr("error");
    if args.list {
        list(args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let codecs = codecs(&args.codecs)?;
    let series = Series::open(&args.files)?;
    refuse_lossy(&args.files)?;
    for (path, why) in &series.skipped {
        say_error!("stepfs: left out: {}: {why}", path.display());
    }
    let stop = super::interrupted()?;
    let parent = args.dir.unwrap_or_else(std::env::temp_dir);
    // Other users may not be allowed to read the checkpoints that are copied here.
    let private = Permissions::from_mode(0o700);
    let dir = tempfile::Builder::new().prefix("stepfs-compare-").permissions(private).tempdir_in(&parent);
    let dir = dir.with_context(|| format!("{}", parent.display()))?;
    let bar = progress(steps(&series, codecs.len()), false);
    let note = |words: &str, done: u64| {
        bar.set_message(words.to_string());
        bar.set_position(done);
    };
    let result = compare(&series, &codecs, dir.path(), &Watch { stop: &stop, progress: &note });
    bar.finish_and_clear();
    let kept = dir.path().to_path_buf();
    dir.close().with_context(|| format!("{}", kept.display()))?;
    let report = result?;
    let mut out = std::io::stdout().lock();
    match args.json {
        true => {
            serde_json::to_writer_pretty(&mut out, &report)?;
            writeln!(out)?;
        }
        false => write!(out, "{}", words(&report))?,
    }
    Ok(ExitCode::SUCCESS)
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
    let rows: Vec<Vec<String>> =
        Codec::usual().into_iter().map(|codec| vec![format!("  {codec}"), codec.about().to_string()]).collect();
    table(&rows, &[false, false]) + "Other numbers work too, if the system or zstd has them.\n"
}

fn list(json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if !json {
        write!(out, "{}", listed())?;
        return Ok(());
    }
    let all =
        Codec::usual().into_iter().map(|codec| serde_json::json!({"name": codec.to_string(), "about": codec.about()}));
    serde_json::to_writer_pretty(&mut out, &all.collect::<Vec<_>>())?;
    writeln!(out)?;
    Ok(())
}

/// The report as tables.
fn words(report: &Report) -> String {
    let raw: u64 = report.codecs.first().map_or(0, |kept| kept.raw_total());
    let files = report.files.len();
    let mut out = format!(
        "{files} checkpoints, {}; {} parameters of rms {}, updates of rms {}\n\n",
        size(raw),
        report.parameters,
        number(report.weights_rms),
        number(report.update_rms),
    );
    let head =
        ["codec", "all", "of raw", "each", "bits/parameter", "encode MB/s", "decode MB/s", "objects read", "most"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for kept in &report.codecs {
        rows.push(vec![
            kept.name.clone(),
            size(kept.total),
            percent(kept.total, raw),
            size(kept.total / files.max(1) as u64),
            number(kept.bits_per_parameter),
            format!("{:.0}", kept.encode_mb_s),
            format!("{:.0}", kept.decode_mb_s),
            format!("{:.1}", kept.chain.mean),
            kept.chain.max.to_string(),
        ]);
    }
    out += &table(&rows, &[false, true, true, true, true, true, true, true, true]);
    out += "MB/s: 10^6 bytes per second of one core's processor time. Encoding includes planning, reading back and\n\
            comparing. Decoding starts with empty caches, so it reads all objects of a file: on average, at most.\n";
    out +=
        "\nErrors of the parameters, relative to the rms of the update between two checkpoints and of the parameters\n";
    let head = ["codec", "rms/update", "largest/update", "rms/weights", "largest/weights"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for kept in &report.codecs {
        let Errors { of_update, of_weights } = kept.error;
        let each = [of_update.rms, of_update.max, of_weights.rms, of_weights.max].map(number);
        rows.push(std::iter::once(kept.name.clone()).chain(each).collect());
    }
    out += &table(&rows, &[false, true, true, true, true]);
    out += "\nBits per number, by role (-: the codec has no roles)\n";
    out += &roles(report);
    out += "\nBytes of each checkpoint\n";
    for some in report.codecs.chunks(ACROSS) {
        let mut rows = vec![std::iter::once("file".into()).chain(some.iter().map(|kept| kept.name.clone())).collect()];
        for (at, file) in files_in_short(&report.files).iter().enumerate() {
            rows.push(std::iter::once(name(file)).chain(some.iter().map(|kept| size(kept.bytes[at]))).collect());
        }
        let right: Vec<bool> = (0..=some.len()).map(|column| column > 0).collect();
        out += &table(&rows, &right);
        out.push('\n');
    }
    out.pop();
    out
}

/// The paths without their common directory.
fn files_in_short(files: &[String]) -> Vec<String> {
    let parent = |file: &String| Path::new(file).parent().map(Path::to_path_buf).unwrap_or_default();
    let mut common = files.first().map(parent).unwrap_or_default();
    while !files.iter().all(|file| Path::new(file).starts_with(&common)) && common.pop() {}
    let rest = |file: &String| Path::new(file).strip_prefix(&common).map(|path| path.to_string_lossy().into_owned());
    files.iter().map(|file| rest(file).unwrap_or_else(|_| file.clone())).collect()
}

fn roles(report: &Report) -> String {
    let of_all = report.codecs.iter().flat_map(|kept| kept.roles.iter());
    let names: std::collections::BTreeSet<&str> =
        of_all.filter(|(_, kept)| kept.bits_per_parameter.is_some()).map(|(name, _)| *name).collect();
    let head = std::iter::once("codec".to_string()).chain(names.iter().map(|name| name.replace('_', " ")));
    let mut rows: Vec<Vec<String>> = vec![head.chain(["all else, bytes".to_string()]).collect()];
    for kept in &report.codecs {
        let bits =
            |name: &&str| kept.roles.get(*name).and_then(|role| role.bits_per_parameter).map_or("-".into(), number);
        let rest: u64 =
            kept.roles.values().filter(|role| role.bits_per_parameter.is_none()).map(|role| role.bytes).sum();
        let rest = if kept.roles.is_empty() { "-".to_string() } else { size(rest) };
        rows.push(std::iter::once(kept.name.clone()).chain(names.iter().map(bits)).chain([rest]).collect());
    }
    let right: Vec<bool> = (0..names.len() + 2).map(|column| column > 0).collect();
    table(&rows, &right)
}

/// Three digits, for any magnitude.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        v if !v.is_finite() => "-".into(),
        v if v < 1e-3 => format!("{value:.1e}"),
        v if v < 0.1 => format!("{value:.4}"),
        v if v < 10.0 => format!("{value:.2}"),
        v if v < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_shown_from_where_they_differ() {
        let short = |files: &[&str]| files_in_short(&files.iter().map(|file| file.to_string()).collect::<Vec<_>>());
        assert_eq!(short(&["/a/b/1.pt", "/a/b/2.pt"]), ["1.pt", "2.pt"]);
        assert_eq!(short(&["/a/v-1/x.ckpt", "/a/v-2/x.ckpt"]), ["v-1/x.ckpt", "v-2/x.ckpt"]);
        assert_eq!(short(&["1.pt", "/a/2.pt"]), ["1.pt", "/a/2.pt"]);
    }
}
