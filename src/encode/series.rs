//! Encodes a series of files without a store: what their objects take, and what they have become.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::recall::{Chain, Memory, usual_memory};
use crate::store::durable::Io;
use crate::store::object::Id;
use crate::store::step_pattern::iterations;
use crate::store::{MIN_RELEASE_BYTES, Profile, Profiles};
use formats::{Description, InOrder};
use papers::check_n_run;

use super::{Base, Difference, Facts, Material, Place, Workers, Written};

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
    /// It agrees with its own checksums. A file that does not stays exact.
    pub intact: bool,
}

/// An object of a series: its bytes, of which a copy of the file before takes none, and its chain, to be read from the
/// device.
pub type SeriesObject = (u64, Chain);

/// Encodes each file under `profile` as a difference to those before it, as a store would, and hands what became of it to
/// `take`: none, if it stays as it is.
///
/// The update after the last file is not known; it counts as large as the one before. `dir` holds the objects while they are
/// written. They have no names, so nothing stays behind.
///
/// # Errors
/// Those of `take`, and device errors. They name the file.
pub fn encode_series(
    files: &[SeriesFile<'_>],
    profile: Profile,
    dir: &Path,
    take: &mut dyn FnMut(usize, Option<SeriesObject>) -> io::Result<()>,
) -> io::Result<()> {
    let memory = Arc::new(Memory::new(usual_memory()));
    let workers = Workers::new(std::thread::available_parallelism().map_or(2, usize::from))?;
    let (mut previous, mut original): (Option<Chain>, _) = (None, [0; 32]);
    // Bytes of each difference, with the object that it is a difference to.
    let mut differences: Vec<(Id, u64)> = Vec::new();
    for (number, state) in files.iter().enumerate() {
        let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", state.path.display()));
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
            facts: Facts { len: state.len, modified_ns: number as i64, sample: 0, signature: 0, lineage: 0 },
            material: Material {
                source: &source,
                description: state.description,
                newer: (&after, &of_newer),
                ahead: false,
                base: &previous.as_ref().map_or_else(Base::default, after_it),
                apart: iterations(state.path, newer.path).or_else(|| iterations(newer.path, state.path)),
                profiles: &profiles,
            },
            refusal: None,
            written: state.file,
            generations: &|| 0,
            tmp: (&Io::disk(), dir),
            memory: &memory,
            workers: &workers,
            cancelled: &|| false,
        };
        let written = match state.len < MIN_RELEASE_BYTES {
            true => None,
            false => difference.write().map_err(io::Error::from).map_err(named)?,
        };
        let Some(Written { writer, header, chain }) = written else {
            take(number, None).map_err(named)?;
            continue;
        };
        let from_device = |chain: &Chain| Chain::of_opened(chain.objects().to_vec());
        if let Some(same) = previous.as_ref().filter(|_| original == header.original) {
            take(number, Some((0, from_device(same)))).map_err(named)?;
            continue;
        }
        differences.extend(header.parent.map(|parent| (parent, chain.leaf().stored())));
        take(number, Some((writer.file_len()?, from_device(&chain)))).map_err(named)?;
        (previous, original) = (chain.from_ancestor(header.id), header.original);
        if let Some(chain) = &previous {
            memory.hold(chain);
        }
    }
    Ok(())
}
