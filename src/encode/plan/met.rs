//! Whether an object that was made before the state after it was known is as fine as the plan that knows it.

use std::collections::HashMap;

use crate::store::object::TensorEntry;
use crate::tile::{Codec, Coding};

use super::Plan;

/// Most that one tensor's step may be coarser than planned. A chain keeps steps within 1.4 of the ideal ones.
const MOST_OF_ONE: f64 = 2.0;
/// Most that the square errors of all elements may exceed the planned ones, in sum. Training feels the sum: a few
/// tensors whose updates have shrunk since cost less than all of them within a kept step.
const MOST_OF_ALL: f64 = 0.15;

/// Compares the tensors that an object quantizes with their plans.
pub(in super::super) fn is_met_by(plans: &[Plan], made: &[TensorEntry]) -> bool {
    let plans: HashMap<&str, &Plan> = plans.iter().map(|plan| (plan.tensor.path.as_str(), plan)).collect();
    let (mut excess, mut elements) = (0.0, 0.0);
    for entry in made.iter().filter(|entry| entry.coding.is_lossy()) {
        let wanted = plans.get(entry.path.as_str()).map(|plan| plan.coding);
        let Some(ratio) = wanted.and_then(|wanted| coarser(entry.coding, wanted)).filter(|ratio| *ratio <= MOST_OF_ONE)
        else {
            log::info!("{}: made ahead as {:?}, now {wanted:?} is wanted", entry.path, entry.coding);
            return false;
        };
        let count = ((entry.extent.end - entry.extent.start) / entry.dtype.size() as u64) as f64;
        excess += count * (ratio.max(1.0).powi(2) - 1.0);
        elements += count;
    }
    excess <= MOST_OF_ALL * elements
}

/// How many times as coarse a lossy coding is as another one; `None` if they cannot be compared.
fn coarser(made: Coding, wanted: Coding) -> Option<f64> {
    if let (Some(made_step), Some(step)) = (made.step(), wanted.step()) {
        return (made.is_by_rows() == wanted.is_by_rows()).then_some(made_step / step);
    }
    if let (Some((made_step, made_rule)), Some((step, rule))) = (made.ratio(), wanted.ratio()) {
        return (made_rule == rule).then_some(made_step / step);
    }
    match (made.unit(), wanted.unit()) {
        (Some(made), Some(wanted)) => Some(f64::from(made) / f64::from(wanted)),
        _ => matches!((made.codec, wanted.codec), (Codec::Cast { .. }, Codec::Cast { .. })).then_some(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_compared_within_one_kind_of_coding() {
        let lattice = |step| Codec::Lattice { step }.on(0);
        assert_eq!(coarser(lattice(3.0), Codec::Lattice { step: 2.0 }.alone()), Some(1.5));
        assert_eq!(coarser(lattice(1.0), Coding::LOSSLESS), None);
        assert_eq!(coarser(lattice(1.0), Codec::Rows { step: 1.0 }.on(0)), None);
        let log = |unit| Codec::Log { unit }.on(0);
        assert_eq!(coarser(log(8), Codec::Log { unit: 4 }.alone()), Some(2.0));
        assert_eq!(coarser(Codec::Cast { of: 1 }.alone(), Codec::Cast { of: 2 }.alone()), Some(1.0));
        assert_eq!(coarser(log(4), lattice(1.0)), None);
    }
}
