//! Decoders in plain terms, one payload after the other, for comparison with [`crate::fused_decode`].

use crate::Corrupt;
use crate::entropy::simd::Level;
use crate::entropy::{ints, varint};
use crate::exception::take_exceptions;
use crate::lattice::Exception;
use crate::log::{self, Grid};

/// `acc` holds the parent's A in the tile's step, and becomes the tile's. Appends the exceptions.
pub(crate) fn decode_tile_add(
    mut payload: &[u8],
    acc: &mut [i32],
    exceptions: &mut Vec<Exception>,
) -> Result<(), Corrupt> {
    let mut symbols = vec![0; acc.len()];
    ints::decode(varint::take_bytes(&mut payload)?, &mut symbols)?;
    for (a, symbol) in acc.iter_mut().zip(symbols) {
        *a = a.checked_add(symbol).ok_or(Corrupt("sum beyond 32 bits"))?;
    }
    take_exceptions(payload, acc.len(), exceptions)
}

/// `q` holds the parent's and becomes the tile's. `alone` is for a tile without a parent.
pub(crate) fn decode_tile(payload: &[u8], alone: Option<Grid>, q: &mut [i32]) -> Result<(), Corrupt> {
    if let Some(grid) = alone {
        Corrupt::when(!grid.holds(q.len()), "elements beyond the factors")?;
        grid.initial(0, q);
    }
    let mut symbols = vec![0; q.len()];
    ints::decode(payload, &mut symbols)?;
    log::apply_symbols(Level::detect(), &symbols, q)
}
