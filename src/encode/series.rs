//! Encodes a series of files without a store: what their objects take, and what the last one has become.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::recall::{Chain, Memory, usual_memory};
use crate::store::durable::Io;
use crate::store::object::Id;
use crate::store::step_pattern::iterations;
use crate::store::{Profile, Profiles};
use formats::{Description, InOrder};
use papers::check_n_run;

use super::{Base, Difference, Facts, Place, Workers, Written};

/// A file of a series, which no program writes to.
pub struct SeriesFile<'a> {
    /// The path that is recorded, and whose step numbers count.
    pub path: &'a Path,
    /// The file as it was written.
    pub file: &'a File,
    /// In bytes.
    pub len: u64,
    /// What is in it.
    pub description: &'a Description,
    /// Hash of its tensors' names, types and shapes.
    pub signature: u64,
    /// It agrees with its own checksums. A file that does not stays exact.
    pub intact: bool,
}

/// Encodes each file under `profile` as a difference to those before it, as a store would. Answers the bytes that each
/// takes (all of the file, if no object is smaller), and the chain of the last one, if it is an object.
///
/// The update after the last file is not known; it counts as large as the one before. `dir` holds the objects while they are
/// written. They have no names, so nothing stays behind. `begin` is called before each file.
///
/// # Errors
/// Those of `begin`; `Interrupted` if cancelled; device errors. They name the file.
pub fn encode_series(
    files: &[SeriesFile<'_>],
    profile: Profile,
    dir: &Path,
    begin: &dyn Fn(usize) -> io::Result<()>,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> io::Result<(Vec<u64>, Option<Chain>)> {
    let memory = Arc::new(Memory::new(usual_memory()));
    let workers = Workers::new(std::thread::available_parallelism().map_or(2, usize::from))?;
    let mut bytes = Vec::with_capacity(files.len());
    let (mut previous, mut last): (Option<Chain>, Option<Chain>) = (None, None);
    // Bytes of each difference, with the object that it is a difference to.
    let mut differences: Vec<(Id, u64)> = Vec::new();
    for (number, state) in files.iter().enumerate() {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", state.path.display()));
        begin(number).map_err(named)?;
        let newer = &files[if number + 1 < files.len() { number + 1 } else { number.saturating_sub(1) }];
        let profiles = Profiles::all(if state.intact { profile } else { Profile::Exact });
        let source = InOrder::new(state.file, state.description);
        let (after, of_newer) = InOrder::as_later_state(newer.file, newer.description, state.description);
        let wants_baseline = |root: &Chain| {
            let (id, baseline) = (root.leaf().header().id, root.leaf().stored().max(1));
            let to_it = differences.iter().filter(|(parent, _)| *parent == id);
            check_n_run::wants_baseline(&to_it.map(|(_, stored)| *stored as f64 / baseline as f64).collect::<Vec<_>>())
        };
        let after_it = |chain: &Chain| {
            let position = chain.leaf().header().position.saturating_add(1);
            let place = Place { position, chain_len: chain.objects().len() as u32, twin: false };
            Base::after(chain.clone(), place, profiles.policy(), wants_baseline)
        };
        let difference = Difference {
            path: state.path,
            facts: Facts {
                len: state.len,
                modified_ns: number as i64,
                sample: 0,
                signature: state.signature,
                lineage: 0,
            },
            own: (&source, state.description),
            newer: (&after, &of_newer),
            ahead: false,
            refusal: None,
            apart: iterations(state.path, newer.path).or_else(|| iterations(newer.path, state.path)),
            written: state.file,
            base: &previous.as_ref().map_or_else(Base::default, after_it),
            profiles: &profiles,
            generations: &|| 0,
            tmp: (&Io::disk(), dir),
            memory: &memory,
            workers: &workers,
            cancelled,
        };
        last = None;
        let Some(Written { writer, header, chain }) = difference.write().map_err(io::Error::from).map_err(named)?
        else {
            bytes.push(state.len);
            continue;
        };
        bytes.push(writer.file_len()?);
        differences.extend(header.parent.map(|parent| (parent, chain.leaf().stored())));
        last = chain.from_ancestor(header.id);
        previous.clone_from(&last);
        if let Some(chain) = &last {
            memory.hold(chain);
        }
    }
    Ok((bytes, last))
}
