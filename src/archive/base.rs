//! What the state of a file becomes a difference to.

use std::io;

use crate::container::{Description, ReadAt, Tensor};
use crate::published::{Policy, check_n_run};
use crate::recall::{Chain, walk};
use crate::store::object::{Header, SUPER_STEP};
use crate::store::{Hold, Id, MAX_CHAIN};

use super::Archive;
use super::catalog::Sealed;
use super::error::{StepError, StepResult};
use super::plan::{read_tile, without_edges};

/// Another lineage's state is the base when its distance is below this share of the own one's. The same state saved
/// twice is off by its quantization only, a thirteenth of what it is off by from the state before.
const MUCH_NEARER: f64 = 0.25;
/// Objects that a read applies at most: a keyframe, three super-steps, seven states after the last, and one more where the
/// last is the same state as another lineage's.
const LONGEST_READ: u32 = 12;
/// Tensors whose middle tiles tell how far two states are apart: the largest ones.
const COMPARED: usize = 4;

/// What a state is to become a difference to.
#[derive(Default)]
pub(super) struct Base {
    /// The object and its ancestors; none for a keyframe.
    pub(super) chain: Option<Chain>,
    /// Keeps the object from being removed before the new one needs it.
    pub(super) hold: Option<Hold>,
    /// The state before, which the updates are measured from.
    pub(super) previous: Option<Chain>,
    /// Why there is no base though the lineage goes on; for people.
    pub(super) note: &'static str,
    /// Number of the new state in its chain.
    pub(super) position: u32,
    /// The new state is a super-step.
    pub(super) super_step: bool,
}

/// The place that the new state would have.
pub(super) struct Place {
    /// In the chain.
    pub(super) position: u32,
    /// Objects that a read of the state before applies.
    pub(super) chain_len: u32,
    /// It is the state before, saved once more.
    pub(super) twin: bool,
}

impl Base {
    /// For a state that comes after the one that a chain is for. `wants_baseline`: whether a new full checkpoint costs less than
    /// another difference to this one, for policies that ask.
    pub(super) fn after(
        chain: Chain,
        place: Place,
        policy: Option<Policy>,
        wants_baseline: impl FnOnce(&Chain) -> bool,
    ) -> Base {
        let mut base = Base::default();
        if place.position.max(place.chain_len) >= MAX_CHAIN {
            base.note = "keyframe: the chain has as many states as it may";
            return base;
        }
        base.position = place.position;
        base.chain = match policy {
            Some(Policy::OneShot) => chain.root(),
            Some(Policy::Intermittent) => {
                let root = chain.root();
                if root.as_ref().is_some_and(wants_baseline) {
                    let note = "keyframe: differences have grown so much that a new one costs less";
                    return Base { note, ..Base::default() };
                }
                root
            }
            Some(Policy::Consecutive) => Some(chain.clone()),
            None => {
                base.super_step = !place.twin && place.position.is_multiple_of(SUPER_STEP);
                // Where twins have made a chain longer than it would be, as if it were one.
                let far = base.super_step || place.chain_len >= LONGEST_READ;
                Some(if far { last_super_step(&chain) } else { chain.clone() })
            }
        };
        base.previous = Some(chain);
        base
    }
}

/// The chain from its last super-step on; from its beginning, if none is left.
fn last_super_step(chain: &Chain) -> Chain {
    let found = chain.objects().iter().find(|object| object.is_super_step()).or(chain.objects().last());
    found.and_then(|object| chain.from_ancestor(object.header().id)).unwrap_or_else(|| chain.clone())
}

impl Archive {
    /// The last archived state of the lineage before this, else the nearest after it; one with the same tensors elsewhere
    /// when there is none, or when it is the same state, saved twice. For a super-step, the super-step before that one. With a
    /// published system's policy, the state of the own lineage that it says.
    pub(super) fn base(
        &self,
        sealed: &Sealed,
        description: &Description,
        source: &dyn ReadAt,
        policy: Option<Policy>,
    ) -> StepResult<Base> {
        let mut base = Base::default();
        let own = nearest(self.objects.of_lineage(sealed.lineage), sealed);
        let mut others = self.objects.of_signature(sealed.signature);
        // All files without tensors have one signature.
        others.retain(|header| header.lineage != sealed.lineage && !description.tensors.is_empty());
        // A published system knows of no other run than its own, whose first state has full precision.
        others.retain(|_| policy.is_none());
        let other = nearest(others, sealed).map(|other| self.objects.first_of_twins(other));
        let twin = match (&own, &other) {
            (Some(own), Some(other))
                if other.modified_ns > own.modified_ns && self.objects.chain_len(other.id) < LONGEST_READ =>
            {
                let distance = |header: &Header| self.distance(header.id, description, source);
                distance(other)?.zip(distance(own)?).is_some_and(|(other, own)| other < MUCH_NEARER * own)
            }
            _ => false,
        };
        let Some(nearest) = (if twin { other } else { own.or(other) }) else {
            return Ok(base);
        };
        // A twin has the place in its chain that the state has which it is: there is nothing between them.
        let place = Place {
            position: nearest.position.saturating_add(u32::from(!twin)),
            chain_len: self.objects.chain_len(nearest.id),
            twin,
        };
        // Before it is opened: garbage is collected meanwhile.
        let Some(hold) = self.objects.hold(nearest.id) else { return Err(StepError::Superseded) };
        match self.recall.chain(nearest.id) {
            Ok(chain) => {
                base = Base::after(chain, place, policy, |root| self.wants_baseline(sealed, root));
                base.hold = match &base.chain {
                    // It may be another one than the nearest, which can be re-parented meanwhile and need it no more.
                    Some(chain) => Some(self.objects.hold(chain.leaf().header().id).ok_or(StepError::Superseded)?),
                    None => Some(hold),
                };
            }
            Err(error) => log::error!("{error}; the next state of this lineage is archived without it"),
        }
        Ok(base)
    }

    /// Check-N-Run's predictor (section 4.1.3): of the sizes S of the differences to a baseline so far, in baselines, whether
    /// 1 + S1 + ... + Si <= (i + 1) Si. Those that were removed meanwhile are not known any more.
    fn wants_baseline(&self, sealed: &Sealed, root: &Chain) -> bool {
        let id = root.leaf().header().id;
        let Some((_, baseline)) = self.objects.get(id) else { return false };
        let mut differences = self.objects.of_lineage(sealed.lineage);
        differences.retain(|header| header.parent == Some(id) && header.modified_ns < sealed.modified_ns);
        differences.sort_by_key(|header| header.modified_ns);
        let stored = |id| self.objects.get(id).map_or(0.0, |(_, stored)| stored as f64);
        let sizes: Vec<f64> = differences.iter().map(|header| stored(header.id) / baseline.max(1) as f64).collect();
        check_n_run::wants_baseline(&sizes)
    }

    /// Mean square of the difference between a file and an archived state, over the middles of its largest tensors;
    /// `None` when they have none in common, or it cannot be decoded.
    fn distance(&self, id: Id, description: &Description, source: &dyn ReadAt) -> io::Result<Option<f64>> {
        let Ok(chain) = self.recall.chain(id) else {
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
            for update in crate::codec::lattice::updates(tensor.dtype, &now, &then) {
                sum += update * update;
                count += 1;
            }
        }
        Ok((count > 0 && sum.is_finite()).then(|| sum / f64::from(count)))
    }
}

/// Of these states the last that is not newer than the file; else the nearest after it.
fn nearest(states: Vec<Header>, sealed: &Sealed) -> Option<Header> {
    states.into_iter().min_by_key(|header| {
        let after = header.modified_ns > sealed.modified_ns;
        (after, header.modified_ns.abs_diff(sealed.modified_ns), header.id)
    })
}
