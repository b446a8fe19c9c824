//! One line per file below a directory.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cli::format::{name, size, table};
use crate::compare::natural;
use crate::container::index_in;

use super::report::Report;

/// True if `path` is a directory, and not a distributed checkpoint.
pub(super) fn is_of(path: &Path) -> bool {
    path.is_dir() && !is_model(path)
}

fn is_model(directory: &Path) -> bool {
    index_in(directory).is_file()
}

/// The regular files below a directory, by name; a distributed checkpoint stands for its files. A directory that
/// cannot be read is an error among them.
pub(super) fn below(directory: &Path) -> Vec<Result<PathBuf>> {
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

/// The cells of a file's line.
pub(super) fn row(directory: &Path, file: &Path, report: &Report) -> Vec<String> {
    let tensors = &report.tensors;
    let count = |of: usize| if of == 0 { String::new() } else { of.to_string() };
    vec![
        report.container.to_string(),
        size(report.bytes),
        count(tensors.len()),
        count(tensors.iter().filter(|tensor| tensor.role == "weight").count()),
        count(tensors.iter().filter(|tensor| tensor.step.is_some()).count()),
        name(&file.strip_prefix(directory).unwrap_or(file).display().to_string()),
        report.note.as_deref().or(report.why.as_deref()).map(name).unwrap_or_default(),
    ]
}

/// Prints the lines.
pub(super) fn write(out: &mut dyn Write, mut rows: Vec<Vec<String>>) -> io::Result<()> {
    rows.insert(0, ["container", "size", "tensors", "weights", "quantized", "file", "note"].map(String::from).to_vec());
    write!(out, "{}", table(&rows, &[false, true, true, true, true, false, false]))
}
