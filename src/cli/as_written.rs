//! Checkpoints that must hold the values that their program wrote.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::compare::natural;

use super::target::attribute;

/// Refuses files, and directories with files, that a mount decodes with loss: a measurement would compare lossy values
/// with themselves. To be called while the files are open: then a mount releases none of them meanwhile.
pub(super) fn refuse_lossy(paths: &[PathBuf]) -> Result<()> {
    let mut lossy = Vec::new();
    for path in paths {
        match path.is_dir() {
            true => {
                let files = fs::read_dir(path)?.filter_map(|entry| Some(entry.ok()?.path()));
                lossy.extend(files.filter_map(|file| Some((errors(&file)?, file))));
            }
            false => lossy.extend(errors(path).map(|errors| (errors, path.clone()))),
        }
    }
    lossy.sort_by(|(_, a), (_, b)| natural::order(a, b));
    let Some((errors, first)) = lossy.first() else { return Ok(()) };
    let more = match lossy.len() {
        1 => String::new(),
        count => format!(" and {} more", count - 1),
    };
    bail!(
        "{}{more}: stepfs has released this with loss{errors}; a measurement would compare the loss with itself\nName \
         copies from before the release, or exact files: set `stepfs profile --set exact DIR`, save a few checkpoints \
         in DIR, and name those.",
        first.display()
    );
}

/// The errors of a lossy file, in words. `None` for an exact file, and outside of mounts: nobody knows there.
fn errors(path: &Path) -> Option<String> {
    let value = attribute(&fs::canonicalize(path).ok()?, "lossy").ok()?;
    let words = String::from_utf8_lossy(&value).into_owned();
    (words != "0").then(|| words.strip_prefix("1 ").map_or(String::new(), |errors| format!(" (errors up to {errors})")))
}
