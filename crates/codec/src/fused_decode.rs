//! Decodes a tile's bytes straight from the payloads of a run of states, block by block. Its integers are never in
//! memory as a whole, which would take several passes over data larger than the first-level cache. The bits equal those
//! of one payload after the other: its symbols added, [`lattice::rescale`] before the next, and
//! [`lattice::reconstruct`] at the end (and their siblings of [`log`] and [`moment`]).

use super::exception::{Exception, apply_exceptions, take_exceptions};
use super::float::{Float, Real, for_float};
use super::lattice::in_single;
use super::log::Grid;
use super::moment::Rule;
use super::narrow::{LARGEST, Sums, Width};
use super::{Corrupt, Dtype, Integers, lattice, log, moment};
use crate::entropy::ints::{BLOCK, Symbol, Symbols};
use crate::entropy::simd::{Level, multiversion};
use crate::entropy::{ints, varint};

pub use super::log::From;

const LENGTHS: Corrupt = Corrupt("lengths of a tile and its parent differ");

/// A run of payloads of the lattice, over a keyframe.
#[derive(Clone, Copy, Debug)]
pub struct LatticeRun<'a> {
    /// Type of the elements.
    pub dtype: Dtype,
    /// The keyframe's bytes; `None` for zeros.
    pub k: Option<&'a [u8]>,
    /// The state before.
    pub from: From<'a>,
    /// Its step.
    pub step: f64,
    /// The payloads that lead from it to the tile, each with its step.
    pub payloads: &'a [(&'a [u8], f64)],
}

/// A run of payloads of the logarithmic lattice.
#[derive(Clone, Copy, Debug)]
pub struct LogRun<'a> {
    /// Type of the elements.
    pub dtype: Dtype,
    /// The factors of the last state.
    pub grid: Grid<'a>,
    /// The unit of all states.
    pub unit: u32,
    /// The state before.
    pub from: From<'a>,
    /// The payloads that lead from it to the tile.
    pub payloads: &'a [&'a [u8]],
}

/// Fills `out` with the tile that a run leads to. If its state is to be kept, its integers and exceptions go to `kept`
/// and `exceptions`.
///
/// # Errors
/// A payload, a step or a length is wrong.
pub fn lattice(
    run: LatticeRun,
    out: &mut [u8],
    exceptions: &mut Vec<Exception>,
    mut kept: Option<&mut Integers>,
) -> Result<(), Corrupt> {
    let LatticeRun { dtype, k, from, step, payloads } = run;
    let (size, n) = (dtype.size(), out.len() / dtype.size());
    if !from.suits(n) || out.len() != n * size || k.is_some_and(|k| k.len() != n * size) {
        return Err(LENGTHS);
    }
    let mut deltas = Vec::with_capacity(payloads.len());
    for &(mut payload, step) in payloads {
        deltas.push((ints::Blocks::new(varint::take_bytes(&mut payload)?, n)?, step));
        exceptions.clear();
        take_exceptions(payload, n, exceptions)?;
    }
    if let (From::Zeros, Some((_, first))) = (from, deltas.first()) {
        // The loop does not restate zeros, but both steps must be steps.
        lattice::rescale(&mut [0], step, *first)?;
    }
    // The usual read takes one step from a state in memory, which one pass can do.
    let once = match (from, deltas.as_slice()) {
        (From::Integers(Integers::Narrow(a)), [(_, to)]) if *to == step && kept.is_none() => {
            in_single(dtype, step).filter(|_| lattice::is_step(step)).map(|g| (a, g))
        }
        _ => None,
    };
    let (mut sums, mut symbols) = (Sums::new(), [0; BLOCK]);
    let (level, payloads) = (Level::detect(), deltas.len());
    'blocks: for (start, out) in (0..n).step_by(BLOCK).zip(out.chunks_mut(BLOCK * size)) {
        let length = BLOCK.min(n - start);
        let k = k.map(|k| &k[start * size..][..length * size]);
        if once.is_none() {
            sums.begin(from, start, length, payloads);
        }
        let mut before = step;
        for (blocks, step) in &mut deltas {
            let symbols = blocks.next(&mut symbols[..length])?;
            if let (Some((a, g)), Symbols::Small(classes)) = (once, symbols)
                && for_float!(dtype, F => {
                    let (k, a) = (k.map(F::elements), &a[start..][..length]);
                    add_and_reconstruct::<F>(level, k, g, a, classes, F::elements_mut(out))
                }, else false)
            {
                continue 'blocks;
            }
            if once.is_some() {
                sums.begin(from, start, length, payloads);
            }
            // In any step, zeros are zeros.
            if before != *step && !sums.is_new() {
                lattice::rescale(sums.widen(), before, *step)?;
            }
            Corrupt::when(!sums.add(symbols), "sum beyond 32 bits")?;
            before = *step;
        }
        if let Some(kept) = &mut kept {
            sums.keep(kept);
        }
        match sums.values() {
            Width::Narrow(sums) => lattice::reconstruct_symbols(dtype, k, before, sums, out)?,
            Width::Wide(sums) => lattice::reconstruct_symbols(dtype, k, before, sums, out)?,
        }
    }
    apply_exceptions(dtype, exceptions, out)
}

multiversion! {
    /// R = K + g * (A + symbol) of a block in one pass, with a step of [`in_single`]. False if an A is so large that its
    /// sum may be beyond 16 bits, or a result may be wrong; `out` is useless then.
    fn add_and_reconstruct<F: Float>(
        k: Option<&[F::Bytes]>,
        g: f32,
        a: &[i16],
        classes: &[u8],
        out: &mut [F::Bytes],
    ) -> bool {
        let mut sound = true;
        let mut one = |k: f32, a: i16, class: u8, out: &mut F::Bytes| {
            let in_doubt;
            (*out, in_doubt) = k.sum::<F>(g * (i32::from(a) + class.value()) as f32);
            sound &= (-LARGEST..=LARGEST).contains(&a) & !in_doubt;
        };
        let both = out.iter_mut().zip(a).zip(classes);
        match k {
            Some(k) => both.zip(k).for_each(|(((out, &a), &class), &k)| one(F::single(k), a, class, out)),
            None => both.for_each(|((out, &a), &class)| one(0.0, a, class, out)),
        }
        sound
    }
}

/// Fills `out` with the tile that a run of the logarithmic lattice leads to. If its q are to be kept, they go to `kept`.
///
/// # Errors
/// A payload, the unit or a length is wrong.
pub fn log(run: LogRun, out: &mut [u8], mut kept: Option<&mut Integers>) -> Result<(), Corrupt> {
    let LogRun { dtype, grid, unit, from, payloads } = run;
    let (size, n) = (dtype.size(), out.len() / dtype.size());
    if !from.suits(n) || !grid.holds(n) || out.len() != n * size {
        return Err(LENGTHS);
    }
    let deltas: Result<Vec<_>, _> = payloads.iter().map(|payload| ints::Blocks::new(payload, n)).collect();
    let mut deltas = deltas?;
    // As for the lattice: one step from a state in memory.
    let once = match (from, payloads) {
        (From::Integers(Integers::Narrow(q)), [_]) if dtype != Dtype::F64 && kept.is_none() && log::is_unit(unit) => {
            Some(q)
        }
        _ => None,
    };
    let level = Level::detect();
    let (mut sums, mut symbols) = (Sums::new(), [0; BLOCK]);
    'blocks: for (start, out) in (0..n).step_by(BLOCK).zip(out.chunks_mut(BLOCK * size)) {
        let length = BLOCK.min(n - start);
        let here = Grid { first: grid.first + start as u64, ..grid };
        if once.is_none() {
            sums.begin(from, start, length, payloads.len());
        }
        for blocks in &mut deltas {
            let symbols = blocks.next(&mut symbols[..length])?;
            if let (Some(q), Symbols::Small(classes)) = (once, symbols)
                && log::add_and_reconstruct(dtype, here, unit, &q[start..][..length], classes, out)
            {
                continue 'blocks;
            }
            if once.is_some() {
                sums.begin(from, start, length, payloads.len());
            }
            match symbols {
                // Symbols below this one are plain differences.
                Symbols::Small(classes) if sums.add_within(classes, log::GONE as i16, log::MAX_Q as i16) => {}
                Symbols::Small(classes) => log::apply_symbols(level, classes, sums.widen())?,
                Symbols::Any(symbols) => log::apply_symbols(level, symbols, sums.widen())?,
            }
        }
        if let Some(kept) = &mut kept {
            sums.keep(kept);
        }
        match sums.values() {
            Width::Narrow(q) => log::reconstruct_symbols(dtype, here, unit, q, out)?,
            Width::Wide(q) => log::reconstruct_symbols(dtype, here, unit, q, out)?,
        }
    }
    Ok(())
}

/// Fills `out` with the tile of this payload; the decoded `second` gives the divisors.
///
/// # Errors
/// The payload, the step or a length is wrong.
pub fn moment(
    (rule, dtype): (Rule, Dtype),
    second: &[u8],
    step: f64,
    mut payload: &[u8],
    out: &mut [u8],
) -> Result<(), Corrupt> {
    let size = dtype.size();
    let n = second.len() / size;
    if out.len() != second.len() || second.len() != n * size {
        return Err(LENGTHS);
    }
    let mut blocks = ints::Blocks::new(varint::take_bytes(&mut payload)?, n)?;
    let mut exceptions = Vec::new();
    take_exceptions(payload, n, &mut exceptions)?;
    let mut a = [0; BLOCK];
    for (second, out) in second.chunks(BLOCK * size).zip(out.chunks_mut(BLOCK * size)) {
        let a = &mut a[..second.len() / size];
        match blocks.next(a)? {
            Symbols::Small(classes) => moment::reconstruct_symbols((rule, dtype), second, step, classes, out)?,
            Symbols::Any(a) => moment::reconstruct_symbols((rule, dtype), second, step, a, out)?,
        }
    }
    apply_exceptions(dtype, &exceptions, out)
}

#[cfg(test)]
mod tests;
