//! The bound of a lossy tensor.

use crate::codec::log;

use super::Coding;

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
