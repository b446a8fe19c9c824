//! Small differences to a parent's integers of 16 bits, in one pass from both to their classes: no block of either is
//! widened or subtracted first. A block with anything else takes the general way.

use super::log;
use crate::entropy::ints::SMALL;
use crate::entropy::simd::multiversion;

/// Classes of small values.
const CLASSES: u32 = 2 * SMALL as u32 + 1;

multiversion! {
    /// The classes of `a` less `before`; false if one is not small, or stands for another value (`Integers`).
    pub(super) fn differences(a: &[i32], before: &[i16], classes: &mut [u8]) -> bool {
        let mut other = 0u32;
        for ((class, &a), &before) in classes.iter_mut().zip(a).zip(before) {
            let index = a.wrapping_sub(before.into()).wrapping_add(SMALL) as u32;
            other |= u32::from((index >= CLASSES) | (before == i16::MIN));
            *class = index as u8;
        }
        other == 0
    }
}

multiversion! {
    /// The same for steps of a logarithmic lattice; false also if an element is 0 or was.
    pub(super) fn steps(q: &[i32], before: &[i16], classes: &mut [u8]) -> bool {
        let mut other = 0u32;
        for ((class, &q), &before) in classes.iter_mut().zip(q).zip(before) {
            let before = i32::from(before);
            let index = q.wrapping_sub(before).wrapping_add(SMALL) as u32;
            // The last class stands for elements that become 0.
            let plain = (index < CLASSES - 1) & log::is_step_of_q(q) & log::is_step_of_q(before);
            other |= u32::from(!plain);
            *class = index as u8;
        }
        other == 0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::lattice::{encode_difference, encode_tile};
    use super::super::log::{MAX_Q, Parent, ZERO};
    use super::super::{Integers, log};

    /// Pairs with small differences, and now and then one without.
    fn pairs(odd: Vec<i32>) -> impl Strategy<Value = Vec<(i32, i32)>> {
        let one = (-300..300, -15..16).prop_map(|(before, step)| (before + step, before));
        let odd = prop::sample::select(odd);
        let other = (odd.clone(), odd).prop_map(|(now, before)| (now, before));
        (prop::collection::vec(one, 1..5000), prop::collection::vec((any::<prop::sample::Index>(), other), 0..4))
            .prop_map(|(mut pairs, odd)| {
                odd.into_iter().for_each(|(at, pair)| {
                    let at = at.index(pairs.len());
                    pairs[at] = pair;
                });
                pairs
            })
    }

    proptest! {
        #[test]
        fn payloads_are_those_of_wide_integers(
            pairs in pairs(vec![0, 16, -16, 32767, -32767, i32::from(i16::MIN), i32::MIN, 1 << 29]),
        ) {
            let (now, before): (Vec<i32>, Vec<i32>) = pairs.into_iter().unzip();
            let integers = Integers::of(&before);
            let (mut narrow, mut wide) = (Vec::new(), Vec::new());
            let fill = |start: usize, block: &mut [i32]| {
                integers.fill(start, block);
                true
            };
            let fits = encode_difference(&now, integers.narrow(), fill, &[], &mut narrow);
            prop_assert_eq!(fits, encode_tile(&now, Some(&before), &[], &mut wide));
            prop_assert_eq!(narrow, wide);
        }

        #[test]
        fn payloads_of_logarithms_are_those_of_wide_integers(
            pairs in pairs(vec![0, ZERO, MAX_Q, -MAX_Q, MAX_Q + 1, -MAX_Q - 1, MAX_Q - 14, 15]),
        ) {
            let (now, before): (Vec<i32>, Vec<i32>) = pairs.into_iter().unzip();
            let (mut narrow, mut wide) = (Vec::new(), Vec::new());
            let fits = log::encode_tile(&now, Parent::Integers(&Integers::of(&before)), &mut narrow);
            prop_assert_eq!(fits, log::encode_tile(&now, Parent::State(&before), &mut wide));
            prop_assert_eq!(narrow, wide);
        }
    }
}
