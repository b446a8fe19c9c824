//! How finely each kind of tensor is quantized: the numbers of the profiles. docs/QUALITY.md has their cost to
//! training.
//!
//! All matrices have the same multiple of their own update. Steps by the fourth root of the Fisher information gave
//! quiet tensors steps of several updates. Rounding then lost everything that those tensors learned between two
//! restores.

use crate::store::Profile;
use formats::{Role, Use};

/// Steps, each in the terms of its codec.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rates {
    /// The promise: what going on from such a state costs at most, in iterations, or as a share of the iterations since
    /// the state before, if that is more.
    pub(super) iterations: f64,
    pub(super) share: f64,
    /// Weights: root mean squares of the update between two checkpoints; less where they are far apart ([`super::pace`]).
    pub(super) weight: f64,
    /// Rows of tables of which most stay as they are: root mean squares of the row's update.
    pub(super) row: f64,
    /// First moments: root mean squares of their ratio to the root of the second.
    pub(super) first_moment: f64,
    /// First moments at short intervals have a step that is smaller by this power of the factor by which the weights' step
    /// grows. The promise stays half an iteration there, and weights take more of it.
    pub(super) first_moment_relief: f64,
    /// The share of that step which is added before rounding ([`codec::moment::OUTWARD`]), so that quotients
    /// keep their sum: .94 to 1.02 of it on GPT.
    pub(super) outward: f64,
    /// The share of a momentum that this step keeps at least; else it is finer ([`moment::kept`]). Losing all of a
    /// momentum costs 3.5 iterations on GPT.
    ///
    /// [`moment::kept`]: codec::moment::kept
    pub(super) least_kept: f64,
    /// Second moments beside their first: octaves / 65536, residual to a rank-1 prediction or to the state before. On
    /// GPT the deviation from the prediction is .4 to .6 octaves, so that at 4 octaves little but the prediction is
    /// stored.
    pub(super) second_moment: u32,
    /// Change of second moments to the next checkpoint, in octaves, below which their steps are finer
    /// ([`super::moments`]).
    pub(super) full_change: f64,
    /// Momentum buffers: root mean squares of the buffer, or of its row and column where small elements count as much.
    pub(super) momentum: f64,
    /// Sums of squares, and second moments alone: octaves / 65536. Sums never decay, so an error in them stays. An
    /// optimizer divides later gradients by such second moments.
    pub(super) square_sum: u32,
}

/// Vectors (norms, biases) take so much finer steps than matrices: they are a hundredth of the bytes, and each of their
/// elements acts on a whole row.
pub(super) const VECTOR: f64 = 1.0 / 8.0;

const OCTAVE: u32 = 1 << 16;

/// Of the profile `balanced`.
pub(super) const BALANCED: Rates = Rates {
    iterations: 0.5,
    share: 0.01,
    weight: 2.0,
    row: 1.0,
    first_moment: 1.75,
    first_moment_relief: 0.5,
    outward: 0.0,
    least_kept: 0.95,
    second_moment: 2 * OCTAVE,
    full_change: 0.2,
    momentum: 1.0,
    square_sum: OCTAVE,
};

/// Of the profile `compact`.
const COMPACT: Rates = Rates {
    iterations: 2.0,
    share: 0.04,
    weight: 4.0,
    row: 1.25,
    first_moment: 2.9,
    first_moment_relief: 0.0,
    outward: 0.06,
    least_kept: 0.9,
    second_moment: 4 * OCTAVE,
    full_change: 0.1,
    momentum: 2.0,
    square_sum: 2 * OCTAVE,
};

/// The numbers of a profile; `None`: lossless.
pub(super) fn rates(profile: Profile) -> Option<Rates> {
    match profile {
        // A published system has its own.
        Profile::Exact | Profile::Published(_) => None,
        Profile::Balanced => Some(BALANCED),
        Profile::Compact => Some(COMPACT),
    }
}

/// The part of a tensor that its role allows to quantize. Unknown roles stay exact. So do moments without their
/// partner: their codecs are safe for Adam, but not for every other use.
pub(super) fn kind(role: Role, used: Use, has_partner: bool, lossless: bool) -> Option<Kind> {
    match role {
        _ if lossless => None,
        Role::Weight | Role::Ema | Role::Master => Some(Kind::Weight),
        Role::FirstMoment if has_partner => Some(Kind::FirstMoment),
        Role::SecondMoment if used == Use::Norm => Some(Kind::Norm),
        Role::SecondMoment => Some(Kind::SecondMoment),
        Role::Momentum if used == Use::Direction => Some(Kind::Direction),
        Role::Momentum if used == Use::Sign => Some(Kind::Sign),
        Role::Momentum => Some(Kind::Momentum),
        Role::SquareSum => Some(Kind::SquareSum),
        Role::FirstMoment | Role::Optimizer | Role::Other => None,
    }
}

/// Which codec a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Weight,
    FirstMoment,
    SecondMoment,
    /// Divided by as it is: an octave of it counts as two of a second moment.
    Norm,
    Momentum,
    /// A momentum of which small elements count as much as large ones.
    Direction,
    /// Only the sign counts.
    Sign,
    SquareSum,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_safer_profile_is_nowhere_coarser() {
        assert_eq!(rates(Profile::Exact), None);
        let (fine, coarse) = (rates(Profile::Balanced).unwrap(), rates(Profile::Compact).unwrap());
        assert!(fine.weight < coarse.weight && fine.row < coarse.row && fine.momentum < coarse.momentum);
        assert!(fine.first_moment < coarse.first_moment && fine.least_kept > coarse.least_kept);
        assert!(fine.second_moment < coarse.second_moment && fine.square_sum < coarse.square_sum);
    }

    #[test]
    fn what_is_not_understood_stays_exact() {
        for role in [Role::Optimizer, Role::Other] {
            assert_eq!(kind(role, Use::ByRole, true, false), None);
        }
        assert_eq!(kind(Role::FirstMoment, Use::ByRole, false, false), None);
        assert!(Role::ALL.iter().all(|role| kind(*role, Use::ByRole, true, true).is_none()));
    }
}
