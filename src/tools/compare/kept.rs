//! Keeps a series as a store keeps it: through the encoder, as under a mount, and decoded again from the device.

use std::fs::File;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use indicatif::ProgressBar;

use crate::clock;
use crate::recall::{Chain, Layout, ReadError, stream};
use crate::store::durable::scratch;
use crate::store::{Profile, STUB_BYTES};
use crate::tools::of_file;
use crate::tools::series::Series;
use crate::tools::values::Size;

use super::report::Measured;

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
                // A copy has the object of the file before, and `len` is 0.
                let (object, bytes) = (chain.leaf(), len + STUB_BYTES as u64);
                let tensors = object.index().tensors.iter();
                let tensors =
                    tensors.map(|of| (of.role, of.dtype, of.stored().min(len), of.extent.end - of.extent.start));
                measured.add_roles(bytes, object.header().logical_len, tensors);
                measured.decode += pool.install(|| decode(&chain, &decoded))?;
                let errors = series.errors(state, &decoded)?;
                measured.add(bytes, errors, chain.objects().len() as u64);
            }
            None => {
                let tensors = state.description.tensors.iter().map(|of| (of.role, of.dtype, of.bytes(), of.bytes()));
                measured.add_roles(state.len, state.len, tensors);
                measured.add(state.len, Size::default(), 0);
            }
        }
        bar.inc(2);
        begun = clock::of_process();
        Ok(())
    })?;
    Ok(measured)
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
