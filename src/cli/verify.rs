//! `stepfs verify`

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;
use xxhash_rust::xxh3::Xxh3;

use crate::recall::{Chain, Layout, ReadError, stream};
use crate::store::{Damage, Id, Objects, Store};

use super::files::read;
use super::survey::{files, stub};
use super::words::{name, progress, size};

/// Read and decode everything in a store, and say exactly what is damaged.
///
/// Works while the store is mounted, too. Exit code 3 when something is damaged.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The store.
    store: PathBuf,
    /// Print a JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Default, Serialize)]
struct Report {
    files: u64,
    objects: u64,
    decoded_bytes: u64,
    damaged: Vec<Damaged>,
}

#[derive(Clone, Serialize)]
struct Damaged {
    /// Files that cannot be read for it; empty when only other objects need it.
    paths: Vec<String>,
    object: Option<String>,
    tensor: Option<String>,
    error: String,
}

impl Damaged {
    fn file(path: &Path, error: &anyhow::Error) -> Damaged {
        Damaged { paths: vec![path.display().to_string()], object: None, tensor: None, error: format!("{error:#}") }
    }
}

/// Looks at what seems damaged, before it is believed: see [`run`].
const LOOKS: u32 = 4;

/// What a look found damaged, to be looked at again.
#[derive(Default)]
struct Suspects {
    objects: HashSet<Id>,
    paths: HashSet<PathBuf>,
}

/// While a store is mounted, files go and come, and objects become differences to other ones, between being listed and being
/// read. What is damaged is so at the next look, too; what was only overtaken is not, for that look begins with new lists.
pub(super) fn run(args: Args) -> Result<ExitCode> {
    super::log_to_stderr("warn");
    let store = Store::look(&args.store)?;
    let (mut report, mut suspects) = look(&store, None)?;
    for _ in 1..LOOKS {
        if report.damaged.is_empty() {
            break;
        }
        let again;
        (again, suspects) = look(&store, Some(&suspects))?;
        report.damaged = again.damaged;
    }
    print(&report, args.json)?;
    Ok(ExitCode::from(if report.damaged.is_empty() { 0 } else { super::DAMAGED }))
}

/// Reads and decodes everything, or only what is suspected.
fn look(store: &Store, only: Option<&Suspects>) -> Result<(Report, Suspects)> {
    let mut report = Report::default();
    let mut suspects = Suspects::default();
    let of_object = |id: &Id| only.is_none_or(|only| only.objects.contains(id));
    let of_path = |path: &PathBuf| only.is_none_or(|only| only.paths.contains(path));
    let mut unreadable = BTreeMap::new();
    let objects = Objects::load(&store.objects(), |id, error| {
        unreadable.insert(id, error.to_string());
    })?;
    unreadable.retain(|id, _| of_object(id));
    let mut names: HashMap<Id, Vec<PathBuf>> = HashMap::new();
    let mut resident = Vec::new();
    for path in files(store, Path::new(""))? {
        report.files += 1;
        match stub(store, &path) {
            Ok(Some(stub)) if of_object(&stub.object) || of_path(&path) => {
                names.entry(stub.object).or_default().push(path);
            }
            Ok(None) if of_path(&path) => resident.push(path),
            Ok(_) => {}
            // Removed since it was listed.
            Err(_) if std::fs::symlink_metadata(store.tree().join(&path)).is_err() => {}
            Err(_) if !of_path(&path) => {}
            Err(error) => {
                report.damaged.push(Damaged::file(&path, &error));
                suspects.paths.insert(path);
            }
        }
    }
    let headers: Vec<_> = objects.all().into_iter().filter(|h| of_object(&h.id) || names.contains_key(&h.id)).collect();
    let bar = progress(headers.iter().map(|header| header.logical_len).sum(), true);
    for header in headers {
        bar.set_message(header.id.to_string());
        report.objects += 1;
        let paths = names.remove(&header.id);
        if let Err(error) = check(&objects, header.id, header.decoded_hash, |bytes| bar.inc(bytes)) {
            // An object may have been collected since it was listed; a file that names it may not.
            if error.source.kind() == io::ErrorKind::NotFound && paths.is_none() {
                continue;
            }
            suspects.objects.insert(header.id);
            report.damaged.push(damaged(paths.unwrap_or_default(), error));
        }
        report.decoded_bytes += header.logical_len;
    }
    bar.finish_and_clear();
    for (id, error) in unreadable {
        let paths = words(names.remove(&id).unwrap_or_default());
        suspects.objects.insert(id);
        report.damaged.push(Damaged { paths, object: Some(id.to_string()), tensor: None, error });
    }
    for (id, paths) in names {
        let error = "the object is missing".to_string();
        suspects.objects.insert(id);
        report.damaged.push(Damaged { paths: words(paths), object: Some(id.to_string()), tensor: None, error });
    }
    for path in resident {
        let gone = || std::fs::symlink_metadata(store.tree().join(&path)).is_err();
        if let Err(error) = read(store, &objects, &path, &mut |_, _| Ok(()))
            && !gone()
        {
            report.damaged.push(Damaged::file(&path, &error));
            suspects.paths.insert(path);
        }
    }
    Ok((report, suspects))
}

fn words(paths: Vec<PathBuf>) -> Vec<String> {
    paths.iter().map(|path| path.to_string_lossy().into_owned()).collect()
}

fn check(objects: &Objects, id: Id, expected: u128, progress: impl Fn(u64)) -> Result<(), ReadError> {
    let chain = Chain::open(objects, id)?;
    let layout = Layout::of(chain.leaf());
    let mut hash = Xxh3::new();
    stream(&chain, &layout, |_, _, bytes| {
        hash.update(bytes);
        progress(bytes.len() as u64);
        Ok::<(), ReadError>(())
    })?;
    match hash.digest128() == expected {
        true => Ok(()),
        false => Err(ReadError::object(id, Damage("it does not decode to what was archived"))),
    }
}

fn damaged(paths: Vec<PathBuf>, error: ReadError) -> Damaged {
    Damaged {
        paths: words(paths),
        object: Some(error.object.to_string()),
        tensor: error.tensor.clone(),
        error: error.source.to_string(),
    }
}

fn print(report: &Report, json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(report)?);
        return Ok(());
    }
    for damaged in &report.damaged {
        let mut line = match damaged.paths.is_empty() {
            true => "no file".to_string(),
            false => name(&damaged.paths.join(", ")),
        };
        line.push_str(": ");
        if let Some(object) = &damaged.object {
            line.push_str(&format!("object {object}: "));
        }
        if let Some(tensor) = &damaged.tensor {
            line.push_str(&format!("tensor {}: ", name(tensor)));
        }
        println!("{line}{}", damaged.error);
    }
    println!("{} files, {} objects, {} decoded", report.files, report.objects, size(report.decoded_bytes));
    match report.damaged.len() {
        0 => println!("no damage"),
        count => println!("{count} damaged; every other file is unharmed"),
    }
    Ok(())
}
