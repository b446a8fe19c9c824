//! `stepfs inspect`

mod report;

use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::archive::rounded_up;
use crate::store::natural;
use formats::index_in;

use super::format::{causes, lines, name, size, table};
use super::{FAILED, exit_if};
use report::{AS_WRITTEN, Report};

/// Show what stepfs finds in checkpoints: tensors, roles, offsets, and how a store keeps them.
///
/// For a directory it prints one line per file below it, with the reason if the file stays as written. A distributed
/// checkpoint of torch is one model: name only its directory to see each tensor.
///
/// Exit code 1 if something could not be read; the rest is shown.
#[derive(clap::Args)]
#[command(after_help = "Example: stepfs inspect /ckpts/run-7/step_100.pt")]
pub(super) struct Args {
    /// Any files and directories, in a mount or not.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Print a JSON object; for several files, an array of objects.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: Args) -> Result<()> {
    let is_array = args.json && (args.paths.len() > 1 || is_overview(&args.paths[0]));
    let (mut shown, mut failed) = (0, false);
    if is_array {
        say_part!("[");
    }
    for path in &args.paths {
        let is_overview = is_overview(path);
        let files = if is_overview { below(path) } else { vec![Ok(path.clone())] };
        let mut rows = Vec::new();
        for file in files {
            let report = match file.and_then(|file| report::of(&file)) {
                Ok(report) => report,
                Err(error) => {
                    failed = true;
                    say_error!("stepfs: {}", lines(&causes(&error)));
                    continue;
                }
            };
            match (args.json, is_overview) {
                // Each by itself: all of them together may be large.
                (true, _) => {
                    let comma = if shown > 0 { ",\n" } else { "" };
                    say_part!("{comma}{}", serde_json::to_string_pretty(&report)?);
                }
                (false, true) => rows.push(row(path, &report)),
                (false, false) => print(&report),
            }
            shown += 1;
        }
        if is_overview && !args.json {
            let head = ["container", ">size", ">tensors", ">weights", ">quantized", "file", "note"];
            say_part!("{}", table(&head, &rows));
        }
    }
    if args.json && (is_array || shown > 0) {
        say!("{}", if is_array { "]" } else { "" });
    }
    exit_if(failed, FAILED)
}

/// Prints each tensor of a file or a model.
fn print(report: &Report) {
    let (container, bytes, count) = (report.container, size(report.bytes), report.tensors.len());
    say!("{}: {container}, {bytes}, {count} tensors", report.path.display());
    if let Some(note) = &report.note {
        say!("note: {note}");
    }
    if let Some(why) = report.why.as_ref().filter(|why| report.note.as_ref() != Some(why)) {
        say!("stays as it is: {}", name(why));
    }
    if let Some(profile) = &report.profile {
        let lossy = report.generations.filter(|count| *count > 0);
        let behind = lossy.map_or(String::new(), |count| format!("; {count} lossy restores behind it"));
        say!("profile: {}{behind}", name(profile));
    }
    if report.tensors.is_empty() {
        return;
    }
    let head =
        ["tensor", "type", "shape", "role", ">bytes", ">offset", "kept as", ">stored", ">bound", "why this role"];
    let mut rows = Vec::new();
    for row in &report.tensors {
        let how = &row.how;
        rows.push(vec![
            name(&row.path),
            row.dtype.into(),
            format!("{:?}", row.shape),
            row.role.replace('_', " "),
            size(row.bytes),
            row.offset.map(|offset| offset.to_string()).unwrap_or_default(),
            if how.kept == AS_WRITTEN { how.kept.into() } else { format!("{} {}", how.codec, how.kept) },
            how.stored_bytes.map(size).unwrap_or_default(),
            if how.bound == 0.0 { "exact".into() } else { rounded_up(how.bound) },
            match (&row.of, row.trained, row.role) {
                (Some(of), ..) => format!("{}; of {}", row.why, name(of)),
                (None, Some(trained), _) => format!("{}; {trained}", row.why),
                (None, None, "weight") => format!("{}; nothing in the file proves that it is trained", row.why),
                (None, None, _) => row.why.into(),
            },
        ]);
    }
    say_part!("{}", table(&head, &rows));
}

/// True if `path` is a directory, and not a distributed checkpoint.
fn is_overview(path: &Path) -> bool {
    path.is_dir() && !is_model(path)
}

fn is_model(directory: &Path) -> bool {
    index_in(directory).is_file()
}

/// The regular files below a directory, by name; a distributed checkpoint stands for its files. A directory that
/// cannot be read is an error among them.
fn below(directory: &Path) -> Vec<Result<PathBuf>> {
    let (mut found, mut errors, mut rest) = (Vec::new(), Vec::new(), vec![directory.to_path_buf()]);
    while let Some(directory) = rest.pop() {
        if let Err(error) = list(&directory, &mut found, &mut rest) {
            errors.push(Err(error).with_context(|| directory.display().to_string()));
        }
    }
    found.sort_by(|a, b| natural::order(a, b));
    found.into_iter().map(Ok).chain(errors).collect()
}

fn list(directory: &Path, found: &mut Vec<PathBuf>, rest: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let (path, file_type) = (entry.path(), entry.file_type()?);
        match file_type.is_dir() {
            true if is_model(&path) => found.push(path),
            true => rest.push(path),
            false if file_type.is_file() => found.push(path),
            false => {}
        }
    }
    Ok(())
}

/// The cells of a file's line below a directory.
fn row(directory: &Path, report: &Report) -> Vec<String> {
    let tensors = &report.tensors;
    let count = |of: usize| if of == 0 { String::new() } else { of.to_string() };
    vec![
        report.container.to_string(),
        size(report.bytes),
        count(tensors.len()),
        count(tensors.iter().filter(|tensor| tensor.role == "weight").count()),
        count(tensors.iter().filter(|tensor| tensor.how.step.is_some()).count()),
        name(report.path.strip_prefix(directory).unwrap_or(&report.path)),
        report.note.as_deref().or(report.why.as_deref()).map(name).unwrap_or_default(),
    ]
}
