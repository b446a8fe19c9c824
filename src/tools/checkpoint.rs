//! One checkpoint as its tensors: a file, or a directory whose files hold one model. Nothing in it is executed.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::store::{files_below, natural, open_aside};
use formats::{Description, Model, Siblings, Tensor, describe_at, siblings};

use super::of_file;

/// A file of a checkpoint.
pub(super) struct Part {
    /// Below the checkpoint's directory; its name, if the checkpoint is one file.
    pub(super) path: PathBuf,
    pub(super) file: File,
    pub(super) description: Description,
}

/// A checkpoint whose files are open.
pub(super) struct Checkpoint {
    pub(super) path: PathBuf,
    pub(super) is_directory: bool,
    /// In the natural order of their paths, those without tensors too.
    pub(super) parts: Vec<Part>,
    /// By name: the tensor's path, after its file's path where several files have one of that path.
    places: HashMap<String, (usize, usize)>,
}

/// A tensor of a checkpoint.
#[derive(Clone, Copy)]
pub(super) struct Found<'a> {
    pub(super) part: &'a Part,
    pub(super) tensor: &'a Tensor,
}

impl Checkpoint {
    /// Opens all files of a checkpoint.
    ///
    /// # Errors
    /// It cannot be read, or no file of it has a tensor.
    pub(super) fn open(path: &Path) -> Result<Checkpoint> {
        let is_directory = std::fs::metadata(path).map_err(of_file(path))?.is_dir();
        let files = match is_directory {
            true => {
                let mut files = files_below(path, Path::new("")).map_err(of_file(path))?;
                files.sort_by(|a, b| natural::order(a, b));
                files
            }
            false => vec![PathBuf::from(path.file_name().unwrap_or_default())],
        };
        let mut parts = Vec::new();
        for file in files {
            let at = if is_directory { path.join(&file) } else { path.to_path_buf() };
            parts.push(Part::open(file, &at)?);
        }
        let mut count: HashMap<&str, usize> = HashMap::new();
        for tensor in parts.iter().flat_map(|part| &part.description.tensors) {
            *count.entry(tensor.path.as_str()).or_default() += 1;
        }
        let mut places = HashMap::new();
        for (at, part) in parts.iter().enumerate() {
            for (number, tensor) in part.description.tensors.iter().enumerate() {
                let name = match count[tensor.path.as_str()] {
                    1 => tensor.path.clone(),
                    _ => format!("{}:{}", part.path.display(), tensor.path),
                };
                places.insert(name, (at, number));
            }
        }
        if places.is_empty() {
            let note = parts.iter().find_map(|part| part.description.note.clone());
            let why = note.unwrap_or_else(|| "no file in it has tensors".into());
            bail!("{}: not a checkpoint that stepfs understands: {why}", path.display());
        }
        Ok(Checkpoint { path: path.to_path_buf(), is_directory, parts, places })
    }

    /// The tensor of a name.
    pub(super) fn get(&self, name: &str) -> Option<Found<'_>> {
        let (part, tensor) = *self.places.get(name)?;
        let part = &self.parts[part];
        Some(Found { part, tensor: &part.description.tensors[tensor] })
    }

    /// All tensors with their names, in the natural order of these.
    pub(super) fn tensors(&self) -> Vec<(&str, Found<'_>)> {
        let mut all: Vec<_> = self.places.keys().filter_map(|name| Some((name.as_str(), self.get(name)?))).collect();
        all.sort_by(|a, b| natural::order(Path::new(a.0), Path::new(b.0)));
        all
    }
}

impl Part {
    fn open(path: PathBuf, at: &Path) -> Result<Part> {
        let file = open_aside(at).map_err(of_file(at))?;
        let mut description = describe_at(at, &file, open_aside).map_err(of_file(at))?;
        if let Some(Siblings { index, files: None }) = siblings(at) {
            let read = open_aside(&index).and_then(|file| Model::read(&file));
            let model = read.with_context(|| format!("{} names the tensors of {}", index.display(), path.display()))?;
            description.name_chunks(at, &model);
        }
        Ok(Part { path, file, description })
    }
}
