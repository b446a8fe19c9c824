//! `stepfs inspect`

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::container::describe;
use crate::store::Store;
use crate::store::object::Object;

use super::place::{Place, attribute};
use super::words::{name, size, table};

/// Show what stepfs finds in a checkpoint: its tensors, their roles, where they lie; and how they are kept.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Any file, in a mount or not.
    file: PathBuf,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    path: String,
    container: &'static str,
    note: Option<String>,
    bytes: u64,
    /// In a mount: the profile it was, or would be, archived with, and the restores from lossy files that are behind it.
    profile: Option<String>,
    generations: Option<u32>,
    tensors: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    path: String,
    aliases: Vec<String>,
    dtype: &'static str,
    shape: Vec<u64>,
    role: &'static str,
    why: &'static str,
    /// Of a weight or an average: what in the file shows that it is trained; without that, only its moves may.
    trained: Option<&'static str>,
    /// Path of the parameter that this is state or an average of, if that is known.
    of: Option<String>,
    /// Path of the parameter's other moment.
    partner: Option<String>,
    offset: u64,
    bytes: u64,
    /// `lossless` or `lattice`.
    codec: &'static str,
    /// How the store keeps it: `difference` to the parent, `keyframe`, in the `skeleton` with everything small; or
    /// `as written`.
    kept: &'static str,
    step: Option<f64>,
    bound: f64,
    max_abs_error: f64,
    stored_bytes: Option<u64>,
}

pub(super) fn run(args: Args) -> Result<ExitCode> {
    let path = args.file.display().to_string();
    let file = open_aside(&args.file).with_context(|| path.clone())?;
    let description = describe(&file).with_context(|| path.clone())?;
    let object = object_of(&args.file);
    let mut report = Report {
        path,
        container: description.kind.name(),
        note: description.note.clone(),
        bytes: file.metadata()?.len(),
        profile: object.as_ref().map(|object| object.index().profile.clone()).or_else(|| word(&args.file, "profile")),
        generations: word(&args.file, "generations").and_then(|count| count.parse().ok()),
        tensors: Vec::new(),
    };
    let paths: Vec<String> = description.tensors.iter().map(|t| t.path.clone()).collect();
    let path_of = |index: Option<usize>| index.and_then(|index| paths.get(index).cloned());
    for tensor in description.tensors {
        let kept = object.as_ref().and_then(|o| o.index().tensors.iter().find(|t| t.path == tensor.path));
        report.tensors.push(Row {
            aliases: tensor.aliases,
            dtype: tensor.dtype.name(),
            role: tensor.role.name(),
            why: tensor.why,
            trained: tensor.trained,
            of: path_of(tensor.of),
            partner: path_of(tensor.partner),
            offset: tensor.extent.start,
            bytes: tensor.extent.end - tensor.extent.start,
            codec: kept.map_or("lossless", |kept| kept.coding.codec()),
            kept: match (&object, kept.map(|kept| kept.coding.parent())) {
                (_, Some(Some(_))) => "difference",
                (_, Some(None)) => "keyframe",
                (Some(_), None) => "skeleton",
                (None, None) => "as written",
            },
            step: kept.and_then(|kept| kept.coding.step()),
            bound: kept.map_or(0.0, |kept| kept.bound),
            max_abs_error: kept.map_or(0.0, |kept| kept.max_abs_error),
            stored_bytes: kept.map(|kept| kept.stored()),
            path: tensor.path,
            shape: tensor.shape,
        });
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &report)?;
        writeln!(out)?;
        return Ok(ExitCode::SUCCESS);
    }
    writeln!(out, "{}: {}, {}, {} tensors", report.path, report.container, size(report.bytes), report.tensors.len())?;
    if let Some(note) = &report.note {
        writeln!(out, "note: {note}")?;
    }
    if let Some(profile) = &report.profile {
        let lossy = report.generations.filter(|count| *count > 0);
        let behind = lossy.map_or(String::new(), |count| format!("; {count} lossy restores behind it"));
        writeln!(out, "profile: {}{behind}", name(profile))?;
    }
    if report.tensors.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let head = ["tensor", "type", "shape", "role", "bytes", "offset", "kept as", "stored", "bound", "why this role"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for row in &report.tensors {
        rows.push(vec![
            name(&row.path),
            row.dtype.into(),
            format!("{:?}", row.shape),
            row.role.replace('_', " "),
            size(row.bytes),
            row.offset.to_string(),
            format!("{} {}", row.codec, row.kept),
            row.stored_bytes.map(size).unwrap_or_default(),
            if row.bound == 0.0 { "exact".into() } else { format!("{:.1e}", row.bound) },
            match (&row.of, row.trained, row.role) {
                (Some(of), ..) => format!("{}; of {}", row.why, name(of)),
                (None, Some(trained), _) => format!("{}; {trained}", row.why),
                (None, None, "weight") => format!("{}; no optimizer in the file trains it", row.why),
                (None, None, _) => row.why.into(),
            },
        ]);
    }
    let right = [false, false, false, false, true, true, false, true, true, false];
    write!(out, "{}", table(&rows, &right))?;
    Ok(ExitCode::SUCCESS)
}

/// Opens a file without its being taken for a restore.
fn open_aside(path: &std::path::Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    // Only the owner may.
    File::options().read(true).custom_flags(libc::O_NOATIME).open(path).or_else(|_| File::open(path))
}

/// What the daemon says of a file in a mount.
fn word(path: &std::path::Path, name: &str) -> Option<String> {
    let place = Place::of(path).ok()?;
    String::from_utf8(attribute(&place.mount?.join(&place.path), name).ok()?).ok()
}

/// The object of a released file in a mount, if that is what it is.
fn object_of(path: &std::path::Path) -> Option<Object> {
    let place = Place::of(path).ok()?;
    let id = word(path, "object")?;
    let store = Store::look(&place.store).ok()?;
    Object::open(&store.objects(), id.parse().ok()?).ok()
}
