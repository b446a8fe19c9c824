//! Chooses the base of a new state among the archived states.

use std::io;

use crate::encode::plan::{read_tile, without_edges};
use crate::encode::{Base, LONGEST_READ, Place, StepError, StepResult};
use crate::recall::{Chain, walk};
use crate::store::object::Header;
use crate::store::{Id, first_of_twins};
use formats::{Description, ReadAt, Tensor};
use papers::{Policy, check_n_run};

use super::entry::Sealed;
use super::shared::Shared;

/// Another lineage's state is the base if its distance is below this share of the distance to the own lineage's. The same
/// state saved twice differs by its quantization only: a thirteenth of the distance to the state before.
const MUCH_NEARER: f64 = 0.25;
/// The middle tiles of this many tensors, the largest ones, give the distance of two states.
const COMPARED: usize = 4;

/// The archived states, as bases of new ones.
pub(super) struct Bases<'a> {
    shared: &'a Shared,
}

impl Bases<'_> {
    /// Of an archive.
    pub(super) fn of(shared: &Shared) -> Bases<'_> {
        Bases { shared }
    }

    /// The base: the last archived state of the lineage before this, else the nearest after it. A state of another
    /// lineage with the same tensors is the base if the own lineage has none, or if it is the same state saved twice.
    /// For a super-step, the super-step before. A published system's policy names a state of the own lineage.
    pub(super) fn base(
        &self,
        sealed: &Sealed,
        description: &Description,
        source: &dyn ReadAt,
        policy: Option<Policy>,
    ) -> StepResult<Base> {
        let mut base = Base::default();
        let Sealed { lineage, signature, modified_ns, .. } = *sealed;
        let own = self.shared.objects.nearest(lineage, modified_ns);
        // All files without tensors have one signature. A published system knows of no other run than its own, whose first
        // state has full precision.
        let has_others = !description.tensors.is_empty() && policy.is_none();
        let other = has_others.then(|| self.shared.objects.nearest_other(signature, lineage, modified_ns)).flatten();
        let other = other.map(|other| first_of_twins(&self.shared.objects, other));
        let twin = match (&own, &other) {
            (Some(own), Some(other))
                if other.modified_ns > own.modified_ns && self.shared.objects.chain_len(other.id) < LONGEST_READ =>
            {
                let distance = |header: &Header| self.distance(header.id, description, source);
                distance(other)?.zip(distance(own)?).is_some_and(|(other, own)| other < MUCH_NEARER * own)
            }
            _ => false,
        };
        let Some(nearest) = (if twin { other } else { own.or(other) }) else {
            return Ok(base);
        };
        // A twin takes the place of the state that it repeats.
        let place = Place {
            position: nearest.position.saturating_add(u32::from(!twin)),
            chain_len: self.shared.objects.chain_len(nearest.id),
            twin,
        };
        // Held before it is opened, because garbage is collected meanwhile.
        let Some(hold) = self.shared.objects.hold(nearest.id) else { return Err(StepError::Superseded) };
        match self.shared.recall.chain(nearest.id) {
            Ok(chain) => {
                base = Base::after(chain, place, policy, |root| self.wants_baseline(sealed, root));
                base.hold = match &base.chain {
                    // The base may be an ancestor of the nearest state, which a re-parenting may free of it meanwhile.
                    Some(chain) => {
                        Some(self.shared.objects.hold(chain.leaf().header().id).ok_or(StepError::Superseded)?)
                    }
                    None => Some(hold),
                };
            }
            Err(error) => log::error!("{error}; the next state of this lineage is archived without it"),
        }
        Ok(base)
    }

    /// Check-N-Run's predictor (section 4.1.3), from the sizes S of the differences to a baseline so far, in
    /// baselines: whether 1 + S1 + ... + Si <= (i + 1) Si. Removed differences are unknown.
    fn wants_baseline(&self, sealed: &Sealed, root: &Chain) -> bool {
        let id = root.leaf().header().id;
        let Some((_, baseline)) = self.shared.objects.get(id) else { return false };
        let mut differences = self.shared.objects.differences(id);
        differences.retain(|header| header.lineage == sealed.lineage && header.modified_ns < sealed.modified_ns);
        differences.sort_by_key(|header| header.modified_ns);
        let stored = |id| self.shared.objects.get(id).map_or(0.0, |(_, stored)| stored as f64);
        let sizes: Vec<f64> = differences.iter().map(|header| stored(header.id) / baseline.max(1) as f64).collect();
        check_n_run::wants_baseline(&sizes)
    }

    /// Mean square of the difference between a file and an archived state, in the middles of its largest tensors.
    /// `None` if they share no tensor, or the state cannot be decoded.
    fn distance(&self, id: Id, description: &Description, source: &dyn ReadAt) -> io::Result<Option<f64>> {
        let Ok(chain) = self.shared.recall.chain(id) else {
            return Ok(None);
        };
        let mut tensors: Vec<&Tensor> = description.tensors.iter().filter(|t| t.dtype.is_lattice_float()).collect();
        tensors.sort_by_key(|tensor| std::cmp::Reverse(tensor.extent.end - tensor.extent.start));
        let (mut sum, mut count) = (0.0, 0);
        for tensor in tensors.into_iter().take(COMPARED) {
            let entries = &chain.leaf().index().tensors;
            let Some(number) = entries.iter().position(|entry| entry.path == tensor.path) else { continue };
            let entry = &entries[number];
            let middle = entry.tiles.len() / 2;
            let tensor = without_edges(tensor);
            let same_len = tensor.extent.end - tensor.extent.start == entry.extent.end - entry.extent.start;
            if entry.dtype != tensor.dtype || !same_len || entry.tiles.is_empty() {
                continue;
            }
            let now = read_tile(source, &tensor, middle)?;
            let Ok(then) = walk::decode(&chain, number, middle) else {
                return Ok(None);
            };
            for update in codec::lattice::updates(tensor.dtype, &now, &then) {
                sum += update * update;
                count += 1;
            }
        }
        Ok((count > 0 && sum.is_finite()).then(|| sum / f64::from(count)))
    }
}
