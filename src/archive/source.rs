//! What the files of the tree contain, wherever their bytes are: as a format describes them, with the files beside them.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

use crate::clock::wall_ns;
use crate::recall::Reader;
use crate::store::durable::DeviceFile;
use crate::store::{beneath, modified_ns, step_pattern};
use crate::sync::Mutex;
use formats::{Description, Model, ReadAt, Trained, describe_at, siblings};

use super::entry::{Siblings, State};
use super::namespace::{FileId, found_at};
use super::shared::Shared;

/// Models kept in memory: of the checkpoint being sealed, of the one being archived, of the state after that, and one
/// more. Thousands of files may ask for one model.
const KEPT: usize = 4;
/// Most files of a checkpoint that are read for a proof. It has few optimizer files, but may have thousands of shards.
const MOST_FILES: usize = 32;
/// No file system's clock has longer ticks.
const TICK_NS: i64 = 2_000_000_000;

/// A version of a file: the file, its length and the time of its last change, which no program can set.
type Identity = (FileId, u64, (i64, i64));
/// The content of an index: the model, and the files that it lists.
type Indexed = (Arc<Model>, Arc<Siblings>);

/// Reads the files of the tree.
pub(super) struct Contents {
    shared: Arc<Shared>,
    /// The content of the last few indexes. Sealers and encoders take this lock, and hold no other then.
    models: Mutex<VecDeque<(Identity, Indexed)>>,
    /// Encoders take this lock for moments, and hold no other then.
    companions: Mutex<Companions>,
}

/// Files of one step, in the directory that was asked about last. A backlog of a large directory would list it for each file.
#[derive(Default)]
struct Companions {
    /// The directory, and when its names changed last. A release gives it that time back.
    of: Option<(FileId, i64)>,
    /// The names of regular files, by their steps. Those of one file alone are not kept.
    names: HashMap<Vec<u64>, Vec<OsString>>,
}

/// A file of the tree.
pub(super) enum Source {
    /// Its bytes are in the tree.
    Resident(DeviceFile),
    /// Its bytes come from an object. Only the parts that are read are decoded.
    Released(Arc<Reader>),
}

impl Contents {
    /// Of an archive's tree.
    pub(super) fn of(shared: Arc<Shared>) -> Contents {
        Contents { shared, models: Mutex::default(), companions: Mutex::default() }
    }

    /// Opens the file at `path` in the tree.
    ///
    /// # Errors
    /// `NotFound` if no regular file is there; the device's errors; an object that cannot be decoded.
    pub(super) fn source(&self, path: &Path) -> io::Result<Source> {
        let released = match self.shared.catalog().get(path).map(|entry| &entry.state) {
            Some(State::Released(object)) => Some(*object),
            _ => None,
        };
        Ok(match released {
            // `other`: a damaged object must not pass for a file that says nothing.
            Some(object) => Source::Released(self.shared.recall.reader(object).map_err(io::Error::other)?),
            None => Source::Resident(self.shared.open_file(path)?),
        })
    }

    /// Describes the file at `path` in the tree, by the index beside it if that has its tensors' names.
    pub(super) fn describe(&self, path: &Path, file: &dyn ReadAt) -> io::Result<Description> {
        describe_at(path, file, |index| self.source(index))
    }

    /// [`Contents::describe`], with the names that an index gives the tensors later. Tensors without a name stay exact.
    pub(super) fn describe_named(&self, path: &Path, file: &dyn ReadAt) -> io::Result<Description> {
        let mut description = self.describe(path, file)?;
        self.name_chunks(path, &mut description)?;
        Ok(description)
    }

    /// Gives the tensors of a file the names that its index tells. The signature of a sealed file is that of before.
    pub(super) fn name_chunks(&self, path: &Path, description: &mut Description) -> io::Result<()> {
        if let Some(index) = siblings(path).filter(|of| of.files.is_none()).map(|of| of.index) {
            match self.model(&index)? {
                Ok((model, _)) => description.name_chunks(path, &model),
                Err(why) => {
                    log::info!("{}: its tensors stay exact, because their names are unknown: {why}", path.display());
                }
            }
        }
        Ok(())
    }

    /// The files that the one at `path` is no state without. `None`: it needs none.
    pub(super) fn siblings(&self, path: &Path) -> io::Result<Option<Arc<Siblings>>> {
        let Some(formats::Siblings { index, files }) = siblings(path) else { return Ok(None) };
        let files = match files {
            Some(files) => files.into_iter().map(|path| (path, 0)).collect(),
            None => match self.model(&index)? {
                Ok((_, siblings)) => return Ok(Some(siblings)),
                Err(_) => Vec::new(),
            },
        };
        Ok(Some(Arc::new(Siblings { index, files })))
    }

    /// The model in an index, and the files that it lists; or why it cannot be read.
    fn model(&self, index: &Path) -> io::Result<Result<Indexed, io::Error>> {
        let Some(metadata) = found_at(&self.shared.store.tree(), index)? else {
            return Ok(Err(io::ErrorKind::NotFound.into()));
        };
        let identity = (FileId::of(&metadata), metadata.size(), (metadata.ctime(), metadata.ctime_nsec()));
        let models = || self.models.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = models().iter().find(|(kept, _)| *kept == identity) {
            return Ok(Ok(known.clone()));
        }
        let model = match self.source(index).and_then(|index| Model::read(&index)) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => {
                return Ok(Err(error));
            }
            model => Arc::new(model?),
        };
        let files = model.files().map(|(name, least)| (index.with_file_name(name), least)).collect();
        let siblings = Arc::new(Siblings { index: index.to_path_buf(), files });
        let mut models = models();
        models.truncate(KEPT - 1);
        let read = (model, siblings);
        models.push_front((identity, read.clone()));
        Ok(Ok(read))
    }

    /// Notes which weights of a file are trained, as the optimizers in the other files of its checkpoint show: Trainer's
    /// `optimizer.pt` beside `model.safetensors`. These have the same directory and the same step. An unreadable file
    /// proves nothing.
    pub(super) fn prove_by_companions(&self, path: &Path, description: &mut Description) {
        let is_open = description.tensors.iter().any(|tensor| tensor.is_weight() && tensor.trained.is_none());
        if !is_open || keeps_no_parameters(path) {
            return;
        }
        let companions = self.companions(path).unwrap_or_else(|error| {
            log::debug!("{}: the other files of its checkpoint: {error}", path.display());
            Vec::new()
        });
        let optimizers = |other: &Path| -> io::Result<Vec<Trained>> {
            Ok(self.describe(other, &self.source(other)?)?.optimizers().to_vec())
        };
        for other in companions {
            match optimizers(&other) {
                Ok(optimizers) => description.prove(&optimizers),
                Err(error) => log::debug!("{}: {error}", other.display()),
            }
        }
    }

    /// Regular files beside a file, of the same step.
    fn companions(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let directory = path.parent().unwrap_or(Path::new(""));
        let opened = beneath::open_dir(&self.shared.store.tree(), directory)?;
        let metadata = fs::metadata(beneath::by_descriptor(&opened))?;
        let (steps, version) = (step_pattern::steps(path), (FileId::of(&metadata), modified_ns(&metadata)));
        let last = || self.companions.lock().unwrap_or_else(PoisonError::into_inner);
        let known = Some(last()).filter(|last| last.of == Some(version)).map(|last| last.names.get(&steps).cloned());
        let found = if let Some(found) = known {
            found
        } else {
            let mut names: HashMap<Vec<u64>, Vec<OsString>> = HashMap::new();
            for entry in fs::read_dir(beneath::by_descriptor(&opened))? {
                let entry = entry?;
                if entry.file_type()?.is_file() {
                    let steps = step_pattern::steps(&directory.join(entry.file_name()));
                    names.entry(steps).or_default().push(entry.file_name());
                }
            }
            names.retain(|_, names| names.len() > 1);
            // A name may still come within the same tick of the clock.
            let is_old = wall_ns().saturating_sub(version.1) > TICK_NS;
            let found = names.get(&steps).cloned();
            *last() = Companions { of: is_old.then_some(version), names };
            found
        };
        let found = found.into_iter().flatten();
        let mut found: Vec<PathBuf> = found.map(|name| directory.join(name)).filter(|other| other != path).collect();
        // The optimizer comes first, so that many shards do not hide it.
        found.sort_by_key(|path| (!path.to_string_lossy().to_lowercase().contains("optim"), path.clone()));
        found.truncate(MOST_FILES);
        Ok(found)
    }
}

/// Whether a file's name says that it has something else of each parameter: Fisher's information, means of gradients,
/// control variates. These have the shapes of the parameters, and so their numbers prove nothing.
fn keeps_no_parameters(path: &Path) -> bool {
    const WORDS: [&str; 25] = [
        "fisher", "importance", "omega", "hessian", "curvature", "grad", "grads", "gradient", "gradients", "momentum",
        "mom", "velocity", "variate", "variates", "local", "residual", "error", "delta", "sq", "square", "mean",
        "means", "var", "variance", "cov",
    ];
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    name.split(|c: char| !c.is_alphanumeric()).any(|word| WORDS.contains(&word))
}

impl ReadAt for Source {
    fn size(&self) -> u64 {
        match self {
            Source::Resident(file) => ReadAt::size(file),
            Source::Released(reader) => reader.len(),
        }
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self {
            Source::Resident(file) => ReadAt::read_exact_at(file, buf, offset),
            Source::Released(reader) => match reader.read_at(offset, buf)? {
                read if read == buf.len() => Ok(()),
                _ => Err(io::ErrorKind::UnexpectedEof.into()),
            },
        }
    }
}
