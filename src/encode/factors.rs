//! The prediction of a logarithmic lattice, from a whole tensor.

use std::io;

use crate::codec::log::{self, Factors, FactorsBuilder};
use crate::container::{ReadAt, Tensor};
use crate::entropy::scratch;
use crate::tile::{Codec, Coding};

use super::plan::{self, has_factors, read_tile, tiles};

/// Elements of each sample that centres a prediction. All samples together give the level to a hundredth of an
/// octave.
const PIECE: u64 = 1024;

/// The rank-1 prediction of a tensor, or of the size of its elements.
pub(super) fn factors(source: &dyn ReadAt, tensor: &Tensor, coding: Coding) -> io::Result<Factors> {
    let unit = coding.unit().unwrap_or(0);
    let of_sizes = matches!(coding.codec, Codec::Sized { .. });
    let middle = || read_tile(source, tensor, tiles(tensor) / 2);
    let found = match has_factors(&tensor.shape) {
        None if of_sizes => Factors::size_of(tensor.dtype, &middle()?),
        None => Factors::flat_of(tensor.dtype, &middle()?),
        Some((rows, width)) => {
            let builder = if of_sizes { FactorsBuilder::of_sizes } else { FactorsBuilder::new };
            let mut builder = builder(rows, width);
            for number in 0..tiles(tensor) {
                let data = read_tile(source, tensor, number)?;
                builder.add(tensor.dtype, plan::rows(tensor, number).first, &data);
                scratch::give_bytes(data.into());
            }
            builder.finish(unit)
        }
    };
    // Shorter steps leave nothing to correct.
    if unit < log::LONG {
        return Ok(found);
    }
    let (mut pieces, first, size) = (Vec::new(), plan::rows(tensor, 0).first, tensor.dtype.size() as u64);
    plan::sample(tensor, |range| {
        let range = range.start..range.end.min(range.start + PIECE * size);
        pieces.push((first + range.start / size, plan::read(source, tensor, &range)?));
        Ok(())
    })?;
    Ok(log::centred(found, tensor.dtype, &pieces, unit))
}
