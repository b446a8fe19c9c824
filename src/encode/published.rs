//! Published systems at work: they see all tensors of a file that are theirs, then encode tile by tile.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::Arc;

use crate::recall::walk;
use crate::store::object::rows_and_width;
use formats::Role;
use papers::registry::SystemId;
use papers::{Fit, Tensor, Tile, tile};

use super::plan::{self, Job, read_tile, tiles};

/// The systems' parameters for the tensors of a file.
pub(super) struct Fits {
    /// By number of the plan.
    of: HashMap<usize, (SystemId, Arc<dyn Fit>)>,
    /// By number of a tensor in the file, see [`first_moments`].
    moments: HashMap<usize, usize>,
}

/// An encoded tile: payload, bytes as written and as decoded.
pub(super) type Encoded = (Vec<u8>, Arc<Vec<u8>>, Arc<Vec<u8>>);

impl Fits {
    /// Shows each system its tensors, tile by tile.
    pub(super) fn of(job: &Job) -> io::Result<Fits> {
        let mut fits = Fits { of: HashMap::new(), moments: first_moments(job) };
        let ids: BTreeSet<SystemId> = job.plans.iter().filter_map(|plan| plan.system).collect();
        for id in ids {
            let plans: Vec<usize> = (0..job.plans.len()).filter(|at| job.plans[*at].system == Some(id)).collect();
            let sources: Vec<Source> = plans.iter().map(|at| fits.source(job, *at)).collect();
            let tensors: Vec<&dyn Tensor> = sources.iter().map(|source| source as &dyn Tensor).collect();
            let found = id.system().fit(&tensors, job.position)?;
            fits.of.extend(plans.into_iter().zip(found.into_iter().map(|fit| (id, fit))));
        }
        Ok(fits)
    }

    /// Encodes a tile. `None`: its tensor is to stay lossless.
    pub(super) fn encode(&self, job: &Job, at: usize, number: usize) -> io::Result<Option<Encoded>> {
        let Some((system, fit)) = self.of.get(&at) else { return Ok(None) };
        let (data, tile) = self.source(job, at).read(number)?;
        let dtype = job.plans[at].tensor.dtype;
        let mut payload = Vec::new();
        let decoded = tile::encode(*system, fit.as_ref(), dtype, &tile, &mut payload);
        Ok(decoded.map(|decoded| (payload, data, Arc::new(decoded.bytes))))
    }

    fn source<'a>(&self, job: &'a Job, at: usize) -> Source<'a> {
        let plan = &job.plans[at];
        let moment = self.moments.get(&plan.index).map(|moment| &job.description.tensors[*moment]);
        Source { job, at, gradient: moment.filter(|moment| moment.shape == plan.tensor.shape) }
    }
}

/// By number of a tensor in the file, the number of its first moment, the nearest to a gradient that a checkpoint has.
fn first_moments(job: &Job) -> HashMap<usize, usize> {
    let mut moments = HashMap::new();
    for (at, tensor) in job.description.tensors.iter().enumerate() {
        if let Some(of) = tensor.of.filter(|_| tensor.role == Role::FirstMoment && tile::is_for(tensor.dtype)) {
            moments.entry(of).or_insert(at);
        }
    }
    moments
}

/// A tensor of the file, with its state before.
struct Source<'a> {
    job: &'a Job<'a>,
    at: usize,
    gradient: Option<&'a formats::Tensor>,
}

impl Source<'_> {
    /// A tile's bytes as written, and the system's view of it.
    fn read(&self, number: usize) -> io::Result<(Arc<Vec<u8>>, Tile)> {
        let (plan, job) = (&self.job.plans[self.at], self.job);
        if (job.cancelled)() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let dtype = plan.tensor.dtype;
        let data = Arc::new(read_tile(job.source, &plan.tensor, number)?);
        let values = tile::widen(dtype, &data).ok_or(io::ErrorKind::InvalidData)?;
        let first = plan::rows(&plan.tensor, number).first;
        let previous = match (plan.coding.parent, job.base) {
            (Some(parent), Some(base)) => {
                let state = walk::state(base, parent as usize, number)?;
                state.before(dtype, |before| before.state(dtype))?
            }
            _ => None,
        };
        let gradient = match self.gradient {
            Some(tensor) => {
                let size = tensor.dtype.size();
                let mut bytes = vec![0; values.len() * size];
                job.source.read_exact_at(&mut bytes, tensor.extent.start + first * size as u64)?;
                tile::widen(tensor.dtype, &Arc::new(bytes))
            }
            None => None,
        };
        Ok((data, Tile { first, values, previous, gradient }))
    }
}

impl papers::Tensor for Source<'_> {
    fn name(&self) -> &str {
        &self.job.plans[self.at].tensor.path
    }

    fn rows(&self) -> (u64, u64) {
        rows_and_width(&self.job.plans[self.at].tensor.shape)
    }

    fn tiles(&self) -> usize {
        tiles(&self.job.plans[self.at].tensor)
    }

    fn tile(&self, number: usize) -> io::Result<Tile> {
        Ok(self.read(number)?.1)
    }
}
