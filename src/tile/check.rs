//! Compares a tile with the bytes that it decodes to: the proof that precedes every loss. It shares no arithmetic with
//! the quantizer. The hash of the compared bytes is the one that reading back must give.

use std::ops::Range;
use std::sync::Arc;

use codec::floor::{self, Floor, Limits};
use codec::hash::{Checksum, Xxh3};
use codec::log::Factors;
use codec::{Corrupt, lattice, log, moment};

use super::{BLOCK, Codec, NO_BASE, TileSpec};

/// The tile of a companion for the same elements, as written and as decoded.
type Divisors<'a> = (&'a [u8], &'a [u8]);

/// A comparison in progress. Blocks come in order, while they are in the first-level cache.
pub struct Check<'a> {
    spec: TileSpec,
    factors: Option<&'a Arc<Factors>>,
    divisors: Option<Divisors<'a>>,
    /// The limits of the tensor as written, where they must hold.
    limits: Option<Limits>,
    /// The largest error that the quantizer states, where no step of the coding bounds it.
    stated: f64,
    /// The checksums of a container: as written and as decoded.
    crc: Option<[Checksum; 2]>,
    hash: Xxh3,
    /// `None` once a condition of the codec was broken.
    error: Option<f64>,
    max_abs_error: f64,
    differs: bool,
}

/// The result of a comparison that found nothing wrong.
#[derive(Clone)]
pub struct Checked {
    /// xxh3-64 of the decoded bytes.
    pub hash: u64,
    /// The checksums of a container: as written and as decoded, if requested.
    pub crc: Option<[Checksum; 2]>,
    /// The largest error in the units of the codec.
    pub error: f64,
    /// The largest |R - W|; infinite if it cannot be stated.
    pub max_abs_error: f64,
    /// True if any byte differs.
    pub differs: bool,
}

impl<'a> Check<'a> {
    /// For a tile of this coding. `divisors` is the companion of a moment: the bytes of the same elements as written and
    /// as decoded.
    pub fn new(spec: TileSpec, factors: Option<&'a Arc<Factors>>, divisors: Option<Divisors<'a>>) -> Check<'a> {
        Check {
            spec,
            factors,
            divisors,
            limits: None,
            stated: f64::INFINITY,
            crc: None,
            hash: Xxh3::default(),
            error: Some(0.0),
            max_abs_error: 0.0,
            differs: false,
        }
    }

    /// The tensor has these limits, so they must hold, and its floor ([`codec::floor`]).
    #[must_use]
    pub fn within(self, limits: Option<Limits>) -> Check<'a> {
        Check { limits, ..self }
    }

    /// Also computes this checksum of no bytes yet.
    #[must_use]
    pub fn with_crc(self, of_none: Option<Checksum>) -> Check<'a> {
        Check { crc: of_none.map(|crc| [crc.clone(), crc]), ..self }
    }

    /// The quantizer states its largest error. A larger one that is found here is a mistake of it.
    pub(super) fn states(&mut self, error: f64) {
        self.stated = error;
    }

    /// Compares all of a tile.
    ///
    /// # Errors
    /// A moment's companion or the factors are missing.
    pub fn add_all(&mut self, written: &[u8], decoded: &[u8]) -> Result<(), Corrupt> {
        if written.len() != decoded.len() {
            self.error = None;
            return Ok(());
        }
        let block = BLOCK * self.spec.dtype.size();
        let blocks = written.chunks(block).zip(decoded.chunks(block));
        blocks.enumerate().try_for_each(|(number, (written, decoded))| self.add(number * block, written, decoded))
    }

    /// Compares the block at byte `start` of the tile.
    pub fn add(&mut self, start: usize, written: &[u8], decoded: &[u8]) -> Result<(), Corrupt> {
        self.hash.update(decoded);
        if let Some([before, after]) = &mut self.crc {
            before.update(written);
            after.update(decoded);
        }
        self.differs = self.differs || written != decoded;
        if !self.spec.coding.is_lossy() {
            self.error = self.error.filter(|_| !self.differs);
            return Ok(());
        }
        // NaN would vanish in the largest.
        let error = self.error_of(start, written, decoded)?.filter(|error| !error.is_nan());
        let sound = self.limits.is_none_or(|limits| are_kept(self.spec, limits, written, decoded));
        self.error = self.error.zip(error.filter(|_| sound)).map(|(before, now)| before.max(now));
        let absolute = match self.spec.coding.codec {
            Codec::Log { .. } | Codec::Moment { .. } | Codec::Sized { .. } => {
                lattice::largest_error(self.spec.dtype, written, decoded).unwrap_or(f64::INFINITY)
            }
            _ => error.unwrap_or(f64::INFINITY),
        };
        self.max_abs_error = self.max_abs_error.max(absolute);
        Ok(())
    }

    /// The largest error of a block in the units of the codec. `None` if a condition of the codec does not hold.
    fn error_of(&self, start: usize, written: &[u8], decoded: &[u8]) -> Result<Option<f64>, Corrupt> {
        let TileSpec { dtype, coding, mut rows, .. } = self.spec;
        let ratios = |rule, step, (before, after): Divisors| {
            moment::largest_error((rule, dtype), written, before, decoded, after, step)
        };
        Ok(match coding.codec {
            Codec::Log { .. } => log::largest_error(dtype, written, decoded),
            Codec::Sized { step, rule } => {
                rows.first += (start / dtype.size()) as u64;
                let sizes = TileSpec { len: written.len(), rows, ..self.spec }.sizes(self.factors)?;
                ratios(rule, step, (&sizes, &sizes))
            }
            Codec::Moment { step, rule, .. } => {
                let (before, after) = self.divisors.ok_or(NO_BASE)?;
                let range: Range<usize> = start..start + written.len();
                match before.get(range.clone()).zip(after.get(range)) {
                    Some(divisors) => ratios(rule, step, divisors),
                    None => None,
                }
            }
            _ => lattice::largest_error(dtype, written, decoded),
        })
    }

    /// The result. `None` if the bound, the floor or another condition of the codec does not hold.
    pub fn finish(self) -> Option<Checked> {
        let error = self.error.filter(|error| *error <= self.spec.coding.bound(*error).min(self.stated))?;
        let (crc, max_abs_error) = (self.crc, self.max_abs_error);
        Some(Checked { hash: self.hash.digest(), crc, error, max_abs_error, differs: self.differs })
    }
}

/// True if a block of a tensor keeps to the limits of the tensor, and to its floor. Moments have no limits: an optimizer
/// divides them by each other.
fn are_kept(spec: TileSpec, limits: Limits, written: &[u8], decoded: &[u8]) -> bool {
    let (floor, is_limited) = match spec.coding.codec {
        Codec::Moment { .. } | Codec::Sized { .. } => (Floor::Sign, false),
        Codec::Cast { .. } => (Floor::Quarter, true),
        Codec::External => (Floor::Eighth, false),
        _ => (Floor::Eighth, true),
    };
    (!is_limited || floor::are_within(spec.dtype, limits, decoded))
        && (!limits.have_one_sign() || floor::holds(spec.dtype, floor, written, decoded))
}

#[cfg(test)]
mod tests;
