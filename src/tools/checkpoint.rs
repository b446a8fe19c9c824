//! One checkpoint as its tensors: a file, or a directory whose files hold one model. Nothing in it is executed.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};

use crate::store::{files_below, natural};
use formats::{Description, Model, Siblings, Tensor, describe_at, siblings};

use super::{Place, of_file};

/// A file of a checkpoint.
pub(super) struct Part {
    /// Below the checkpoint's directory; its name, if the checkpoint is one file.
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// Permission bits.
    pub(super) mode: u32,
    pub(super) description: Description,
    /// Of a file of a distributed checkpoint: what `.metadata` tells.
    pub(super) model: Option<Arc<Model>>,
}

/// A checkpoint whose files are open.
pub(super) struct Checkpoint {
    /// As its user named it.
    pub(super) name: String,
    /// Its path on disk.
    pub(super) at: PathBuf,
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
    /// Among the tensors of the part.
    pub(super) index: usize,
    pub(super) tensor: &'a Tensor,
}

/// The type and shape of a tensor, in words.
pub(super) fn form(tensor: &Tensor) -> String {
    format!("{} {:?}", tensor.dtype.name(), tensor.shape)
}

/// Whether two tensors have one type and shape.
pub(super) fn is_alike(a: &Tensor, b: &Tensor) -> bool {
    (a.dtype, &a.shape) == (b.dtype, &b.shape)
}

impl Checkpoint {
    /// Opens all files of a checkpoint.
    ///
    /// # Errors
    /// It cannot be read, no file of it has a tensor, or one is cut short.
    pub(super) fn open(place: &dyn Place) -> Result<Checkpoint> {
        let (path, name) = (place.at(), place.name().to_string());
        let shown = Path::new(&name);
        let is_directory = std::fs::metadata(path).map_err(of_file(shown))?.is_dir();
        let files = match is_directory {
            true => {
                let mut files = files_below(path, Path::new("")).map_err(of_file(shown))?;
                files.sort_by(|a, b| natural::order(a, b));
                files
            }
            false => vec![PathBuf::from(path.file_name().unwrap_or_default())],
        };
        Checkpoint::of(place, (path, name), is_directory, files)
    }

    /// The same with these files, of a path on disk and its name for people: paths below it, or its own name.
    pub(super) fn of(
        place: &dyn Place,
        (path, name): (&Path, String),
        is_directory: bool,
        files: Vec<PathBuf>,
    ) -> Result<Checkpoint> {
        let shown = Path::new(&name);
        let (mut parts, mut models) = (Vec::new(), HashMap::new());
        for file in files {
            let (at, shown) = match is_directory {
                true => (path.join(&file), shown.join(&file)),
                false => (path.to_path_buf(), shown.to_path_buf()),
            };
            let part = Part::open(place, file, &at, &mut models)
                .map_err(|error| error.context(shown.display().to_string()))?;
            if let (true, Some(why)) = (part.description.cut_short, &part.description.note) {
                bail!("{}: {why}; name a whole checkpoint: `stepfs latest` finds the newest", shown.display());
            }
            parts.push(part);
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
            bail!("{name}: not a checkpoint that stepfs understands: {why}");
        }
        Ok(Checkpoint { at: path.to_path_buf(), name, is_directory, parts, places })
    }

    /// The tensor of a name.
    pub(super) fn get(&self, name: &str) -> Option<Found<'_>> {
        let (part, index) = *self.places.get(name)?;
        let part = &self.parts[part];
        Some(Found { part, index, tensor: &part.description.tensors[index] })
    }

    /// All tensors with their names, in the natural order of these.
    pub(super) fn tensors(&self) -> Vec<(&str, Found<'_>)> {
        let mut all: Vec<_> = self.places.keys().filter_map(|name| Some((name.as_str(), self.get(name)?))).collect();
        all.sort_by(|a, b| natural::order(Path::new(a.0), Path::new(b.0)));
        all
    }
}

impl Part {
    /// `models` holds what the indices tell that were read so far, by their paths.
    fn open(place: &dyn Place, path: PathBuf, at: &Path, models: &mut HashMap<PathBuf, Arc<Model>>) -> Result<Part> {
        let open = |path: &Path| place.open(path);
        let (file, permissions) = open(at)?;
        let mut description = describe_at(at, &file, |path: &Path| open(path).map(|opened| opened.0))?;
        let mut model = None;
        if let Some(Siblings { index, files: None }) = siblings(at) {
            if !models.contains_key(&index) {
                let read = open(&index).and_then(|(file, _)| Model::read(&file));
                let read = read.context("the .metadata beside it, which names its tensors")?;
                models.insert(index.clone(), Arc::new(read));
            }
            model = models.get(&index).cloned();
        }
        if let Some(model) = &model {
            description.name_chunks(at, model);
        }
        Ok(Part { path, file, mode: permissions.mode(), description, model })
    }
}
