//! The base of a new state: the chain that the state becomes a difference to.

use crate::recall::Chain;
use crate::store::object::SUPER_STEP;
use crate::store::{Hold, MAX_CHAIN};
use papers::Policy;

/// Most objects that a read applies: a keyframe, three super-steps, seven states after the last, and one more if the last is
/// the same state as another lineage's.
pub(crate) const LONGEST_READ: u32 = 12;

/// The base of a new state.
#[derive(Default)]
pub(crate) struct Base {
    /// The object and its ancestors; none for a keyframe.
    pub(crate) chain: Option<Chain>,
    /// Keeps the object from being removed before the new one needs it.
    pub(crate) hold: Option<Hold>,
    /// The state before, which the updates are measured from.
    pub(crate) previous: Option<Chain>,
    /// Why there is no base though the lineage goes on; for people.
    pub(crate) note: &'static str,
    /// Number of the new state in its chain.
    pub(crate) position: u32,
    /// The new state is a super-step.
    pub(crate) super_step: bool,
}

/// The place that the new state would have.
pub(crate) struct Place {
    /// In the chain.
    pub(crate) position: u32,
    /// Objects that a read of the state before applies.
    pub(crate) chain_len: u32,
    /// It is the state before, saved once more.
    pub(crate) twin: bool,
}

impl Base {
    /// For a state that comes after the one that a chain is for. `wants_baseline`: whether a new full checkpoint costs
    /// less than another difference to this one, for policies that ask.
    pub(crate) fn after(
        chain: Chain,
        place: Place,
        policy: Option<Policy>,
        wants_baseline: impl FnOnce(&Chain) -> bool,
    ) -> Base {
        let mut base = Base::default();
        if place.position.max(place.chain_len) >= MAX_CHAIN {
            base.note = "keyframe: the chain has as many states as it may";
            base.previous = Some(chain);
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
