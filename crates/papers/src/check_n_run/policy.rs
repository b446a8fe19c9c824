//! Decides on full baselines (section 5.1), and on the bits for the expected restores (section 6.2.1).

/// The predictor of the intermittent policy (section 5.1). It takes the sizes S_1 to S_i of the differences to the
/// baseline so far, in baselines. With a new baseline the next i + 1 intervals cost as much as the past ones did, F_c =
/// 1 + S_1 + ... + S_i. Without one, each costs at least S_i, I_c = (i + 1) S_i. It makes a baseline if F_c <= I_c.
/// Right after a baseline (i = 0) there is no history, and a difference follows.
pub fn wants_baseline(sizes: &[f64]) -> bool {
    let intervals = sizes.len() as f64 + 1.0;
    sizes.last().is_some_and(|last| 1.0 + sizes.iter().sum::<f64>() <= intervals * last)
}

/// Restores that a bit width can bear within the paper's limit of .01% of accuracy: 2 bits one, 3 bits three, 4 bits
/// twenty.
const STANDS: [(u32, u32); 3] = [(1, 2), (3, 3), (20, 4)];

/// Bit width for this many expected restores of a training.
pub fn bits_for(restores: u32) -> u32 {
    STANDS.iter().find(|&&(most, _)| restores <= most).map_or(8, |&(_, bits)| bits)
}

/// Bit width from now on: the width for `expected` restores, or 8 after more than those.
pub fn bits_after(expected: u32, restores: u32) -> u32 {
    if restores > expected { 8 } else { bits_for(expected) }
}
