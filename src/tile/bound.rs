//! The limits of a lossy tile: a bound on its error, and a floor if the tensor has one sign.

use std::sync::Arc;

use crate::codec::floor::{self, Floor};
use crate::codec::log::Factors;
use crate::codec::{Corrupt, Dtype, lattice, log, moment};

use super::quantize::Companion;
use super::{Coding, NO_BASE, TileSpec};

/// True if a tile of a tensor of one sign keeps to the floor ([`crate::codec::floor`]).
pub fn is_above_floor(dtype: Dtype, coding: Coding, written: &[u8], decoded: &[u8]) -> bool {
    let floor = match coding {
        Coding::Moment { .. } | Coding::Sized { .. } => Floor::Sign,
        Coding::Cast { .. } => Floor::Quarter,
        _ => Floor::Eighth,
    };
    !coding.is_lossy() || floor::holds(dtype, floor, written, decoded)
}

/// Maximum error of a tensor in this coding once it is read back; `found` is the error when it was quantized.
pub fn bound(coding: Coding, found: f64) -> f64 {
    match coding {
        Coding::Lossless | Coding::LosslessDelta { .. } => 0.0,
        Coding::Lattice { step, .. } | Coding::LatticeKey { step } | Coding::LatticeWithKeyframe { step } => step / 2.0,
        // The codec defines the allowance for its roundings.
        Coding::Moment { step, rule, .. } | Coding::Sized { step, rule } => found.max(step * rule.steps()),
        Coding::Log { unit, .. } => log::bound(unit, true),
        Coding::LogKey { unit } => log::bound(unit, false),
        // Quantizing checked each row's own bound. A cast has the error of its source.
        Coding::Rows { .. } | Coding::RowsKey { .. } | Coding::Cast { .. } => found,
        // Published systems promise nothing.
        Coding::External { .. } | Coding::ExternalKey => found,
    }
}

/// The largest error of a tile in the units of its codec: `written` is the original, `decoded` the tile as read back.
/// `None` if a condition of the codec does not hold.
///
/// # Errors
/// A moment's companion or the factors are missing.
pub fn error(
    spec: TileSpec,
    written: &[u8],
    decoded: &[u8],
    companion: Option<Companion>,
    factors: Option<&Arc<Factors>>,
) -> Result<Option<f64>, Corrupt> {
    Ok(match spec.coding {
        Coding::Log { .. } | Coding::LogKey { .. } => log::largest_error(spec.dtype, written, decoded),
        Coding::Sized { step, rule } => {
            let sizes = spec.sizes(factors)?;
            moment::largest_error((rule, spec.dtype), written, &sizes, decoded, &sizes, step)
        }
        Coding::Moment { step, rule, .. } => {
            let (_, before, after) = companion.ok_or(NO_BASE)?;
            moment::largest_error((rule, spec.dtype), written, before, decoded, after, step)
        }
        _ => lattice::largest_error(spec.dtype, written, decoded),
    })
}
