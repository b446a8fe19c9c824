//! The other files of a file's checkpoint, which may prove its weights: Trainer's `optimizer.pt` beside
//! `model.safetensors`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::store::{beneath, step_pattern};
use formats::{Description, Trained};

use super::Archive;

/// Most files of a checkpoint that are read. It has few optimizer files, but may have thousands of shards.
const MOST_FILES: usize = 32;

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

impl Archive {
    /// Notes which weights of a file are trained, as the optimizers in the other files of its checkpoint show. These
    /// have the same directory and the same step. An unreadable file proves nothing.
    pub(super) fn prove_by_companions(&self, path: &Path, description: &mut Description) {
        if !description.tensors.iter().any(|tensor| tensor.is_weight() && tensor.trained.is_none()) {
            return;
        }
        let companions = self.companions(path).unwrap_or_else(|error| {
            log::debug!("{}: the other files of its checkpoint: {error}", path.display());
            Vec::new()
        });
        if keeps_no_parameters(path) {
            return;
        }
        for other in companions {
            match self.optimizers_of(&other) {
                Ok(optimizers) => description.prove(&optimizers),
                Err(error) => log::debug!("{}: {error}", other.display()),
            }
        }
    }

    /// Regular files beside a file, of the same step.
    fn companions(&self, path: &Path) -> io::Result<Vec<PathBuf>> {
        let directory = path.parent().unwrap_or(Path::new(""));
        let steps = step_pattern::steps(path);
        let opened = beneath::open_dir(&self.store.tree(), directory)?;
        let mut found = Vec::new();
        for entry in fs::read_dir(beneath::by_descriptor(&opened))? {
            let entry = entry?;
            let other = directory.join(entry.file_name());
            if other != path && step_pattern::steps(&other) == steps && entry.file_type()?.is_file() {
                found.push(other);
            }
        }
        // The optimizer comes first, so that many shards do not hide it.
        found.sort_by_key(|path| (!path.to_string_lossy().to_lowercase().contains("optim"), path.clone()));
        found.truncate(MOST_FILES);
        Ok(found)
    }

    fn optimizers_of(&self, path: &Path) -> io::Result<Vec<Trained>> {
        Ok(self.describe(path, &self.source(path)?)?.optimizers().to_vec())
    }
}
