//! Keeps a series as a store keeps it: through the encoder, as under a mount, and decoded again from the device.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use indicatif::ProgressBar;

use crate::clock;
use crate::recall::{Chain, Layout, ReadError, stream};
use crate::store::durable::scratch;
use crate::store::object::Object;
use crate::store::{Profile, STUB_BYTES};
use crate::tools::of_file;
use crate::tools::series::{Series, State};
use crate::tools::values::Size;

use super::report::{Measured, RoleKept, SKELETON};

/// Keeps the series under a profile, and measures the result.
pub(super) fn measure(series: &Series, profile: Profile, dir: &Path, bar: &ProgressBar) -> Result<Measured> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    let decoded = tempfile::tempfile_in(dir).map_err(of_file(dir))?;
    let mut measured = Measured::default();
    let mut begun = clock::of_process();
    series.keep(profile, dir, &mut |at, kept| {
        measured.encode += clock::of_process().saturating_sub(begun);
        let state = &series.states[at];
        match kept {
            Some((len, chain)) => {
                let bytes = weigh(chain.leaf(), len, &mut measured.roles);
                measured.decode += pool.install(|| decode(&chain, &decoded))?;
                let errors = series.errors(state, &decoded)?;
                measured.add(bytes, errors, chain.objects().len() as u64);
            }
            None => {
                whole(state, &mut measured.roles);
                measured.add(state.len, Size::default(), 0);
            }
        }
        bar.inc(2);
        begun = clock::of_process();
        Ok(())
    })?;
    Ok(measured)
}

/// Adds an object's tensors to the roles, and returns the size of the object and its stub. `len` 0: it is a copy, and
/// takes no more room.
fn weigh(object: &Object, len: u64, roles: &mut BTreeMap<&'static str, RoleKept>) -> u64 {
    let (mut raw, mut kept) = (0, 0);
    for tensor in &object.index().tensors {
        let bytes = tensor.extent.end - tensor.extent.start;
        let stored = tensor.stored().min(len);
        roles.entry(tensor.role.name()).or_default().add(stored, bytes, bytes / tensor.dtype.size() as u64);
        (raw, kept) = (raw + bytes, kept + stored);
    }
    let bytes = len + STUB_BYTES as u64;
    roles.entry(SKELETON).or_default().add(bytes - kept, object.header().logical_len - raw, 0);
    bytes
}

/// Adds a file that stays as it was written.
fn whole(state: &State, roles: &mut BTreeMap<&'static str, RoleKept>) {
    let mut tensors = 0;
    for tensor in &state.description.tensors {
        let len = tensor.extent.end - tensor.extent.start;
        roles.entry(tensor.role.name()).or_default().add(len, len, len / tensor.dtype.size() as u64);
        tensors += len;
    }
    roles.entry(SKELETON).or_default().add(state.len - tensors, state.len - tensors, 0);
}

/// Decodes a file with its whole chain into `to`, rows in the order of their ids, and returns this thread's time for
/// it.
fn decode(chain: &Chain, to: &File) -> Result<Duration, ReadError> {
    let id = chain.leaf().header().id;
    to.set_len(0).map_err(|error| ReadError::object(id, error))?;
    let (start, mut writing) = (clock::of_thread(), Duration::ZERO);
    stream(chain, &Layout::of(chain.leaf()), |offset, _, bytes| {
        clock::timed(&mut writing, || scratch::write_all_at(to, bytes, offset))
            .map_err(|error| ReadError::object(id, error))
    })?;
    Ok(clock::of_thread().saturating_sub(start).saturating_sub(writing))
}
