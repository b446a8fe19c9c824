//! `stepfs inspect`

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::container::{Kind, METADATA, Model, Tensor, describe, is_of_chunks};
use crate::store::Store;
use crate::store::object::Object;

use super::place::{Place, attribute};
use super::words::{name, size, table};

/// Show what stepfs finds in a checkpoint: its tensors, their roles, where they lie; and how they are kept.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Any file, in a mount or not; or the directory of a distributed checkpoint, which is shown as one model.
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
    /// None where chunks of several files are shown as one tensor.
    offset: Option<u64>,
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
    let report = if args.file.is_dir() { of_directory(&args.file) } else { of_file(&args.file) };
    let report = report.with_context(|| path)?;
    write(&report, args.json)
}

/// What is in a file. The chunks of a distributed checkpoint get their names from the `.metadata` beside it.
fn of_file(path: &Path) -> Result<Report> {
    let file = open_aside(path)?;
    let mut description = describe(&file)?;
    if is_of_chunks(path) {
        let metadata = path.with_file_name(METADATA);
        match open_aside(&metadata).and_then(|file| Model::read(&file)) {
            Ok(model) => description.name_chunks(&path.file_name().unwrap_or_default().to_string_lossy(), &model),
            Err(error) => description.note = Some(format!("no names: {}: {error}", metadata.display())),
        }
    }
    let object = object_of(path);
    let mut kept = Kept::default();
    kept.add(object.as_ref(), &HashSet::new());
    Ok(Report {
        path: path.display().to_string(),
        container: description.kind.name(),
        note: description.note.clone(),
        bytes: file.metadata()?.len(),
        profile: object.as_ref().map(|object| object.index().profile.clone()).or_else(|| word(path, "profile")),
        generations: word(path, "generations").and_then(|count| count.parse().ok()),
        tensors: rows(&description.tensors, &kept, true),
    })
}

/// What is in a distributed checkpoint: its tensors, whole, however they are cut among the ranks.
fn of_directory(path: &Path) -> Result<Report> {
    let metadata = open_aside(&path.join(METADATA)).with_context(|| {
        format!("this directory has no {METADATA}, so it is no distributed checkpoint; name a file in it")
    })?;
    let model = Model::read(&metadata)?;
    let wholes: HashSet<&str> = model.tensors().iter().map(|tensor| tensor.path.as_str()).collect();
    let (mut kept, mut bytes, mut profiles) = (Kept::default(), metadata.metadata()?.len(), BTreeSet::new());
    let mut files: Vec<&str> = model.files().map(|(name, _)| name).collect();
    files.sort_unstable();
    let mut gone = 0;
    for file in &files {
        let file = path.join(file);
        let Ok(metadata) = std::fs::symlink_metadata(&file) else {
            gone += 1;
            continue;
        };
        bytes += metadata.len();
        let object = object_of(&file);
        profiles.extend(object.as_ref().map(|object| object.index().profile.clone()));
        kept.add(object.as_ref(), &wholes);
    }
    Ok(Report {
        path: path.display().to_string(),
        container: Kind::Dcp.name(),
        note: Some(match gone {
            0 => format!("whole, from {} files", files.len()),
            gone => format!("{gone} of {} files are not there", files.len()),
        }),
        bytes,
        profile: (!profiles.is_empty()).then(|| profiles.into_iter().collect::<Vec<_>>().join(", ")),
        generations: None,
        tensors: rows(model.tensors(), &kept, false),
    })
}

/// How a store keeps tensors, by path; chunks of one tensor are put together.
#[derive(Default)]
struct Kept {
    tensors: HashMap<String, HowKept>,
    /// Files that are released.
    objects: usize,
}

struct HowKept {
    codec: &'static str,
    difference: bool,
    step: Option<f64>,
    bound: f64,
    max_abs_error: f64,
    stored: u64,
}

impl Kept {
    /// Chunks of one of these tensors count as that.
    fn add(&mut self, object: Option<&Object>, wholes: &HashSet<&str>) {
        self.objects += usize::from(object.is_some());
        for tensor in object.iter().flat_map(|object| &object.index().tensors) {
            let how = HowKept {
                codec: tensor.coding.codec(),
                difference: tensor.coding.parent().is_some(),
                step: tensor.coding.step(),
                bound: tensor.bound,
                max_abs_error: tensor.max_abs_error,
                stored: tensor.stored(),
            };
            let path = if wholes.contains(whole(&tensor.path)) { whole(&tensor.path) } else { &tensor.path };
            self.tensors.entry(path.to_string()).and_modify(|all| all.join(&how)).or_insert(how);
        }
    }
}

/// The path of the tensor that a path's chunk is a part of.
fn whole(path: &str) -> &str {
    path.strip_suffix(']').and_then(|path| path.rsplit_once('[')).map_or(path, |(whole, _)| whole)
}

impl HowKept {
    fn join(&mut self, other: &HowKept) {
        self.bound = self.bound.max(other.bound);
        self.max_abs_error = self.max_abs_error.max(other.max_abs_error);
        self.stored += other.stored;
        self.difference |= other.difference;
    }
}

fn rows(tensors: &[Tensor], kept: &Kept, placed: bool) -> Vec<Row> {
    let path_of = |index: Option<usize>| index.map(|index| tensors[index].path.clone());
    let row = |tensor: &Tensor| {
        let how = kept.tensors.get(&tensor.path);
        Row {
            path: tensor.path.clone(),
            aliases: tensor.aliases.clone(),
            dtype: tensor.dtype.name(),
            shape: tensor.shape.clone(),
            role: tensor.role.name(),
            why: tensor.why,
            trained: tensor.trained,
            of: path_of(tensor.of),
            partner: path_of(tensor.partner),
            offset: placed.then_some(tensor.extent.start),
            bytes: tensor.extent.end - tensor.extent.start,
            codec: how.map_or("lossless", |how| how.codec),
            kept: match (kept.objects, how.map(|how| how.difference)) {
                (_, Some(true)) => "difference",
                (_, Some(false)) => "keyframe",
                (0, None) => "as written",
                (_, None) => "skeleton",
            },
            step: how.and_then(|how| how.step),
            bound: how.map_or(0.0, |how| how.bound),
            max_abs_error: how.map_or(0.0, |how| how.max_abs_error),
            stored_bytes: how.map(|how| how.stored),
        }
    };
    tensors.iter().map(row).collect()
}

fn write(report: &Report, json: bool) -> Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, report)?;
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
            row.offset.map(|offset| offset.to_string()).unwrap_or_default(),
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
fn open_aside(path: &Path) -> std::io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    // Only the owner may.
    File::options().read(true).custom_flags(libc::O_NOATIME).open(path).or_else(|_| File::open(path))
}

/// What the daemon says of a file in a mount.
fn word(path: &Path, name: &str) -> Option<String> {
    let place = Place::of(path).ok()?;
    String::from_utf8(attribute(&place.mount?.join(&place.path), name).ok()?).ok()
}

/// The object of a released file in a mount, if that is what it is.
fn object_of(path: &Path) -> Option<Object> {
    let place = Place::of(path).ok()?;
    let id = word(path, "object")?;
    let store = Store::look(&place.store).ok()?;
    Object::open(&store.objects(), id.parse().ok()?).ok()
}
