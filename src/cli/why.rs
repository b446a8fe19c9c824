//! `stepfs why`

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Serialize;

use crate::archive::why_at_rest;
use crate::store::{Named, Store};

use super::format::name;
use super::say_answer;
use super::source::{Local, Mount};

/// Say why files are exact, lossy, or as they were written, and the next step.
///
/// Prints one line per file: the reason, and the next step where there is one. Same as `getfattr -n user.stepfs.why`.
///
/// The newest file of a lineage stays exact. So do small, pinned and unfinished files, and those named as the best. An
/// older file becomes an object, exact or lossy. A number in its name must count training: step_10, epoch_3, iter_500
/// or checkpoint-7. Otherwise it has no newer state.
///
/// Of a store that is not mounted it knows released, small, pinned and recalled files. Only a mount knows all others.
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  \
stepfs why /ckpts/run/step_100.pt      one file\n  \
stepfs why /ckpts/run                  each file below a directory\n  \
stepfs why /ckpts --json               for programs\n\n\
`stepfs ls` shows the sizes, `stepfs inspect` the tensors of one file.")]
pub(super) struct Args {
    /// Files and directories in a mount, or a store.
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Print a JSON array, one object per file.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Answer {
    #[serde(flatten)]
    path: Named,
    why: String,
}

pub(super) fn run(args: Args) -> Result<()> {
    let mut answers = Vec::new();
    for path in &args.paths {
        let local = Local::of(path)?;
        let tree = local.tree()?;
        for file in tree.files(&local.path)? {
            // A file may disappear meanwhile.
            let Some(why) = why(&tree.store, local.mount.as_ref(), &file)? else { continue };
            answers.push(Answer { path: Named("path", local.shown(path, &file)), why });
        }
    }
    let line = |answer: &Answer| say!("{}: {}", name(&*answer.path), name(&answer.why));
    say_answer(args.json, &answers, |answers| answers.iter().for_each(line))
}

/// Why a file is as it is; `None` if it is gone.
fn why(store: &Store, mount: Option<&Mount>, file: &Path) -> Result<Option<String>> {
    let answer = match mount {
        Some(mount) => mount.word(file, "why").map(|why| String::from_utf8_lossy(&why).into_owned()),
        None => why_at_rest(store, file),
    };
    match answer {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENODATA | libc::ENOENT | libc::ENOTDIR)) => Ok(None),
        answer => answer.map(Some).with_context(|| format!("{}", file.display())),
    }
}
